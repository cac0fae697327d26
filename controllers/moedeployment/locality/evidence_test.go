// SPDX-License-Identifier: Apache-2.0

package locality

import (
	"slices"
	"strings"
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

// The evidence of engines is that of the tables in use. What engines report instead is named.
func TestEngineEvidenceOf(t *testing.T) {
	bucket := func(before int, tables string, local int64) lar.EngineBucket {
		return lar.EngineBucket{Start: moedtest.Start.Add(-time.Duration(before) * lar.EngineBucketTime), Tables: tables, Activations: lar.Activations{Local: local, Total: 20_000}}
	}
	reports := []lar.Report{{EngineBuckets: []lar.EngineBucket{bucket(7, "new", 1), bucket(6, "new", 5000), bucket(1, "old", 2), bucket(0, "new", 10_000), bucket(-4, "new", 3)}}}
	got := EngineEvidenceOf(reports, "new", moedtest.Start, time.Minute)
	if len(got.Points) != 2 || got.Points[0].Value != 0.25 || got.Points[1].Value != 0.5 || got.Window != 90*time.Second || got.Problem.Reason != "" {
		t.Errorf("evidence %+v", got)
	}
	if got := EngineEvidenceOf(nil, "new", moedtest.Start, 24*time.Hour); got.Window != time.Hour || got.Problem.Reason != "" {
		t.Errorf("without a report: %+v", got)
	}
	for name, tc := range map[string]struct {
		engine       lar.EngineCounts
		reason, want string
	}{
		"other tables":    {lar.EngineCounts{Pod: "p", Tables: "0123456789abcdef0123"}, "TablesNotLoaded", "it uses the tables of plan 0123456789abcdef. If this persists, see the log of its container follow-tables"},
		"refused":         {lar.EngineCounts{Pod: "p", Refused: "OtherModel"}, "TablesNotLoaded", "reason OtherModel"},
		"nonsense":        {lar.EngineCounts{Pod: "p", Tables: "new", Problem: "a value is NaN"}, "CountersInvalid", "pod p are not used: a value is NaN"},
		"no consumer":     {lar.EngineCounts{Pod: "p", Activations: lar.Activations{Total: 9}}, "NotObserved", "Use an image with a consumer"},
		"tables, no time": {lar.EngineCounts{Pod: "p", Tables: "new"}, "", ""},
	} {
		got := EngineEvidenceOf([]lar.Report{{Engines: []lar.EngineCounts{tc.engine}}}, "new", moedtest.Start, time.Hour)
		if got.Problem.Reason != tc.reason || !strings.Contains(got.Problem.Message, tc.want) {
			t.Errorf("%s: %+v, want %s, %q", name, got.Problem, tc.reason, tc.want)
		}
	}
}
