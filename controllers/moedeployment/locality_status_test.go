// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/decision"
	"github.com/semmoe/operator/controllers/moedeployment/locality"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/observation/lar"
)

// The reported rate changes by steps of at least 20 milli, at most once a minute, within one revision. Another revision
// starts a new report.
func TestLARStatus(t *testing.T) {
	at := func(milli int32, after time.Duration, summary string) *semmoev1.LARStatus {
		return &semmoev1.LARStatus{ObservedMilli: &milli, ObservedTime: &metav1.Time{Time: moedtest.Start.Add(after)}, ObservedRevision: "r1", Summary: summary, Source: semmoev1.LARSourceRouter}
	}
	counted := func(milli int32, after time.Duration, summary string) *semmoev1.LARStatus {
		status := at(milli, after, summary)
		status.Source = semmoev1.LARSourceEngine
		return status
	}
	engine := lar.Activations{Local: 75_000, Total: 250_000}
	previous, other := at(250, 0, "25.0%"), at(250, 0, "25.0%")
	other.ObservedRevision = "r0"
	cases := map[string]struct {
		previous *semmoev1.LARStatus
		local    int64
		few      bool
		engine   lar.Activations
		after    time.Duration
		want     *semmoev1.LARStatus
	}{
		"first":                      {nil, 250, false, lar.Activations{}, 0, previous},
		"too few, first":             {nil, 250, true, lar.Activations{}, 0, nil},
		"too few, same revision":     {previous, 900, true, lar.Activations{}, time.Hour, previous},
		"too few, another revision":  {other, 900, true, lar.Activations{}, time.Hour, nil},
		"small change":               {previous, 269, false, lar.Activations{}, time.Hour, previous},
		"change":                     {previous, 270, false, lar.Activations{}, time.Hour, at(270, time.Hour, "27.0%")},
		"change downwards":           {previous, 230, false, lar.Activations{}, time.Hour, at(230, time.Hour, "23.0%")},
		"change within the minute":   {previous, 900, false, lar.Activations{}, 59 * time.Second, previous},
		"change after the minute":    {previous, 900, false, lar.Activations{}, time.Minute, at(900, time.Minute, "90.0%")},
		"the clock was set back":     {previous, 900, false, lar.Activations{}, -6 * time.Hour, at(900, -6*time.Hour, "90.0%")},
		"change without a time":      {&semmoev1.LARStatus{ObservedMilli: new(int32(250)), ObservedRevision: "r1"}, 900, false, lar.Activations{}, time.Hour, at(900, time.Hour, "90.0%")},
		"another revision, at once":  {other, 260, false, lar.Activations{}, time.Second, at(260, time.Second, "26.0%")},
		"engine counts":              {nil, 900, false, engine, 0, counted(300, 0, "30.0%")},
		"no sample, engine counts":   {nil, 900, true, engine, 0, counted(300, 0, "30.0%")},
		"few engine counts":          {nil, 900, false, lar.Activations{Local: 1, Total: 249_999}, 0, at(900, 0, "90.0%")},
		"another source":             {at(300, 0, "30.0%"), 300, false, engine, time.Hour, counted(300, time.Hour, "30.0%")},
		"another source, at once":    {at(300, 0, "30.0%"), 300, false, engine, time.Second, at(300, 0, "30.0%")},
		"small change in the counts": {counted(310, 0, "31.0%"), 900, false, engine, time.Hour, counted(310, 0, "31.0%")},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			o := observation{Decision: decision.Decision{Revision: "r1", Observed: sampledOf(tc.local)}}
			if o.Observed.Engine = tc.engine; tc.few {
				o.Observed.Sketch.Overall.Requests--
			}
			got := larStatus(tc.previous, nil, o, true, moedtest.Start.Add(tc.after))
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("lar (-want +got):\n%s", diff)
			}
		})
	}
}

