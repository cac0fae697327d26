// SPDX-License-Identifier: Apache-2.0

package placement_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// twoClusters has eight experts. Each token activates the first four or the last four: token 0 occurs a quarter of the
// time, token 1 the rest.
func twoClusters() placement.Problem {
	counts := affinity.Counts{
		Experts: 8, TopK: 4, Start: []int{0, 4, 8}, Expert: []uint16{0, 1, 2, 3, 4, 5, 6, 7}, Occurrences: []float32{25, 75},
		Count: []float32{25, 25, 25, 25, 75, 75, 75, 75},
	}
	return placement.Problem{
		Attention: placement.TensorParallel, Ranks: 2, Layers: []int{3}, Algorithm: placement.Auto, Seed: 1, Tokens: []affinity.Counts{counts},
		Constraints: placement.Constraints{RankCapacity: []float64{3, 1}},
	}
}

// TestLargeShareHoldsFrequentExperts checks that the experts of the frequent token are on the rank with the larger
// share, for every numbering and every search.
func TestLargeShareHoldsFrequentExperts(t *testing.T) {
	budget := 8
	for name, change := range map[string]func(*placement.Problem){
		"from nothing": func(*placement.Problem) {},
		"for a forecast that distinguishes occurrences": func(p *placement.Problem) {
			together, within := make([]float32, 64), make([]float32, 64)
			for e := range 8 {
				for f := range 8 {
					if n := p.Tokens[0].Occurrences[e/4]; e != f && e/4 == f/4 {
						together[e*8+f], within[e*8+f] = n, n/(n-1)
					}
				}
			}
			p.Pairs = []affinity.Pairs{{Experts: 8, Together: together, Within: within}}
		},
		"from the placement in service": func(p *placement.Problem) { p.Current = placement.Contiguous(p.Layers, 8, 2) },
		"under a move budget": func(p *placement.Problem) {
			p.Current, p.Constraints.MoveBudget = placement.Contiguous(p.Layers, 8, 2), &budget
		},
		"with a pin": func(p *placement.Problem) { p.Constraints.Pins = []placement.Pin{{Layer: 3, Expert: 5, Rank: 0}} },
	} {
		p := twoClusters()
		change(&p)
		if diff := cmp.Diff([]int{4, 5, 6, 7, 0, 1, 2, 3}, solve(t, p).Placement.Layers[0].Slots); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

// TestSharesReachTheOptimum compares with the enumeration of all placements and permutations of ranks.
func TestSharesReachTheOptimum(t *testing.T) {
	random := rand.New(rand.NewPCG(33, 33))
	n, reached := instances(capacityInstances), 0
	for instance := range n {
		ranks := 2 + random.IntN(3)
		shape := tracetest.Shape{
			Experts: ranks * 2, TopK: 2, Layers: 1, Vocabulary: 30, Domains: 2, DocumentsPerDomain: 3, RequestsPerDocument: 2, TokensPerRequest: 40, Noise: 20,
		}
		p := problem(t, tracetest.Generate(shape, uint64(instance)), placement.TensorParallel, ranks)
		for range ranks {
			p.Constraints.RankCapacity = append(p.Constraints.RankCapacity, []float64{0.25, 0.5, 1, random.Float64() + 0.1}[random.IntN(4)])
		}
		got, best := solve(t, p).TrainLAR, placement.Enumerate(t.Context(), p)
		// A budget for all experts leaves the search as free as it is without one.
		p.Current, p.Fresh, p.Constraints.MoveBudget = shuffled(p, random), true, &shape.Experts
		if moved := placement.Value(t.Context(), p, solve(t, p).Placement); moved < got*(1-1e-3) {
			t.Errorf("instance %d: %v under a budget for all experts, %v without", instance, moved, got)
		}
		name := fmt.Sprintf("instance %d: %d experts, shares %v: %v, the optimum is %v", instance, shape.Experts, p.Constraints.RankCapacity, got, best)
		if got > best*(1+1e-3) || got < best*(1-5e-3) {
			t.Error(name)
		}
		if got >= best*(1-1e-4) {
			reached++
		} else {
			t.Log(name)
		}
	}
	if float64(reached) < 0.95*float64(n) {
		t.Errorf("the optimum is reached in %d of %d instances", reached, n)
	}
}
