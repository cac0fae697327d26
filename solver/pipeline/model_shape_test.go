// SPDX-License-Identifier: Apache-2.0

package pipeline

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/semmoe/operator/solver/cost/hardware"
)

// Two models with the sizes of the paper: DeepSeek-V2 with latent attention and shared experts, Qwen3-235B-A22B with
// grouped queries and no shared experts; and a small model with separate keys for all heads.
const (
	latentConfig = `{"num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 2, "intermediate_size": 12288, "moe_intermediate_size": 1536,
		"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}`
	groupedConfig = `{"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536}`
	headsConfig   = `{"num_attention_heads": 16, "intermediate_size": 1024, "shared_expert_intermediate_size": 4096}`
)

func shapeOf(t *testing.T, s Shape, config string) *Shape {
	t.Helper()
	if err := s.ReadSizes([]byte(config)); err != nil {
		t.Fatal(err)
	}
	if err := s.Check(); err != nil {
		t.Fatal(err)
	}
	return &s
}

// The first size of a list is used; unreadable sizes yield an error.
func TestListsOfSizes(t *testing.T) {
	var s Shape
	if err := s.ReadSizes([]byte(`{"intermediate_size":[40,40],"moe_intermediate_size":[6,3]}`)); err != nil || s.ExpertSize != 6 || s.DenseSize != 40 {
		t.Errorf("experts of %d, dense layers of %d, %v", s.ExpertSize, s.DenseSize, err)
	}
	for _, size := range []string{`"6"`, `[]`, `["6"]`} {
		if err := s.ReadSizes([]byte(`{"moe_intermediate_size":` + size + `}`)); err == nil || !strings.Contains(err.Error(), "moe_intermediate_size") {
			t.Errorf("size %s: error %v", size, err)
		}
	}
}

func latent(t *testing.T) *Shape {
	return shapeOf(t, Shape{HiddenLayers: 60, MoELayers: 59, Experts: 160, TopK: 6, Hidden: 5120}, latentConfig)
}

func groupedQueries(t *testing.T) *Shape {
	return shapeOf(t, Shape{HiddenLayers: 94, MoELayers: 94, Experts: 128, TopK: 8, Hidden: 4096}, groupedConfig)
}

func TestShapesByHand(t *testing.T) {
	heads := shapeOf(t, Shape{HiddenLayers: 16, MoELayers: 16, Experts: 64, TopK: 8, Hidden: 2048}, headsConfig)
	for name, c := range map[string]struct {
		shape                       *Shape
		projections, cache, experts float64
		shared                      int
	}{
		"MLA": {latent(t), 5120*1536 + 1536*128*192 + 5120*576 + 512*128*256 + 128*128*5120, 576, 40 * 3 * 5120 * 1536 * 2 * 59, 3072},
		"GQA": {groupedQueries(t), 4096*8192 + 2*4096*512 + 8192*4096, 1024, 32 * 3 * 4096 * 1536 * 2 * 94, 0},
		"MHA": {heads, 4 * 2048 * 2048, 4096, 16 * 3 * 2048 * 1024 * 2 * 16, 4096},
	} {
		sum := 0.0
		for _, w := range c.shape.Projections() {
			sum += w
		}
		if sum != c.projections || c.shape.CacheWidth() != c.cache || c.shape.SharedSize != c.shared {
			t.Errorf("%s: %v weights of attention, %v values in the cache, shared experts of %d; want %v, %v and %d", name, sum, c.shape.CacheWidth(), c.shape.SharedSize,
				c.projections, c.cache, c.shared)
		}
		if got := c.shape.expertBytes(4, Serving{WeightBytes: 2}); got != c.experts {
			t.Errorf("%s: experts need %v bytes on four ranks; want %v", name, got, c.experts)
		}
	}
}

func serving() Serving {
	return Serving{Ranks: 8, Sequence: 2048, Samples: 4, MemoryBytes: 126e9, WeightBytes: 2, DispatchBytes: 2}
}

