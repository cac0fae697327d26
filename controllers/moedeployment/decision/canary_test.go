// SPDX-License-Identifier: Apache-2.0

package decision

import (
	"testing"
	"time"

	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/internal/observation/lar"
)

func TestSampleOf(t *testing.T) {
	since := moedtest.Start.Add(30 * time.Second)
	at := func(after time.Duration, change ...func(*lar.Observation)) lar.Observation {
		o := lar.Observation{Time: moedtest.Start.Add(after), Revision: "r", Count: lar.Count{Activations: lar.Activations{Local: 1, Total: 4}}}
		for _, c := range change {
			c(&o)
		}
		return o
	}
	planned := func(o *lar.Observation) { o.Plan = "d" }
	scored := func(o *lar.Observation) { o.Plan, o.Forecast = "d", &lar.Forecast{} }
	other := func(o *lar.Observation) { o.Revision = "s" }
	minute := lar.ServiceBucket{Start: moedtest.Start.Add(time.Minute), Revisions: map[string]lar.Service{"r": {Requests: 7, Locality: lar.Ratio{Requests: 3}}}}
	before := lar.ServiceBucket{Start: moedtest.Start, Revisions: map[string]lar.Service{"r": {Requests: 100, Locality: lar.Ratio{Requests: 50}}}}
	got := sampleOf([]lar.Report{{
		Observations: []lar.Observation{at(0), at(time.Minute), at(time.Minute, planned), at(time.Minute, scored), at(time.Minute, other)},
		Service:      []lar.ServiceBucket{before, minute},
	}}, "r", since)
	if got.Locality.Requests != 3 || got.Service.Requests != 7 {
		t.Errorf("%d sampled requests of %d, want those of the whole minute: 3 of 7", got.Locality.Requests, got.Service.Requests)
	}
	got = sampleOf([]lar.Report{{Observations: []lar.Observation{at(0), at(time.Minute), at(time.Minute, planned), at(time.Minute, scored), at(time.Minute, other)}}}, "r", since)
	if got.Locality.Requests != 2 {
		t.Errorf("%d sampled requests, want the two that were sent as the plan wants it, as far as there is one", got.Locality.Requests)
	}
}

// The time of a trial is at least the time that all routers have reached. A single router cannot move it forward.
func TestTrialTime(t *testing.T) {
	at := func(minutes ...int) lar.Report {
		var report lar.Report
		for _, m := range minutes {
			report.Observations = append(report.Observations, lar.Observation{Time: moedtest.Start.Add(time.Duration(m) * time.Minute)})
		}
		return report
	}
	for name, tc := range map[string]struct {
		reports []lar.Report
		want    int
	}{
		"no router":                  {nil, 0},
		"no router has samples":      {[]lar.Report{at(), at()}, 0},
		"the manager is ahead":       {[]lar.Report{at(-9, -5), at(-3)}, 0},
		"the manager is behind":      {[]lar.Report{at(300, 310), at(), at(305)}, 305},
		"one router is ahead":        {[]lar.Report{at(-1), at(120)}, 0},
		"one router has few samples": {[]lar.Report{at(300), at(-20)}, 0},
	} {
		if got, want := trialTime(moedtest.Start, tc.reports), moedtest.Start.Add(time.Duration(tc.want)*time.Minute); !got.Equal(want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
}
