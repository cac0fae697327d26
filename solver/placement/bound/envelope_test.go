// SPDX-License-Identifier: Apache-2.0

package bound

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestEnvelope(t *testing.T) {
	for name, test := range map[string]struct {
		k, ranks, most int
		want           []vertex
	}{
		// The sums of squares are 6, 8 (2+1+1+1+1), 12 (3+1+1+1), 18 (4+1+1), 26 (5+1) and 36 of 36.
		"top-6 on 8 ranks":   {6, 8, 8, []vertex{{6. / 36, 1. / 6}, {8. / 36, 2. / 6}, {12. / 36, 3. / 6}, {18. / 36, 4. / 6}, {26. / 36, 5. / 6}, {1, 1}}},
		"four slots":         {6, 8, 4, []vertex{{6. / 36, 1. / 6}, {8. / 36, 2. / 6}, {12. / 36, 3. / 6}, {18. / 36, 4. / 6}}},
		"more than ranks":    {3, 2, 4, []vertex{{5. / 9, 2. / 3}, {1, 1}}},
		"one expert a token": {1, 4, 2, []vertex{{1, 1}}},
	} {
		if diff := cmp.Diff(test.want, newEnvelope(test.k, test.ranks, test.most).vertices, cmp.AllowUnexported(vertex{}), cmpopts.EquateApprox(0, 1e-12)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

// TestTangentsAreNowhereBelowWholeRows assigns activations to ranks at random. No tangent, at any point, may be below a
// feasible value.
func TestTangentsAreNowhereBelowWholeRows(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 5))
	touched := 0
	for range 20_000 {
		ranks, k := 2+random.IntN(7), 1+random.IntN(8)
		most := (k+ranks-1)/ranks + random.IntN(3)
		on := make([]int, ranks)
		for left := k; left > 0; {
			if rank := random.IntN(ranks); on[rank] < most {
				on[rank]++
				left--
			}
		}
		largest, squares := 0, 0
		for _, n := range on {
			largest, squares = max(largest, n), squares+n*n
		}
		share, concentration := float64(largest)/float64(k), float64(squares)/float64(k*k)
		value, slope, at := newEnvelope(k, ranks, most).tangent(random.Float64())
		bound := value + slope*(concentration-at)
		if bound < share-1e-12 {
			t.Fatalf("%v: the tangent allows %v, the largest share is %v", on, bound, share)
		}
		if math.Abs(bound-share) < 1e-12 {
			touched++
		}
	}
	if touched < 1000 {
		t.Errorf("only %d of 20,000 tangents touch what is possible: they are too loose", touched)
	}
}

// TestOccurrencesBoundHoldsAgainstEnumeration also compares it with the bound that does not know that rows are whole.
func TestOccurrencesBoundHoldsAgainstEnumeration(t *testing.T) {
	random := rand.New(rand.NewPCG(6, 6))
	whole, continuous := 0.0, 0.0
	for i := range 300 {
		ranks := 2 + random.IntN(2)
		in := instance{ranks: ranks, layers: 1, experts: ranks * (2 + random.IntN(2))}
		topK := 1 + random.IntN(4)
		tight, loose := NewOccurrences(in.ranks, in.experts, topK), New(in.ranks, in.experts, 1)
		for range 1 + random.IntN(20) {
			row := make([]float64, in.experts)
			var columns []int
			for _, e := range random.Perm(in.experts)[:topK] {
				row[e] = 1
			}
			for e, n := range row {
				if n > 0 {
					columns = append(columns, e)
				}
			}
			in.rows, in.weights = append(in.rows, row), append(in.weights, 1)
			ones, sigma := make([]float64, topK), random.Float64()
			for k := range ones {
				ones[k] = 1
			}
			tight.Add(columns, ones, 1, sigma)
			loose.Add(columns, ones, 1, sigma)
		}
		best, bound := in.best(), tight.Tangent(30)
		if bound < best-1e-9 {
			t.Fatalf("instance %d %+v: the bound is %v, the optimum %v", i, in, bound, best)
		}
		whole, continuous = whole+bound/300, continuous+loose.Tangent(30)/300
	}
	if whole > continuous-0.02 {
		t.Errorf("the mean bound is %v; %v without knowing that rows are whole", whole, continuous)
	}
}
