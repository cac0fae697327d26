// SPDX-License-Identifier: Apache-2.0

// Package poll waits in tests for the effects of other goroutines and processes.
package poll

import (
	"testing"
	"time"

	"github.com/semmoe/operator/test/load"
)

const (
	// limit is the maximum wait, in time of an idle machine (see load.Clock). It ends a blocked test. It is far above the
	// time of any operation in a test, also with the race detector, so it is no bound on speed.
	limit = 2 * time.Minute
	// interval is the time between two polls.
	interval = time.Millisecond
)

// Until returns when the condition holds. It fails the test if the condition does not hold within the limit.
func Until(t testing.TB, what string, holds func() bool) {
	t.Helper()
	var clock load.Clock
	for !holds() {
		if clock.Elapsed() > limit {
			t.Fatalf("not within %v on an idle machine: %s", limit, what)
		}
		time.Sleep(interval)
	}
}
