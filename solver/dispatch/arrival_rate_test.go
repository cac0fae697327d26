// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"testing"
	"time"

	"github.com/semmoe/operator/solver/dispatch"
)

// Waiting pays while at least as many requests arrive within the maximum wait as the queue holds.
func TestArrivalRate(t *testing.T) {
	p := dispatch.NewArrivalRate(4, 100*time.Millisecond)
	for _, step := range []struct {
		gap  time.Duration
		n    int
		want bool
	}{
		{20 * time.Millisecond, 1, false}, {20 * time.Millisecond, 20, true}, {30 * time.Millisecond, 20, false}, {20 * time.Millisecond, 20, true},
		{time.Hour, 1, false}, {0, 5, true},
	} {
		got := false
		for range step.n {
			got = p.Arrive(step.gap)
		}
		if got != step.want {
			t.Errorf("%d requests, one every %v: waiting pays: %t", step.n, step.gap, got)
		}
	}
}
