// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"math/rand/v2"
	"slices"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/assign"
)

// layerRefiner returns the refiner of one layer with attention tensor parallelism.
func (p *Problem) layerRefiner(l int, stop limit) (refiner, error) {
	if !p.Messages.None() {
		return newMessageRefiner(p, []int{l}), nil
	}
	counts, err := p.layerCounts(l)
	if err != nil {
		return nil, err
	}
	s := newLayerSearch(p, counts, stop)
	by := &tokenRefiner{search: s}
	if p.Pairs != nil {
		by.pairs = mixedGram(counts, &p.Pairs[l])
	}
	return by, nil
}

// jointRefiner returns the refiner of all layers with attention data parallelism.
func (p *Problem) jointRefiner(stop limit) refiner {
	if !p.Messages.None() {
		return newMessageRefiner(p, nil)
	}
	part := *p
	part.Requests = sampleRequests(p.Requests, p.Seed)
	return &requestRefiner{search: newJointSearch(&part, stop), scale: p.profileTokens() / max(part.Requests.TokenCount(), 1)}
}

// tokenRefiner refines a layer by activations. With pairs, the value of a placement is its affinity, as in solvePairs,
// because the forecast for the placement is not known yet.
type tokenRefiner struct {
	search *layerSearch
	pairs  *gram
	prices assign.Prices
	// follows is set if a settled placement differs little from the previous one, whose prices are then a good start.
	follows bool
	// balanced is set if ranks have equal shares of the tokens in the activations of copies.
	balanced bool
}

func (r *tokenRefiner) anneals() bool { return r.pairs != nil }

func (r *tokenRefiner) settle(rankOf [][]int) float64 {
	var value float64
	if r.follows && r.prices != nil {
		r.search.score(rankOf[0])
		r.prices, value = r.search.balance.FollowExact(r.search.steps()/4, r.prices)
		value /= r.search.activations
	} else {
		r.prices, value = r.search.value(rankOf[0], nil)
	}
	if r.pairs != nil {
		return r.related(r.pairs, rankOf[0]).inside() / float64(r.search.counts.TopK)
	}
	return value * r.search.activations
}

func (r *tokenRefiner) related(g *gram, rankOf []int) related {
	return related{newPartition(g, rankOf, r.search.ranks, r.search.groups), float64(r.search.counts.TopK)}
}

func (r *tokenRefiner) swaps(_ int, rankOf []int) swapper {
	if r.pairs != nil {
		return r.related(r.pairs, rankOf)
	}
	return &weighted{r.copies(0, rankOf), rankOf, r.search.ranks}
}

func (r *tokenRefiner) copies(_ int, rankOf []int) []float32 {
	if r.balanced {
		return r.search.balancedAffinities(rankOf, r.prices)
	}
	return r.search.affinities(rankOf, r.prices)
}

// annealed returns a placement annealed by affinities under limits.
func (r *tokenRefiner) annealed(rankOf []int, within *limits, seed uint64) []int {
	g := r.pairs
	if g == nil {
		g = tokenGram(r.search.counts, r.search.shrinkage)
	}
	to := slices.Clone(rankOf)
	annealSwaps(r.related(g, to), within, rand.New(rand.NewPCG(seed, 0x6c696d697473)), r.search.stop)
	return to
}

// requestRefiner refines all layers by the activations of requests.
type requestRefiner struct {
	search *jointSearch
	// scale is the number of tokens of the profile per token of the requests.
	scale float64
	ranks []int
}

func (r *requestRefiner) anneals() bool { return false }

func (r *requestRefiner) settle(rankOf [][]int) float64 {
	var value float64
	r.ranks, value = r.search.bestRequests(rankOf, make([]extras, len(rankOf)))
	return value * r.search.activations * r.scale
}

func (r *requestRefiner) swaps(l int, rankOf []int) swapper {
	return &weighted{r.copies(l, rankOf), rankOf, r.search.ranks}
}

func (r *requestRefiner) copies(l int, _ []int) []float32 {
	part := *r.search
	part.weight = make([]float32, len(r.search.weight))
	part.affinities(l, r.ranks)
	for i := range part.weight {
		part.weight[i] *= float32(r.scale)
	}
	return part.weight
}

// messageRefiner refines layers by the messages of single tokens. Units (token IDs or requests) have one rank each.
// With a forecast that distinguishes the occurrences of a token, every token is a unit.
type messageRefiner struct {
	sample *affinity.Occurrences
	layers []int
	ranks  int
	cost   affinity.Messages
	// unit is the unit of each occurrence, balance assigns the units to ranks, own is the resulting rank of each
	// occurrence.
	unit    []int32
	balance assign.Weighted
	own     []int32
}

