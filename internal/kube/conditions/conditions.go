// SPDX-License-Identifier: Apache-2.0

// Package conditions writes findings of controllers as conditions, with the same wording for each kind.
//
// Invariant: an unchanged finding leaves the conditions unchanged at any time.
package conditions

import (
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/printable"
)

// messageLimit is the maximum length of a condition's message: texts of engines and stores may have any length.
const messageLimit = 1024

// Verdict is the content of a condition.
type Verdict struct {
	Status          metav1.ConditionStatus
	Reason, Message string
}

// True returns a verdict with status True.
func True(reason, message string) Verdict { return Verdict{metav1.ConditionTrue, reason, message} }

// False returns a verdict with status False.
func False(reason, message string) Verdict { return Verdict{metav1.ConditionFalse, reason, message} }

// Unknown returns a verdict with status Unknown.
func Unknown(reason, message string) Verdict {
	return Verdict{metav1.ConditionUnknown, reason, message}
}

// Fault is the most relevant error. Stalls reports whether it needs a user's action.
type Fault struct {
	Reason, Message string
	Stalls          bool
}

// Degraded returns the verdict of the condition Degraded for an error, or nil.
func Degraded(f *Fault) Verdict {
	if f == nil {
		return False("AsExpected", "No problem is known")
	}
	return True(f.Reason, f.Message)
}

// Stalled returns the verdict of the condition Stalled for an error, or nil.
func Stalled(f *Fault) Verdict {
	switch {
	case f == nil:
		return False("NotStalled", "No user action is required")
	case !f.Stalls: // its message may ask for an action, such as creating an object
		return False("NotStalled", "The operator retries until the problem in condition Degraded is solved")
	}
	return True(f.Reason, f.Message)
}

// Finished reports whether the work of a generation was completed once, according to the condition Reconciling. Later
// work is repair.
func Finished(list []metav1.Condition, generation int64) bool {
	c := meta.FindStatusCondition(list, semmoev1.ConditionReconciling)
	return c != nil && c.Status == metav1.ConditionFalse && c.Reason == "Complete" && c.ObservedGeneration == generation
}

// Set sets a condition for a generation. Its transition time is that of the last change of its status.
func Set(list *[]metav1.Condition, kind string, v Verdict, generation int64, now time.Time) {
	meta.SetStatusCondition(list, metav1.Condition{
		Type: kind, Status: v.Status, Reason: v.Reason, Message: printable.Line(printable.Steady(v.Message), messageLimit),
		ObservedGeneration: generation, LastTransitionTime: metav1.NewTime(now.Truncate(time.Second)),
	})
}
