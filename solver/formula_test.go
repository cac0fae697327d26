// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"cmp"
	"math"
	"slices"
	"testing"

	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// documentedShares computes the shares S of docs/table-format.md (How scores follow from counts) from a trace and a
// placement [MoE layer][token ID][rank].
func documentedShares(t *trace.Trace, requests []int, p *placement.Placement) [][][]float64 {
	shares := make([][][]float64, len(t.Model.Layers))
	for l := range shares {
		onRank := make([][]float64, t.Model.Vocabulary) // the sum over e of C(l, v, e) on r, divided by K
		n, prior, all := make([]float64, t.Model.Vocabulary), make([]float64, p.Ranks), 0.0
		for v := range onRank {
			onRank[v] = make([]float64, p.Ranks)
		}
		for _, request := range requests {
			for position := t.Offsets[request]; position < t.Offsets[request+1]; position++ {
				v := t.Tokens[position]
				n[v]++
				for _, expert := range t.Row(int(position), l) {
					all++
					for slot, held := range p.Layers[l].Slots {
						if held == int(expert) {
							onRank[v][slot/p.SlotsPerRank] += 1 / float64(t.Model.TopK)
							prior[slot/p.SlotsPerRank]++
						}
					}
				}
			}
		}
		for v := range onRank {
			for r := range prior {
				onRank[v][r] = (onRank[v][r] + prior[r]/all) / (n[v] + 1)
			}
		}
		shares[l] = onRank
	}
	return shares
}

// A reader of a plan can rebuild its tables by the documented formula.
func TestTablesFollowTheDocumentedFormula(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 3)
	for _, attention := range []placement.Attention{placement.DataParallel, placement.TensorParallel} {
		o := options(attention, 4)
		solution, err := Solve(t.Context(), tr, o)
		if err != nil {
			t.Fatal(err)
		}
		plan := solution.Plan
		train, _, err := trace.Split(tr, o.TrainPercent, o.Seed)
		if err != nil {
			t.Fatal(err)
		}
		shares := documentedShares(tr, train, plan.Placement)
		near := func(stored uint16, share float64) bool {
			return math.Abs(float64(stored)-math.Round(65535*min(max(share, 0), 1))) <= 1 // tables are computed in float32
		}
		for v := range tr.Model.Vocabulary {
			for r := range plan.Placement.Ranks {
				mean := 0.0
				for l := range shares {
					mean += shares[l][v][r] / float64(len(shares))
				}
				if attention == placement.DataParallel && !near(plan.Ranks.Score[v*plan.Ranks.Ranks+r], mean) {
					t.Fatalf("token %d, rank %d: %d is stored, the formula gives %.1f", v, r, plan.Ranks.Score[v*plan.Ranks.Ranks+r], 65535*mean)
				}
			}
			for l := range shares {
				if attention == placement.DataParallel {
					break
				}
				best := slices.SortedFunc(slices.Values(slices.Clone(shares[l][v])), func(a, b float64) int { return cmp.Compare(b, a) })
				for i := range plan.Tokens.Best {
					at := (l*tr.Model.Vocabulary+v)*plan.Tokens.Best + i
					rank, score := plan.Tokens.Rank[at], plan.Tokens.Score[at]
					if !near(score, best[i]) || !near(score, shares[l][v][rank]) {
						t.Fatalf("layer %d, token %d: rank %d with %d is stored, the formula gives %.1f", l, v, rank, score, 65535*best[i])
					}
				}
			}
		}
	}
}
