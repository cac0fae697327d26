// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"math"
	"strings"
	"testing"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
)

func TestJackknifeOfAMeanIsItsStandardError(t *testing.T) {
	values, mean, sum := []float64{1, 4, 2, 8, 5, 7, 1, 3}, 31.0/8, 0.0
	trial := &TimeTrial{partFraction: 1}
	for _, v := range values {
		trial.parts = append(trial.parts, scorePair{after: cost.Report{LAR: (31 - v) / 7}})
		sum += (v - mean) * (v - mean)
	}
	want := math.Sqrt(sum / 7 / 8)
	if got := trial.Jackknife(func(_, after *cost.Report) float64 { return after.LAR }); math.Abs(got-want) > 1e-12 {
		t.Errorf("the standard error is %v; want %v", got, want)
	}
	if got := new(TimeTrial).Jackknife(func(_, _ *cost.Report) float64 { return 1 }); got != 0 {
		t.Errorf("without parts it is %v", got)
	}
}

func TestJudge(t *testing.T) {
	for _, c := range []struct {
		finding Finding
		want    Verdict
		says    string
	}{
		{Finding{Saved: 8, Low: 3, Max: 40}, Gain, "falls by 8.0%"},
		{Finding{Saved: 2, Low: 1, Max: 40}, Gain, "falls by 2.0%"},
		{Finding{Saved: 1.9, Low: 1, Max: 40}, NoGainExpected, "the minimum is 2%"},
		{Finding{Saved: -3, Low: -5, Max: 40}, NoGainExpected, "rises by 3.0%"},
		{Finding{Saved: 8, Low: -1, Max: 40}, NoGainExpected, "interval begins at -1.0%"},
		{Finding{Saved: 8, Low: 3, Max: 40, SlowerAt: 4096, SlowerBy: 0.012}, NoGainExpected, "rises by 1.2% with 4096 tokens"},
		{Finding{Saved: 8, Low: 3, Max: 40, SlowerAt: 4, SlowerBy: 0.008}, Gain, "falls by 8.0%"},
		{Finding{Saved: 1, Low: 0.5, Max: 1.5}, LocalityDoesNotPay, "latency dominates"},
	} {
		verdict, reason := c.finding.Judge(2)
		if verdict != c.want || !strings.Contains(reason, c.says) {
			t.Errorf("%+v: %s, %q; want %s, %q", c.finding, verdict, reason, c.want, c.says)
		}
	}
	if verdict, reason := (&Finding{Saved: 8, Low: -1, Max: 40}).Judge(0); verdict != Gain {
		t.Errorf("at a minimum of 0 a plan needs no proof: %s, %q", verdict, reason)
	}
	if verdict, _ := (&Finding{Max: 40}).Judge(0); verdict != NoGainExpected {
		t.Errorf("a plan that saves nothing has verdict %s at a minimum of 0", verdict)
	}
}

func TestFastestOfChoosesBeyondChance(t *testing.T) {
	names := []string{"contiguous", placement.PointOfTime, "eplb"}
	for _, c := range []struct {
		plain, own, other []float64
		want              string
	}{
		{[]float64{100, 100}, []float64{90, 90}, []float64{80, 81}, "eplb"},
		{[]float64{100, 100}, []float64{90, 90}, []float64{80, 96}, placement.PointOfTime},
		{[]float64{100}, []float64{90}, []float64{89.8}, placement.PointOfTime},
		{[]float64{100}, []float64{90}, []float64{88}, "eplb"},
		{[]float64{100, 100}, []float64{101, 102}, []float64{103, 104}, "contiguous"},
		{[]float64{100, 100}, []float64{101, 102}, []float64{97, 98}, "eplb"},
		{[]float64{100, 100}, []float64{99.7, 99.6}, []float64{99.9, 99.8}, "contiguous"},
	} {
		if got := fastestOf(names, map[string][]float64{names[0]: c.plain, names[1]: c.own, names[2]: c.other}); got != c.want {
			t.Errorf("%+v: chosen is %s; want %s", c, got, c.want)
		}
	}
}
