// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/plan/overlap"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/pipeline"
	"github.com/semmoe/operator/solver/schedule"
)

// TestChosenOverlapStarts starts each release with the overlap settings that mode Auto chooses for large batches. The
// command line has the documented flags.
func TestChosenOverlapStarts(t *testing.T) {
	machines := hardware.DefaultProfile()
	shape := &pipeline.Shape{
		HiddenLayers: 48, MoELayers: 48, Experts: 128, TopK: 8, Hidden: 2048, ExpertSize: 768, Heads: 32, KVHeads: 4, QueryDim: 128, ValueDim: 128,
	}
	made, err := schedule.Of(shape, machines, schedule.Inputs{Ranks: 4, SlotsPerRank: 32, LAR: 0.4})
	if err != nil {
		t.Fatal(err)
	}
	const deepep, split = "--moe-a2a-backend deepep", "--enable-two-batch-overlap"
	const highThroughput, dbo = "--all2all-backend deepep_high_throughput", "--enable-dbo --dbo-decode-token-threshold --dbo-prefill-token-threshold"
	for dialect, tc := range map[string]struct {
		engine, args, flags, env string
	}{
		"sglang-0.5.12": {"SGLang", deepep, split, ""},
		"sglang-0.5.17": {"SGLang", deepep, split, ""},
		"sglang-0.5.23": {"SGLang", deepep, split, ""},
		"vllm-0.22.0":   {"VLLM", highThroughput, dbo, ""},
		"vllm-0.25.1":   {"VLLM", highThroughput, dbo, ""},
		"vllm-0.32.0":   {"VLLM", highThroughput, dbo, "VLLM_USE_V2_MODEL_RUNNER"},
	} {
		t.Run(dialect, func(t *testing.T) {
			adapter, err := registry.For(tc.engine)
			if err != nil {
				t.Fatal(err)
			}
			_, release, _ := strings.Cut(dialect, "-")
			launch := engine.Launch{ModelPath: tinyModel, ServedModelName: "tiny", Host: "127.0.0.1", Port: 8000, Ranks: 4, AttentionDP: true, RoutedExperts: true}
			s := engine.Situation{Release: engine.ParseRelease(release), Launch: launch, UserArgs: strings.Fields(tc.args), Family: "qwen3_moe"}
			if tc.env != "" {
				t.Setenv(tc.env, "1")
				s.UserEnv = []string{tc.env + "=1"}
			}
			c := overlap.Choose(&overlap.Model{Schedule: made, Hardware: machines, SlotsPerRank: 32}, overlap.Options{
				Ranks: 4, LAR: 0.4, BatchTokens: []int32{65536, 131072}, MinGain: 0.02, Automatic: true, Adapter: adapter, Situation: s,
			})
			if c.Verdict != overlap.Change {
				t.Fatalf("%+v", c)
			}
			launch.Overlap = c.Values
			args, err := adapter.Args(launch, s.UserArgs)
			if err != nil {
				t.Fatal(err)
			}
			for flag := range strings.FieldsSeq(tc.flags) {
				if !slices.Contains(args, flag) {
					t.Errorf("%v has no %s", args, flag)
				}
			}
			if _, err := options(dialect, slices.Concat(adapter.Command, args)); err != nil {
				t.Errorf("the engine does not start with %v: %v", args, err)
			}
		})
	}
}
