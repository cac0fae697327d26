// SPDX-License-Identifier: Apache-2.0

package cost

import (
	"context"
	"slices"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/placement/bound"
	"github.com/semmoe/operator/solver/trace"
)

// Detail contains the values that the figures of a Report average.
type Detail struct {
	// Layers has an entry for each MoE layer.
	Layers []LayerDetail
}

// LayerDetail contains ranks and domains in one MoE layer, as means over the arrival orders (attention DP).
type LayerDetail struct {
	// OracleLAR and UpperBound are the layer's terms in those of the Report; 0 without bounds. With attention DP a
	// request has one rank for all layers: OracleLAR is the layer's local rate under the oracle's assignment of
	// requests (of the first arrival order), while UpperBound lets requests change rank between layers, so its mean
	// over layers may exceed the Report's.
	OracleLAR, UpperBound float64
	// Tokens are the tokens dispatched to each rank, Served the activations that its experts compute, as multiples of a
	// rank's equal share.
	Tokens, Served []float64
	// Kinds are the trace's domains, or one entry for all text.
	Kinds []KindDetail
}

// KindDetail is one domain in one MoE layer.
type KindDetail struct {
	// Activations is the domain's share of all activations; 0 without requests.
	Activations float64
	// LAR is the domain's local activation rate.
	LAR float64
	// Ranks are the shares of the domain's tokens that are dispatched to each rank.
	Ranks []float64
}

// kindTally counts one domain in one MoE layer.
type kindTally struct {
	tokens             []int
	local, activations int
}

func (k *kindTally) add(own, local, activations int) {
	k.tokens[own]++
	k.local += local
	k.activations += activations
}

// kindsOf returns the number of domains, at least 1.
func kindsOf(t *trace.Trace) int {
	kinds := max(1, len(t.Model.Domains))
	for _, domain := range t.Domains {
		kinds = max(kinds, int(domain)+1)
	}
	return kinds
}

func kindOf(t *trace.Trace, request int) uint8 {
	if t.Domains == nil {
		return 0
	}
	return t.Domains[request]
}

// kindOfPositions returns the domain of each token of the trace; nil if no details are requested.
func (o *Options) kindOfPositions(t *trace.Trace) []uint8 {
	if !o.Detail {
		return nil
	}
	kinds := make([]uint8, len(t.Tokens))
	for _, request := range o.Requests {
		for at := t.Offsets[request]; at < t.Offsets[request+1]; at++ {
			kinds[at] = kindOf(t, request)
		}
	}
	return kinds
}

// newDetail returns the mean over runs [run][layer].
func newDetail(runs [][]*tally) *Detail {
	d := &Detail{Layers: make([]LayerDetail, len(runs[0]))}
	for l := range d.Layers {
		ranks := len(runs[0][l].tokens)
		layer := LayerDetail{Tokens: make([]float64, ranks), Served: make([]float64, ranks), Kinds: make([]KindDetail, len(runs[0][l].kinds))}
		for kind := range layer.Kinds {
			layer.Kinds[kind].Ranks = make([]float64, ranks)
		}
		for _, run := range runs {
			layer.add(run[l], 1/float64(len(runs)))
		}
		d.Layers[l] = layer
	}
	return d
}

func (d *LayerDetail) add(t *tally, weight float64) {
	tokens, ranks := 0, float64(len(t.tokens))
	for _, n := range t.tokens {
		tokens += n
	}
	for rank := range t.tokens {
		d.Tokens[rank] += weight * ranks * float64(t.tokens[rank]) / float64(max(tokens, 1))
		d.Served[rank] += weight * ranks * float64(t.served[rank]) / float64(max(t.activations, 1))
	}
	for i, kind := range t.kinds {
		of, total := &d.Kinds[i], 0
		for _, n := range kind.tokens {
			total += n
		}
		of.Activations += weight * float64(kind.activations) / float64(max(t.activations, 1))
		of.LAR += weight * float64(kind.local) / float64(max(kind.activations, 1))
		for rank, n := range kind.tokens {
			of.Ranks[rank] += weight * float64(n) / float64(max(total, 1))
		}
	}
}

// layers computes the rate of the oracle in each layer, with the observed loads of ranks, and the layer's upper bound
// for all placements.
func (s *realRoutes) layers(ctx context.Context, p *placement.Placement, tokens []int, d *Detail) error {
	const steps = 150
	s.weighted.Limits = s.limits(tokens)
	prices, _ := s.weighted.Price(steps, nil)
	rankOf := s.weighted.Assign(prices, 0)
	highestLoad := 1.0
	for _, limit := range s.weighted.Limits {
		highestLoad = max(highestLoad, limit/s.fair)
	}
	topK := s.trace.Model.TopK
	return affinity.Parallel(ctx, len(p.Layers), func(l int) {
		hosts, local, all := p.Local(l), 0.0, 0.0
		rows := bound.New(s.ranks, p.Experts, 1)
		s.eachRow(1, l, func(i int, columns []int, activations []float64) {
			for at, expert := range columns {
				all += activations[at]
				if slices.Contains(hosts[expert], rankOf[i]) {
					local += activations[at]
				}
			}
			if !p.Redundant() {
				rows.Add(columns, activations, float64(s.weighted.Sizes[i]), s.concentration(i))
			}
		})
		d.Layers[l].OracleLAR, d.Layers[l].UpperBound = local/all, float64(min(p.SlotsPerRank, topK))/float64(topK)
		if !p.Redundant() {
			d.Layers[l].UpperBound = min(rows.PerRow(), rows.Tangent(0), rows.Balanced(highestLoad))
		}
	})
}
