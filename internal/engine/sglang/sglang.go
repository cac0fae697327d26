// SPDX-License-Identifier: Apache-2.0

// Package sglang describes SGLang's command line and HTTP API.
package sglang

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/semmoe/operator/internal/engine"
)

// Adapter returns SGLang's adapter. On routes that read both, the rank header takes precedence over the body's
// routed_dp_rank. The native route reads only the body (sgl-project/sglang#38729), the Responses API reads neither
// (run: 0.5.17). A rank that the engine does not have is refused with 400 and the text "routed_dp_rank=N out of range"
// on each route that reads a rank (read: generate_request in managers/tokenizer_manager.py of 0.5.12 and 0.5.17; run:
// 0.5.17). Responses of the native route report the rank as meta_info.dp_rank. Unstreamed chat completions report it as
// choices[].meta_info.dp_rank if the client sends return_meta_info (read: entrypoints/openai/serving_chat.py of 0.5.17;
// 0.5.12 does not have the member). Responses of completions do not report a rank.
func Adapter() engine.Adapter {
	return engine.Adapter{
		Type:       "SGLang",
		Command:    []string{"python3", "-m", "sglang.launch_server"},
		RankHeader: "X-Data-Parallel-Rank",
		// The reference engine counts activations.
		CountsActivations: true,
		StepMetrics: &engine.StepMetrics{
			Steps: "sglang:cuda_graph_passes_total", Tokens: "sglang:realtime_tokens_total", Kind: "mode",
			Prefill:     engine.StepKind{Steps: "prefill_", Tokens: "prefill_compute"},
			Decode:      engine.StepKind{Steps: "decode_", Tokens: "decode"},
			Requirement: "add --enable-metrics to spec.engine.args",
		},
		RankRoutes: engine.NewRankRoutes(routes(), "routed_dp_rank", "dp_rank"),
		// The engine reads the header only with --schedule-policy routing-key.
		RoutingKeyHeader: "X-Smg-Routing-Key",
		HealthPath:       "/health",
		ExpertMap:        &engine.ExpertMap{File: "sglang.json", Write: writeMap, Read: readMap},
		RoutedExperts: engine.RoutedExperts{
			RequestField: "return_routed_experts",
			StartField:   "routed_experts_start_len",
			// The native route, and the extension on the OpenAI routes. Source and documentation of the engine disagree
			// about the spelling and the location of the extension.
			ResponsePaths: [][]string{
				{"meta_info", "routed_experts"},
				{"sglext", "routed_experts"}, {"sgl_ext", "routed_experts"},
				{"choices", "sglext", "routed_experts"}, {"choices", "sgl_ext", "routed_experts"},
			},
			Decode:   decodeRoutedExperts,
			Renumber: renumberRoutedExperts,
			TokenIDs: engine.TokenIDs{
				RequestField: "return_token_ids",
				PromptPaths:  [][]string{{"choices", "prompt_token_ids"}}, AnswerPaths: [][]string{{"choices", "token_ids"}},
			},
		},
		Generation: engine.Generation{TokenizePath: "/v1/tokenize", Path: "/generate", Body: generateBody, Answer: readGenerated},
		Flags:      flags,
		// 0.5.17 on GPUs: "device-side assert triggered", for /v1/completions and /generate, ids above the vocabulary and
		// below 0. _validate_input_ids_in_vocab (srt/managers/tokenizer_manager.py of 0.5.12 and 0.5.17) has no caller,
		// and 0.5.23 does not have it.
		CrashesOnUnknownTokens: true,
		// Before an all-to-all, the tokens of the batch are scattered over the ranks of attention.
		TensorParallelExchange: true,
		CheckOverlap:           checkOverlap,

		Nodes: &engine.Nodes{WorkersServeHealth: true},
		Check: check, CheckStart: checkStart,

		IgnoresTiedEmbeddings: ignoresTiedEmbeddings,

		Images: []string{"sglang"}, ReleasePath: "/server_info",
		Oldest: minimum, Newest: mapAlwaysUsed, Mechanisms: mechanisms(), Routes: routes(), Administrative: administrative,
	}
}

// minimum is the first release that accepts a rank by header and returns the routed experts on the OpenAI routes.
var minimum = engine.Release{Minor: 5, Patch: 12}

// flags returns SGLang's flags. The tensor-parallel and the expert-parallel size are both the number of devices,
// because SGLang's expert map assumes that the expert-parallel size is the size of the whole process group. With
// attention data parallelism, the data-parallel size is the same number, so that data-parallel rank d is
// expert-parallel rank d.
func flags(launch engine.Launch) []engine.Flag {
	ranks := strconv.Itoa(int(launch.Ranks))
	const size = "spec.parallelism.expertParallelSize"
	dataParallel := engine.Flag{Names: []string{"--dp-size", "--data-parallel-size"}, Value: ranks, Source: size}
	dpAttention := engine.Flag{Names: []string{"--enable-dp-attention"}, Source: "spec.parallelism.attention"}
	if !launch.AttentionDP {
		dataParallel.Forbidden, dataParallel.Source = true, dpAttention.Source
		dpAttention.Forbidden = true
	}
	all := []engine.Flag{
		{Names: []string{"--model-path", "--model"}, Value: launch.ModelPath, Source: "spec.model.path"},
		{Names: []string{"--served-model-name"}, Value: launch.ServedModelName, Source: "spec.model.name"},
		{Names: []string{"--host"}, Value: launch.Host, Source: "the operator (the pod's address)"},
		{Names: []string{"--port"}, Value: strconv.Itoa(int(launch.Port)), Source: "spec.engine.port"},
		{Names: []string{"--tp-size", "--tensor-parallel-size"}, Value: ranks, Source: size},
		{Names: []string{"--ep-size", "--expert-parallel-size", "--ep"}, Value: ranks, Source: size},
		{Names: []string{"--pp-size", "--pipeline-parallel-size"}, Source: size, Forbidden: true},
		dataParallel,
		dpAttention,
		{Names: []string{"--attn-dp-size"}, Source: dpAttention.Source, Forbidden: true},
		{Names: []string{"--enable-return-routed-experts"}, Source: "spec.routing.samplePercent", Forbidden: !launch.RoutedExperts},
	}
	all = append(all, engine.KVEventsFlag(launch, nil)...)
	all = append(all, engine.TLSFlags(launch)...)
	all = append(all, nodeFlags(launch)...)
	all = append(all, overlapFlags(launch.Overlap)...)
	if launch.NeedsKnownPlacement() {
		all = append(all, placementFlags(launch)...)
	}
	return all
}

