package moedeployment

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/router"
)

// The reported rate moves on a change of 20 milli or more, and at most once a minute.
func TestLARStatus(t *testing.T) {
	at := func(milli int32, after time.Duration, summary string) *semmoev1.LARStatus {
		return &semmoev1.LARStatus{ObservedMilli: milli, ObservedTime: metav1.NewTime(start.Add(after)), Summary: summary}
	}
	previous := at(250, 0, "25.0%")
	cases := map[string]struct {
		previous *semmoev1.LARStatus
		local    int64
		after    time.Duration
		want     *semmoev1.LARStatus
	}{
		"first":                    {nil, 250, 0, previous},
		"small change":             {previous, 269, time.Hour, previous},
		"change":                   {previous, 270, time.Hour, at(270, time.Hour, "27.0%")},
		"change downwards":         {previous, 230, time.Hour, at(230, time.Hour, "23.0%")},
		"change within the minute": {previous, 900, 59 * time.Second, previous},
		"change after the minute":  {previous, 900, time.Minute, at(900, time.Minute, "90.0%")},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got := larStatus(tc.previous, router.Activations{Local: tc.local, Total: 1000}, start.Add(tc.after))
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("lar (-want +got):\n%s", diff)
			}
		})
	}
}
