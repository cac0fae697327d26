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
