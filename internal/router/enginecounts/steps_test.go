// SPDX-License-Identifier: Apache-2.0

package enginecounts

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/observation/stepsizes"
	"github.com/semmoe/operator/internal/router/discovery"
)

func stepMetrics(t testing.TB, name string) *engine.StepMetrics {
	t.Helper()
	adapter, err := registry.For(name)
	if err != nil || adapter.StepMetrics == nil {
		t.Fatalf("%s counts no steps: %v", name, err)
	}
	return adapter.StepMetrics
}

// ofVLLM returns an exposition in the format of vLLM 0.32.0, for ranks with the steps in each bucket up to 8, 16, 4096
// and +Inf.
func ofVLLM(running float64, ranks ...[5]float64) string {
	var text strings.Builder
	text.WriteString("process_start_time_seconds 1.79e+09\n")
	text.WriteString("# HELP vllm:iteration_tokens_total Histogram of number of tokens per engine_step.\n# TYPE vllm:iteration_tokens_total histogram\n")
	for rank, counts := range ranks {
		below := 0.0
		for i, bound := range []string{"8.0", "16.0", "4096.0", "+Inf"} {
			below += counts[i]
			fmt.Fprintf(&text, "vllm:iteration_tokens_total_bucket{engine=\"%d\",le=\"%s\",model_name=\"m,{}\\\"\"} %v\n", rank, bound, below)
		}
		fmt.Fprintf(&text, "vllm:iteration_tokens_total_count{engine=\"%[1]d\",model_name=\"m,{}\\\"\"} %[2]v\nvllm:iteration_tokens_total_sum{engine=\"%[1]d\",model_name=\"m,{}\\\"\"} %[3]v\n", rank, below, counts[4])
		fmt.Fprintf(&text, "vllm:iteration_tokens_total_created{engine=\"%d\",model_name=\"m,{}\\\"\"} 1.79e+09\n", rank)
		fmt.Fprintf(&text, "vllm:num_requests_running{engine=\"%d\",model_name=\"m,{}\\\"\"} %v\n", rank, running)
	}
	return text.String()
}

// several returns an exposition of an engine with several servers, which lacks the metrics of a process.
func several(text string) string {
	_, rest, _ := strings.Cut(text, "\n")
	return rest
}

// ofSGLang returns an exposition in the format of SGLang 0.5.17 with --enable-metrics, for ranks with steps and tokens
// of decode and prefill.
func ofSGLang(ranks ...[4]float64) string {
	var text strings.Builder
	for rank, c := range ranks {
		labels := fmt.Sprintf(`dp_rank="%d",engine_type="unified",mode="%%s",model_name="m",moe_ep_rank="%[1]d",pp_rank="0",tp_rank="%[1]d"`, rank)
		for _, series := range []struct {
			name, mode string
			value      float64
		}{
			{"cuda_graph_passes_total", "decode_cuda_graph", c[0] - 1}, {"cuda_graph_passes_total", "decode_none", 1}, {"realtime_tokens_total", "decode", c[1]},
			{"cuda_graph_passes_total", "prefill_none", c[2]}, {"realtime_tokens_total", "prefill_compute", c[3]}, {"realtime_tokens_total", "prefill_cache", 1e6},
		} {
			fmt.Fprintf(&text, "sglang:%s{"+labels+"} %v\n", series.name, series.mode, series.value)
		}
	}
	return text.String()
}

