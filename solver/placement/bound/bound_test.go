// SPDX-License-Identifier: Apache-2.0

package bound

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

func randomSymmetric(n int, random *rand.Rand) []float64 {
	m := make([]float64, n*n)
	for i := range n {
		for j := i; j < n; j++ {
			m[i*n+j] = random.NormFloat64()
			m[j*n+i] = m[i*n+j]
		}
	}
	return m
}

func TestEigenvectors(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	for _, n := range []int{1, 2, 3, 10, 64, 100} {
		m := randomSymmetric(n, random)
		if n == 10 {
			clear(m)
		}
		values, vectors := eigenvectors(append([]float64(nil), m...), n)
		for i, v := range vectors {
			if i > 0 && values[i] > values[i-1] {
				t.Fatalf("n=%d: values do not descend: %v", n, values)
			}
			for j := range n {
				if got, want := dot(m[j*n:(j+1)*n], v), values[i]*v[j]; math.Abs(got-want) > 1e-9*float64(n) {
					t.Fatalf("n=%d: row %d of vector %d: %v; want %v", n, j, i, got, want)
				}
			}
			for k := range i + 1 {
				want := 0.0
				if k == i {
					want = 1
				}
				if got := dot(v, vectors[k]); math.Abs(got-want) > 1e-9 {
					t.Fatalf("n=%d: vectors %d and %d have product %v", n, i, k, got)
				}
			}
		}
		for i, v := range eigenvalues(append([]float64(nil), m...), n) {
			if math.Abs(v-values[i]) > 1e-9*float64(n) {
				t.Fatalf("n=%d: values differ: %v and %v", n, v, values[i])
			}
		}
	}
}

// TestBoundsOfOneRow checks matrices of rank one. Reflections leave only rounding errors of them, as small as numbers can be.
func TestBoundsOfOneRow(t *testing.T) {
	random := rand.New(rand.NewPCG(9, 9))
	for range 200 {
		ranks, layers := 2+random.IntN(3), 1+random.IntN(3)
		experts := ranks * (1 + random.IntN(5))
		rows := New(ranks, experts, layers)
		var columns []int
		for layer := range layers {
			columns = append(columns, layer*experts+random.IntN(experts))
		}
		rows.Add(columns, slices.Repeat([]float64{1}, layers), 1, 1)
		for name, bound := range map[string]float64{"tangent": rows.Tangent(3), "balanced": rows.Balanced(float64(ranks))} {
			if !(bound >= 1-1e-9 && bound <= 1) {
				t.Fatalf("%d experts on %d ranks, %d layers, one expert of each: the %s bound is %v; one rank can hold them all", experts, ranks, layers, name, bound)
			}
		}
	}
}

// instance is a small problem that can be enumerated.
type instance struct {
	ranks, experts, layers int
	rows                   [][]float64
	weights                []float64
}

func randomInstance(random *rand.Rand) instance {
	in := instance{ranks: 2 + random.IntN(2), layers: 1 + random.IntN(2)}
	in.experts = in.ranks * (1 + random.IntN(2))
	for range 3 + random.IntN(8) {
		row, weight := make([]float64, in.experts*in.layers), float64(1+random.IntN(5))
		for x := range row {
			if random.IntN(3) > 0 {
				row[x] = float64(random.IntN(6))
			}
		}
		in.rows, in.weights = append(in.rows, row), append(in.weights, weight)
	}
	return in
}

// best is the largest local activation rate of any placement when each row takes its best rank.
func (in instance) best() float64 {
	rankOf, load := make([]int, in.experts*in.layers), make([]int, in.ranks*in.layers)
	var place func(x int) float64
	place = func(x int) float64 {
		if x == len(rankOf) {
			return in.value(rankOf)
		}
		best := 0.0
		for rank := range in.ranks {
			if slot := x/in.experts*in.ranks + rank; load[slot] < in.experts/in.ranks {
				rankOf[x] = rank
				load[slot]++
				best = max(best, place(x+1))
				load[slot]--
			}
		}
		return best
	}
	return place(0)
}

func (in instance) value(rankOf []int) float64 {
	local, all := 0.0, 0.0
	for _, row := range in.rows {
		on := make([]float64, in.ranks)
		for x, n := range row {
			on[rankOf[x]] += n
			all += n
		}
		best := 0.0
		for _, n := range on {
			best = max(best, n)
		}
		local += best
	}
	return local / all
}

func (in instance) bounds(random *rand.Rand) *Rows {
	rows := New(in.ranks, in.experts, in.layers)
	for r, row := range in.rows {
		var columns []int
		var activations []float64
		for x, n := range row {
			if n > 0 {
				columns, activations = append(columns, x), append(activations, n)
			}
		}
		// The bound must hold for any incumbent.
		rows.Add(columns, activations, in.weights[r], random.Float64())
	}
	return rows
}

func TestBoundsHoldAgainstEnumeration(t *testing.T) {
	random := rand.New(rand.NewPCG(2, 2))
	tight := 0
	for i := range 400 {
		in := randomInstance(random)
		best := in.best()
		if math.IsNaN(best) {
			continue
		}
		rows := in.bounds(random)
		for name, bound := range map[string]float64{
			"per row": rows.PerRow(), "balanced": rows.Balanced(float64(in.ranks)), "tangent": rows.Tangent(0), "tangent, corrected": rows.Tangent(20),
		} {
			if bound < best-1e-9 {
				t.Fatalf("instance %d %+v: the bound %s is %v, the optimum %v", i, in, name, bound, best)
			}
			if bound < 1 && bound < best*1.2 {
				tight++
			}
		}
	}
	if tight == 0 {
		t.Error("no bound was ever within 20% of the optimum: the test proves nothing")
	}
}

func TestCorrectionTightens(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 3))
	rows := New(4, 16, 1)
	for range 500 {
		first := random.IntN(16)
		columns := []int{min(first, first^1), max(first, first^1)}
		rows.Add(columns, []float64{1, 1}, 1, 0.9)
	}
	if plain, corrected := rows.Tangent(0), rows.Tangent(40); corrected > plain {
		t.Errorf("the bound went from %v to %v", plain, corrected)
	}
}

func TestOneRankIsAlwaysLocal(t *testing.T) {
	rows := New(1, 4, 1)
	rows.Add([]int{0, 3}, []float64{1, 2}, 3, 1)
	for _, bound := range []float64{rows.PerRow(), rows.Balanced(1), rows.Tangent(3)} {
		if bound != 1 {
			t.Errorf("bound %v; want 1", bound)
		}
	}
}
