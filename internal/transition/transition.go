// Package transition tells changes of conditions by events.
//
// Invariant: what changes several conditions at once for one reason is one event of a level. The recorder would take more for a repetition: it
// keeps the first note alone, and writes the count some minutes later, when nothing happens any more. For the same reason the action of an event is
// that its condition is set: conditions that come to one reason one after the other are two events.
package transition

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"

	"github.com/semmoe/operator/internal/podhealth"
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
	t.recorder.Eventf(t.regarding, t.related, c.level, c.reason, "Set"+after.Type, "%s is %s: %s", after.Type, after.Status, podhealth.Truncate(after.Message, noteLimit))
}
