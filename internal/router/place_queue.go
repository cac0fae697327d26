// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/router/waitqueue"
)

// QueueOptions configures the queue of the requests that wait while all ranks are at PendingLimitPerRank. The zero value
// means no queue: these requests are rejected.
type QueueOptions struct {
	// Size is the maximum number of waiting requests.
	Size int
	// Timeout is the maximum time that a request waits.
	Timeout time.Duration
	// MaxPriority is the highest priority that a client gets.
	MaxPriority int
}

// The bounds of QueueOptions, and of the priority of a request.
const (
	MaxQueueSize    = 10_000
	MaxQueueTimeout = 10 * time.Minute
	MaxPriority     = 100
)

func (o *QueueOptions) validate(pendingLimitPerRank int) error {
	switch {
	case o.Size < 0 || o.Size > MaxQueueSize:
		return fmt.Errorf("queue.size: %d is invalid: it must be 0 to %d", o.Size, MaxQueueSize)
	case o.Size == 0 && *o != QueueOptions{}:
		return errors.New("queue.size: 0 is invalid: the other settings of the queue need one")
	case o.Size == 0:
		return nil
	case pendingLimitPerRank == 0:
		return errors.New("pendingLimitPerRank: 0 is invalid: a queue needs a limit, because requests wait while all ranks are at it")
	case o.Timeout <= 0 || o.Timeout > MaxQueueTimeout:
		return fmt.Errorf("queue.timeout: %v is invalid: it must be above 0 and at most %v", o.Timeout, MaxQueueTimeout)
	case o.MaxPriority < 0 || o.MaxPriority > MaxPriority:
		return fmt.Errorf("queue.maxPriority: %d is invalid: it must be 0 to %d", o.MaxPriority, MaxPriority)
	}
	return nil
}

// HeaderPriority is the priority of a request in the queue: an integer; requests of higher priorities are first.
const HeaderPriority = "X-Semmoe-Priority"

// errPriority is returned for a priority that is not valid.
var errPriority = fmt.Errorf("the header %s is invalid: an integer from %d to %d is allowed", HeaderPriority, -MaxPriority, MaxPriority)

// priority returns the priority of a request with these headers; 0 by default.
func (o *QueueOptions) priority(header http.Header) (int, error) {
	text := header.Get(HeaderPriority)
	if o.Size == 0 || text == "" {
		return 0, nil
	}
	priority, err := strconv.Atoi(text)
	if err != nil || priority < -MaxPriority || priority > MaxPriority {
		return 0, errPriority
	}
	return min(priority, o.MaxPriority), nil
}

var (
	errNoRoomToWait = errors.New("all ranks have reached their limit of pending requests, and the queue of the router is full")
	errWaitedLong   = errors.New("all ranks have reached their limit of pending requests, and the request has waited for as long as the router allows")
)

// Outcomes of waiting requests.
const (
	waitServed  = "served"
	waitTimeout = "timeout"
	waitFull    = "full"
	waitLeft    = "left" // the client has disconnected, or no pod is ready
)

// newQueueSeconds returns the metric of the waiting times.
func newQueueSeconds() *prometheus.HistogramVec {
	times := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "semmoe_router_queue_seconds",
		Help:    "Time that requests waited in the queue of the router because all ranks were at their limit, by outcome: served, timeout, full (rejected or evicted) or left.",
		Buckets: prometheus.ExponentialBuckets(0.001, 4, 10),
	}, []string{"outcome"})
	for _, outcome := range []string{waitServed, waitTimeout, waitFull, waitLeft} {
		times.WithLabelValues(outcome)
	}
	return times
}

// waitsForPlace reports whether a request waits for a place, although one is free: other requests are before it in the
// queue. The lock must be held.
func (p *Pool) waitsForPlace(r *request, allowed filter) bool {
	if p.waiters == nil || p.waiters.Len() == 0 || !r.inference {
		return false
	}
	if !p.queueForPlace(r, allowed) {
		return true
	}
	first := p.firstWaiter(allowed.now)
	if first == r.waiter || first == nil {
		r.mayWait = false // for a better place: the others would wait too
		return false
	}
	first.Wake()
	r.refused = errAllFull
	return true
}

