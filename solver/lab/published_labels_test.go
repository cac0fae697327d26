// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// TestCompareShowsPublishedAlgorithmsAsPrinted checks that each algorithm has rows with the token table and with its
// own labels, and a margin that compares it as a whole with our method.
func TestCompareShowsPublishedAlgorithmsAsPrinted(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	all, err := Compare(t.Context(), tr, CompareOptions{
		Attentions: []placement.Attention{placement.TensorParallel, placement.DataParallel}, Ranks: []int{4}, Seeds: []uint64{1, 2},
		Algorithms: []placement.Algorithm{placement.Auto, placement.Alternating, placement.AlternatingPrinted, placement.CrossEntropyPrinted},
		Forecasts:  []solver.Forecast{solver.Table}, Baselines: []solver.Forecast{solver.Table, solver.Prefill}, TrainPercent: 30,
	})
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]float64{}
	for _, c := range all {
		rows[fmt.Sprintf("%s, %s, %s, %s", c.Attention, c.Algorithm, c.Forecast, c.Dispatch)] = c.LAR.Mean
	}
	leads := map[string]float64{}
	for _, l := range BaselineMargins(all) {
		leads[fmt.Sprintf("%s, %s", l.Attention, l.Baseline)] = l.Mean
	}
	for _, a := range []placement.Algorithm{placement.AlternatingPrinted, placement.CrossEntropyPrinted} {
		for _, test := range []struct{ attention, labels, dispatch, ours string }{
			{"dp", labelVotes, "masked", "price"}, {"dp", labelShares, "masked", "price"}, {"tp", tokenLabels, "equal", "equal"}, {"tp", tokenLabels, "free", "free"},
		} {
			name := fmt.Sprintf("%s, %s, %s, %s", test.attention, a, test.labels, test.dispatch)
			theirs, known := rows[name]
			if _, table := rows[fmt.Sprintf("%s, %s, table, %s", test.attention, a, test.dispatch)]; !known || !table {
				t.Fatalf("no row %s, or none with the token table", name)
			}
			line := fmt.Sprintf("%s, placement %s, %s, dispatch %s", test.attention, a, test.labels, test.dispatch)
			lead, known := leads[line]
			if want := rows[fmt.Sprintf("%s, auto, table, %s", test.attention, test.ours)] - theirs; !known || math.Abs(lead-want) > 1e-9 {
				t.Errorf("%s: mean lead %v, %v; want %v", line, lead, known, want)
			}
		}
	}
	for name := range rows {
		if strings.Contains(name, "its labels") && (strings.Contains(name, "alternating,") || strings.Contains(name, "auto")) {
			t.Errorf("row %s: the algorithm reports no labels", name)
		}
	}
}

// TestLabelsCountOccurrences recomputes lines 54 and 55 of Algorithm 1, one occurrence at a time.
func TestLabelsCountOccurrences(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	steps, err := solver.NewSteps(tr, solver.Options{
		Ranks: 4, Attention: placement.DataParallel, Algorithm: placement.AlternatingPrinted, Forecast: solver.Table, TrainPercent: 30, Seed: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	s := newStudy(tr, steps)
	if err := steps.Count(t.Context()); err != nil {
		t.Fatal(err)
	}
	rowRank := make([]int, len(s.train))
	for i := range rowRank {
		rowRank[i] = i * i % 4
	}
	table := s.labels(placement.AlternatingPrinted, 0, rowRank)
	votes, shares := requestLabels{tr, table, true}, requestLabels{tr, table, false}
	unknown := 0
	for _, request := range s.test {
		voted, shared := make([]float64, 4), make([]float64, 4)
		tokens := tr.Request(request)
		for _, token := range tokens {
			on := make([]float64, 4)
			for i, r := range s.train {
				for _, seen := range tr.Request(r) {
					if seen == token {
						on[rowRank[i]]++
					}
				}
			}
			total := on[0] + on[1] + on[2] + on[3]
			if total == 0 {
				unknown++
				continue
			}
			voted[slices.Index(on, slices.Max(on))] += 1 / float64(len(tokens))
			for i, n := range on {
				shared[i] += n / total / float64(len(tokens))
			}
		}
		for _, test := range []struct {
			forecast requestLabels
			want     []float64
		}{{votes, voted}, {shares, shared}} {
			got := make([]float32, 4)
			test.forecast.Score(got, request)
			for i := range got {
				if math.Abs(float64(got[i])-test.want[i]) > 1e-4 {
					t.Fatalf("request %d, votes %v: scores %v; want %v", request, test.forecast.votes, got, test.want)
				}
			}
		}
	}
	if unknown == 0 {
		t.Error("every token id has a label: the test does not see one without")
	}
}
