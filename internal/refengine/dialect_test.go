// SPDX-License-Identifier: Apache-2.0

package refengine

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/refengine/server"
)

// dialectRoutes contains a valid request for each route.
var dialectRoutes = map[string]string{
	"/v1/completions":      `{"model":"tiny","prompt":"func","max_tokens":2}`,
	"/v1/chat/completions": `{"model":"tiny","messages":[{"role":"user","content":"func"}],"max_tokens":2}`,
	"/v1/messages":         `{"model":"tiny","messages":[{"role":"user","content":"func"}],"max_tokens":2}`,
	"/v1/responses":        `{"model":"tiny","input":"func","max_output_tokens":2}`,
	"/generate":            `{"text":"func","sampling_params":{"max_new_tokens":2}}`,
}

// TestDialects checks the API of each release: the routes that read a rank from the header or the body, the response to
// a missing rank and to one that is not a number, the form of errors, health and the release, and the location of
// routed experts.
func TestDialects(t *testing.T) {
	sglang := func(responses bool) map[string]string {
		routes := map[string]string{"/v1/completions": "header body", "/v1/chat/completions": "header body", "/v1/messages": "header", "/v1/responses": "", "/generate": "body"}
		if responses {
			routes["/v1/responses"] = "header body"
		}
		return routes
	}
	vllm := map[string]string{"/v1/completions": "header", "/v1/chat/completions": "header", "/v1/messages": "header", "/v1/responses": ""}
	vllm33 := maps.Clone(vllm)
	vllm33["/v1/responses"] = "header"
	for name, test := range map[string]struct {
		adapter string
		// ranks is the source of the rank by route.
		ranks map[string]string
		// noNumber is the response status for a rank that is not a number.
		noNumber int
		// flat lists the members of an error of completions. It is empty if the only member is error.
		flat bool
	}{
		"sglang-0.5.12":      {adapter: "SGLang", ranks: sglang(false), noNumber: 400, flat: true},
		"sglang-0.5.17":      {adapter: "SGLang", ranks: sglang(false), noNumber: 400, flat: true},
		"sglang-0.5.23":      {adapter: "SGLang", ranks: sglang(true), noNumber: 400, flat: true},
		"vllm-0.22.0":        {adapter: "VLLM", ranks: vllm, noNumber: 200},
		"vllm-0.25.1":        {adapter: "VLLM", ranks: vllm, noNumber: 200},
		"vllm-0.32.0":        {adapter: "VLLM", ranks: vllm, noNumber: 200},
		"vllm-0.33.0":        {adapter: "VLLM", ranks: vllm33, noNumber: 200},
		"vllm-ascend-0.25.1": {adapter: "VLLMAscend", ranks: vllm, noNumber: 200},
		"vllm-ascend-0.30.0": {adapter: "VLLMAscend", ranks: vllm, noNumber: 200},
		"tensorrt-llm-1.2.0": {adapter: "TensorRTLLM", ranks: map[string]string{"/v1/completions": "", "/v1/chat/completions": "", "/v1/responses": ""}, noNumber: 200, flat: true},
		"tensorrt-llm-1.3.0": {adapter: "TensorRTLLM", ranks: map[string]string{"/v1/completions": "", "/v1/chat/completions": "", "/v1/responses": ""}, noNumber: 200, flat: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			adapter, err := registry.For(test.adapter)
			if err != nil {
				t.Fatal(err)
			}
			e := start(t, func(o *Options) { fourRanks(o); o.Dialect, o.EnableMetrics = name, true })
			for route, body := range dialectRoutes {
				reads, has := test.ranks[route]
				if !has {
					if got := e.post(t, route, body); got.status != http.StatusNotFound {
						t.Errorf("%s %s: %d, want 404: %s", name, route, got.status, got.body)
					}
					continue
				}
				inBody := strings.TrimSuffix(body, "}") + `,"routed_dp_rank":9}`
				for _, ask := range []struct {
					what, body string
					header     []string
					want       int
				}{
					{"a rank in the header", body, []string{"X-Data-Parallel-Rank", "3"}, http.StatusOK},
					{"no such rank in the header", body, []string{"X-Data-Parallel-Rank", "9"}, refusedIf(strings.Contains(reads, "header"))},
					{"a negative rank", body, []string{"X-Data-Parallel-Rank", "-1"}, refusedIf(strings.Contains(reads, "header"))},
					{"no such rank in the body", inBody, nil, refusedIf(strings.Contains(reads, "body"))},
					{"no number", body, []string{"X-Data-Parallel-Rank", "one"}, map[bool]int{true: test.noNumber, false: http.StatusOK}[strings.Contains(reads, "header")]},
				} {
					late := name == "sglang-0.5.12" || name == "sglang-0.5.17" && ask.what == "no number"
					if late && route == "/v1/messages" && ask.want == http.StatusBadRequest {
						ask.want = http.StatusInternalServerError // anthropic/serving.py
					}
					if got := e.post(t, route, ask.body, ask.header...); got.status != ask.want {
						t.Errorf("%s %s, %s: %d, want %d: %s", name, route, ask.what, got.status, ask.want, got.body)
					}
				}
				// The router sends a rank where the adapter defines it, and the engine must read it there.
				header, field := adapter.OnRoute(route)
				mixed := slices.Contains(adapter.RankRoutes.Mixed, route) // the router asks the engine
				if header != "" && !strings.Contains(reads, "header") && !mixed || field != "" && !strings.Contains(reads, "body") {
					t.Errorf("%s %s: the router pins by header %q and member %q, and the engine reads %q", name, route, header, field, reads)
				}
			}
			members := slices.Sorted(maps.Keys(object(t, e.post(t, "/v1/completions", `{"model":"tiny","prompt":"func","max_tokens":-5}`).body)))
			want := []string{"error"}
			if test.flat {
				want = []string{"code", "message", "object", "param", "type"}
			}
			if !slices.Equal(members, want) {
				t.Errorf("%s: an error has the members %v, want %v", name, members, want)
			}
			release := strings.TrimPrefix(name[strings.LastIndex(name, "-"):], "-")
			if got := engine.ReadRelease(e.get(t, adapter.ReleasePath).body); got.String() != release {
				t.Errorf("%s: %s reports %s", name, adapter.ReleasePath, got)
			}
			if got := e.get(t, adapter.HealthPath); got.status != http.StatusOK {
				t.Errorf("%s: %s answers %d", name, adapter.HealthPath, got.status)
			}
			returnsExperts(t, name, e, adapter)
		})
	}
	if names := server.Dialects(); len(names) != 11 {
		t.Errorf("the dialects are %v: test each", names)
	}
}

