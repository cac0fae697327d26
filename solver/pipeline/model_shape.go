// SPDX-License-Identifier: Apache-2.0

package pipeline

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/modelconfig"
	"github.com/semmoe/operator/solver/trace"
)

// Shape contains the properties of a model that determine its schedule.
type Shape struct {
	// HiddenLayers is the number of all layers, MoELayers the number of layers with routed experts, which are
	// scheduled.
	HiddenLayers int `json:"hidden_layers"`
	MoELayers    int `json:"moe_layers"`
	// A token activates TopK of Experts. Each expert has three matrices of Hidden × ExpertSize. SharedSize is the total
	// width of the shared experts, 0 if there are none; DenseSize is the width of layers without experts.
	Experts    int `json:"experts"`
	TopK       int `json:"top_k"`
	Hidden     int `json:"hidden_size"`
	ExpertSize int `json:"expert_size"`
	SharedSize int `json:"shared_size"`
	DenseSize  int `json:"dense_size"`
	// Heads is the number of query heads, KVHeads the number of heads of keys and values (equal with MHA, fewer with GQA).
	// QueryDim is the size of a head in queries and keys, ValueDim in values.
	Heads    int `json:"heads"`
	KVHeads  int `json:"kv_heads"`
	QueryDim int `json:"query_dim"`
	ValueDim int `json:"value_dim"`
	// KVRank is above 0 with latent attention (MLA): the width of compressed keys and values, in addition to RopeDim for
	// positions. QueryRank is the width of compressed queries, 0 without compression.
	KVRank    int `json:"kv_rank"`
	QueryRank int `json:"query_rank"`
	RopeDim   int `json:"rope_dim"`
}

// ReadSizes sets widths and heads from a model's config.json; the caller sets layers and experts.
func (s *Shape) ReadSizes(config []byte) error {
	var c struct {
		Heads           int              `json:"num_attention_heads"`
		KVHeads         int              `json:"num_key_value_heads"`
		HeadDim         int              `json:"head_dim"`
		Intermediate    modelconfig.Size `json:"intermediate_size"`
		MoEIntermediate modelconfig.Size `json:"moe_intermediate_size"`
		Shared          int              `json:"n_shared_experts"`
		SharedSize      int              `json:"shared_expert_intermediate_size"`
		QueryRank       int              `json:"q_lora_rank"`
		KVRank          int              `json:"kv_lora_rank"`
		NopeDim         int              `json:"qk_nope_head_dim"`
		RopeDim         int              `json:"qk_rope_head_dim"`
		ValueDim        int              `json:"v_head_dim"`
	}
	if err := json.Unmarshal(config, &c); err != nil {
		return err
	}
	s.Heads, s.KVHeads, s.QueryDim, s.ValueDim = c.Heads, c.KVHeads, c.HeadDim, c.HeadDim
	if s.KVHeads == 0 {
		s.KVHeads = s.Heads
	}
	if s.QueryDim == 0 && s.Heads > 0 {
		s.QueryDim, s.ValueDim = s.Hidden/s.Heads, s.Hidden/s.Heads
	}
	if c.KVRank > 0 {
		s.KVRank, s.QueryRank, s.RopeDim = c.KVRank, c.QueryRank, c.RopeDim
		s.QueryDim, s.ValueDim, s.KVHeads = c.NopeDim+c.RopeDim, c.ValueDim, c.Heads
	}
	s.ExpertSize, s.DenseSize = int(cmp.Or(c.MoEIntermediate, c.Intermediate)), int(c.Intermediate)
	s.SharedSize = c.SharedSize + c.Shared*s.ExpertSize
	return nil
}

// ShapeOf returns the shape of the model that a trace was recorded from. Fields that the trace does not contain are 0
// and must be set by the caller.
func ShapeOf(m *trace.Model) (Shape, error) {
	s := Shape{HiddenLayers: m.HiddenLayers, MoELayers: len(m.Layers), Experts: m.Experts, TopK: m.TopK, Hidden: m.HiddenSize}
	if m.Config == "" {
		return s, nil
	}
	return s, s.ReadSizes([]byte(m.TextConfig()))
}

