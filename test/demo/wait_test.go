// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/semmoe/operator/test/load"
)

// TestDeadlinesGrowWithTheLoad checks that a step has ten times the time on a machine that is ten times slower, and so
// has each of its requests.
func TestDeadlinesGrowWithTheLoad(t *testing.T) {
	const factor = 10
	load.Assume(t, factor)
	if got, want := rolloutTimeout(), "--timeout=3000s"; got != want {
		t.Errorf("kubectl waits with %s, want %s", got, want)
	}
	synctest.Test(t, func(t *testing.T) {
		begin, limit := time.Now(), time.Duration(0)
		err := poll(t.Context(), func(string) {}, func(ctx context.Context) (string, bool, error) {
			deadline, _ := ctx.Deadline()
			limit = time.Until(deadline)
			return "not yet", false, nil
		})
		if took := time.Since(begin); err == nil || !strings.Contains(err.Error(), "not yet") || took < factor*stepLimit || limit != factor*answerLimit {
			t.Errorf("%v after %v, requests have %v; want %v and %v", err, took, limit, factor*stepLimit, factor*answerLimit)
		}
	})
}

// TestUnansweredRequestIsRepeated checks that a request without an answer within its limit does not end a step.
func TestUnansweredRequestIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		requests := 0
		err := poll(t.Context(), func(string) {}, func(ctx context.Context) (string, bool, error) {
			if requests++; requests == 1 {
				<-ctx.Done()
				return "", false, ctx.Err()
			}
			return "", true, nil
		})
		if err != nil || requests != 2 {
			t.Errorf("%v after %d requests", err, requests)
		}
	})
}
