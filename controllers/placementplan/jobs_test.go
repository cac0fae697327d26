// SPDX-License-Identifier: Apache-2.0

package placementplan

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
)

// clock is a manual clock.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) Add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

var first, second = types.NamespacedName{Namespace: "ns", Name: "first"}, types.NamespacedName{Namespace: "ns", Name: "second"}

func testJobs(t *testing.T, workers int) (*jobs, *clock) {
	t.Helper()
	c := &clock{now: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)}
	j := newJobs(workers, c.Now)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- j.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return j, c
}

// changed waits until a job of each plan starts or ends, in any order.
func changed(t *testing.T, j *jobs, plans ...types.NamespacedName) {
	t.Helper()
	awaited := sets.New(plans...)
	for awaited.Len() > 0 {
		select {
		case e := <-j.changed:
			plan := types.NamespacedName{Namespace: e.Object.GetNamespace(), Name: e.Object.GetName()}
			if !awaited.Has(plan) {
				t.Fatalf("event for %s, want one of %v", plan, awaited.UnsortedList())
			}
			awaited.Delete(plan)
		case <-time.After(10 * time.Second):
			t.Fatalf("no event for %v", awaited.UnsortedList())
		}
	}
}

// blocking is work that runs until the test ends it or it is cancelled.
type blocking struct {
	end       chan error
	cancelled chan struct{}
}

func newBlocking() *blocking {
	return &blocking{end: make(chan error, 1), cancelled: make(chan struct{})}
}

func (b *blocking) work(ctx context.Context, _ func(string, int, int)) error {
	select {
	case err := <-b.end:
		return err
	case <-ctx.Done():
		close(b.cancelled)
		return ctx.Err()
	}
}

func (b *blocking) awaitCancel(t *testing.T) {
	t.Helper()
	select {
	case <-b.cancelled:
	case <-time.After(10 * time.Second):
		t.Fatal("not cancelled")
	}
}

func TestJobsAreBounded(t *testing.T) {
	j, _ := testJobs(t, 1)
	one, two := newBlocking(), newBlocking()
	if p, f := j.Ensure(first, "a", one.work); p.Step != "" || f != nil {
		t.Fatalf("%+v, %+v", p, f)
	}
	changed(t, j, first)
	j.Ensure(second, "a", two.work)
	if p, _ := j.Ensure(first, "a", nil); p.Step == "" {
		t.Error("the first job does not run")
	}
	if p, _ := j.Ensure(second, "a", nil); p.Step != "" {
		t.Error("the second job is not queued")
	}
	one.end <- nil
	changed(t, j, first, second) // the worker is free before the event of the end
	if p, _ := j.Ensure(second, "a", nil); p.Step == "" {
		t.Error("the second job does not run")
	}
	j.Cancel(second)
	two.awaitCancel(t)
}

func TestJobsEndWithTheirPlan(t *testing.T) {
	j, _ := testJobs(t, 2)
	one, other := newBlocking(), newBlocking()
	j.Ensure(first, "a", one.work)
	changed(t, j, first)
	j.Ensure(first, "b", other.work) // different inputs
	one.awaitCancel(t)
	changed(t, j, first)
	j.Cancel(first)
	other.awaitCancel(t)
	j.Cancel(first)
}

func TestJobsEndWithTheManager(t *testing.T) {
	j := newJobs(1, time.Now)
	ctx, cancel := context.WithCancel(context.Background())
	one := newBlocking()
	j.Ensure(first, "a", one.work)
	changed(t, j, first)
	cancel()
	if err := j.Start(ctx); err != nil {
		t.Fatal(err)
	}
	one.awaitCancel(t)
	j.Ensure(second, "a", func(context.Context, func(string, int, int)) error {
		t.Error("a job started after the manager stopped")
		return nil
	})
}

// TestJobsDoNotDelayTheManager checks that a job that ignores its cancellation does not delay the stop of the manager.
// Some steps of the solver do so.
func TestJobsDoNotDelayTheManager(t *testing.T) {
	j := newJobs(1, time.Now)
	ctx, cancel := context.WithCancel(context.Background())
	end, ended := make(chan struct{}), make(chan struct{})
	j.Ensure(first, "a", func(context.Context, func(string, int, int)) error {
		defer close(ended)
		<-end
		return nil
	})
	changed(t, j, first)
	cancel()
	stopped := make(chan error, 1)
	go func() { stopped <- j.Start(ctx) }()
	select {
	case err := <-stopped:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("the job delays the stop of the manager")
	}
	close(end)
	<-ended
}

func TestFailedJobsWait(t *testing.T) {
	j, c := testJobs(t, 1)
	fail := func(err error) work { return func(context.Context, func(string, int, int)) error { return err } }
	attempt := func(err error) *failure {
		t.Helper()
		if _, f := j.Ensure(first, "a", fail(err)); f != nil {
			return f
		}
		changed(t, j, first)
		changed(t, j, first)
		_, f := j.Ensure(first, "a", nil)
		if f == nil || !errors.Is(f.Err, err) {
			t.Fatalf("failure %+v", f)
		}
		return f
	}
	away := errors.New("away")
	f := attempt(away)
	if wait := f.RetryAt.Sub(c.Now()); f.Invalid || wait <= 0 {
		t.Fatalf("failure %+v", f)
	}
	firstWait := f.RetryAt.Sub(c.Now())
	c.Add(firstWait - time.Second)
	if again := attempt(errors.New("another")); !errors.Is(again.Err, away) {
		t.Errorf("retried too early: %v", again.Err)
	}
	c.Add(time.Second)
	if f = attempt(away); f.RetryAt.Sub(c.Now()) <= firstWait {
		t.Errorf("second back-off %v, want longer than the first, %v", f.RetryAt.Sub(c.Now()), firstWait)
	}
	c.Add(time.Hour)
	invalid := invalidf("Bad", "bad")
	if f = attempt(invalid); !f.Invalid {
		t.Errorf("failure %+v", f)
	}
	c.Add(24 * time.Hour)
	if _, f := j.Ensure(first, "a", nil); f == nil || !errors.Is(f.Err, invalid) {
		t.Errorf("invalid inputs are retried: %+v", f)
	}
	if _, f := j.Ensure(first, "b", fail(nil)); f != nil { // different inputs start a new job
		t.Errorf("failure %+v", f)
	}
}

func TestProgressMovesSlowly(t *testing.T) {
	j, c := testJobs(t, 1)
	reported, next := make(chan struct{}), make(chan struct{})
	j.Ensure(first, "a", func(ctx context.Context, report func(string, int, int)) error {
		for done := range 3 {
			report("Placement", done, 3)
			reported <- struct{}{}
			<-next
		}
		return nil
	})
	changed(t, j, first)
	shown := func() progress {
		p, _ := j.Ensure(first, "a", nil)
		return p
	}
	<-reported
	if got := shown(); got.Step != "Starting" {
		t.Errorf("%+v", got)
	}
	c.Add(progressPeriod)
	if got, want := shown(), (progress{"Placement", 0, 3}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	next <- struct{}{}
	<-reported
	if got, want := shown(), (progress{"Placement", 0, 3}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	c.Add(progressPeriod)
	if got, want := shown(), (progress{"Placement", 1, 3}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	next <- struct{}{}
	<-reported
	next <- struct{}{}
	changed(t, j, first)
}
