// Package outcome tells what a reconciliation ends with: when to look again, and which errors are worth a condition.
package outcome

import (
	"errors"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/semmoe/operator/internal/printable"
)

// ForeignError is that an object of somebody else has the name that one of ours is to have. It says what to do.
type ForeignError struct{ Message string }

func (e *ForeignError) Error() string { return e.Message }

// Lasting is the text of an error that retries alone will not cure: an object in the way, or what the API server refuses, by itself, by a
// webhook that gives no reason of its own (a bad request, then), or for want of one. Conflicts and outages pass, and are not worth a
// condition.
func Lasting(err error) string {
	var foreign *ForeignError
	switch {
	case err == nil:
		return ""
	case errors.As(err, &foreign), apierrors.IsForbidden(err), apierrors.IsInvalid(err), apierrors.IsBadRequest(err), webhookAway(err):
		return printable.Line(err.Error(), 1024)
	}
	return ""
}

// webhookAway tells whether an admission webhook with failure policy Fail could not be asked. The API server reports that as
// an internal error, which only its text tells from others.
func webhookAway(err error) bool {
	return apierrors.IsInternalError(err) && strings.Contains(err.Error(), "failed calling webhook")
}

// Soonest is the shortest of times to wait, of which 0 means for ever.
func Soonest(times ...time.Duration) time.Duration {
	var soonest time.Duration
	for _, wait := range times {
		if wait != 0 && (soonest == 0 || wait < soonest) {
			soonest = wait
		}
	}
	return soonest
}
