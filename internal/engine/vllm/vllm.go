// SPDX-License-Identifier: Apache-2.0

// Package vllm describes vLLM's command line and HTTP API.
package vllm

import (
	"encoding/json"
	"slices"
	"strconv"

	"github.com/semmoe/operator/internal/engine"
)

// Adapter returns vLLM's adapter. The engine reads no expert map. It places experts linearly, so a permuted checkpoint
// puts them where a plan requires them. The engine refuses a rank that it does not have with 400 and the text
// "data_parallel_rank N is out of range" on each route that reads the header (v1/engine/input_processor.py and run:
// 0.32.0), and ignores a header that is not a number. No response reports the serving rank.
func Adapter() engine.Adapter {
	return engine.Adapter{
		Type:       "VLLM",
		Command:    []string{"vllm", "serve"},
		RankHeader: "X-data-parallel-rank",
		RankRoutes: engine.NewRankRoutes(routes(), "", ""),
		HealthPath: "/health",
		RoutedExperts: engine.RoutedExperts{
			// The OpenAI routes ignore unknown members.
			RequestField: "return_routed_experts", Unrequested: true, NonStreamingOnly: true,
			StartField:    "routed_experts_prompt_start",
			ResponsePaths: [][]string{{"choices", "routed_experts"}},
			Decode:        decodeRoutedExperts,
			Renumber:      renumberRoutedExperts,
			TokenIDs: engine.TokenIDs{
				RequestField: "return_token_ids", Null: true,
				PromptPaths: [][]string{{"prompt_token_ids"}, {"choices", "prompt_token_ids"}}, AnswerPaths: [][]string{{"choices", "token_ids"}},
			},
		},
		Generation: engine.Generation{TokenizePath: "/tokenize", Path: "/v1/completions", Body: completionBody, Answer: readCompletion},
		// With the plug-in of integrations/vllm.
		CountsActivations: true,
		StepMetrics:       &engine.StepMetrics{Histogram: "vllm:iteration_tokens_total", Running: "vllm:num_requests_running", OneServer: "process_start_time_seconds", Requirement: "remove --disable-log-stats from spec.engine.args"},
		Flags:             Flags,
		Nodes:             &engine.Nodes{AttentionDP: true},
		Check:             check,
		CheckStart:        checkStart,

		CheckOverlap:      checkOverlap,
		OverlapThresholds: &engine.OverlapThresholds{Decode: 32, Prefill: 512}, // vllm/config/parallel.py

		Images: []string{"vllm-openai", "vllm"}, ReleasePath: "/version",
		Oldest: oldest, Newest: newest, Mechanisms: Mechanisms(), Routes: routes(), Administrative: administrative,
	}
}

// Flags returns vLLM's flags. The expert-parallel size is the data-parallel times the tensor-parallel size, in
// data-parallel order. With a tensor-parallel size of 1, data-parallel rank d is therefore expert-parallel rank d.
// Requests are pinned through the single server of the engine's internal load balancer. With any other assignment of
// servers to ranks, the rank header has no effect.
func Flags(launch engine.Launch) []engine.Flag {
	const size, attention = "spec.parallelism.expertParallelSize", "spec.parallelism.attention"
	ranks, one := strconv.Itoa(int(launch.Ranks)), "1"
	tensorParallel, dataParallel := one, ranks
	if !launch.AttentionDP {
		tensorParallel, dataParallel = ranks, one
	}
	all := []engine.Flag{
		{Value: launch.ModelPath},
		{Names: []string{"--model"}, Source: "spec.model.path", Forbidden: true},
		{Names: []string{"--served-model-name"}, Value: launch.ServedModelName, Source: "spec.model.name"},
		{Names: []string{"--host"}, Value: launch.Host, Source: "the operator (the pod's address)"},
		{Names: []string{"--port"}, Value: strconv.Itoa(int(launch.Port)), Source: "spec.engine.port"},
		{Names: []string{"--tensor-parallel-size", "-tp"}, Value: tensorParallel, Source: size},
		{Names: []string{"--data-parallel-size", "-dp"}, Value: dataParallel, Source: size},
		{Names: []string{"--enable-expert-parallel", "-ep"}, Source: size},
		{Names: []string{"--no-enable-expert-parallel", "--disable-expert-parallel"}, Source: size, Forbidden: true},
		{Names: []string{"--pipeline-parallel-size", "-pp"}, Source: size, Forbidden: true},
		{Names: []string{"--enable-return-routed-experts"}, Source: "spec.routing.samplePercent", Forbidden: !launch.RoutedExperts},
	}
	for _, names := range [][]string{
		{"--data-parallel-rank", "-dpn"}, {"--data-parallel-external-lb", "-dpe"}, {"--data-parallel-hybrid-lb", "-dph"},
		{"--data-parallel-multi-port-external-lb", "-dpm"},
	} {
		all = append(all, engine.Flag{Names: names, Source: attention, Forbidden: true})
	}
	all = append(all, engine.KVEventsFlag(launch, map[string]any{"enable_kv_cache_events": true})...)
	all = append(all, engine.TLSFlags(launch)...)
	all = append(all, nodeFlags(launch)...)
	all = append(all, overlapFlags(launch.Overlap)...)
	if launch.NeedsKnownPlacement() {
		all = append(all,
			// The engine's own load balancer and in-place scaling would move experts away from their known locations.
			engine.Flag{Names: []string{"--enable-eplb"}, Source: engine.PlanSource, Forbidden: true},
			engine.Flag{Names: []string{"--eplb-config"}, Source: engine.PlanSource, Forbidden: true},
			engine.Flag{Names: []string{"--enable-elastic-ep"}, Source: engine.PlanSource, Forbidden: true},
			engine.Flag{Names: []string{"--expert-placement-strategy"}, Value: "linear", Source: engine.PlanSource},
			engine.RefuseFlagFile("--config"))
	}
	return all
}