// Check returns an error for an invalid shape.
func (s *Shape) Check() error {
	for _, field := range []struct {
		name       string
		value, max int
	}{
		{"hidden layers", s.HiddenLayers, 1 << 12}, {"MoE layers", s.MoELayers, s.HiddenLayers}, {"experts", s.Experts, 1 << 16}, {"experts of a token", s.TopK, s.Experts},
		{"hidden size", s.Hidden, 1 << 20}, {"size of an expert", s.ExpertSize, 1 << 20}, {"attention heads", s.Heads, 1 << 12}, {"heads of keys and values", s.KVHeads, s.Heads},
		{"head size of queries", s.QueryDim, 1 << 14}, {"head size of values", s.ValueDim, 1 << 14},
	} {
		if field.value < 1 || field.value > field.max {
			return fmt.Errorf("%s: %d; allowed is 1 to %d", field.name, field.value, field.max)
		}
	}
	for _, field := range []struct {
		name  string
		value int
	}{
		{"size of shared experts", s.SharedSize}, {"size of dense layers", s.DenseSize}, {"rank of keys and values", s.KVRank}, {"rank of queries", s.QueryRank}, {"size of positions", s.RopeDim},
	} {
		if field.value < 0 || field.value > 1<<20 {
			return fmt.Errorf("%s: %d; allowed is 0 to %d", field.name, field.value, 1<<20)
		}
	}
	if s.KVRank > 0 && s.RopeDim >= s.QueryDim {
		return fmt.Errorf("size of positions: %d; it must be below the %d of a head of queries", s.RopeDim, s.QueryDim)
	}
	return nil
}

// Projections returns the number of weights of each attention matrix.
func (s *Shape) Projections() []float64 {
	hidden, heads := float64(s.Hidden), float64(s.Heads)
	queries := []float64{hidden * heads * float64(s.QueryDim)}
	output := heads * float64(s.ValueDim) * hidden
	if s.KVRank == 0 {
		keys := float64(s.KVHeads)
		return append(queries, hidden*keys*float64(s.QueryDim), hidden*keys*float64(s.ValueDim), output)
	}
	if s.QueryRank > 0 {
		rank := float64(s.QueryRank)
		queries = []float64{hidden * rank, rank * heads * float64(s.QueryDim)}
	}
	rank := float64(s.KVRank)
	return append(queries, hidden*(rank+float64(s.RopeDim)), rank*heads*float64(s.QueryDim-s.RopeDim+s.ValueDim), output)
}

// CacheWidth returns the number of values per token in the KV cache of a layer.
func (s *Shape) CacheWidth() float64 {
	if s.KVRank > 0 {
		return float64(s.KVRank + s.RopeDim)
	}
	return float64(s.KVHeads * (s.QueryDim + s.ValueDim))
}

// CacheParts returns the number of parts of the KV cache with attention tensor parallelism: at most one per KV head,
// and one with compressed keys and values, which every rank stores completely.
func (s *Shape) CacheParts(ranks int) int {
	if s.KVRank > 0 {
		return 1
	}
	return min(ranks, s.KVHeads)
}

// Serving contains the parameters of serving a model.
type Serving struct {
	// Ranks is the number of ranks to divide into attention group and expert group.
	Ranks int
	// Sequence is the number of tokens of a sample, all processed together. Samples is the maximum number of samples on
	// a rank of the attention group; 0 means as many as its memory holds.
	Sequence, Samples int
	// MemoryBytes is the memory of a rank for weights and KV cache. WeightBytes is the size of an expert weight,
	// DispatchBytes the size of a dispatched activation value: 2 with bf16, 1 with FP8, without scales.
	MemoryBytes                float64
	WeightBytes, DispatchBytes float64
	// MicroBatches is the maximum number of micro-batches; 0 is DefaultMicroBatches.
	MicroBatches int
}

// ErrNoRoom reports that no split of the ranks has enough memory for the model.
var ErrNoRoom = errors.New("no split of the ranks has enough memory for the model and a sample")

const bf16 = 2

