// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/router/balance"
	"github.com/semmoe/operator/internal/router/plans"
	"github.com/semmoe/operator/solver/dispatch"
)

// waitingPool returns a pool with the wait queue enabled and one pod that serves under a plan on four ranks. The clock is
// stopped.
func waitingPool(t *testing.T, hold time.Duration) (*Pool, *time.Time) {
	t.Helper()
	p, _ := solved(t)
	pool := poolWith(t, func(o *PoolOptions) { o.Hold, o.Cap = hold, 1.03 })
	now := time.Now()
	pool.now = func() time.Time { return now }
	pool.Set(backendsOf(p.Artifact.Digest, 1, 4, "p"))
	pool.AddLayout(p.layout)
	return pool, &now
}

// served contains the results of a sequence of requests.
type served struct {
	forecast, imbalance float64
	waited              int
}

// play sends requests to a pool. Queued requests try again when they are woken. At the end their waiting time is over.
func play(t *testing.T, pool *Pool, requests []*request) (all served) {
	t.Helper()
	var even balance.Window
	var windows float64
	sent := 0
	try := func(r *request) bool {
		lease, ok := pool.acquire(r, nil)
		if !ok {
			if r.queued == nil {
				t.Fatalf("request %s: no place, and not queued", r.id)
			}
			return false
		}
		if r.queued != nil || !lease.scored {
			t.Fatalf("request %s: %+v is queued", r.id, lease)
		}
		all.forecast += r.forecast.on(lease.Rank).Predicted
		even.Add(balance.Arrival{Rank: lease.Rank, Ranks: 4, Tokens: lease.tokens})
		if sent++; sent > balance.Requests {
			all.imbalance += even.Imbalance()
			windows++
		}
		lease.Release()
		return true
	}
	var line []*request
	called := func() bool {
		for i, r := range line {
			select {
			case <-r.queued.Woken():
				if try(r) {
					line = append(line[:i:i], line[i+1:]...)
					return true
				}
			default:
			}
		}
		return false
	}
	for _, r := range requests {
		r.mayWait = true
		if !try(r) {
			all.waited++
			line = append(line, r)
		}
		for called() {
		}
		if len(line) >= 4 {
			t.Fatalf("%d requests are left in a queue of 4", len(line))
		}
	}
	for _, r := range line {
		if r.mayWait = false; !try(r) {
			t.Fatal("a request that may not wait is queued")
		}
	}
	if sent != len(requests) || outstanding(pool) != 0 {
		t.Fatalf("%d of %d requests were served, %d tokens are outstanding", sent, len(requests), outstanding(pool))
	}
	all.forecast /= float64(sent)
	all.imbalance /= windows
	return all
}

// TestDelayBringsRequestsToTheirExperts checks that waiting increases the local share of requests, keeps the loads even,
// and leaves no request in the queue.
func TestDelayBringsRequestsToTheirExperts(t *testing.T) {
	const requests = 1500
	none, _ := waitingPool(t, 0)
	atOnce := play(t, none, samplePrompts(requests))
	pool, _ := waitingPool(t, time.Second)
	held := play(t, pool, samplePrompts(requests))
	t.Logf("at once %+v, held %+v", atOnce, held)
	if atOnce.waited != 0 || held.waited == 0 || held.waited == requests {
		t.Errorf("%d and %d of %d requests were queued", atOnce.waited, held.waited, requests)
	}
	// The gain is 14 to 20%. It would be at most 5% if the forecast were ignored for queued requests.
	if held.forecast < 1.09*atOnce.forecast || held.imbalance > atOnce.imbalance+0.005 {
		t.Errorf("with requests that wait %+v, without %+v", held, atOnce)
	}
}

// queuedRequest sends requests until one is queued.
func queuedRequest(t *testing.T, pool *Pool) *request {
	t.Helper()
	for _, r := range samplePrompts(2000) {
		r.mayWait = true
		lease, ok := pool.acquire(r, nil)
		if !ok {
			return r
		}
		lease.Release()
	}
	t.Fatal("no request is queued")
	return nil
}

// queueLength returns the number of queued requests.
func queueLength(pool *Pool) (n int) {
	pool.mu.Lock()
	defer pool.mu.Unlock()
	for _, plan := range pool.plans {
		n += plan.queue.Len()
	}
	return n
}

