// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestTimeOfSwaps compares the value of a swap, from sums that are updated, with the value of the swapped placement, for
// an exchange of the busiest rank, of all ranks on average, and between. A bound instead of the value must be at most
// the floor, and at least the value.
func TestTimeOfSwaps(t *testing.T) {
	const experts, ranks, windows = 16, 4, 5
	for _, mean := range []float64{0, 0.5, 1} {
		random := rand.New(rand.NewPCG(1, 2))
		c := NewClock(func(exchange, load float64) float64 { return 20 + 70*exchange + 110*max(load, 1.05) })
		c.MeanExchange, c.Windows = mean, [][]float32{make([]float32, windows*experts)}
		for i := range c.Windows[0] {
			c.Windows[0][i] = float32(random.IntN(100))
		}
		weight, rankOf := make([]float32, experts*ranks), make([]int, experts)
		for i := range weight {
			weight[i] = float32(random.IntN(50))
		}
		for e := range rankOf {
			rankOf[e] = e % ranks
		}
		s := newTiming(c, 0, weight, slices.Clone(rankOf), ranks)
		for swap := range 200 {
			e, f := random.IntN(experts), random.IntN(experts)
			if rankOf[e] == rankOf[f] {
				continue
			}
			swapped := slices.Clone(rankOf)
			swapped[e], swapped[f] = swapped[f], swapped[e]
			want := newTiming(c, 0, weight, swapped, ranks).value
			near := func(a, b float64) bool { return math.Abs(a-b) < 1e-6*math.Abs(b) }
			if got := s.valueAfter(e, f, math.Inf(-1)); !near(got, want) {
				t.Fatalf("mean exchange %v, swap %d: value %v, recomputed %v", mean, swap, got, want)
			}
			floor := want + (random.Float64()-0.5)*0.02*math.Abs(want)
			if got := s.valueAfter(e, f, floor); !near(got, want) && (got > floor || got < want-1e-6*math.Abs(want)) {
				t.Fatalf("mean exchange %v, swap %d: bound %v of value %v with floor %v", mean, swap, got, want, floor)
			}
			if swap%3 == 0 {
				s.swap(e, f)
				rankOf = swapped
				if !near(s.value, want) {
					t.Fatalf("mean exchange %v, swap %d: value after the swap %v, recomputed %v", mean, swap, s.value, want)
				}
			}
		}
	}
}
