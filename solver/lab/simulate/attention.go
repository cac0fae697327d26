// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/pipeline"
)

// sequence is the work of a step for one request: query tokens after past tokens.
type sequence struct{ query, past int }

// dense computes the times of attention and dense blocks on a rank in one layer.
type dense struct {
	shape   *pipeline.Shape
	profile *hardware.Profile
	// ranks is the number of ranks that share the heads of a sequence: 1 with data parallelism.
	ranks float64
	// projections are the weights of the attention matrices.
	projections []float64
}

func newDense(s *pipeline.Shape, p *hardware.Profile, ranks int) *dense {
	return &dense{shape: s, profile: p, ranks: float64(ranks), projections: s.Projections()}
}

// attention returns the time of a batch: its projections, and for each sequence the longer of computing and reading
// keys and values. Memory is read at the rate of dense products.
func (d *dense) attention(batch []sequence) float64 {
	if len(batch) == 0 {
		return 0
	}
	tokens, us := 0, d.profile.Attention.Start
	for _, s := range batch {
		tokens += s.query
		us += max(d.profile.Attention.Computing(d.work(s)), d.cacheBytes(s)/d.profile.Dense.BytesPerMicrosecond)
	}
	for _, weights := range d.projections {
		us += d.profile.Dense.Microseconds(weights/d.ranks, float64(tokens))
	}
	return us
}

// work returns the attention work of a rank: queries attend to all previous tokens.
func (d *dense) work(s sequence) hardware.AttentionWork {
	const multiplyAndAdd = 2
	seen := float64(s.past) + float64(s.query)/2
	return hardware.AttentionWork{
		Flops: multiplyAndAdd * float64(s.query) * seen * float64(d.shape.Heads*(d.shape.QueryDim+d.shape.ValueDim)) / d.ranks,
		Rows:  float64(s.query) * float64(d.shape.Heads) / d.ranks,
	}
}

// cacheBytes returns the bytes of keys and values that a rank reads: with tensor parallelism those of its heads if
// there are enough heads, and all of compressed keys and values.
func (d *dense) cacheBytes(s sequence) float64 {
	return float64(s.past+s.query) * d.shape.CacheWidth() * bf16 / float64(d.shape.CacheParts(int(d.ranks)))
}

// forward returns the time of a feed-forward block of the given width.
func (d *dense) forward(width, tokens float64) float64 {
	if width == 0 || tokens == 0 {
		return 0
	}
	return d.profile.Dense.Block(float64(d.shape.Hidden)*width, tokens)
}
