// SPDX-License-Identifier: Apache-2.0

package placement_test

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// TestExchangeCountsExactly compares the gains of random swaps, and the resulting state, with sums over all rows. With
// two ranks, a swap changes every rank.
func TestExchangeCountsExactly(t *testing.T) {
	for seed, ranks := range []int{2, 4, 8, 16} {
		tr := tracetest.Generate(tracetest.Small, uint64(seed))
		p := problem(t, tr, placement.TensorParallel, ranks)
		p.Shrinkage = float64(seed)
		random := rand.New(rand.NewPCG(uint64(seed), 1))
		rankOf := make([]int, 16)
		for i, e := range random.Perm(16) {
			rankOf[e] = i * ranks / 16
		}
		x := placement.NewExchange(t.Context(), p, rankOf)
		for step := range 300 {
			e, f := random.IntN(16), random.IntN(16)
			if x.RankOf(e) == x.RankOf(f) {
				continue
			}
			before, gain := x.Total(), x.Gain(e, f)
			x.Swap(e, f)
			if want := x.Total() - before; math.Abs(gain-want) > 1e-5*before {
				t.Fatalf("EP %d, step %d: the gain of swapping %d and %d is %v; counted it is %v", ranks, step, e, f, gain, want)
			}
		}
	}
}

// TestExchangeImproves starts from random placements: the value never decreases, groups and rank sizes are preserved,
// and most placements improve.
func TestExchangeImproves(t *testing.T) {
	better := 0
	const instances = 20
	for seed := range uint64(instances) {
		tr := tracetest.Generate(tracetest.Small, seed)
		p := problem(t, tr, placement.TensorParallel, 8)
		p.Groups = 1 + int(seed%2)*3
		random := rand.New(rand.NewPCG(seed, 2))
		rankOf, group := make([]int, 16), 16/p.Groups
		for first := 0; first < 16; first += group {
			for i, e := range random.Perm(group) {
				rankOf[first+e] = (first + i) / 2
			}
		}
		before, after, to := placement.Exchanged(t.Context(), p, rankOf)
		if after < before*(1-1e-5) {
			t.Errorf("seed %d: %v before, %v after", seed, before, after)
		}
		if after > before*(1+1e-3) {
			better++
		}
		load := make([]int, 8)
		for e, rank := range to {
			load[rank]++
			if rank*2/group != e/group {
				t.Errorf("seed %d: expert %d is on rank %d, outside its group", seed, e, rank)
			}
		}
		for rank, n := range load {
			if n != 2 {
				t.Errorf("seed %d: %d experts on rank %d", seed, n, rank)
			}
		}
	}
	if better < instances/2 {
		t.Errorf("%d of %d random placements were improved", better, instances)
	}
}

// TestShrinkageDiscountsRareTokens checks that shrinkage reduces the value of a placement by about the shares
// a/(a+shrinkage) of rare token IDs.
func TestShrinkageDiscountsRareTokens(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 3)
	p := problem(t, tr, placement.TensorParallel, 4)
	plain := placement.Value(t.Context(), p, placement.Contiguous(p.Layers, 16, 4))
	p.Shrinkage = placement.DefaultShrinkage
	shrunk := placement.Value(t.Context(), p, placement.Contiguous(p.Layers, 16, 4))
	if shrunk >= plain || shrunk <= 0 {
		t.Errorf("the contiguous placement is worth %v with shrinkage, %v without", shrunk, plain)
	}
	occurrences, kept := 0.0, 0.0
	for _, a := range p.Tokens[0].Occurrences {
		occurrences += float64(a)
		if a > 0 {
			kept += float64(a) * float64(a) / (float64(a) + p.Shrinkage)
		}
	}
	if least := plain * kept / occurrences * 0.8; shrunk < least {
		t.Errorf("%v with shrinkage; about %v of %v was to be kept", shrunk, kept/occurrences, plain)
	}
}
