// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"slices"

	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// Stages are the times of a step by stage, in microseconds.
type Stages struct {
	// Attention includes its projections. Dense is the time of shared experts and of layers without experts,
	// Collectives the time of reduce, scatter and gather with attention TP.
	Attention, Dense, Collectives float64
	// Experts are the stages of the MoE layers.
	Experts LayerTime
}

// Total returns the sum of the stages.
func (s *Stages) Total() float64 { return s.Attention + s.Dense + s.Collectives + s.Experts.Total() }

func (s *Stages) add(x Stages) {
	s.Attention += x.Attention
	s.Dense += x.Dense
	s.Collectives += x.Collectives
	s.Experts.add(x.Experts, 1)
}

func (t *LayerTime) add(x LayerTime, weight float64) {
	t.Gate += weight * x.Gate
	t.Dispatch += weight * x.Dispatch
	t.Products += weight * x.Products
	t.Combine += weight * x.Combine
}

// stepper computes the times of steps.
type stepper struct {
	trace   *trace.Trace
	options *Options
	method  *Method
	dense   *dense
	layer   Layer
	routes  []*routes
	counts  *Counts
	// positions are the positions of the step's tokens in the trace, owners their ranks; scores are [tokens × ranks].
	positions, owners []int
	scores            []float32
	shards            *dispatch.Shards
	batch             []sequence
	// rows is the number of activations in all steps, local the number of activations of experts on the token's rank.
	rows, local int
}

func newStepper(t *trace.Trace, m *Method, o *Options) *stepper {
	share := 1
	if o.Attention == placement.TensorParallel {
		share = o.Topology.Ranks
	}
	s := &stepper{
		trace: t, options: o, method: m, dense: newDense(&o.Shape, o.Profile, share), layer: o.layer(), counts: newCounts(m.Placement.Ranks, m.Placement.SlotsPerRank),
		shards: dispatch.NewShards(m.Placement.Ranks),
	}
	for l := range m.Placement.Layers {
		s.routes = append(s.routes, newRoutes(m.Placement, l, o.Topology.Links[0].RanksPerGroup))
	}
	return s
}

// time returns the time of a step over all lanes, each of which waits for the slowest lane.
func (s *stepper) time(lanes []*lane) Stages {
	var us Stages
	s.positions, s.owners = s.positions[:0], s.owners[:0]
	maxTokens := 0
	for rank, l := range lanes {
		before := len(s.positions)
		us.Attention = max(us.Attention, s.attention(l, rank))
		maxTokens = max(maxTokens, len(s.positions)-before)
	}
	shape := &s.options.Shape
	for l, routes := range s.routes {
		us.Experts.add(s.moe(l, routes), float64(shape.MoELayers)/float64(len(s.routes)))
	}
	us.Attention *= float64(shape.HiddenLayers)
	us.Dense = s.denseTime(maxTokens)
	if len(lanes) == 1 && s.options.Topology.Ranks > 1 {
		us.Collectives = s.collectives(len(s.positions))
	}
	return us
}

// attention returns the time of a lane in one layer, and records the lane's tokens.
func (s *stepper) attention(l *lane, rank int) float64 {
	s.batch = s.batch[:0]
	for _, r := range l.running {
		if r.query == 0 {
			continue
		}
		s.batch = append(s.batch, sequence{r.query, r.computed})
		first, length := int(s.trace.Offsets[r.Source]), s.trace.Length(r.Source)
		for i := range r.query {
			s.positions, s.owners = append(s.positions, first+(r.computed+i)%length), append(s.owners, rank)
		}
	}
	return s.dense.attention(s.batch)
}

// denseTime returns the time of the shared experts and of the layers without experts. With attention TP, ranks share
// the width of blocks for which they have all tokens, and after a reduce-scatter the tokens of the shared experts.
func (s *stepper) denseTime(tokens int) float64 {
	shape := &s.options.Shape
	shared, sharedWidth, width := float64(tokens), float64(shape.SharedSize), float64(shape.DenseSize)
	if s.options.Attention == placement.TensorParallel {
		ranks := float64(s.options.Topology.Ranks)
		width /= ranks
		if s.options.allReduced() {
			sharedWidth /= ranks
		} else {
			shared /= ranks
		}
	}
	return float64(shape.MoELayers)*s.dense.forward(sharedWidth, shared) + float64(shape.HiddenLayers-shape.MoELayers)*s.dense.forward(width, float64(tokens))
}

// collectives returns the time of the collectives of all layers: after attention, and after the experts or the dense
// block. The profile's times are scaled to the slowest links.
func (s *stepper) collectives(tokens int) float64 {
	shape, p := &s.options.Shape, s.options.Profile
	slower := p.AllToAll.Rate() / s.options.Topology.slowest().Rate()
	bytes := slower * float64(tokens) * float64(shape.Hidden) * bf16
	reduced := p.AllReduce.Microseconds(bytes)
	moe := 2 * reduced
	if s.options.Collective == ReduceScatter {
		moe = p.ReduceScatter.Microseconds(bytes) + p.AllGather.Microseconds(bytes)
	}
	return float64(shape.MoELayers)*moe + float64(shape.HiddenLayers-shape.MoELayers)*2*reduced
}

// moe returns the time of the step's tokens in one MoE layer of the trace.
func (s *stepper) moe(layer int, routes *routes) LayerTime {
	s.counts.clear()
	if s.options.Attention == placement.TensorParallel {
		s.assign(layer)
	}
	for i, position := range s.positions {
		routes.add(s.counts, s.trace.Row(position, layer), s.owners[i])
	}
	ranks := s.options.Topology.Ranks
	for from := range ranks {
		for to := range ranks {
			s.rows += s.counts.Rows[from*ranks+to]
		}
		s.local += s.counts.Rows[from*ranks+from]
	}
	if s.options.allReduced() {
		// Every rank has all tokens: it selects their experts and computes its own experts.
		for rank := range s.counts.Tokens {
			s.counts.Tokens[rank] = len(s.positions)
		}
		us := s.layer.Time(s.options.Profile, &s.options.Topology, s.counts)
		us.Dispatch, us.Combine = 0, 0
		return us
	}
	return s.layer.Time(s.options.Profile, &s.options.Topology, s.counts)
}

// assign divides the tokens of the batch into equal shards (attention TP).
func (s *stepper) assign(layer int) {
	ranks := s.options.Topology.Ranks
	if s.method.Tokens == nil || s.options.Collective == AllReduce {
		for i := range s.owners {
			s.owners[i] = i % ranks
		}
		return
	}
	s.scores = slices.Grow(s.scores[:0], len(s.positions)*ranks)[:len(s.positions)*ranks]
	for i, position := range s.positions {
		s.method.Tokens.Score(s.scores[i*ranks:(i+1)*ranks], layer, position)
	}
	copy(s.owners, s.shards.Assign(s.scores))
}