func refusedIf(refused bool) int {
	if refused {
		return http.StatusBadRequest
	}
	return http.StatusOK
}

func object(t *testing.T, text []byte) map[string]any {
	t.Helper()
	var members map[string]any
	if err := json.Unmarshal(text, &members); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return members
}

// returnsExperts profiles a prompt like the adapter, and reads the routed experts of the response.
func returnsExperts(t *testing.T, name string, e *running, adapter engine.Adapter) {
	t.Helper()
	prompt := []int32{1, 2, 3}
	if adapter.Generation.Path == "" {
		if answer := e.post(t, "/v1/completions", `{"model":"tiny","prompt":"func","max_tokens":2,"return_routed_experts":true}`); strings.Contains(string(answer.body), "routed_experts") {
			t.Errorf("%s: an answer has routed experts: %s", name, answer.body)
		}
		return
	}
	if tokens := e.post(t, adapter.Generation.TokenizePath, `{"model":"tiny","prompt":"func main"}`); len(object(t, tokens.body)["tokens"].([]any)) == 0 {
		t.Errorf("%s: %s", name, tokens.body)
	}
	answer := e.post(t, adapter.Generation.Path, adapter.Generation.Body(prompt, 4, 0, 0))
	generated, text, err := adapter.Generation.Answer(answer.body)
	if err != nil || len(generated) != 4 {
		t.Fatalf("%s: %v tokens, %v: %s", name, generated, err, answer.body)
	}
	const layers, top = 4, 4
	ids, err := adapter.RoutedExperts.Decode(text, layers, top)
	if want := (len(prompt) + 4 - 1) * layers * top; err != nil || len(ids) != want {
		t.Errorf("%s: %d experts, %v, want %d", name, len(ids), err, want)
	}
	if adapter.RoutedExperts.NonStreamingOnly {
		body := adapter.Generation.Body(prompt, 4, 0, 0)
		body["stream"] = true
		if streamed := e.post(t, adapter.Generation.Path, body); strings.Contains(string(streamed.body), "routed_experts") {
			t.Errorf("%s: a stream has routed experts: %s", name, streamed.body)
		}
	}
}

