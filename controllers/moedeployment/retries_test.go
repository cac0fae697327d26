// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// A permanent failure is retried every minute, because no event may report that its cause is gone.
func TestRetries(t *testing.T) {
	limiter, request := retries(), reconcile.Request{}
	if first := limiter.When(request); first > time.Second {
		t.Errorf("the first retry is after %v", first)
	}
	for range 100 {
		if wait := limiter.When(request); wait > time.Minute {
			t.Fatalf("a retry is after %v", wait)
		}
	}
}
