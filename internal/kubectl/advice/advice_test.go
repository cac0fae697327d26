// SPDX-License-Identifier: Apache-2.0

package advice

import (
	"encoding/json"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kubectl/terminal"
	"github.com/semmoe/operator/internal/plan/overlap"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/pipeline"
	"github.com/semmoe/operator/solver/schedule"
)

// input returns a vLLM deployment of DeepSeek-V2 on eight ranks, with the schedule of its plan in service.
func input(t *testing.T, change ...func(*Input)) Input {
	t.Helper()
	machines, err := hardware.BuiltIn(hardware.Default)
	if err != nil {
		t.Fatal(err)
	}
	shape := &pipeline.Shape{
		HiddenLayers: 60, MoELayers: 59, Experts: 160, TopK: 6, Hidden: 5120, ExpertSize: 1536, SharedSize: 3072, DenseSize: 12288,
		Heads: 128, KVHeads: 128, QueryDim: 192, ValueDim: 128, KVRank: 512, QueryRank: 1536, RopeDim: 64,
	}
	made, err := schedule.Of(shape, machines, schedule.Inputs{Ranks: 8, SlotsPerRank: 20, LAR: 0.4})
	if err != nil {
		t.Fatal(err)
	}
	moed := &semmoev1.MoEDeployment{}
	moed.Name, moed.Namespace = "m", "ns"
	moed.Spec.Engine = semmoev1.EngineSpec{Type: semmoev1.EngineVLLM, Image: "vllm/vllm-openai:v0.32.0", Args: []string{"--all2all-backend", "deepep_high_throughput"}}
	moed.Spec.Model.Path = "/models/m"
	moed.Spec.Parallelism = semmoev1.ParallelismSpec{ExpertParallelSize: 8, Attention: semmoev1.AttentionDataParallel}
	moed.Status.PlanDigest = "bb"
	moed.Status.Model = &semmoev1.ModelStatus{Family: "deepseek_v2"}
	moed.Status.BatchTokens = &semmoev1.BatchTokensStatus{Observed: []int32{65536, 131072}}
	in := Input{Moed: moed, ShortDigest: "bb", Model: &overlap.Model{Schedule: made, Hardware: machines, SlotsPerRank: 20}, BatchTokens: []int32{4096}}
	for _, c := range change {
		c(&in)
	}
	return in
}

func sglang(in *Input) {
	in.Moed.Spec.Engine = semmoev1.EngineSpec{Type: semmoev1.EngineSGLang, Image: "lmsysorg/sglang:v0.5.12", Args: []string{"--moe-a2a-backend", "deepep"}}
}

func sizes(sizes ...int32) func(*Input) {
	return func(in *Input) { in.Moed.Status.BatchTokens.Observed = sizes }
}