// queueForPlace adds a request to the queue, unless it is in it already. It reports false if the queue is full, which
// sets r.refused. The lock must be held.
func (p *Pool) queueForPlace(r *request, allowed filter) bool {
	switch {
	case r.waiter == nil:
		allowed.tried, allowed.ejected = maps.Clone(allowed.tried), true
		r.waiter = p.waiters.Add(allowed, r.priority, r.client, float64(r.tokens), allowed.now)
		if r.waiter == nil {
			p.queueSeconds.WithLabelValues(waitFull).Observe(0)
		}
	case r.waiter.Evicted:
		p.stopWaiting(r, waitFull, allowed.now)
	}
	if r.waiter == nil {
		r.refused = errNoRoomToWait
		return false
	}
	return true
}

// firstWaiter returns the first request in the queue with a free place; nil if there is none. A request that may go to
// any pod cannot go if no pod has a free place, and then no request can. The lock must be held.
func (p *Pool) firstWaiter(now time.Time) *waitqueue.Waiter[filter] {
	free := func(f filter) bool {
		f.now = now
		for _, g := range p.groups {
			if g.ranks(f) > 0 {
				return true
			}
		}
		return false
	}
	places := 0
	for _, g := range p.groups {
		places += len(g.backends) * g.maxRanks
	}
	left := 1 + maxEvaluatedPlaces/max(1, places)
	if !free(filter{ejected: true, limit: p.options.PendingLimitPerRank}) {
		return nil
	}
	return p.waiters.First(func(f filter) bool {
		if !f.restricts() {
			return true
		}
		left--
		return left >= 0 && free(f)
	})
}

// restricts reports whether the request cannot go to every rank that is not full.
func (f filter) restricts() bool {
	return len(f.tried) > 0 || f.eligible != nil || f.logicalPlans != nil || f.lacking != nil || f.pins != nil
}

// wakeWaiter wakes the first request in the queue with a free place. It is called after each event that frees a place,
// and after each request that leaves the queue, so that as many requests go as places are free. The lock must be held.
func (p *Pool) wakeWaiter() {
	if p.waiters == nil || p.waiters.Len() == 0 {
		return
	}
	if first := p.firstWaiter(p.now()); first != nil {
		first.Wake()
	}
}

// stopWaiting removes a request from the queue. Further calls do nothing. The lock must be held.
func (p *Pool) stopWaiting(r *request, outcome string, now time.Time) {
	if r.waiter == nil {
		return
	}
	waited := p.waiters.Leave(r.waiter, outcome == waitServed, now)
	r.waiter = nil
	r.record.Wait(waited)
	p.queueSeconds.WithLabelValues(outcome).Observe(waited.Seconds())
}

// awaitPlace reserves a rank for a request in the queue, like reserve. The time in the queue does not count for the
// deadline.
func (p *Pool) awaitPlace(ctx context.Context, deadline time.Time, r *request, tries *tries) (*Lease, bool) {
	outcome, start := waitLeft, time.Now()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.stopWaiting(r, outcome, p.now())
		p.wakeWaiter()
	}()
	timer := time.NewTimer(p.options.Queue.Timeout)
	defer timer.Stop()
	for r.refused == errAllFull {
		select {
		case <-ctx.Done():
			return nil, false
		case <-timer.C:
			outcome, r.refused = waitTimeout, errWaitedLong
			return nil, false
		case <-r.waiter.Woken():
		}
		lease, ok := p.reserveUntil(ctx, deadline.Add(time.Since(start)), r, tries)
		if ok || r.waiter == nil {
			return lease, ok
		}
	}
	return nil, false
}

// waitingForPlace returns the number of requests in the queue.
func (p *Pool) waitingForPlace() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.waiters == nil {
		return 0
	}
	return p.waiters.Len()
}
