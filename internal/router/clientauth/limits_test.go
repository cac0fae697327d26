// SPDX-License-Identifier: Apache-2.0

package clientauth

import (
	"errors"
	"testing"
	"time"
)

func reasonOf(err error) string {
	if limit := (*LimitError)(nil); errors.As(err, &limit) {
		return limit.Reason
	}
	return ""
}

// TestLimits checks that a client at a limit is rejected while another client is served.
func TestLimits(t *testing.T) {
	now := time.Unix(1000, 0)
	limits := &Limits{RequestsPerMinute: 60, Pending: 8, Now: func() time.Time { return now }}
	var releases []func()
	admit := func(client string) string {
		t.Helper()
		release, err := limits.Admit(client)
		if err == nil {
			releases = append(releases, release)
		}
		return reasonOf(err)
	}
	for i := range 6 { // a tenth of a minute's requests at once
		if reason := admit("a"); reason != "" {
			t.Fatalf("request %d is rejected: %s", i, reason)
		}
	}
	_, err := limits.Admit("a")
	if limit := (*LimitError)(nil); !errors.As(err, &limit) || limit.Reason != Rate || limit.RetryAfter != time.Second {
		t.Errorf("above the burst: %+v, want a retry after 1 s", err)
	}
	if reason := admit("b"); reason != "" {
		t.Errorf("another client is rejected: %s", reason)
	}
	now = now.Add(2 * time.Second)
	for range 2 {
		if reason := admit("a"); reason != "" {
			t.Errorf("a rejected request uses up the rate: %s", reason)
		}
	}
	now = now.Add(time.Minute)
	if reason := admit("a"); reason != Pending {
		t.Errorf("the ninth concurrent request: %q, want %q", reason, Pending)
	}
	releases[0]()
	releases[0]() // releasing twice is a no-op
	if reason := admit("a"); reason != "" {
		t.Errorf("after the end of a request: %s", reason)
	}
	if reason := admit("a"); reason != Pending {
		t.Errorf("a request is released twice: %q", reason)
	}
}

func TestNoLimits(t *testing.T) {
	for _, limits := range []*Limits{nil, {}, {Pending: 1}, {RequestsPerMinute: 1}} {
		release, err := limits.Admit("a")
		if err != nil {
			t.Fatalf("%+v: %v", limits, err)
		}
		release()
	}
}
