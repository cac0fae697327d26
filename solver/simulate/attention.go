package simulate

import (
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/pipeline"
)

// sequence is what a step computes of a request: query tokens, after past ones.
type sequence struct{ query, past int }

// dense are the times of what is not a matter of experts, on a rank, in one layer.
type dense struct {
	shape   *pipeline.Shape
	profile *hardware.Profile
	// ranks share the heads of a sequence: 1 with data parallelism.
	ranks float64
	// projections are the weights of attention's matrices.
	projections []float64
}

func newDense(s *pipeline.Shape, p *hardware.Profile, ranks int) *dense {
	return &dense{shape: s, profile: p, ranks: float64(ranks), projections: s.Projections()}
}

// attention is the time of a batch: its projections, and for each sequence the longer of computing and of reading keys and values. Memory is
// read as fast as by dense products.
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

// work is that of a rank: queries see all tokens before them.
func (d *dense) work(s sequence) hardware.AttentionWork {
	const multiplyAndAdd = 2
	seen := float64(s.past) + float64(s.query)/2
	return hardware.AttentionWork{
		Flops: multiplyAndAdd * float64(s.query) * seen * float64(d.shape.Heads*(d.shape.QueryDim+d.shape.ValueDim)) / d.ranks,
		Rows:  float64(s.query) * float64(d.shape.Heads) / d.ranks,
	}
}

// cacheBytes are what a rank reads of keys and values: with tensor parallelism its heads', where there are as many, and all of compressed ones.
func (d *dense) cacheBytes(s sequence) float64 {
	return float64(s.past+s.query) * d.shape.CacheWidth() * bf16 / float64(d.shape.CacheParts(int(d.ranks)))
}

// forward is the time of a feed-forward block of that width.
func (d *dense) forward(width, tokens float64) float64 {
	if width == 0 || tokens == 0 {
		return 0
	}
	return d.profile.Dense.Block(float64(d.shape.Hidden)*width, tokens)
}