// nodeFlags returns the flags for several nodes. The first node's server balances over the ranks of all nodes; the
// other nodes have no server. Each node infers its number of ranks and its first rank from the number of nodes and its
// own index (vllm-project/vllm#23691). The first node listens on the given address. libzmq may not resolve a name to
// listen on, so the first node gets its IP address.
func nodeFlags(launch engine.Launch) []engine.Flag {
	const source = "spec.parallelism.podsPerReplica"
	one := launch.Nodes <= 1
	address := launch.Host
	if launch.Worker {
		address = launch.LeaderAddress
	}
	return []engine.Flag{
		{Names: []string{"--nnodes", "-n"}, Value: strconv.Itoa(int(launch.Nodes)), Source: source, Forbidden: one},
		{Names: []string{"--node-rank", "-r"}, Value: launch.NodeRank, Source: source, Forbidden: one},
		{Names: []string{"--master-addr"}, Value: address, Source: source, Forbidden: one},
		{Names: []string{"--headless"}, Source: source, Forbidden: one || !launch.Worker},
		{Names: []string{"--data-parallel-size-local", "-dpl"}, Source: source, Forbidden: true},
		{Names: []string{"--data-parallel-address", "-dpa"}, Source: source, Forbidden: true},
		{Names: []string{"--data-parallel-rpc-port", "-dpp"}, Source: source, Forbidden: true},
		{Names: []string{"--data-parallel-start-rank", "-dpr"}, Source: source, Forbidden: true},
	}
}

// collectiveBackends lists the backends with which every rank takes part in the exchange of every token. The first is
// the engine's default. The others are removed backends, which the engine replaces by its default.
var collectiveBackends = []string{"allgather_reducescatter", "naive", "pplx"}

func check(s engine.Situation, verdict *engine.Support) {
	if !s.Launch.AttentionDP {
		return // no exchange, regardless of the backend
	}
	backend, given := engine.FlagValue(s.UserArgs, "--all2all-backend")
	if given && !slices.Contains(collectiveBackends, backend) {
		return
	}
	advice := "Set --all2all-backend, for example to deepep_low_latency"
	if s.Sets(backendVariable) {
		advice += ": " + backendVariable + " was removed (vllm-project/vllm#33535)"
	}
	verdict.NoAllToAll(s.Launch, "--all2all-backend", backend, advice)
}

func completionBody(prompt []int32, newTokens int, temperature float64, seed int64) map[string]any {
	return map[string]any{
		"prompt": prompt, "max_tokens": newTokens, "temperature": temperature, "seed": seed,
		"return_token_ids": true, "return_routed_experts": true,
	}
}

func readCompletion(response []byte) (generated []int32, routedExperts string, err error) {
	var answer struct {
		Choices []struct {
			TokenIDs      []int32 `json:"token_ids"`
			RoutedExperts string  `json:"routed_experts"`
		} `json:"choices"`
	}
	if err := json.Unmarshal(response, &answer); err != nil || len(answer.Choices) == 0 {
		return nil, "", err
	}
	return answer.Choices[0].TokenIDs, answer.Choices[0].RoutedExperts, nil
}