// TestDelayEnds checks that no request waits longer than the maximum, and that waiting is counted.
func TestDelayEnds(t *testing.T) {
	const hold = 20 * time.Millisecond
	pool, now := waitingPool(t, hold)
	r := queuedRequest(t, pool)
	*now = now.Add(hold)
	began := time.Now()
	lease, ok := pool.wait(t.Context(), r, nil)
	if !ok || time.Since(began) < hold || queueLength(pool) != 0 {
		t.Fatalf("lease %+v after %v, %d queued", lease, time.Since(began), queueLength(pool))
	}
	if spent := pool.DecisionSums(); spent.Waits != 1 || spent.Waited != hold.Seconds() {
		t.Errorf("%v requests waited %v s", spent.Waits, spent.Waited)
	}
}

// TestDelayEndsWithItsClient checks that a request leaves the queue when its client disconnects.
func TestDelayEndsWithItsClient(t *testing.T) {
	pool, _ := waitingPool(t, time.Second)
	r := queuedRequest(t, pool)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if lease, ok := pool.wait(ctx, r, nil); ok || queueLength(pool) != 0 || outstanding(pool) != 0 {
		t.Errorf("lease %+v, %d queued, %d tokens outstanding", lease, queueLength(pool), outstanding(pool))
	}
}

// TestDelayEndsAtTheDeadline checks that a request with a deadline for pods that is shorter than the maximum waiting time is
// served at the deadline.
func TestDelayEndsAtTheDeadline(t *testing.T) {
	pool, _ := waitingPool(t, time.Second)
	r := queuedRequest(t, pool)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if lease, ok := pool.wait(ctx, r, nil); !ok || !lease.scored || queueLength(pool) != 0 {
		t.Errorf("lease %+v, %d queued", lease, queueLength(pool))
	}
}

// TestDelaySurvivesItsPlan checks that queued requests try again or time out when their plan is loaded again or removed.
func TestDelaySurvivesItsPlan(t *testing.T) {
	pool, _ := waitingPool(t, 50*time.Millisecond)
	p, _ := solved(t)
	for name, change := range map[string]func(){
		"brought anew": func() { pool.AddLayout(p.layout) },
		"gone":         func() { pool.DropLayout(p.Artifact.Digest) },
	} {
		pool.AddLayout(p.layout)
		r := queuedRequest(t, pool)
		change()
		lease, ok := pool.wait(t.Context(), r, nil)
		if !ok || r.queued != nil || queueLength(pool) != 0 {
			t.Fatalf("%s: lease %+v, entry %+v, %d queued", name, lease, r.queued, queueLength(pool))
		}
		lease.Release()
	}
}

// TestNoWaitWhilePlansAreCompared checks that requests do not wait while two plans serve, because waiting would favor
// the plan with more requests.
func TestNoWaitWhilePlansAreCompared(t *testing.T) {
	pool, _ := waitingPool(t, time.Second)
	p, _ := solved(t)
	alone, compared := backendsOf(p.Artifact.Digest, 9, 4, "p"), backendsOf("canary", 1, 4, "canary")
	pool.AddLayout(plans.New("canary", p.Plan, p.layout.Tokenizer)) // the same plan with another digest
	pool.Set(alone)
	r := queuedRequest(t, pool)
	pool.Set(append(alone, compared...))
	for _, r := range append([]*request{r}, samplePrompts(500)...) {
		r.mayWait = true
		lease, ok := pool.acquire(r, nil)
		if !ok || r.queued != nil {
			t.Fatal("a request waits while there is a canary")
		}
		lease.Release()
	}
	pool.Set(alone)
	queuedRequest(t, pool)
}

// TestNoWaitAtLowLoad checks that requests do not wait at a low arrival rate: the queue would not fill in time.
func TestNoWaitAtLowLoad(t *testing.T) {
	pool, now := waitingPool(t, 100*time.Millisecond)
	for _, r := range samplePrompts(500) {
		*now = now.Add(30 * time.Millisecond) // four of them take longer
		r.mayWait = true
		lease, ok := pool.acquire(r, nil)
		if !ok {
			t.Fatal("a request waits")
		}
		lease.Release()
	}
}

func TestDelayIsValidated(t *testing.T) {
	for want, change := range map[string]func(*PoolOptions){
		"hold: -1ns is invalid: it must be 0 to 1s": func(o *PoolOptions) { o.Hold = -1 },
		"hold: 2s is invalid: it must be 0 to 1s":   func(o *PoolOptions) { o.Hold = 2 * time.Second },
		"waiting requires policy price, not":        func(o *PoolOptions) { o.Hold, o.Policy = time.Second, dispatch.Masked },
	} {
		o := DefaultPoolOptions()
		change(&o)
		if _, err := NewPoolWith(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v; want %q", err, want)
		}
	}
}
