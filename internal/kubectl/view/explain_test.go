package view

import (
	"strings"
	"testing"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// Of a plan for tokens that are not shuffled messages are told: its rate is everyone's.
func TestMessagesAreTold(t *testing.T) {
	plan := &semmoev1.PlacementPlan{Status: semmoev1.PlacementPlanStatus{
		Verdict: semmoev1.VerdictGain, Forecast: &semmoev1.PlanForecast{LARMilli: 250, BaselineMilli: 250, RemoteRanksMilli: 1804, BaselineRemoteRanksMilli: 2300},
	}}
	if why, _ := whyOf(plan); why != "It is worth it: it has the experts of a token on 1.80 other ranks, the default placement on 2.30" {
		t.Errorf("%q", why)
	}
	told := ""
	for _, fact := range factsOf(plan) {
		told += fact.Name + ": " + fact.Text + "\n"
	}
	if !strings.Contains(told, "It promises: the experts of a token on 1.80 other ranks") || !strings.Contains(told, "the local activation rate is 25.0% under any plan") {
		t.Errorf("%s", told)
	}
	plan.Status.Verdict = semmoev1.VerdictNoGainExpected
	if why, _ := whyOf(plan); !strings.HasPrefix(why, "It gains too little: it would have the experts") {
		t.Errorf("%q", why)
	}
}

// A first plan whose layer would take longer is not said to gain too little: it is the time that speaks against it.
func TestTimesOfFirstPlans(t *testing.T) {
	for name, test := range map[string]struct {
		verdict       semmoev1.Verdict
		lar           int32
		nanos         int64
		why, timeTold string
	}{
		"slower":                      {semmoev1.VerdictNoGainExpected, 432, 124700, "More would stay on its rank (43.2% against 25.7%), but a layer is modelled to take 124.7 µs against 121.3. ", "124.7 µs, in the default placement 121.3: 2.8% more, by the hardware profile h200-nvlink"},
		"hardly slower":               {semmoev1.VerdictNoGainExpected, 259, 121400, "More would stay on its rank (25.9% against 25.7%)", "0.1% more"},
		"hardly a rate, and slower":   {semmoev1.VerdictNoGainExpected, 259, 124700, "More would stay on its rank (25.9% against 25.7%)", "2.8% more"},
		"no rate, and slower":         {semmoev1.VerdictNoGainExpected, 257, 124700, "It gains too little: 25.7%", "2.8% more"},
		"no rate":                     {semmoev1.VerdictNoGainExpected, 259, 120000, "It gains too little: 25.9%", "1.1% less"},
		"quicker":                     {semmoev1.VerdictGain, 432, 108900, "It is worth it", "10.2% less"},
		"the model's size is unknown": {semmoev1.VerdictGain, 432, 0, "It is worth it", ""},
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
			told := ""
			for _, fact := range factsOf(plan) {
				if fact.Name == "Time" {
					told += fact.Text
				}
			}
			if !strings.Contains(told, test.timeTold) || test.timeTold == "" && told != "" {
				t.Errorf("time %q, want %q", told, test.timeTold)
			}
		})
	}
}