// The plan's prediction is reported next to the observed rate only while the plan is in service.
func TestLARStatusShowsThePlan(t *testing.T) {
	plan := moedtest.PlanOf("m-1", "ab", nil)
	ready := larStatus(nil, nil, observation{Decision: decision.Decision{Planning: planner.Planning{Plan: plan}}}, true, moedtest.Start)
	if ready == nil || *ready.BaselineMilli != 250 || ready.PredictedMilli != nil {
		t.Errorf("a plan that is not in service gives %+v, want only its baseline", ready)
	}
	serving := larStatus(nil, nil, observation{Decision: decision.Decision{Planning: planner.Planning{Plan: plan, Serving: revisions.LayoutOf(plan, semmoev1.RealizationEngineMap), Promise: plan}}}, true, moedtest.Start)
	if serving == nil || *serving.BaselineMilli != 250 || *serving.PredictedMilli != 400 {
		t.Errorf("a plan in service gives %+v, want baseline and promise", serving)
	}
}

// sampledOf returns sufficient traffic with local of 1000 activations.
func sampledOf(local int64) locality.Traffic {
	return locality.Traffic{Sketch: lar.Sketch{Overall: lar.Ratio{Requests: 30, Activations: lar.Activations{Local: local, Total: 1000}}}}
}

// The reported capture overhead changes by steps of at least 20 milli, at most once a minute, and stays while it is
// unknown. The distribution over ranks is not affected.
func TestCaptureStatus(t *testing.T) {
	costOf := func(ratio float64, requests int) locality.Traffic {
		var reported locality.Traffic
		for range requests {
			reported.Capture.Asked.Add(ratio, 1)
			reported.Capture.Plain.Add(1, 1)
		}
		return reported
	}
	noisy := costOf(1.1, 100)
	for range 10 {
		noisy.Capture.Asked.Add(11, 1)
		noisy.Capture.Plain.Add(10, 1)
	}
	at := func(milli int32, after time.Duration) *semmoev1.RoutingStatus {
		return &semmoev1.RoutingStatus{CaptureCostMilli: &milli, CaptureCostTime: &metav1.Time{Time: moedtest.Start.Add(after)}}
	}
	with := func(status *semmoev1.RoutingStatus, share int32) *semmoev1.RoutingStatus {
		status.Ranks = []semmoev1.RankShare{{ShareMilli: share}}
		return status
	}
	for name, tc := range map[string]struct {
		routing, previous *semmoev1.RoutingStatus
		reported          locality.Traffic
		off               bool
		after             time.Duration
		want              *semmoev1.RoutingStatus
	}{
		"nothing":            {nil, nil, locality.Traffic{}, false, 0, nil},
		"too few":            {nil, nil, costOf(2, 99), false, 0, nil},
		"first":              {nil, nil, costOf(1.3, 100), false, 0, at(300, 0)},
		"with shares":        {with(&semmoev1.RoutingStatus{}, 7), nil, costOf(1.3, 100), false, 0, with(at(300, 0), 7)},
		"faster":             {nil, nil, costOf(0.9, 100), false, 0, at(-100, 0)},
		"too few, known":     {with(&semmoev1.RoutingStatus{}, 8), with(at(50, 0), 7), costOf(2, 99), false, time.Hour, with(at(50, 0), 8)},
		"small change":       {nil, at(50, 0), costOf(1.069, 100), false, time.Hour, at(50, 0)},
		"change":             {nil, at(50, 0), costOf(1.07, 100), false, time.Hour, at(70, time.Hour)},
		"noise":              {nil, at(50, 0), noisy, false, time.Hour, at(50, 0)},
		"within the minute":  {nil, at(50, 0), costOf(1.5, 100), false, 59 * time.Second, at(50, 0)},
		"clock set back":     {nil, at(50, 0), costOf(1.5, 100), false, -6 * time.Hour, at(500, -6*time.Hour)},
		"without a time":     {nil, &semmoev1.RoutingStatus{CaptureCostMilli: new(int32(50))}, costOf(1.5, 100), false, 0, at(500, 0)},
		"nothing is sampled": {nil, at(50, 0), costOf(1.5, 100), true, time.Hour, nil},
	} {
		t.Run(name, func(t *testing.T) {
			got := captureStatus(tc.routing, tc.previous, observation{Decision: decision.Decision{Observed: tc.reported}}, !tc.off, moedtest.Start.Add(tc.after))
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("routing (-want +got):\n%s", diff)
			}
		})
	}
}
