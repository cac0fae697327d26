// SPDX-License-Identifier: Apache-2.0

// Package conditionevents records events for changes of conditions.
//
// Invariant: one cause that changes several conditions at once is one event per level. The recorder would treat further
// events as repetitions: it keeps only the first note, and writes the count some minutes later. For the same reason,
// the action of an event contains the condition's type, so that conditions that get the same reason one after the other
// are two events.
package conditionevents

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/printable"
)

// noteLimit is the maximum length of a note, in bytes; the API server accepts 1,024 in total.
const noteLimit = 900

// EventRecorder records events for the changes of one observation. The zero value is not usable; see NewTeller.
type EventRecorder struct {
	recorder           events.EventRecorder
	regarding, related runtime.Object
	recorded           map[cause]bool
}

type cause struct{ level, reason string }

// NewEventRecorder returns a recorder for changes of regarding. related is another object, or nil.
func NewEventRecorder(recorder events.EventRecorder, regarding, related runtime.Object) *EventRecorder {
	return &EventRecorder{recorder, regarding, related, map[cause]bool{}}
}

// Change is a condition with a new status or reason.
type Change struct {
	After *metav1.Condition
	// Before is the previous status; empty if the condition did not exist.
	Before metav1.ConditionStatus
}

// Holds reports whether the condition is True now.
func (c Change) Holds() bool { return c.After.Status == metav1.ConditionTrue }

// Lost reports whether the condition was True before and is not True now.
func (c Change) Lost() bool { return c.Before == metav1.ConditionTrue && !c.Holds() }

// Changes returns the changes of conditions of the given types, in the order of kinds.
func Changes(before, after []metav1.Condition, kinds ...string) []Change {
	var changes []Change
	for _, kind := range kinds {
		was, is := meta.FindStatusCondition(before, kind), meta.FindStatusCondition(after, kind)
		if is == nil || was != nil && was.Status == is.Status && was.Reason == is.Reason {
			continue
		}
		change := Change{After: is}
		if was != nil {
			change.Before = was.Status
		}
		changes = append(changes, change)
	}
	return changes
}

// RecordSteps records events for the conditions of an object that is completed once: each new reason of Progressing,
// changes of Ready to and from True, and problems.
func (t *EventRecorder) RecordSteps(before, after []metav1.Condition) {
	for _, c := range Changes(before, after, semmoev1.ConditionProgressing, semmoev1.ConditionDegraded, semmoev1.ConditionReady) {
		kind := c.After.Type
		if c.Before == "" && !c.Holds() && kind != semmoev1.ConditionProgressing {
			continue // the condition did not hold before
		}
		t.Record(c.After, kind == semmoev1.ConditionReady && c.Lost() || kind == semmoev1.ConditionDegraded && c.Holds())
	}
}

// Record records an event for a condition, as a warning or not, unless an event with the same reason was recorded.
func (t *EventRecorder) Record(after *metav1.Condition, warning bool) {
	c := cause{corev1.EventTypeNormal, after.Reason}
	if warning {
		c.level = corev1.EventTypeWarning
	}
	if t.recorded[c] {
		return
	}
	t.recorded[c] = true
	t.recorder.Eventf(t.regarding, t.related, c.level, c.reason, "Set"+after.Type, "%s is %s: %s", after.Type, after.Status, printable.Line(after.Message, noteLimit))
}
