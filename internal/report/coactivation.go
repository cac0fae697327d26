package report

import (
	"context"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// mostRequests bounds the requests by which pairs of experts are counted with attention DP: each costs a square of the experts that it
// activates, in each layer.
const mostRequests = 512

// together are the pairs of experts of one MoE layer that fire together: in a token with attention TP, in a request with DP, as that is
// what has one rank.
type together struct {
	experts int
	// count is how often two experts do, symmetric [N × N]; the diagonal says nothing. busy are the activations of each expert.
	count []float32
	busy  []float64
	// scale makes scale·busy(e)·busy(f) what count(e, f) would be by chance: its sum over all pairs is that of count.
	scale float64
}

// countTogether counts every MoE layer.
func countTogether(ctx context.Context, t *trace.Trace, requests []int, attention placement.Attention, seed uint64) ([]together, error) {
	n, layers := t.Model.Experts, make([]together, len(t.Model.Layers))
	if attention == placement.TensorParallel {
		pairs, err := affinity.CountPairs(ctx, t, requests)
		if err != nil {
			return nil, err
		}
		for l := range layers {
			layers[l] = together{experts: n, count: pairs[l].Together, busy: make([]float64, n)}
			for e := range n {
				layers[l].busy[e] = float64(pairs[l].Together[e*n+e])
			}
			layers[l].compare()
		}
		return layers, nil
	}
	requests = trace.Shuffled(requests, seed)
	requests = requests[:min(mostRequests, len(requests))]
	err := affinity.Parallel(ctx, len(layers), func(l int) {
		layers[l] = together{experts: n, count: make([]float32, n*n), busy: make([]float64, n)}
		for _, request := range requests {
			layers[l].addRequest(t, l, request)
		}
		layers[l].compare()
	})
	return layers, err
}

// addRequest counts a pair of experts by the product of what the request activates of them, over the request's tokens: long requests count
// by their length.
func (g *together) addRequest(t *trace.Trace, layer, request int) {
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

func (g *together) compare() {
	counted, expected := 0.0, 0.0
	g.eachPair(func(e, f int) {
		counted += float64(g.count[e*g.experts+f])
		expected += g.busy[e] * g.busy[f]
	})
	if expected > 0 {
		g.scale = counted / expected
	}
}

func (g *together) eachPair(do func(e, f int)) {
	for e := range g.experts {
		for f := range g.experts {
			if e != f {
				do(e, f)
			}
		}
	}
}

// timesChance is how many times as often as by chance two experts fire together, given how busy each of them is; 0 where one never fires.
func (g *together) timesChance(e, f int) float64 {
	if expected := g.scale * g.busy[e] * g.busy[f]; expected > 0 {
		return float64(g.count[e*g.experts+f]) / expected
	}
	return 0
}

// withinRanks is the same for all pairs that have a rank in common; 1 where there is none.
func (g *together) withinRanks(hosts [][]int) float64 {
	counted, expected := 0.0, 0.0
	g.eachPair(func(e, f int) {
		if !meet(hosts[e], hosts[f]) {
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

// meet reports whether two ascending lists share an element.
func meet(a, b []int) bool {
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
