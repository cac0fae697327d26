// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"math"
	"runtime"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/lab"
	"github.com/semmoe/operator/solver/placement"
)

func TestDescribe(t *testing.T) {
	tr := clustered()
	var first *lab.Statistics
	for _, processors := range []int{1, 4} {
		before := runtime.GOMAXPROCS(processors)
		got, err := lab.Describe(t.Context(), tr, lab.StatisticsOptions{Ranks: 4, Transfer: placement.TensorParallel, TrainPercent: 30, Seed: 1})
		runtime.GOMAXPROCS(before)
		if err != nil {
			t.Fatal(err)
		}
		if first == nil {
			first = got
		}
		if diff := cmp.Diff(first, got); diff != "" {
			t.Errorf("on %d processors: %s", processors, diff)
		}
	}
	if first.TrainTokens+first.TestTokens != len(tr.Tokens) || len(first.Layers) != 3 || first.Mean.Layer != -1 {
		t.Errorf("%+v", first)
	}
	mean := 0.0
	for l, d := range first.Layers {
		if len(d.LookBack) != l || (d.Transition == nil) != (l == 2) || d.Layer != l+1 {
			t.Errorf("layer %d: %+v", l, d)
		}
		// A domain uses half of a group of experts, so experts have few partners, and tokens few experts.
		if d.Coactivation.Share < 1.5*d.Coactivation.Uniform || d.StaticTopK.F1 < 1.5*2./32 {
			t.Errorf("layer %d: %+v", l, d)
		}
		mean += d.StaticTopK.F1 / 3
	}
	if math.Abs(first.Mean.StaticTopK.F1-mean) > 1e-12 || len(first.Mean.LookBack) != 2 || first.Mean.LookBack[1] != first.Layers[2].LookBack[1] {
		t.Errorf("means %+v", first.Mean)
	}
	own, other := 0.0, 0.0
	for a, row := range first.Transfer.LAR {
		for b, lar := range row {
			if a == b {
				own += *lar / 4
			} else {
				other += *lar / 12
			}
		}
	}
	if own < other+0.1 {
		t.Errorf("plans reach %v on the kind of text that they were solved on, %v on others", own, other)
	}
	tr.Domains = nil
	without, err := lab.Describe(t.Context(), tr, lab.StatisticsOptions{Ranks: 4, Transfer: placement.TensorParallel, TrainPercent: 30, Seed: 1})
	if err != nil || without.Transfer != nil {
		t.Errorf("transfer %v between kinds of text that the trace does not name; error %v", without.Transfer, err)
	}
	if _, err := lab.Describe(t.Context(), tr, lab.StatisticsOptions{Ranks: 5, TrainPercent: 30}); err == nil {
		t.Error("an EP size that does not divide the experts is accepted")
	}
}

func TestTransferOfKindsWithoutNames(t *testing.T) {
	tr := clustered()
	tr.Model.Domains = nil
	for r, domain := range tr.Domains {
		if domain == 3 {
			tr.Domains[r] = math.MaxUint8 // the maximum
		}
	}
	got, err := lab.Describe(t.Context(), tr, lab.StatisticsOptions{Ranks: 4, Transfer: placement.TensorParallel, TrainPercent: 30, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	if n := len(got.Transfer.Domains); n != 256 || got.Transfer.Domains[255] != "domain 255" || got.Transfer.LAR[255][0] == nil || got.Transfer.LAR[255][3] != nil {
		t.Errorf("%d kinds, the last %q, its rates %v", n, got.Transfer.Domains[n-1], got.Transfer.LAR[n-1])
	}
}
