// SPDX-License-Identifier: Apache-2.0

package affinity_test

import (
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

func TestMessagesByHand(t *testing.T) {
	close := cmpopts.EquateApprox(0, 1e-6)
	m := affinity.Messages{Rank: 1, Node: 5, RanksPerNode: 2}
	counts := []float32{3, 0, 0, 0, 1, 2}
	m.Count(counts)
	if diff := cmp.Diff([]float32{6, 5, 0, 0, 6, 6}, counts, close); diff != "" {
		t.Error(diff)
	}
	shares := []float32{0.5, 0.25, 0, 0.25}
	m.Expect(shares, 2)
	// Two draws miss a share of .5 with probability .25, a share of .25 with .5625, and a node's share of .75 with
	// .0625.
	if diff := cmp.Diff([]float32{0.75 + 5*0.9375, 0.4375 + 5*0.9375, 5 * 0.4375, 0.4375 + 5*0.4375}, shares, close); diff != "" {
		t.Error(diff)
	}
	table := &affinity.RankTable{Ranks: 4, Score: []uint16{11000, 22000, 0, 5500}}
	table.Spread(affinity.Messages{Rank: 1, RanksPerNode: 2})
	if diff := cmp.Diff([]uint16{11000, 22000, 0, 5500}, table.Score); diff != "" {
		t.Errorf("without cost of nodes: %s", diff)
	}
	table.Spread(m)
	if diff := cmp.Diff([]uint16{16000, 17000, 2500, 3000}, table.Score); diff != "" {
		t.Error(diff)
	}
}

// TestSampleOccurrences draws samples with both kinds of units: a seed determines the sample, no token occurs twice,
// and tokens share a unit if they share a rank.
func TestSampleOccurrences(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	all := affinity.SampleOccurrences(tr, tr.AllRequests(), len(tr.Tokens)+5, true, 1)
	if all.Len() != len(tr.Tokens) || all.Units != tr.Requests() || all.Scale != 1 {
		t.Fatalf("%d of %d tokens, %d units, scale %v", all.Len(), len(tr.Tokens), all.Units, all.Scale)
	}
	for l := range all.Layers {
		for at := range all.Len() {
			if diff := cmp.Diff(tr.Row(at, l), all.Layers[l][at*all.TopK:(at+1)*all.TopK]); diff != "" {
				t.Fatal(diff)
			}
		}
	}
	for _, byRequest := range []bool{false, true} {
		some := affinity.SampleOccurrences(tr, tr.AllRequests(), 300, byRequest, 1)
		if diff := cmp.Diff(some, affinity.SampleOccurrences(tr, tr.AllRequests(), 300, byRequest, 1)); diff != "" {
			t.Errorf("the same seed yields another sample: %s", diff)
		}
		if math.Abs(some.Scale*300-float64(len(tr.Tokens))) > 1e-6 || some.Len() != 300 {
			t.Errorf("%d occurrences with scale %v for %d tokens", some.Len(), some.Scale, len(tr.Tokens))
		}
		for _, unit := range some.Unit {
			if unit < 0 || int(unit) >= some.Units {
				t.Fatalf("unit %d of %d", unit, some.Units)
			}
		}
	}
	grouped := all.Grouped(4)
	if grouped.Experts != 4 || grouped.Layers[1][7] != all.Layers[1][7]/4 {
		t.Errorf("%d groups, %d for expert %d", grouped.Experts, grouped.Layers[1][7], all.Layers[1][7])
	}
}
