// SPDX-License-Identifier: Apache-2.0

package view

import (
	"strings"
	"testing"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// TestRemoteRanks verifies that a plan without token shuffling is described by its remote ranks per token. Its local
// activation rate is the same as that of every other plan.
func TestRemoteRanks(t *testing.T) {
	plan := &semmoev1.PlacementPlan{Status: semmoev1.PlacementPlanStatus{
		Verdict: semmoev1.VerdictGain, Forecast: &semmoev1.PlanForecast{LARMilli: 250, BaselineMilli: 250, RemoteRanksMilli: 1804, BaselineRemoteRanksMilli: 2300},
	}}
	if why, _ := whyOf(plan); why != "A gain is expected: the plan has the experts of a token on 1.80 remote ranks, versus 2.30 with the default placement" {
		t.Errorf("%q", why)
	}
	facts := ""
	for _, fact := range factsOf(plan) {
		facts += fact.Name + ": " + fact.Text + "\n"
	}
	if !strings.Contains(facts, "Promise: the experts of a token on 1.80 remote ranks") || !strings.Contains(facts, "the local activation rate is 25.0% with any plan") {
		t.Errorf("%s", facts)
	}
	plan.Status.Verdict = semmoev1.VerdictNoGainExpected
	if why, _ := whyOf(plan); !strings.HasPrefix(why, "The gain is too small: the plan has the experts") {
		t.Errorf("%q", why)
	}
}

// TestTimesOfFirstPlans verifies that a first plan that increases the time of a layer is explained by that time, and
// not by a small gain.
func TestTimesOfFirstPlans(t *testing.T) {
	for name, test := range map[string]struct {
		verdict      semmoev1.Verdict
		lar          int32
		nanos        int64
		why, timeHas string
	}{
		"slower":                      {semmoev1.VerdictNoGainExpected, 432, 124700, "More activations would be local (43.2% versus 25.7%), but the modelled time of a layer is 124.7 µs versus 121.3 µs. ", "124.7 µs, versus 121.3 µs with the default placement: 2.8% more, hardware profile h200-nvlink"},
		"slightly slower":             {semmoev1.VerdictNoGainExpected, 259, 121400, "More activations would be local (25.9% versus 25.7%)", "0.1% more"},
		"small gain, and slower":      {semmoev1.VerdictNoGainExpected, 259, 124700, "More activations would be local (25.9% versus 25.7%)", "2.8% more"},
		"no gain, and slower":         {semmoev1.VerdictNoGainExpected, 257, 124700, "The gain is too small: 25.7%", "2.8% more"},
		"small gain":                  {semmoev1.VerdictNoGainExpected, 259, 120000, "The gain is too small: 25.9%", "1.1% less"},
		"faster":                      {semmoev1.VerdictGain, 432, 108900, "A gain is expected", "10.2% less"},
		"the model's size is unknown": {semmoev1.VerdictGain, 432, 0, "A gain is expected", ""},
	} {
		t.Run(name, func(t *testing.T) {
			forecast := &semmoev1.PlanForecast{LARMilli: test.lar, BaselineMilli: 257, LayerNanos: test.nanos, Hardware: "h200-nvlink"}
			if test.nanos > 0 {
				forecast.BaselineLayerNanos = 121300
			}
			plan := &semmoev1.PlacementPlan{Status: semmoev1.PlacementPlanStatus{Verdict: test.verdict, Forecast: forecast}}
			if why, _ := whyOf(plan); !strings.HasPrefix(why, test.why) {
				t.Errorf("%q, want %q", why, test.why)
			}
			text := ""
			for _, fact := range factsOf(plan) {
				if fact.Name == "Time" {
					text += fact.Text
				}
			}
			if !strings.Contains(text, test.timeHas) || test.timeHas == "" && text != "" {
				t.Errorf("time %q, want %q", text, test.timeHas)
			}
		})
	}
}
