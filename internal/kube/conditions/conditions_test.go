// SPDX-License-Identifier: Apache-2.0

package conditions

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

func TestFaults(t *testing.T) {
	for name, tc := range map[string]struct {
		fault             *Fault
		degraded, stalled Verdict
	}{
		"none":   {nil, False("AsExpected", "No problem is known"), False("NotStalled", "No user action is required")},
		"passes": {&Fault{"Away", "is asked again", false}, True("Away", "is asked again"), False("NotStalled", "The operator retries until the problem in condition Degraded is solved")},
		"stalls": {&Fault{"Broken", "fix it", true}, True("Broken", "fix it"), True("Broken", "fix it")},
	} {
		if got := Degraded(tc.fault); got != tc.degraded {
			t.Errorf("%s: degraded %+v", name, got)
		}
		if got := Stalled(tc.fault); got != tc.stalled {
			t.Errorf("%s: stalled %+v", name, got)
		}
	}
}

func TestFinished(t *testing.T) {
	for name, tc := range map[string]struct {
		verdict    Verdict
		generation int64
		want       bool
	}{
		"complete":             {False("Complete", ""), 3, true},
		"of another one":       {False("Complete", ""), 2, false},
		"stalled":              {False("Stalled", ""), 3, false},
		"in progress":          {True("InProgress", ""), 3, false},
		"complete in progress": {True("Complete", ""), 3, false},
	} {
		var list []metav1.Condition
		Set(&list, semmoev1.ConditionReconciling, tc.verdict, tc.generation, time.Unix(0, 0))
		if got := Finished(list, 3); got != tc.want {
			t.Errorf("%s: %t", name, got)
		}
	}
	if Finished(nil, 0) {
		t.Error("finished without a condition")
	}
}

// The transition time is that of the last change of the status. Other changes do not move it.
func TestSet(t *testing.T) {
	start := time.Date(2026, 5, 4, 3, 2, 1, 999, time.UTC)
	var list []metav1.Condition
	Set(&list, "Ready", False("Waiting", "for it"), 1, start)
	first := append([]metav1.Condition(nil), list...)
	Set(&list, "Ready", False("Waiting", "for it"), 1, start.Add(time.Hour))
	if diff := cmp.Diff(first, list); diff != "" {
		t.Error(diff)
	}
	Set(&list, "Ready", False("Waiting", strings.Repeat("long", 500)), 2, start.Add(time.Hour))
	if c := list[0]; !c.LastTransitionTime.Time.Equal(start.Truncate(time.Second)) || c.ObservedGeneration != 2 || len(c.Message) != 1024 {
		t.Errorf("%+v", c)
	}
	Set(&list, "Ready", False("Waiting", "the engine: \x1b[31mno\x1b[2J\nmemory\u202e\xff"), 2, start.Add(time.Hour))
	if got, want := list[0].Message, "the engine: no\ufffd[2J memory\ufffd\ufffd"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	Set(&list, "Ready", True("Here", ""), 2, start.Add(time.Hour))
	if c := list[0]; !c.LastTransitionTime.Time.Equal(start.Truncate(time.Second).Add(time.Hour)) {
		t.Errorf("%+v", c)
	}
}