// TestDialectMetrics checks that the counters of vLLM's dialects are by rank, and that SGLang serves metrics only if
// they are enabled.
func TestDialectMetrics(t *testing.T) {
	for _, name := range []string{"vllm-0.22.0", "vllm-0.32.0"} {
		e := start(t, func(o *Options) { fourRanks(o); o.Dialect = name })
		if e.metric(t, "process_start_time_seconds") == 0 {
			t.Errorf("%s: steps seem to be counted by several servers", name)
		}
		for range 3 {
			e.post(t, "/v1/completions", `{"model":"tiny","prompt":"func","max_tokens":2,"ignore_eos":true}`, "X-data-parallel-rank", "2")
		}
		for rank := range 4 {
			want := map[bool]float64{true: 3}[rank == 2]
			if got := e.metric(t, fmt.Sprintf(`vllm:request_success_total{engine="%d",finished_reason="length",model_name="tiny"}`, rank)); got != want {
				t.Errorf("%s: rank %d has finished %v requests, want %v", name, rank, got, want)
			}
			if got := e.metric(t, fmt.Sprintf(`vllm:generation_tokens_total{engine="%d",model_name="tiny"}`, rank)); got != 2*want {
				t.Errorf("%s: rank %d has generated %v tokens, want %v", name, rank, got, 2*want)
			}
			prompts := e.metric(t, fmt.Sprintf(`vllm:prompt_tokens_total{engine="%d",model_name="tiny"}`, rank))
			steps, tokens := e.metric(t, fmt.Sprintf(`vllm:iteration_tokens_total_count{engine="%d",model_name="tiny"}`, rank)), e.metric(t, fmt.Sprintf(`vllm:iteration_tokens_total_sum{engine="%d",model_name="tiny"}`, rank))
			if steps != 2*want || tokens != prompts+2*want {
				t.Errorf("%s: rank %d has computed %v tokens in %v steps, want %v and %v", name, rank, tokens, steps, prompts+2*want, 2*want)
			}
		}
	}
	for _, name := range []string{"sglang-0.5.12", "sglang-0.5.17", "sglang-0.5.23"} {
		e := start(t, func(o *Options) { o.Dialect = name })
		if got := e.get(t, "/metrics"); got.status != http.StatusNotFound {
			t.Errorf("%s: /metrics answers %d without --enable-metrics", name, got.status)
		}
		e = start(t, func(o *Options) { fourRanks(o); o.Dialect, o.EnableMetrics = name, true })
		prompt := e.post(t, "/v1/tokenize", `{"model":"tiny","prompt":"func"}`)
		tokens := float64(len(object(t, prompt.body)["tokens"].([]any)))
		e.post(t, "/v1/completions", `{"model":"tiny","prompt":"func","max_tokens":5,"ignore_eos":true}`, "X-Data-Parallel-Rank", "2")
		for series, want := range map[string]float64{
			"cuda_graph_passes_total prefill_none": 1, "realtime_tokens_total prefill_compute": tokens,
			"cuda_graph_passes_total decode_none": 4, "realtime_tokens_total decode": 4, // the first token comes with the prompt
		} {
			metric, mode, _ := strings.Cut(series, " ")
			if got := e.metric(t, fmt.Sprintf(`sglang:%s{dp_rank="2",engine_type="unified",mode="%s",model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"}`, metric, mode)); got != want {
				t.Errorf("%s: %s is %v, want %v", name, series, got, want)
			}
		}
	}
}