func newMessageRefiner(p *Problem, layers []int) *messageRefiner {
	if layers == nil {
		for l := range p.Layers {
			layers = append(layers, l)
		}
	}
	o := p.Occurrences
	r := &messageRefiner{sample: o, layers: layers, ranks: p.Ranks, cost: p.Messages, unit: o.Unit, own: make([]int32, o.Len())}
	r.balance.Sizes = make([]float32, o.Units)
	for _, unit := range r.unit {
		r.balance.Sizes[unit]++
	}
	r.balance.Scores = make([]float32, o.Units*p.Ranks)
	r.balance.Limits = p.Constraints.tokenLimits(float64(o.Len()), p.Ranks)
	return r
}

func (r *messageRefiner) anneals() bool { return true }

// each calls do for every occurrence in every layer, with the messages that each rank would save as the rank of the
// token.
func (r *messageRefiner) each(rankOf [][]int, do func(at int, saved []float32)) {
	saved := make([]float32, r.ranks)
	for i, l := range r.layers {
		k := r.sample.TopK
		for at := range r.own {
			clear(saved)
			for _, e := range r.sample.Layers[l][at*k : (at+1)*k] {
				saved[rankOf[i][e]]++
			}
			r.cost.Count(saved)
			do(at, saved)
		}
	}
}

func (r *messageRefiner) settle(rankOf [][]int) float64 {
	clear(r.balance.Scores)
	r.each(rankOf, func(at int, saved []float32) {
		row := r.balance.Scores[int(r.unit[at])*r.ranks:]
		for rank, s := range saved {
			row[rank] += s
		}
	})
	prices, _ := r.balance.PriceExact(priceSteps, nil)
	ranks, _ := r.balance.Take(prices)
	for at, unit := range r.unit {
		r.own[at] = int32(ranks[unit])
	}
	return -r.total(rankOf) * r.sample.Scale
}

// total returns the message cost of the sample.
func (r *messageRefiner) total(rankOf [][]int) float64 {
	sum := 0.0
	for i := range r.layers {
		sum += r.distinct(i, rankOf[i]).total()
	}
	return sum
}

func (r *messageRefiner) distinct(i int, rankOf []int) *distinct {
	return newDistinct(r.sample, r.layers[i], rankOf, r.own, r.ranks, r.cost)
}

func (r *messageRefiner) swaps(i int, rankOf []int) swapper { return r.distinct(i, rankOf) }

// copies counts the messages to a rank and node that only one expert causes.
func (r *messageRefiner) copies(i int, rankOf []int) []float32 {
	d := r.distinct(i, rankOf)
	weight := make([]float32, len(rankOf)*r.ranks)
	for e, occurrences := range d.of {
		for _, at := range occurrences {
			weight[e*r.ranks+int(d.own[at])] += float32(d.soleMessageCost(int(at), rankOf[e]) * r.sample.Scale)
		}
	}
	return weight
}

// together places the experts of a layer by co-activations of single tokens: first on nodes, if they count, and then on
// the ranks of each node.
func (p *Problem) together(l int, stop limit) []int {
	g := newGram(p.experts())
	k := p.Occurrences.TopK
	experts := p.Occurrences.Layers[l]
	for at := range p.Occurrences.Len() {
		row := experts[at*k : (at+1)*k]
		for i, e := range row {
			for _, f := range row[:i] {
				if e != f {
					g.values[int(min(e, f))*g.n+int(max(e, f))]++
				}
			}
		}
	}
	g.mirror()
	nodes := p.nodes()
	if nodes == 1 || p.groups() > 1 {
		return annealed(g, p.Ranks, p.groups(), starts, p.Seed, uint64(l), stop).rankOf
	}
	nodeOf := annealed(g, nodes, 1, starts, p.Seed, uint64(l), stop).rankOf
	rankOf := make([]int, g.n)
	for node := range nodes {
		var members []int
		for e, of := range nodeOf {
			if of == node {
				members = append(members, e)
			}
		}
		within := annealed(g.part(members), p.Ranks/nodes, 1, starts, p.Seed, uint64(l), stop).rankOf
		for i, e := range members {
			rankOf[e] = node*p.Ranks/nodes + within[i]
		}
	}
	return rankOf
}

// part returns the matrix of a subset of the experts.
func (g *gram) part(experts []int) *gram {
	to := newGram(len(experts))
	for i, e := range experts {
		for j, f := range experts {
			to.values[i*to.n+j] = g.values[e*g.n+f]
		}
	}
	return to
}