// Problem returns the schedule problem of a model on given hardware: the times of tasks come from the hardware profile,
// the possible splits from the memory of the ranks.
func (s *Shape) Problem(p *hardware.Profile, v Serving) (*Problem, error) {
	if err := s.Check(); err != nil {
		return nil, err
	}
	if v.Ranks < 2 || v.Ranks > 1<<12 {
		return nil, fmt.Errorf("ranks: %d; allowed is 2 to %d, because attention and experts use separate ranks", v.Ranks, 1<<12)
	}
	if v.Sequence < 1 || v.Samples < 0 {
		return nil, fmt.Errorf("%d samples of %d tokens; samples must be at least 0, tokens at least 1", v.Samples, v.Sequence)
	}
	if !(v.MemoryBytes > 0) || !(v.WeightBytes > 0) || !(v.DispatchBytes > 0) {
		return nil, fmt.Errorf("memory of %v bytes, weights of %v and activations of %v bytes; all must be above 0", v.MemoryBytes, v.WeightBytes, v.DispatchBytes)
	}
	problem := &Problem{Layers: s.MoELayers, Experts: s.Experts, TopK: s.TopK, Sequence: v.Sequence, MicroBatches: v.MicroBatches}
	samples := s.samples(v)
	if samples < 1 {
		return nil, fmt.Errorf("%w: attention, shared experts and the KV cache of one sample need more than %.1f GiB on a rank", ErrNoRoom, v.MemoryBytes/(1<<30))
	}
	for attention := 1; attention < v.Ranks; attention++ {
		experts := v.Ranks - attention
		if experts > s.Experts || s.expertBytes(experts, v) > v.MemoryBytes {
			continue
		}
		problem.Splits = append(problem.Splits, s.split(p, v, attention, experts, samples))
	}
	if len(problem.Splits) == 0 {
		return nil, fmt.Errorf("%w: on %d ranks the experts need %.1f GiB each, of %.1f", ErrNoRoom, min(v.Ranks-1, s.Experts), s.expertBytes(min(v.Ranks-1, s.Experts), v)/(1<<30),
			v.MemoryBytes/(1<<30))
	}
	return problem, nil
}

// samples returns the maximum number of samples on a rank of the attention group. Its memory also contains attention,
// shared experts and dense layers.
func (s *Shape) samples(v Serving) int {
	weights := 0.0
	for _, w := range s.Projections() {
		weights += w * float64(s.HiddenLayers)
	}
	const matrices = 3 // gate, up and down
	weights += matrices * float64(s.Hidden) * float64(s.SharedSize*s.MoELayers+s.DenseSize*(s.HiddenLayers-s.MoELayers))
	cache := float64(v.Sequence) * s.CacheWidth() * bf16 * float64(s.HiddenLayers)
	room := int(min((v.MemoryBytes-weights*bf16)/cache, 1<<20))
	if v.Samples > 0 {
		return min(room, v.Samples)
	}
	return room
}

// perRank returns the number of experts on the fullest rank.
func (s *Shape) perRank(ranks int) float64 { return float64((s.Experts + ranks - 1) / ranks) }

func (s *Shape) expertBytes(ranks int, v Serving) float64 {
	const matrices = 3
	return s.perRank(ranks) * matrices * float64(s.Hidden) * float64(s.ExpertSize) * v.WeightBytes * float64(s.MoELayers)
}

func (s *Shape) split(p *hardware.Profile, v Serving, attention, experts, samples int) Split {
	projections, held, hidden := s.Projections(), s.perRank(experts), float64(s.Hidden)
	sequence, expert, shared := float64(v.Sequence), hidden*float64(s.ExpertSize), hidden*float64(s.SharedSize)
	link := p.Between(attention, experts)
	// All activations pass the links of the smaller group: of the attention ranks if there are fewer, or of the fullest
	// expert rank.
	activations := max(float64(s.Experts)/float64(attention), held)
	split := Split{
		AttentionRanks: attention, ExpertRanks: experts, Samples: samples,
		Attention: func(samples float64) float64 {
			us := p.Attention.Microseconds(hardware.CausalAttention(samples, float64(s.Heads), sequence, float64(s.QueryDim), float64(s.ValueDim)))
			for _, weights := range projections {
				us += p.Dense.Microseconds(weights, samples*sequence)
			}
			return us
		},
		Dispatch: waysOf(link, activations*hidden*v.DispatchBytes),
		Experts: func(tokens float64) float64 {
			return p.Grouped.Block(held*expert, tokens)
		},
		Combine: waysOf(link, activations*hidden*bf16),
	}
	if shared > 0 {
		split.Shared = func(samples float64) float64 {
			return p.Dense.Block(shared, samples*sequence)
		}
	}
	return split
}

// waysOf returns the ways to send a chunk with the given number of bytes per token of an expert.
func waysOf(link *hardware.Exchange, bytes float64) Ways {
	var ways Ways
	for _, line := range link.Lines() {
		ways = append(ways, func(tokens float64) float64 { return line.Microseconds(tokens * bytes) })
	}
	return ways
}
