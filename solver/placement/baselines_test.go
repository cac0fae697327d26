// SPDX-License-Identifier: Apache-2.0

package placement_test

import (
	"testing"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// inside returns the share of a matrix of expert pairs that is within ranks, in one layer.
func inside(p *placement.Placement, layer int, pairs []float32) float64 {
	hosts, n := p.Hosts(layer), p.Experts
	within, all := 0.0, 0.0
	for e := range n {
		for f := range n {
			if e == f {
				continue
			}
			all += float64(pairs[e*n+f])
			if hosts[e][0] == hosts[f][0] {
				within += float64(pairs[e*n+f])
			}
		}
	}
	return within / all
}

// kept returns the share of transitions between two layers that stay on a rank.
func kept(p *placement.Placement, layer int, transitions []float32) float64 {
	before, after, n := p.Hosts(layer), p.Hosts(layer+1), p.Experts
	same, all := 0.0, 0.0
	for e := range n {
		for f := range n {
			all += float64(transitions[e*n+f])
			if before[e][0] == after[f][0] {
				same += float64(transitions[e*n+f])
			}
		}
	}
	return same / all
}

// imbalance returns the maximum load of a rank's experts relative to the mean, in one layer.
func imbalance(p *placement.Placement, layer int, loads []float64) float64 {
	load, total := make([]float64, p.Ranks), 0.0
	for e, ranks := range p.Hosts(layer) {
		for _, rank := range ranks {
			load[rank] += loads[e] / float64(len(ranks))
		}
		total += loads[e]
	}
	most := 0.0
	for _, n := range load {
		most = max(most, n)
	}
	return most * float64(p.Ranks) / total
}

// TestBaselinesImproveTheirObjective compares each published algorithm with the contiguous placement by the algorithm's own
// objective.
func TestBaselinesImproveTheirObjective(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 7)
	p := problem(t, tr, placement.TensorParallel, 4)
	pairs, err := affinity.CountPairs(t.Context(), tr, tr.AllRequests())
	if err != nil {
		t.Fatal(err)
	}
	plain := placement.Contiguous(p.Layers, 16, 4)
	solved := map[placement.Algorithm]*placement.Placement{}
	for _, p.Algorithm = range placement.Algorithms {
		if p.Pairs = nil; p.Algorithm == placement.Coactivation {
			p.Pairs = pairs
		}
		solved[p.Algorithm] = solve(t, p).Placement
	}
	for l := range p.Layers {
		if a, b := inside(solved[placement.Coactivation], l, pairs[l].Together), inside(plain, l, pairs[l].Together); a <= b {
			t.Errorf("layer %d: co-activation keeps %.3f of pairs together, contiguous %.3f", l, a, b)
		}
		if a, b := imbalance(solved[placement.EPLB], l, p.Tokens[l].ExpertTotals()), imbalance(plain, l, p.Tokens[l].ExpertTotals()); a > min(b, 1.1) {
			t.Errorf("layer %d: EPLB's imbalance is %.3f, contiguous %.3f", l, a, b)
		}
		if a := imbalance(solved[placement.MoETuner], l, p.Tokens[l].ExpertTotals()); a > 1.2 {
			t.Errorf("layer %d: MoETuner's imbalance is %.3f", l, a)
		}
		if l == 0 {
			continue
		}
		chain, balanced, none := kept(solved[placement.ExFlow], l-1, p.Transitions[l-1]), kept(solved[placement.MoETuner], l-1, p.Transitions[l-1]), kept(plain, l-1, p.Transitions[l-1])
		if chain <= none || balanced <= none {
			t.Errorf("layers %d and %d: ExFlow keeps %.3f of transitions, MoETuner %.3f, contiguous %.3f", l-1, l, chain, balanced, none)
		}
	}
	value := func(p *placement.Placement) float64 {
		return placement.Value(t.Context(), problem(t, tr, placement.TensorParallel, 4), p)
	}
	for _, algorithm := range []placement.Algorithm{
		placement.Alternating, placement.AlternatingPrinted, placement.CrossEntropy, placement.CrossEntropyPrinted, placement.KMeans2D, placement.Auto,
	} {
		if a, b := value(solved[algorithm]), value(plain); a <= b {
			t.Errorf("%s is worth %.4f, contiguous %.4f", algorithm, a, b)
		}
		if a, b := value(solved[placement.Auto]), value(solved[algorithm]); a < b*(1-2e-3) {
			t.Errorf("auto is worth %.4f, %s %.4f", a, algorithm, b)
		}
	}
}