func TestSteps(t *testing.T) {
	for name, tc := range map[string]struct {
		engine        string
		before, after string
		want          []float64
		steps         float64
		prefill       float64
	}{
		"vLLM, one bucket": { // their sum determines the position in the bucket
			"VLLM", ofVLLM(4, [5]float64{}), ofVLLM(4, [5]float64{0, 800, 0, 0, 800 * 12}),
			[]float64{12, 12, 12, 12, 12, 12, 12, 12}, 800, 1,
		},
		"vLLM, decode and prompts": {
			"VLLM", ofVLLM(16, [5]float64{}), ofVLLM(16, [5]float64{0, 700, 0, 100, 700*11.313708 + 100*8000}),
			[]float64{11.31, 11.31, 11.31, 11.31, 11.31, 11.31, 11.31, 8000}, 800, .125,
		},
		"vLLM, ranks together": { // the second rank was idle in half of the steps: 1.5 ranks compute on average
			"VLLM", ofVLLM(16, [5]float64{}, [5]float64{}), ofVLLM(16, [5]float64{0, 800, 0, 0, 800 * 12}, [5]float64{0, 400, 0, 0, 400 * 12}),
			[]float64{18, 18, 18, 18, 18, 18, 18, 18}, 800, 0,
		},
		"vLLM, several servers": { // each of two ranks decodes 23 requests, half of them on each of two servers; prompts are not split
			"VLLM", several(ofVLLM(23, [5]float64{}, [5]float64{})), several(ofVLLM(23, [5]float64{0, 1400, 0, 100, 1400*11.313708 + 100*8000}, [5]float64{0, 1400, 0, 100, 1400*11.313708 + 100*8000})),
			[]float64{45.255, 45.255, 45.255, 45.255, 45.255, 45.255, 45.255, 16000}, 800, .125,
		},
		"vllm-ascend": {
			"VLLMAscend", ofVLLM(4, [5]float64{}), ofVLLM(4, [5]float64{0, 800, 0, 0, 800 * 12}),
			[]float64{12, 12, 12, 12, 12, 12, 12, 12}, 800, 1,
		},
		"SGLang": {
			"SGLang", ofSGLang([4]float64{5, 50, 0, 0}, [4]float64{5, 50, 0, 0}), ofSGLang([4]float64{705, 50 + 700*32, 100, 100 * 4096}, [4]float64{705, 50 + 700*32, 100, 100 * 4096}),
			[]float64{64, 64, 64, 64, 64, 64, 64, 8192}, 800, .125,
		},
		"idle": {"VLLM", ofVLLM(0, [5]float64{0, 9, 0, 0, 90}), ofVLLM(0, [5]float64{0, 9, 0, 0, 90}), nil, 0, 0},
		"restarted": {
			"VLLM", ofVLLM(0, [5]float64{0, 9, 0, 0, 90}), ofVLLM(0, [5]float64{0, 5, 0, 0, 60}), nil, 0, 0,
		},
	} {
		t.Run(name, func(t *testing.T) {
			metrics := stepMetrics(t, tc.engine)
			var pod podSteps
			now := time.Unix(1_700_000_000, 0)
			for _, text := range []string{tc.before, tc.after} {
				got := parse(strings.NewReader(text), metrics)
				if got.stepsErr != nil {
					t.Fatal(got.stepsErr)
				}
				pod.add(got.steps, now)
				now = now.Add(Period)
			}
			h := &pod.histogram
			if diff := cmp.Diff(tc.want, h.Sizes(), cmpopts.EquateApprox(1e-3, 0)); diff != "" || math.Abs(h.Steps()-tc.steps) > 1e-6 || math.Abs(h.PrefillShare()-tc.prefill) > 1e-6 {
				t.Errorf("%v steps, share of prefill %v; sizes (-want +got):\n%s", h.Steps(), h.PrefillShare(), diff)
			}
		})
	}
}

// TestUnreadableSteps checks that unreadable metrics are reported, and that nothing is derived from them.
func TestUnreadableSteps(t *testing.T) {
	good := ofVLLM(4, [5]float64{0, 800, 0, 0, 800 * 12})
	for name, tc := range map[string]struct{ engine, text, want string }{
		"absent":        {"VLLM", "vllm:prompt_tokens_total{engine=\"0\"} 1\n", "no vllm:iteration_tokens_total"},
		"other engine":  {"SGLang", good, "no sglang:cuda_graph_passes_total"},
		"not a number":  {"VLLM", strings.Replace(good, "} 800\n", "} NaN\n", 1), "a value is not a number"},
		"infinite":      {"VLLM", strings.Replace(good, "} 9600\n", "} +Inf\n", 1), "infinite, or too large"},
		"negative":      {"VLLM", strings.Replace(good, "} 9600\n", "} -1\n", 1), "a value is negative"},
		"decreasing":    {"VLLM", strings.Replace(good, `le="4096.0",model_name="m,{}\""} 800`, `le="4096.0",model_name="m,{}\""} 7`, 1), "fewer steps up to a larger bound"},
		"no bound":      {"VLLM", strings.Replace(good, `le="8.0",`, "", 1), `has the bound ""`},
		"no infinity":   {"VLLM", strings.Replace(good, "+Inf", "8192.0", 1), "no bucket +Inf"},
		"no value":      {"VLLM", strings.Replace(good, "} 9600\n", "}\n", 1), "no value"},
		"broken labels": {"VLLM", strings.Replace(good, `engine="0"`, `engine=0`, 1), "are invalid"},
		"many ranks":    {"VLLM", ofVLLM(0, make([][5]float64, maxRanks+1)...), "more than 1024 ranks"},
		"twice":         {"VLLM", good + good, "occurs twice"},
		"SGLang's NaN":  {"SGLang", strings.Replace(ofSGLang([4]float64{5, 50, 0, 0}), "} 50\n", "} NaN\n", 1), "a value is not a number"},
	} {
		got := parse(strings.NewReader(tc.text), stepMetrics(t, tc.engine))
		if got.steps != nil || got.stepsErr == nil || !strings.Contains(got.stepsErr.Error(), tc.want) {
			t.Errorf("%s: %v, error %v; want an error with %q", name, got.steps, got.stepsErr, tc.want)
		}
	}
}