// Micro-batches are advised for large batches and removed for small ones, if the engine supports the change.
func TestOverlap(t *testing.T) {
	args := func(args ...string) func(*Input) { return func(in *Input) { in.Moed.Spec.Engine.Args = args } }
	present := func(o semmoev1.OverlapSpec) func(*Input) {
		return func(in *Input) { in.Moed.Spec.Engine.Overlap = &o }
	}
	for name, tc := range map[string]struct {
		in      Input
		verdict Verdict
		why     string
		patch   string // overlap in the patch
	}{
		"vLLM, large batches":        {input(t), Change, "overlaps", `{"decodeThresholdTokens":%T,"microBatches":2,"prefillThresholdTokens":%T}`},
		"vLLM, small batches":        {input(t, sizes(256, 512)), Keep, "changes by +0.0%", ""},
		"vLLM, as advised":           {input(t, present(semmoev1.OverlapSpec{MicroBatches: 2, DecodeThresholdTokens: threshold(t), PrefillThresholdTokens: threshold(t)})), Keep, "2 micro-batches", ""},
		"vLLM, slow micro-batches":   {input(t, sizes(512, 1024), present(semmoev1.OverlapSpec{MicroBatches: 2})), Change, "cost more", ``},
		"vLLM, no backend":           {input(t, args()), Unsupported, "--all2all-backend", ""},
		"vLLM, flag of the user":     {input(t, args("--all2all-backend", "deepep_high_throughput", "--enable-dbo")), Unsupported, "--enable-dbo", ""},
		"vLLM, attention TP":         {input(t, func(in *Input) { in.Moed.Spec.Parallelism.Attention = semmoev1.AttentionTensorParallel }), Unsupported, "TensorParallel", ""},
		"vLLM, V2 runner":            {input(t, func(in *Input) { in.Moed.Spec.Profiling = &semmoev1.ProfilingSpec{} }), Unsupported, "V2 model runner", ""},
		"chosen by the operator":     {input(t, present(semmoev1.OverlapSpec{Mode: semmoev1.OverlapAuto})), Keep, "status.overlap", ""},
		"SGLang, large batches":      {input(t, sglang), Change, "overlaps", `{"microBatches":2}`},
		"SGLang, small batches":      {input(t, sglang, sizes(256)), Keep, "changes by +", ""},
		"SGLang, slow micro-batches": {input(t, sglang, sizes(256), present(semmoev1.OverlapSpec{MicroBatches: 2, DistributionThresholdPercent: ptr.To[int32](0)})), Change, "", `null`},
		"SGLang, with multiprocessors": {input(t, sglang, sizes(256), present(semmoev1.OverlapSpec{MicroBatches: 2, CommunicationSMs: 24, DistributionThresholdPercent: ptr.To[int32](0)})), Change, "",
			`{"distributionThresholdPercent":null,"microBatches":null}`},
		"SGLang, no backend":      {input(t, sglang, args()), Unsupported, "--moe-a2a-backend", ""},
		"SGLang, another family":  {input(t, sglang, func(in *Input) { in.Moed.Status.Model.Family = "gpt_oss" }), Unsupported, "gpt_oss", ""},
		"TensorRT-LLM":            {input(t, func(in *Input) { in.Moed.Spec.Engine = semmoev1.EngineSpec{Type: semmoev1.EngineTensorRTLLM} }), Unsupported, "no flag", ""},
		"no schedule":             {input(t, func(in *Input) { in.Model = nil }), NotModelled, "no schedule", ""},
		"another number of ranks": {input(t, func(in *Input) { in.Moed.Spec.Parallelism.ExpertParallelSize = 4 }), NotModelled, "8 ranks", ""},
		"no batch size":           {input(t, sizes(), func(in *Input) { in.BatchTokens = nil }), NotModelled, "no batch size", ""},
		"no reported batch size":  {input(t, sizes(), func(in *Input) { in.BatchTokens = []int32{131072} }), Change, "overlaps", `{"decodeThresholdTokens":%T,"microBatches":2,"prefillThresholdTokens":%T}`},
		"high minimum gain":       {input(t, func(in *Input) { in.Moed.Spec.Rollout.MinimumGainPercent = ptr.To[int32](90) }), Keep, "from -90%", ""},
	} {
		t.Run(name, func(t *testing.T) {
			a := Of(tc.in)
			item := a.Items[0]
			if item.Setting != "spec.engine.overlap" || item.Verdict != tc.verdict || !strings.Contains(item.Why, tc.why) {
				t.Fatalf("%+v, want %s with %q", item, tc.verdict, tc.why)
			}
			if (tc.verdict == Change) != (a.Patch != nil) || (tc.verdict == Change) != (item.Advised != "") {
				t.Errorf("%+v has patch %v", item, a.Patch)
			}
			if tc.verdict == Change && item.After >= 0.98*item.Before {
				t.Errorf("%v µs instead of %v µs is advised", item.After, item.Before)
			}
			if tc.patch != "" {
				data, err := json.Marshal(a.Patch["spec"].(map[string]any)["engine"].(map[string]any)["overlap"])
				if err != nil {
					t.Fatal(err)
				}
				want := strings.ReplaceAll(tc.patch, "%T", strconv.Itoa(int(threshold(t))))
				if diff := cmp.Diff(want, string(data)); diff != "" {
					t.Errorf("patch (-want +got):\n%s", diff)
				}
			}
			text := a.Text(terminal.Style{})
			if advised := strings.Contains(text, "A change is recommended"); advised != (a.Patch != nil) || !strings.Contains(text, item.Why) {
				t.Errorf("text:\n%s", text)
			}
		})
	}
}

// threshold returns the threshold of the deployment of input.
func threshold(t *testing.T) int32 {
	t.Helper()
	in := input(t)
	m, err := in.Model.Schedule.MicroBatches(in.Model.Hardware, in.Model.SlotsPerRank, in.Model.Schedule.LAR)
	if err != nil {
		t.Fatal(err)
	}
	return int32(m.Threshold(2, overlap.MinSaved))
}

// A change that was made is not advised again.
func TestAdviceIsStable(t *testing.T) {
	for name, in := range map[string]Input{"vLLM": input(t), "SGLang": input(t, sglang), "SGLang, small": input(t, sglang, sizes(256), func(in *Input) {
		in.Moed.Spec.Engine.Overlap = &semmoev1.OverlapSpec{MicroBatches: 2}
	})} {
		a := Of(in)
		if a.Patch == nil {
			t.Fatalf("%s: no change is advised: %+v", name, a.Items)
		}
		data, err := json.Marshal(a.Patch)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(data, in.Moed); err != nil {
			t.Fatal(err)
		}
		if again := Of(in); again.Patch != nil {
			t.Errorf("%s: after %s, %v is advised", name, data, again.Patch)
		}
	}
}

func TestCopies(t *testing.T) {
	compared := &solver.Copies{Chosen: 2, Points: []solver.CopyPoint{{RedundantSlots: 0, LayerUS: 100}, {RedundantSlots: 1, LayerUS: 95}, {RedundantSlots: 2, LayerUS: 90}}}
	for name, tc := range map[string]struct {
		in      Input
		verdict Verdict
		why     string
	}{
		"vLLM":         {input(t), Unsupported, "reads no expert map"},
		"not compared": {input(t, sglang), NotModelled, "redundantExperts Auto"},
		"compared":     {input(t, sglang, func(in *Input) { in.Copies = compared }), Keep, "0: 100 µs, 1: 95 µs, 2: 90 µs"},
	} {
		if item := Of(tc.in).Items[1]; item.Verdict != tc.verdict || !strings.Contains(item.Why, tc.why) {
			t.Errorf("%s: %+v", name, item)
		}
	}
}
