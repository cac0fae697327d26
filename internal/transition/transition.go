// Package transition tells changes of conditions by events.
//
// Invariant: what changes several conditions at once for one reason is one event of a level. The recorder would take more for a repetition: it
// keeps the first note alone, and writes the count some minutes later, when nothing happens any more. For the same reason the action of an event is
// that its condition is set: conditions that come to one reason one after the other are two events.
package transition

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/printable"
)

// noteLimit is the longest message that a note has; the API server takes 1,024 bytes in all.
const noteLimit = 900

// Teller tells the changes of one observation. Its zero value is of no use.
type Teller struct {
	recorder           events.EventRecorder
	regarding, related runtime.Object
	told               map[cause]bool
}

type cause struct{ level, reason string }

// NewTeller returns a teller of changes of an object, which relate to another one or nil.
func NewTeller(recorder events.EventRecorder, regarding, related runtime.Object) *Teller {
	return &Teller{recorder, regarding, related, map[cause]bool{}}
}

// Change is a condition that has come to another status or reason.
type Change struct {
	After *metav1.Condition
	// Before is the status that it had; empty where there was none.
	Before metav1.ConditionStatus
}

// Holds is whether the condition is True now.
func (c Change) Holds() bool { return c.After.Status == metav1.ConditionTrue }

// Lost is whether the condition was True, and is no more.
func (c Change) Lost() bool { return c.Before == metav1.ConditionTrue && !c.Holds() }

// Changes are those of conditions of some kinds, in that order.
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

// TellSteps tells the conditions of something that is made once: each new stage of progress, when it is ready and no more, and what is wrong
// with it.
func (t *Teller) TellSteps(before, after []metav1.Condition) {
	for _, c := range Changes(before, after, semmoev1.ConditionProgressing, semmoev1.ConditionDegraded, semmoev1.ConditionReady) {
		kind := c.After.Type
		if c.Before == "" && !c.Holds() && kind != semmoev1.ConditionProgressing {
			continue // it was never otherwise
		}
		t.Tell(c.After, kind == semmoev1.ConditionReady && c.Lost() || kind == semmoev1.ConditionDegraded && c.Holds())
	}
}

// Tell records that a condition has become what it is, as a warning or not, unless its reason has been told so.
func (t *Teller) Tell(after *metav1.Condition, warning bool) {
	c := cause{corev1.EventTypeNormal, after.Reason}
	if warning {
		c.level = corev1.EventTypeWarning
	}
	if t.told[c] {
		return
	}
	t.told[c] = true
	t.recorder.Eventf(t.regarding, t.related, c.level, c.reason, "Set"+after.Type, "%s is %s: %s", after.Type, after.Status, printable.Line(after.Message, noteLimit))
}