func FuzzSteps(f *testing.F) {
	f.Add(ofVLLM(4, [5]float64{0, 800, 0, 0, 800 * 12}), ofVLLM(4, [5]float64{1, 900, 3, 0, 900 * 12}))
	f.Add(ofSGLang([4]float64{5, 50, 0, 0}), ofSGLang([4]float64{6, 90, 1, 20}))
	vllm, sglang := stepMetrics(f, "VLLM"), stepMetrics(f, "SGLang")
	f.Fuzz(func(t *testing.T, before, after string) {
		for _, metrics := range []*engine.StepMetrics{vllm, sglang} {
			var pod podSteps
			for i, text := range []string{before, after} {
				if got := parse(strings.NewReader(text), metrics); got.stepsErr == nil {
					pod.add(got.steps, time.Unix(int64(i), 0))
				}
			}
			report := stepsizes.Pod{Sizes: pod.histogram.Sizes(), Steps: pod.histogram.Steps(), PrefillShare: pod.histogram.PrefillShare()}
			if err := stepsizes.Validate([]stepsizes.Pod{report}); err != nil {
				t.Fatalf("%q, %q: %v", before, after, err)
			}
		}
	})
}

// TestPollSteps checks that a pod has a distribution while its counters are readable, and the reason if they are not.
// Older steps weigh less.
func TestPollSteps(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	pods := answers{}
	poller := &Poller{
		Backends: func() []discovery.Backend {
			return []discovery.Backend{{Pod: "p", Address: "p:1", Engine: "VLLM"}, {Pod: "trt", Address: "trt:1", Engine: "TensorRTLLM"}}
		},
		Transport: pods, Now: func() time.Time { return now },
	}
	poll := func(text string) []stepsizes.Pod {
		if pods["p:1"] = text; text == "" {
			delete(pods, "p:1")
		}
		poller.Poll(context.Background())
		return poller.Steps()
	}
	if got := poll(ofVLLM(0, [5]float64{})); len(got) != 1 || got[0].Sizes != nil || got[0].Problem != "" {
		t.Errorf("after one reading: %+v", got)
	}
	now = now.Add(Period)
	if got := poll(ofVLLM(0, [5]float64{0, 800, 0, 0, 9600})); len(got) != 1 || len(got[0].Sizes) != stepsizes.Parts || got[0].Steps != 800 {
		t.Errorf("after two readings: %+v", got)
	}
	now = now.Add(halfLife)
	if got := poll(ofVLLM(0, [5]float64{0, 800, 0, 100, 9600 + 100*8192})); len(got) != 1 || math.Abs(got[0].Steps-500) > 1 || math.Abs(got[0].Sizes[7]-8192) > 1 {
		t.Errorf("after a half-life: %+v", got)
	}
	for text, want := range map[string]string{"": "failed to read /metrics", "vllm:a 1\n": "no vllm:iteration_tokens_total"} {
		if got := poll(text); len(got) != 1 || got[0].Sizes != nil || !strings.Contains(got[0].Problem, want) {
			t.Errorf("%q: %+v, want the problem %q", text, got, want)
		}
	}
	if got := poll(ofVLLM(0, [5]float64{0, 800, 0, 100, 9600 + 100*8192})); len(got) != 1 || got[0].Problem != "" || len(got[0].Sizes) != stepsizes.Parts {
		t.Errorf("once it can be read again: %+v", got)
	}
	now = now.Add(3 * Period)
	if got := poller.Steps(); len(got) != 0 {
		t.Errorf("after readings have ended: %+v", got)
	}
}
