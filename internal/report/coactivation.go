// SPDX-License-Identifier: Apache-2.0

package report

import (
	"context"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// maxRequests limits the number of requests for counting pairs of experts with attention DP. The cost per request and
// layer is quadratic in the number of experts that it activates.
const maxRequests = 512

// coactivation counts the pairs of experts of one MoE layer that are activated together: by a token with attention TP,
// or by a request with attention DP. These are the units that have one rank.
type coactivation struct {
	experts int
	// count is the number of co-activations of two experts, a symmetric [N × N] matrix with an unused diagonal. busy is
	// the number of activations of each expert.
	count []float32
	busy  []float64
	// scale·busy(e)·busy(f) is the expectation of count(e, f) by chance. Its sum over all pairs equals the sum of
	// count.
	scale float64
}

// countCoactivations counts the pairs of every MoE layer.
func countCoactivations(ctx context.Context, t *trace.Trace, requests []int, attention placement.Attention, seed uint64) ([]coactivation, error) {
	n, layers := t.Model.Experts, make([]coactivation, len(t.Model.Layers))
	if attention == placement.TensorParallel {
		pairs, err := affinity.CountPairs(ctx, t, requests)
		if err != nil {
			return nil, err
		}
		for l := range layers {
			layers[l] = coactivation{experts: n, count: pairs[l].Together, busy: make([]float64, n)}
			for e := range n {
				layers[l].busy[e] = float64(pairs[l].Together[e*n+e])
			}
			layers[l].setScale()
		}
		return layers, nil
	}
	requests = trace.Shuffled(requests, seed)
	requests = requests[:min(maxRequests, len(requests))]
	err := affinity.Parallel(ctx, len(layers), func(l int) {
		layers[l] = coactivation{experts: n, count: make([]float32, n*n), busy: make([]float64, n)}
		for _, request := range requests {
			layers[l].addRequest(t, l, request)
		}
		layers[l].setScale()
	})
	return layers, err
}

// addRequest adds, for each pair of experts, the product of their activations in the request divided by the number of
// tokens of the request. This weights a request by its length.
func (g *coactivation) addRequest(t *trace.Trace, layer, request int) {
	row := make([]float32, g.experts)
	for position := t.Offsets[request]; position < t.Offsets[request+1]; position++ {
		for _, expert := range t.Row(int(position), layer) {
			row[expert]++
		}
	}
	tokens := float32(t.Length(request))
	for e, of := range row {
		if of == 0 {
			continue
		}
		g.busy[e] += float64(of)
		for f, with := range row {
			g.count[e*g.experts+f] += of * with / tokens
		}
	}
}

func (g *coactivation) setScale() {
	counted, expected := 0.0, 0.0
	g.eachPair(func(e, f int) {
		counted += float64(g.count[e*g.experts+f])
		expected += g.busy[e] * g.busy[f]
	})
	if expected > 0 {
		g.scale = counted / expected
	}
}

func (g *coactivation) eachPair(do func(e, f int)) {
	for e := range g.experts {
		for f := range g.experts {
			if e != f {
				do(e, f)
			}
		}
	}
}

// timesChance returns how many times as often as by chance two experts are activated together, given the activations of
// each expert. It is 0 if one of them is never activated.
func (g *coactivation) timesChance(e, f int) float64 {
	if expected := g.scale * g.busy[e] * g.busy[f]; expected > 0 {
		return float64(g.count[e*g.experts+f]) / expected
	}
	return 0
}

// withinRanks returns the same ratio for all pairs of experts that share a rank, or 1 without such pairs.
func (g *coactivation) withinRanks(hosts [][]int) float64 {
	counted, expected := 0.0, 0.0
	g.eachPair(func(e, f int) {
		if !intersect(hosts[e], hosts[f]) {
			return
		}
		counted += float64(g.count[e*g.experts+f])
		expected += g.scale * g.busy[e] * g.busy[f]
	})
	if expected == 0 {
		return 1
	}
	return counted / expected
}

// intersect reports whether two sorted lists share an element.
func intersect(a, b []int) bool {
	for len(a) > 0 && len(b) > 0 {
		switch {
		case a[0] == b[0]:
			return true
		case a[0] < b[0]:
			a = a[1:]
		default:
			b = b[1:]
		}
	}
	return false
}
