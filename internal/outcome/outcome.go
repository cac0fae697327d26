// Package outcome tells what a reconciliation ends with: when to look again, and which errors are worth a condition.
package outcome

import (
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/semmoe/operator/internal/podhealth"
)

// Lasting is the text of an error that retries alone will not cure: what the API server refuses. Conflicts and outages
// pass, and are not worth a condition.
func Lasting(err error) string {
	if err == nil || !(apierrors.IsForbidden(err) || apierrors.IsInvalid(err)) {
		return ""
	}
	return podhealth.Truncate(err.Error(), 1024)
}

// Soonest is the shorter of two times to wait, of which 0 means for ever.
func Soonest(a, b time.Duration) time.Duration {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}
