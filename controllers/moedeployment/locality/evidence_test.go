// SPDX-License-Identifier: Apache-2.0

package locality

import (
	"slices"
	"testing"
	"time"

	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/internal/observation/lar"
)

// Samples of several routers are merged in order of time. Samples of other plans or tables, and samples far from now,
// are omitted.
func TestEvidenceOf(t *testing.T) {
	unscored, other, empty, odd := moedtest.Observed(4, "ab-full", 40), moedtest.Observed(4, "ab-full", 40), moedtest.Observed(4, "ab-full", 0), moedtest.Observed(4, "ab-full", 101)
	unscored.Forecast, other.Plan, empty.Total = nil, "cd-full", 0
	a := lar.Report{Observations: []lar.Observation{moedtest.Observed(9, "new", 1), moedtest.Observed(3, "new", 3), unscored, other, empty}}
	b := lar.Report{Observations: []lar.Observation{moedtest.Observed(3601, "new", 9), moedtest.Observed(8, "ab-full", 9), moedtest.Observed(5, "new", 2), odd, moedtest.Observed(-3601, "new", 9), moedtest.Observed(2, "new", 4)}}
	for _, reports := range [][]lar.Report{{a, b}, {b, a}} {
		got := EvidenceOf(reports, "ab-full", moedtest.Start, time.Hour)
		var shares []float64
		for _, s := range got.Samples {
			shares = append(shares, s.Local)
		}
		if !slices.Equal(shares, []float64{0.01, 0.02, 0.03, 0.04}) || got.Tables != "new" || got.Answered != 2 || !got.Newest.Equal(moedtest.Start.Add(-2*time.Second)) {
			t.Errorf("evidence %+v", got)
		}
		if s := got.Samples[0]; s.Best != 1 || s.Rank != 1 || s.Highest != 0.4 || s.Predicted != 0.4 || s.Known != 1 || s.Pairs != 1 {
			t.Errorf("sample %+v", s)
		}
	}
	if got := EvidenceOf([]lar.Report{a, b}, "ef", moedtest.Start, time.Hour); !got.Newest.IsZero() || got.Answered != 2 {
		t.Errorf("evidence of a layout that no pod serves: %+v", got)
	}
}