func profile(t *testing.T) *hardware.Profile {
	t.Helper()
	p, err := hardware.BuiltIn(hardware.Default)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// bent returns a profile with separate parameters of large exchanges, and with costs per row of attention.
func bent(t *testing.T) *hardware.Profile {
	p := profile(t)
	p.AllToAll.Line, p.AllToAll.Large = hardware.Line{Start: 13, PerMicrosecond: 225e3}, &hardware.Line{Start: 40, PerMicrosecond: 318e3}
	p.Attention.RowFlops = 150e3
	return p
}

// With real shapes, the guarantees of Search hold, and the times satisfy its preconditions.
func TestRealShapes(t *testing.T) {
	for name, shape := range map[string]*Shape{"latent": latent(t), "grouped": groupedQueries(t)} {
		for _, h := range []*hardware.Profile{profile(t), bent(t)} {
			for _, sequence := range []int{1024, 4096, 8192} {
				v := serving()
				v.Sequence = sequence
				p, err := shape.Problem(h, v)
				if err != nil {
					t.Fatal(err)
				}
				r, err := Search(p)
				if err != nil {
					t.Fatal(err)
				}
				checkResult(t, p, r)
				if r.Plan.AttentionRanks+r.Plan.ExpertRanks != 8 || r.Plan.Samples*r.Plan.Sizes.MicroBatches > 4 {
					t.Errorf("%s: %d + %d ranks, %d micro-batches of %d", name, r.Plan.AttentionRanks, r.Plan.ExpertRanks, r.Plan.Sizes.MicroBatches, r.Plan.Samples)
				}
				if (r.Plan.Durations.Shared > 0) != (shape.SharedSize > 0) {
					t.Errorf("%s: shared experts take %v µs", name, r.Plan.Durations.Shared)
				}
				for i := range p.Splits {
					checkTimes(t, name, h, &p.Splits[i])
				}
			}
		}
	}
}

// checkTimes checks that each time, and each way to send a chunk, is convex and grows less than its load, and that
// there are as many ways as the profile has lines.
func checkTimes(t *testing.T, name string, h *hardware.Profile, split *Split) {
	t.Helper()
	if lines := len(h.AllToAll.Lines()); len(split.Dispatch) != lines || len(split.Combine) != lines {
		t.Fatalf("%s: %d ways to dispatch, %d to combine, want %d", name, len(split.Dispatch), len(split.Combine), lines)
	}
	for _, time := range slices.Concat(split.Dispatch, split.Combine, Ways{split.Attention, split.Experts}) {
		for x := 1.0; x < 1e5; x *= 2 {
			if a, b, c := time(x), time(2*x), time(3*x); a > b*(1+1e-12) || 2*b > (a+c)*(1+1e-9) || b > 2*a*(1+1e-12) {
				t.Fatalf("%s: times %v, %v, %v for 1, 2 and 3 times the load %v", name, a, b, c, x)
			}
		}
	}
}

// Smaller activations reduce the dispatch time; the combine time stays the same.
func TestDispatchInFewerBytes(t *testing.T) {
	v := serving()
	p16, err := latent(t).Problem(profile(t), v)
	if err != nil {
		t.Fatal(err)
	}
	v.DispatchBytes = 1
	p8, err := latent(t).Problem(profile(t), v)
	if err != nil {
		t.Fatal(err)
	}
	a, b, start := p16.Splits[0], p8.Splits[0], profile(t).AllToAll.Start
	if got := (b.Dispatch.fastest(1e4) - start) / (a.Dispatch.fastest(1e4) - start); math.Abs(got-0.5) > 1e-9 || a.Combine.fastest(1e4) != b.Combine.fastest(1e4) {
		t.Errorf("FP8 takes %v of the dispatch time; combine %v and %v", got, a.Combine.fastest(1e4), b.Combine.fastest(1e4))
	}
}

func TestProblemRefuses(t *testing.T) {
	for want, change := range map[string]func(s *Shape, v *Serving){
		"ranks: 1; allowed is 2":             func(_ *Shape, v *Serving) { v.Ranks = 1 },
		"0 tokens":                           func(_ *Shape, v *Serving) { v.Sequence = 0 },
		"memory of -1 bytes":                 func(_ *Shape, v *Serving) { v.MemoryBytes = -1 },
		"MoE layers: 61; allowed is 1 to 60": func(s *Shape, _ *Serving) { s.MoELayers = 61 },
		"attention heads: 0":                 func(s *Shape, _ *Serving) { s.Heads = 0 },
		"size of shared experts: -1":         func(s *Shape, _ *Serving) { s.SharedSize = -1 },
		"size of positions: 192":             func(s *Shape, _ *Serving) { s.RopeDim = 192 },
	} {
		s, v := latent(t), serving()
		change(s, &v)
		if _, err := s.Problem(profile(t), v); err == nil || !strings.Contains(err.Error(), want) || errors.Is(err, ErrNoRoom) {
			t.Errorf("wanted is an error with %q; got %v", want, err)
		}
	}
	for want, change := range map[string]func(v *Serving){
		"one sample need more than": func(v *Serving) { v.Sequence = 1 << 22 },
		"on 2 ranks the experts":    func(v *Serving) { v.Ranks = 3 },
	} {
		v := serving()
		change(&v)
		if _, err := latent(t).Problem(profile(t), v); !errors.Is(err, ErrNoRoom) || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v; want ErrNoRoom with %q", err, want)
		}
	}
}
