// SPDX-License-Identifier: Apache-2.0

package pipeline

import (
	"math"
	"testing"

	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/trace"
)

func TestOutsideExpertsByHand(t *testing.T) {
	h := profile(t)
	model := trace.Model{
		HiddenLayers: 3, Layers: []int{1, 2}, Experts: 8, TopK: 2, HiddenSize: 1024,
		Config: `{"num_attention_heads":8,"num_key_value_heads":2,"head_dim":128,"intermediate_size":4096,"moe_intermediate_size":512,"n_shared_experts":1}`,
	}
	s, err := ShapeOf(&model)
	if err != nil {
		t.Fatal(err)
	}
	block := func(width, parts, rows float64) float64 {
		return h.Dense.Microseconds(2*1024*width/parts, rows) + h.Dense.Microseconds(1024*width/parts, rows)
	}
	attention := func(samples, parts, rows float64) float64 {
		us := h.Attention.Microseconds(hardware.CausalAttention(samples, 8/parts, 1000, 128, 128))
		for _, weights := range []float64{1024 * 1024, 1024 * 256, 1024 * 256, 1024 * 1024} {
			us += h.Dense.Microseconds(weights/parts, rows)
		}
		return us
	}
	own := 3*attention(2, 1, 2000) + 2*block(512, 1, 2000) + block(4096, 1, 2000)
	const bytes = 8000 * 1024 * 2
	all := 3*(attention(8, 4, 8000)+h.ReduceScatter.Microseconds(bytes)+h.AllGather.Microseconds(bytes)) + 2*block(512, 4, 8000) + block(4096, 4, 8000)
	for name, c := range map[string]struct {
		pass    Pass
		us      float64
		prompts int
	}{
		"own prompts":  {Pass{Ranks: 4, Tokens: 8000, Sequence: 1000}, own, 1},
		"shared heads": {Pass{Ranks: 4, Tokens: 8000, Sequence: 1000, TensorParallel: true}, all, 1},
	} {
		if got := s.OutsideExperts(h, c.pass); math.Abs(got/c.us-1) > 1e-9 || c.pass.PassesOfPrompt() != c.prompts {
			t.Errorf("%s: %v µs, %d passes; want %v, %d", name, got, c.pass.PassesOfPrompt(), c.us, c.prompts)
		}
	}
	for want, pass := range map[int]Pass{
		4: {Ranks: 4, Tokens: 1000, Sequence: 1000}, 2: {Ranks: 4, Tokens: 999, Sequence: 1000, TensorParallel: true}, 1000: {Ranks: 4, Tokens: 2, Sequence: 1000},
	} {
		if got := pass.PassesOfPrompt(); got != want {
			t.Errorf("%+v: a prompt takes %d passes; want %d", pass, got, want)
		}
	}
}
