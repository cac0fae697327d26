// SPDX-License-Identifier: Apache-2.0

package overlap

import (
	"strings"
	"testing"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/pipeline"
	"github.com/semmoe/operator/solver/schedule"
)

// model returns the models of a plan for DeepSeek-V2 on eight ranks.
func model(t *testing.T, change ...func(*hardware.Profile)) *Model {
	t.Helper()
	machines, err := hardware.BuiltIn(hardware.Default)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range change {
		c(machines)
	}
	shape := &pipeline.Shape{
		HiddenLayers: 60, MoELayers: 59, Experts: 160, TopK: 6, Hidden: 5120, ExpertSize: 1536, SharedSize: 3072, DenseSize: 12288,
		Heads: 128, KVHeads: 128, QueryDim: 192, ValueDim: 128, KVRank: 512, QueryRank: 1536, RopeDim: 64,
	}
	made, err := schedule.Of(shape, machines, schedule.Inputs{Ranks: 8, SlotsPerRank: 20, LAR: 0.4})
	if err != nil {
		t.Fatal(err)
	}
	return &Model{Schedule: made, Hardware: machines, SlotsPerRank: 20}
}

// options returns the options of an engine for large batches.
func options(t *testing.T, engineType, release string, args ...string) Options {
	t.Helper()
	adapter, err := registry.For(engineType)
	if err != nil {
		t.Fatal(err)
	}
	return Options{
		Ranks: 8, LAR: 0.4, BatchTokens: []int32{65536, 131072}, MinGain: 0.02, Automatic: true, Adapter: adapter,
		Situation: engine.Situation{
			Launch: engine.Launch{ModelPath: "/models", Ranks: 8, AttentionDP: true}, UserArgs: args, Release: engine.ParseRelease(release), Family: "deepseek_v2",
		},
	}
}

func TestChoose(t *testing.T) {
	vllm := options(t, "VLLM", "0.32.0", "--all2all-backend", "deepep_high_throughput")
	sglang := options(t, "SGLang", "0.5.23", "--moe-a2a-backend", "deepep")
	with := func(o Options, change func(*Options)) Options {
		change(&o)
		return o
	}
	small := func(o *Options) { o.BatchTokens = []int32{256, 512} }
	steps, err := model(t).Schedule.MicroBatches(model(t).Hardware, 20, 0.4)
	if err != nil {
		t.Fatal(err)
	}
	from := int32(steps.Threshold(2, MinSaved))
	if from == 0 {
		t.Fatal("no threshold")
	}
	splitVLLM := semmoev1.OverlapSpec{MicroBatches: 2, DecodeThresholdTokens: from, PrefillThresholdTokens: from}
	splitSGLang := semmoev1.OverlapSpec{MicroBatches: 2}
	// Products get faster on more multiprocessors, and exchanges have little to do.
	local := func(o *Options) { o.LAR = 0.999 }
	for name, tc := range map[string]struct {
		o       Options
		m       *Model
		verdict Verdict
		want    semmoev1.OverlapSpec
		why     string
	}{
		"vLLM, large batches":           {vllm, model(t), Change, splitVLLM, "overlaps"},
		"vLLM, small batches":           {with(vllm, small), model(t), Keep, semmoev1.OverlapSpec{}, "changes by"},
		"vLLM, in use":                  {with(vllm, func(o *Options) { o.Present = splitVLLM }), model(t), Keep, splitVLLM, "changes by"},
		"vLLM, in use at small batches": {with(vllm, func(o *Options) { small(o); o.Present = semmoev1.OverlapSpec{MicroBatches: 2} }), model(t), Change, semmoev1.OverlapSpec{}, "cost more"},
		"vLLM, attention tp":            {with(vllm, func(o *Options) { o.Situation.Launch.AttentionDP = false }), model(t), Unsupported, semmoev1.OverlapSpec{}, "TensorParallel"},
		"vLLM, V2 runner":               {with(vllm, func(o *Options) { o.Situation.Launch.RoutedExperts = true }), model(t), Unsupported, semmoev1.OverlapSpec{}, "V2 model runner"},
		"vLLM, V2 runner is set": {with(vllm, func(o *Options) {
			o.Situation.Launch.RoutedExperts, o.Situation.UserEnv = true, []string{"VLLM_USE_V2_MODEL_RUNNER"}
		}), model(t), Change, splitVLLM, "overlaps"},
		"vLLM, another backend":          {options(t, "VLLM", "0.32.0", "--all2all-backend", "pplx"), model(t), Unsupported, semmoev1.OverlapSpec{}, "--all2all-backend"},
		"SGLang, large batches":          {sglang, model(t), Change, splitSGLang, "overlaps"},
		"SGLang, in use at small ones":   {with(sglang, func(o *Options) { small(o); o.Present = splitSGLang }), model(t), Change, semmoev1.OverlapSpec{}, "cost more"},
		"SGLang, another family":         {with(sglang, func(o *Options) { o.Situation.Family = "gpt_oss" }), model(t), Unsupported, semmoev1.OverlapSpec{}, "gpt_oss"},
		"SGLang, high minimum gain":      {with(sglang, func(o *Options) { o.MinGain = 0.9 }), model(t), Keep, semmoev1.OverlapSpec{}, "from -90%"},
		"SGLang, all experts are local":  {with(sglang, local), model(t), Keep, semmoev1.OverlapSpec{}, ""},
		"no schedule":                    {sglang, nil, NotModelled, semmoev1.OverlapSpec{}, "no schedule"},
		"another number of ranks":        {with(sglang, func(o *Options) { o.Ranks = 4 }), model(t), NotModelled, semmoev1.OverlapSpec{}, "8 ranks"},
		"no batch size":                  {with(sglang, func(o *Options) { o.BatchTokens = nil }), model(t), NotModelled, semmoev1.OverlapSpec{}, "no batch size"},
		"no slots, which no plan can be": {sglang, &Model{model(t).Schedule, model(t).Hardware, 0}, NotModelled, semmoev1.OverlapSpec{}, "slots"},
	} {
		t.Run(name, func(t *testing.T) {
			c := Choose(tc.m, tc.o)
			if c.Verdict != tc.verdict || c.Values != tc.want || !strings.Contains(c.Why, tc.why) {
				t.Fatalf("%+v, want %s %+v with %q", c, tc.verdict, tc.want, tc.why)
			}
			if c.Verdict == Change && !(c.Microseconds() < (1-tc.o.MinGain)*c.Before) {
				t.Errorf("%v µs instead of %v µs is a gain of less than %v", c.After, c.Before, tc.o.MinGain)
			}
		})
	}
}

