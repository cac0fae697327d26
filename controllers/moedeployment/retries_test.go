package moedeployment

import (
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// What failed long since is still looked at each minute: that what was in its way has gone may be told by nobody.
func TestRetries(t *testing.T) {
	limiter, request := retries(), reconcile.Request{}
	if first := limiter.When(request); first > time.Second {
		t.Errorf("the first retry comes after %v", first)
	}
	for range 100 {
		if wait := limiter.When(request); wait > time.Minute {
			t.Fatalf("a retry comes after %v", wait)
		}
	}
}
