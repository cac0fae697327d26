// SPDX-License-Identifier: Apache-2.0

package hindsight

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/semmoe/operator/solver/dispatch"
)

// randomRun returns a run of requests that each prefer some rank.
func randomRun(requests, ranks int, random *rand.Rand) *Run {
	r := &Run{}
	for range requests {
		local, sum := make([]float64, ranks), 0.0
		for rank := range local {
			local[rank] = random.ExpFloat64()
			sum += local[rank]
		}
		for rank := range local {
			local[rank] /= sum
		}
		r.Local, r.Tokens = append(r.Local, local), append(r.Tokens, 1+random.IntN(9))
	}
	return r
}

// optimum enumerates all assignments and returns the highest local activation rate within the limit, or -Inf if no
// assignment satisfies the limit.
func optimum(r *Run, w windows, limit float64) float64 {
	best, own := math.Inf(-1), make([]int, len(r.Tokens))
	for {
		if s := newState(r, w, own); s.imbalance <= limit {
			best = max(best, s.local)
		}
		at := 0
		for ; at < len(own) && own[at] == r.ranks()-1; at++ {
			own[at] = 0
		}
		if at == len(own) {
			return best
		}
		own[at]++
	}
}

func TestAgainstEnumeration(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	reached, solved := 0, 0
	for n := range 40 {
		r := randomRun(7, 3, random)
		w, limit := newWindows(r, 3+n%5), 1.2+random.Float64()
		best := optimum(r, w, limit)
		if bound := r.bound(limit, w); bound < best-1e-9 {
			t.Errorf("run %d: bound %v, an assignment has %v", n, bound, best)
		}
		own, found := r.search(limit, w, 300, random)
		if math.IsInf(best, -1) {
			if found {
				t.Errorf("run %d: found %v, which is above the limit", n, own)
			}
			continue
		}
		solved++
		if !found {
			continue
		}
		s := newState(r, w, own)
		if s.imbalance > limit+1e-9 || s.local > best+1e-9 {
			t.Errorf("run %d: found %v with imbalance %v; the limit is %v, the optimum %v", n, s.local, s.imbalance, limit, best)
		}
		if s.local > best-1e-9 {
			reached++
		}
	}
	if solved < 20 || reached < solved*8/10 {
		t.Errorf("the search reached the optimum of %d runs of %d", reached, solved)
	}
}

func TestLongRun(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	r := randomRun(3*dispatch.Arrivals, 4, random)
	const limit = 1.1
	own, found := r.Search(limit, 60, 5)
	if !found {
		t.Fatal("found none")
	}
	roundRobin := make([]int, len(own))
	for i := range roundRobin {
		roundRobin[i] = i % 4
	}
	if lar, base, bound := r.LAR(own), r.LAR(roundRobin), r.Bound(limit); lar > bound || lar < base+0.8*(bound-base) {
		t.Errorf("the search reached %v; round-robin reaches %v, and the bound is %v", lar, base, bound)
	}
	if imbalance := r.Imbalance(own); imbalance > limit+1e-9 {
		t.Errorf("imbalance %v, above the limit %v", imbalance, limit)
	}
}

// TestMovesKeepCount compares the incremental sums after moves with a full recomputation.
func TestMovesKeepCount(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	r := randomRun(50, 5, random)
	w := newWindows(r, 8)
	s := newState(r, w, make([]int, 50))
	for range 2000 {
		s.move(random.IntN(50), random.IntN(5))
	}
	fresh := newState(r, w, s.own)
	if math.Abs(s.imbalance-fresh.imbalance) > 1e-9 || math.Abs(s.local-fresh.local) > 1e-9 {
		t.Errorf("after moves: %v, %v; recomputed: %v, %v", s.local, s.imbalance, fresh.local, fresh.imbalance)
	}
}
