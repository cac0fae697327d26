// SPDX-License-Identifier: Apache-2.0

package storewatch

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/artifact/storetest"
	"github.com/semmoe/operator/test/metricsdoc"
	"github.com/semmoe/operator/test/tier"
)

var environment *storetest.Environment

func TestMain(m *testing.M) {
	var err error
	if environment, err = storetest.Start(context.Background()); err != nil {
		os.Exit(tier.ExitCode(err))
	}
	code := m.Run()
	if err := environment.Stop(); err != nil {
		panic(err)
	}
	os.Exit(code)
}

// TestWatch checks that the next check detects the loss of a store, and that Failure reports it after patience. The
// return of the store is reported at once. A store that answers "not found" is available.
func TestWatch(t *testing.T) {
	store := environment.Run(t)
	now := time.Unix(1e9, 0)
	watch := New(store.Access, func() time.Time { return now })
	check := func(wantChanged, wantUp bool) {
		t.Helper()
		changed, err := watch.check(t.Context())
		if changed != wantChanged || (err == nil) != wantUp {
			t.Fatalf("check: changed %v, error %v; want %v, available %v", changed, err, wantChanged, wantUp)
		}
	}
	available := func() float64 { return testutil.ToFloat64(watch) }
	check(false, true)
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(watch)
	metricsdoc.Check(t, "../../docs/metrics.md", "store availability", registry)
	if available() != 1 || watch.Failure() != "" {
		t.Errorf("store is available: metric %v, failure %q", available(), watch.Failure())
	}

	store.Stop()
	check(false, false)
	if available() != 0 || watch.Failure() != "" {
		t.Errorf("store is unavailable for less than patience: metric %v, failure %q", available(), watch.Failure())
	}
	now = now.Add(patience)
	check(true, false)
	cause := watch.Failure()
	if !strings.Contains(cause, "refused") || strings.Contains(cause, "\n") {
		t.Errorf("cause %q is not one line that contains \"refused\"", cause)
	}
	now = now.Add(time.Hour)
	check(false, false)
	if watch.Failure() != cause {
		t.Errorf("cause changed from %q to %q", cause, watch.Failure())
	}

	store.Start(t)
	check(true, true)
	if available() != 1 || watch.Failure() != "" {
		t.Errorf("store is available again: metric %v, failure %q", available(), watch.Failure())
	}
}

// TestReportsWithinAMinute checks that a failure is reported in less than a minute after the loss of the store,
// including the time for which a request is retried.
func TestReportsWithinAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		watch := New(nil, time.Now)
		begin := time.Now()
		for !watch.record(errors.New("away")) {
			time.Sleep(max(period, checkTimeout))
		}
		if took := period + time.Since(begin); took > time.Minute-patience/2 {
			t.Errorf("the loss of a store is reported after up to %s, want at most %s", took, time.Minute-patience/2)
		}
	})
}

// TestWithoutStore checks that there is neither a metric nor a failure without a store.
func TestWithoutStore(t *testing.T) {
	for _, store := range []*access.Access{nil, {}} {
		watch := New(store, time.Now)
		if changed, _ := watch.check(t.Context()); changed || watch.Failure() != "" || testutil.CollectAndCount(watch) != 0 {
			t.Errorf("without a store: changed %v, failure %q, %d series", changed, watch.Failure(), testutil.CollectAndCount(watch))
		}
	}
	if failure := (*Watch)(nil).Failure(); failure != "" {
		t.Errorf("a nil Watch reports failure %q", failure)
	}
}