// For every batch size, the choice is stable: with the chosen settings in use, they are kept. Chosen settings are never
// slower than none.
func TestChoiceIsStable(t *testing.T) {
	for _, o := range []Options{options(t, "VLLM", "0.32.0", "--all2all-backend", "deepep_low_latency"), options(t, "SGLang", "0.5.23", "--moe-a2a-backend", "deepep")} {
		for size := int32(64); size <= 1<<20; size *= 2 {
			o.BatchTokens, o.Present = []int32{size, 2 * size, 8 * size}, semmoev1.OverlapSpec{}
			first := Choose(model(t), o)
			o.Present = first.Values
			if again := Choose(model(t), o); again.Values != first.Values || again.Verdict == Change {
				t.Errorf("%s, %d tokens: first %+v, then %+v", o.Adapter.Type, size, first, again)
			}
			if first.Microseconds() > first.Unsplit {
				t.Errorf("%s, %d tokens: %+v is slower than no micro-batches", o.Adapter.Type, size, first)
			}
		}
	}
}

// Where exchanges need few multiprocessors, SGLang with DeepEP gets fewer, unless its mode accepts no number.
func TestMultiprocessors(t *testing.T) {
	set := 0
	for lar := 0.5; lar < 1; lar += 0.025 {
		o := options(t, "SGLang", "0.5.23", "--moe-a2a-backend", "deepep")
		o.LAR = lar
		c := Choose(model(t), o)
		if c.Values.CommunicationSMs == 0 {
			continue
		}
		set++
		if c.Values.MicroBatches != 2 || c.Values.CommunicationSMs >= 20 || c.Values.CommunicationSMs%2 != 0 {
			t.Errorf("local %v: %+v", lar, c)
		}
		low := options(t, "SGLang", "0.5.23", "--moe-a2a-backend", "deepep", "--deepep-mode", "low_latency")
		low.LAR = lar
		if c := Choose(model(t), low); c.Values != (semmoev1.OverlapSpec{MicroBatches: 2}) || !strings.Contains(c.Why, "are not set: spec.engine.overlap.communicationSMs") {
			t.Errorf("local %v, low latency: %+v", lar, c)
		}
		vllm := options(t, "VLLM", "0.32.0", "--all2all-backend", "deepep_high_throughput")
		vllm.LAR = lar
		if c := Choose(model(t), vllm); c.Values.CommunicationSMs != 0 {
			t.Errorf("local %v, vLLM: %+v", lar, c)
		}
	}
	if set == 0 {
		t.Error("no local activation rate leads to a number of multiprocessors")
	}
}
