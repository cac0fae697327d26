package moedeployment

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"

	"github.com/semmoe/operator/internal/lar"
)

// The reported rate moves on a change of 20 milli or more, and at most once a minute, within one revision; another
// revision starts anew.
func TestLARStatus(t *testing.T) {
	at := func(milli int32, after time.Duration, summary string) *semmoev1.LARStatus {
		return &semmoev1.LARStatus{ObservedMilli: &milli, ObservedTime: &metav1.Time{Time: start.Add(after)}, ObservedRevision: "r1", Summary: summary}
	}
	previous, other := at(250, 0, "25.0%"), at(250, 0, "25.0%")
	other.ObservedRevision = "r0"
	cases := map[string]struct {
		previous *semmoev1.LARStatus
		local    int64
		few      bool
		after    time.Duration
		want     *semmoev1.LARStatus
	}{
		"first":                     {nil, 250, false, 0, previous},
		"too few, first":            {nil, 250, true, 0, nil},
		"too few, same revision":    {previous, 900, true, time.Hour, previous},
		"too few, another revision": {other, 900, true, time.Hour, nil},
		"small change":              {previous, 269, false, time.Hour, previous},
		"change":                    {previous, 270, false, time.Hour, at(270, time.Hour, "27.0%")},
		"change downwards":          {previous, 230, false, time.Hour, at(230, time.Hour, "23.0%")},
		"change within the minute":  {previous, 900, false, 59 * time.Second, previous},
		"change after the minute":   {previous, 900, false, time.Minute, at(900, time.Minute, "90.0%")},
		"another revision, at once": {other, 260, false, time.Second, at(260, time.Second, "26.0%")},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			o := observation{Revision: "r1", Observed: lar.Activations{Local: tc.local, Total: 1000}, Enough: !tc.few}
			got := larStatus(tc.previous, o, true, start.Add(tc.after))
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("lar (-want +got):\n%s", diff)
			}
		})
	}
}

// What a plan promises is shown beside what is observed, and only once the plan is in service.
func TestLARStatusShowsThePlan(t *testing.T) {
	plan := planOf("m-1", "ab", nil)
	ready := larStatus(nil, observation{Planning: planning{Plan: plan}}, true, start)
	if ready == nil || *ready.BaselineMilli != 250 || ready.PredictedMilli != nil {
		t.Errorf("a plan that is not in service gives %+v, want its baseline alone", ready)
	}
	serving := larStatus(nil, observation{Planning: planning{Plan: plan, Serving: layoutOf(plan, semmoev1.RealizationEngineMap), Promise: plan}}, true, start)
	if serving == nil || *serving.BaselineMilli != 250 || *serving.PredictedMilli != 400 {
		t.Errorf("a plan in service gives %+v, want baseline and promise", serving)
	}
}
