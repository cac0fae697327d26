// SPDX-License-Identifier: Apache-2.0

// Package result evaluates the results of a reconciliation: when to requeue, and which errors to report in a
// condition.
package result

import (
	"errors"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/semmoe/operator/internal/kube/printable"
)

// ForeignError reports that an object of another owner has the name of a child. The message contains the required
// action.
type ForeignError struct{ Message string }

func (e *ForeignError) Error() string { return e.Message }

// PermanentErrorText returns the text of an error that a retry does not fix: a conflicting object, or a rejection by the API
// server (by validation, by a webhook that gives no reason, which is a bad request, or because a webhook is unavailable).
// Conflicts and outages are temporary, and are not reported in a condition.
func PermanentErrorText(err error) string {
	var foreign *ForeignError
	switch {
	case err == nil:
		return ""
	case errors.As(err, &foreign), apierrors.IsForbidden(err), apierrors.IsInvalid(err), apierrors.IsBadRequest(err), webhookAway(err):
		return printable.Line(err.Error(), 1024)
	}
	return ""
}

// webhookAway reports whether an admission webhook with failure policy Fail could not be reached. The API server
// reports this as an internal error, which differs from other internal errors only in its text.
func webhookAway(err error) bool {
	return apierrors.IsInternalError(err) && strings.Contains(err.Error(), "failed calling webhook")
}

// ShortestDelay returns the shortest of the delays. A delay of 0 means never.
func ShortestDelay(times ...time.Duration) time.Duration {
	var soonest time.Duration
	for _, wait := range times {
		if wait != 0 && (soonest == 0 || wait < soonest) {
			soonest = wait
		}
	}
	return soonest
}
