// Package conditions writes what controllers found as conditions, in the same words for each kind.
//
// Invariant: what has not changed leaves conditions as they are, whatever the time is.
package conditions

import (
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/printable"
)

// messageLimit is the longest message of a condition: what engines and stores say may be of any length.
const messageLimit = 1024

// Verdict is what a condition says.
type Verdict struct {
	Status          metav1.ConditionStatus
	Reason, Message string
}

// True is the verdict that something is so.
func True(reason, message string) Verdict { return Verdict{metav1.ConditionTrue, reason, message} }

// False is the verdict that something is not so.
func False(reason, message string) Verdict { return Verdict{metav1.ConditionFalse, reason, message} }

// Unknown is the verdict that nobody can tell.
func Unknown(reason, message string) Verdict {
	return Verdict{metav1.ConditionUnknown, reason, message}
}

// Fault is what is wrong, the most telling first; one that stalls needs a human.
type Fault struct {
	Reason, Message string
	Stalls          bool
}

// Degraded is the verdict that something is wrong: a fault, or nil.
func Degraded(f *Fault) Verdict {
	if f == nil {
		return False("AsExpected", "Nothing is wrong")
	}
	return True(f.Reason, f.Message)
}

// Stalled is the verdict that somebody must act on a fault, or nil.
func Stalled(f *Fault) Verdict {
	if f == nil || !f.Stalls {
		return False("NotStalled", "Nothing waits for a human")
	}
	return True(f.Reason, f.Message)
}

// Finished tells that the work of a generation was done once, as its condition Reconciling says: what follows is repair.
func Finished(list []metav1.Condition, generation int64) bool {
	c := meta.FindStatusCondition(list, semmoev1.ConditionReconciling)
	return c != nil && c.Status == metav1.ConditionFalse && c.Reason == "Complete" && c.ObservedGeneration == generation
}

// Set enters a verdict about a generation among conditions; its time is that of the last change of its status.
func Set(list *[]metav1.Condition, kind string, v Verdict, generation int64, now time.Time) {
	meta.SetStatusCondition(list, metav1.Condition{
		Type: kind, Status: v.Status, Reason: v.Reason, Message: printable.Line(v.Message, messageLimit),
		ObservedGeneration: generation, LastTransitionTime: metav1.NewTime(now.Truncate(time.Second)),
	})
}
