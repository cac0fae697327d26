// SPDX-License-Identifier: Apache-2.0

package placementplan

import (
	"context"
	"errors"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/event"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/jobstate"
)

// progressPeriod is the minimum interval between updates of the reported progress.
const progressPeriod = 10 * time.Second

// stopTimeout is the maximum time that the stop of the manager waits for cancelled jobs.
const stopTimeout = 250 * time.Millisecond

// progress is the progress of a job. The zero value means that the job is queued.
type progress struct {
	Step        string
	Done, Total int
}

// failure is the error of a job. Jobs with invalid inputs are not retried.
type failure struct {
	Err     error
	Invalid bool
	// RetryAt is the earliest time of the next attempt.
	RetryAt time.Time
}

// jobs runs work for plans, with a bounded number of concurrent jobs.
type jobs struct {
	ctx    context.Context
	cancel context.CancelFunc
	slots  chan struct{}
	// changed receives an event for each job that starts or ends.
	changed chan event.GenericEvent
	now     func() time.Time

	mu      sync.Mutex
	running sync.WaitGroup
	byPlan  map[types.NamespacedName]*job
}

// job is the work for one plan. The lock of jobs guards its fields.
type job struct {
	inputs      string
	cancel      context.CancelFunc
	attempt     int
	live, shown progress
	shownAt     time.Time
	failed      *failure
}

// work is the work for a plan. It may report progress from any goroutine.
type work func(ctx context.Context, report func(step string, done, total int)) error

func newJobs(workers int, now func() time.Time) *jobs {
	j := &jobs{slots: make(chan struct{}, max(1, workers)), changed: make(chan event.GenericEvent, 64), now: now, byPlan: map[types.NamespacedName]*job{}}
	j.ctx, j.cancel = context.WithCancel(context.Background())
	return j
}

// Start waits for the end of ctx, and cancels all jobs. It waits at most stopTimeout for the jobs to end, because some
// steps of the solver do not check their context. A cancelled job writes nothing.
func (j *jobs) Start(ctx context.Context) error {
	<-ctx.Done()
	j.mu.Lock()
	j.cancel()
	j.mu.Unlock()
	ended := make(chan struct{})
	go func() { j.running.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(stopTimeout):
	}
	return nil
}

// Ensure starts the work for a plan, unless it is running for the same inputs, or has failed and must wait. It returns
// the progress, or the failure.
func (j *jobs) Ensure(plan types.NamespacedName, inputs string, w work) (progress, *failure) {
	j.mu.Lock()
	defer j.mu.Unlock()
	current := j.byPlan[plan]
	if current != nil && current.inputs != inputs {
		current.cancel()
		current = nil
	}
	switch {
	case current == nil:
		current = j.start(plan, inputs, 1, w)
	case current.failed != nil && (current.failed.Invalid || j.now().Before(current.failed.RetryAt)):
		return progress{}, current.failed
	case current.failed != nil:
		current = j.start(plan, inputs, current.attempt+1, w)
	}
	if now := j.now(); now.Sub(current.shownAt) >= progressPeriod {
		current.shown, current.shownAt = current.live, now
	}
	return current.shown, nil
}

// Cancel stops the work for a plan and removes it.
func (j *jobs) Cancel(plan types.NamespacedName) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if current := j.byPlan[plan]; current != nil {
		current.cancel()
		delete(j.byPlan, plan)
	}
}

// start starts a job. The caller holds the lock.
func (j *jobs) start(plan types.NamespacedName, inputs string, attempt int, w work) *job {
	ctx, cancel := context.WithCancel(j.ctx)
	started := &job{inputs: inputs, cancel: cancel, attempt: attempt}
	j.byPlan[plan] = started
	if ctx.Err() != nil { // the manager stops, and no goroutine may be added to the wait group
		return started
	}
	j.running.Go(func() {
		defer cancel()
		err := j.run(ctx, plan, started, w)
		if ctx.Err() == nil {
			j.end(plan, started, err)
		}
	})
	return started
}

// run waits for a free worker and does the work.
func (j *jobs) run(ctx context.Context, plan types.NamespacedName, current *job, w work) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case j.slots <- struct{}{}:
	}
	defer func() { <-j.slots }()
	j.mu.Lock()
	current.live = progress{Step: "Starting", Total: 1}
	current.shown, current.shownAt = current.live, j.now()
	j.mu.Unlock()
	j.notify(plan)
	return w(ctx, func(step string, done, total int) {
		j.mu.Lock()
		defer j.mu.Unlock()
		current.live = progress{step, done, total}
	})
}

// end records the result of a job, and requests a reconciliation of its plan. It ignores a job that was replaced.
func (j *jobs) end(plan types.NamespacedName, ended *job, err error) {
	j.mu.Lock()
	if j.byPlan[plan] != ended {
		j.mu.Unlock()
		return
	}
	if err == nil {
		delete(j.byPlan, plan)
	} else {
		var invalid *invalidError
		ended.failed = &failure{Err: err, Invalid: errors.As(err, &invalid), RetryAt: j.now().Add(jobstate.BackOff(ended.attempt))}
	}
	j.mu.Unlock()
	j.notify(plan)
}

// notify requests a reconciliation of a plan.
func (j *jobs) notify(plan types.NamespacedName) {
	select {
	case j.changed <- event.GenericEvent{Object: &semmoev1.PlacementPlan{ObjectMeta: metav1.ObjectMeta{Namespace: plan.Namespace, Name: plan.Name}}}:
	case <-j.ctx.Done():
	}
}
