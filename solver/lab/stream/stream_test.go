// SPDX-License-Identifier: Apache-2.0

package stream_test

import (
	"math"
	"strings"
	"testing"

	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/lab/stream"
	"github.com/semmoe/operator/solver/pipeline"
)

// backbones returns the two models of FinDEP's measurements.
func backbones(t *testing.T) map[string]*pipeline.Shape {
	t.Helper()
	shapes := map[string]*pipeline.Shape{
		"DeepSeek-V2":     {HiddenLayers: 60, MoELayers: 59, Experts: 160, TopK: 6, Hidden: 5120},
		"Qwen3-235B-A22B": {HiddenLayers: 94, MoELayers: 94, Experts: 128, TopK: 8, Hidden: 4096},
	}
	for name, config := range map[string]string{
		"DeepSeek-V2": `{"num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 2, "intermediate_size": 12288, "moe_intermediate_size": 1536,
			"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}`,
		"Qwen3-235B-A22B": `{"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536}`,
	} {
		if err := shapes[name].ReadSizes([]byte(config)); err != nil {
			t.Fatal(err)
		}
	}
	return shapes
}

func equal(a, b float64) bool { return math.Abs(a-b) <= 1e-9*max(math.Abs(a), math.Abs(b)) }

// streamOf returns batches of the backbone by length.
func streamOf(t *testing.T, shape *pipeline.Shape, counts map[int]int) []stream.Batches {
	t.Helper()
	profile, err := hardware.BuiltIn(hardware.Default)
	if err != nil {
		t.Fatal(err)
	}
	var all []stream.Batches
	for _, sequence := range []int{512, 1024, 2048, 4096, 8192} {
		if counts[sequence] == 0 {
			continue
		}
		p, err := shape.Problem(profile, pipeline.Serving{
			Ranks: 8, Sequence: sequence, Samples: 4, MemoryBytes: 126e9, WeightBytes: 2, DispatchBytes: 2,
		})
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, stream.Batches{Problem: p, Count: counts[sequence]})
	}
	return all
}

// One schedule per length is never slower than one for all lengths (FinDEP's Table 6).
func TestAdaptiveIsAtLeastFixed(t *testing.T) {
	for name, shape := range backbones(t) {
		s, err := stream.Compare(t.Context(), streamOf(t, shape, map[int]int{512: 10, 1024: 8, 2048: 6, 4096: 3, 8192: 1}))
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: adaptive over the mean length's %.4f, over the best fixed %.4f", name, s.Adaptive.TokensPerSecond/s.Mean.TokensPerSecond, s.Adaptive.TokensPerSecond/s.Fixed.TokensPerSecond)
		if s.Batches != 28 || s.Lengths != 5 || s.Mean.Sequence != 2048 || math.Abs(s.MeanSequence-1645.7) > 0.1 {
			t.Errorf("%s: the stream is %+v", name, s)
		}
		if s.Adaptive.TokensPerSecond < s.Fixed.TokensPerSecond*(1-1e-9) || s.Fixed.TokensPerSecond < s.Mean.TokensPerSecond || s.Mean.TokensPerSecond <= 0 {
			t.Errorf("%s: %+v", name, s)
		}
		one, err := stream.Compare(t.Context(), streamOf(t, shape, map[int]int{2048: 7}))
		if err != nil {
			t.Fatal(err)
		}
		if !equal(one.Adaptive.TokensPerSecond, one.Fixed.TokensPerSecond) || one.Mean != one.Fixed {
			t.Errorf("%s: with one length %+v", name, one)
		}
	}
}

func TestCompareRejects(t *testing.T) {
	if _, err := stream.Compare(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "no batch") {
		t.Errorf("an empty stream: %v", err)
	}
	if _, err := stream.Compare(t.Context(), []stream.Batches{{Problem: &pipeline.Problem{}}}); err == nil || !strings.Contains(err.Error(), "0 batches of") {
		t.Errorf("no batch of a length: %v", err)
	}
}