// rendezvousPort is the rendezvous port of the nodes of a replica. Each pod has its own address, so the port is free.
const rendezvousPort = 20000

// nodeFlags returns the flags for several nodes. All nodes are started with the same flags except for their index. Node
// 0 serves requests; the other nodes serve only /health.
func nodeFlags(launch engine.Launch) []engine.Flag {
	const source = "spec.parallelism.podsPerReplica"
	one := launch.Nodes <= 1
	return []engine.Flag{
		{Names: []string{"--nnodes"}, Value: strconv.Itoa(int(launch.Nodes)), Source: source, Forbidden: one},
		{Names: []string{"--node-rank"}, Value: launch.NodeRank, Source: source, Forbidden: one},
		{Names: []string{"--dist-init-addr", "--nccl-init-addr"}, Value: fmt.Sprintf("%s:%d", launch.LeaderAddress, rendezvousPort), Source: source, Forbidden: one},
	}
}

// placementFlags returns the flags that keep experts at their known locations.
func placementFlags(launch engine.Launch) []engine.Flag {
	redundant := engine.Flag{Names: []string{"--ep-num-redundant-experts"}, Value: strconv.Itoa(int(launch.RedundantExperts)), Source: engine.PlanSource}
	// With static dispatch, a token uses a copy on its own rank first, which is the purpose of redundant experts.
	dispatch := engine.Flag{Names: []string{"--ep-dispatch-algorithm"}, Value: "static", Source: engine.PlanSource}
	all := []engine.Flag{
		// Observed activations are compared with the known placement. A user-provided map would invalidate the
		// comparison.
		{Names: []string{"--init-expert-location"}, Value: launch.ExpertMap, Source: engine.PlanSource, Forbidden: launch.ExpertMap == ""},
		// The engine's own load balancer and in-place scaling would move experts away from their known locations.
		{Names: []string{"--enable-eplb"}, Source: engine.PlanSource, Forbidden: true},
		{Names: []string{"--elastic-ep-backend"}, Source: engine.PlanSource, Forbidden: true},
		engine.RefuseFlagFile("--config"),
	}
	if launch.ExpertMap == "" || launch.RedundantExperts == 0 {
		// Without copies, there is no copy to choose.
		redundant.Forbidden = true
		return append(all, redundant)
	}
	return append(all, redundant, dispatch)
}

func generateBody(prompt []int32, newTokens int, temperature float64, seed int64) map[string]any {
	return map[string]any{
		"input_ids":             prompt,
		"return_routed_experts": true,
		"sampling_params":       map[string]any{"temperature": temperature, "sampling_seed": seed, "max_new_tokens": newTokens},
	}
}

func readGenerated(response []byte) (generated []int32, routedExperts string, err error) {
	var answer struct {
		OutputIDs []int32 `json:"output_ids"`
		Meta      struct {
			RoutedExperts string `json:"routed_experts"`
		} `json:"meta_info"`
	}
	err = json.Unmarshal(response, &answer)
	return answer.OutputIDs, answer.Meta.RoutedExperts, err
}

// decodeRoutedExperts decodes base64 of little-endian int32, row-major [tokens][layers][top].
func decodeRoutedExperts(text string, layers, top int) ([]int32, error) {
	data, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil, fmt.Errorf("routed experts: %w", err)
	}
	if row := 4 * layers * top; row == 0 || len(data)%row != 0 {
		return nil, fmt.Errorf("routed experts: %d bytes are not a multiple of 4 bytes x %d layers x %d experts", len(data), layers, top)
	}
	ids := make([]int32, len(data)/4)
	for i := range ids {
		ids[i] = int32(binary.LittleEndian.Uint32(data[4*i:]))
	}
	return ids, nil
}

// renumberRoutedExperts returns an editor of the format that decodeRoutedExperts reads.
func renumberRoutedExperts(layers, top int, logical engine.Logical) engine.TextEditor {
	at, row := 0, layers*top
	return engine.EditBase64(func(data []byte, end bool) (done int, err error) {
		for ; row > 0 && done+4 <= len(data); done += 4 {
			id := int32(binary.LittleEndian.Uint32(data[done:]))
			binary.LittleEndian.PutUint32(data[done:], uint32(logical(at/top%layers, id)))
			at++
		}
		if end && (row == 0 || done < len(data) || at%row != 0) {
			return 0, fmt.Errorf("%d bytes are not a multiple of 4 bytes x %d layers x %d experts", 4*at+len(data)-done, layers, top)
		}
		return done, nil
	})
}
