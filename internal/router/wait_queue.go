// SPDX-License-Identifier: Apache-2.0

package router

import (
	"time"

	"github.com/semmoe/operator/internal/router/kvevents"
	"github.com/semmoe/operator/internal/router/waitqueue"
	"github.com/semmoe/operator/solver/dispatch"
)

// waiting describes a queued request. The request itself belongs to the goroutine that waits.
type waiting struct {
	asked    dispatch.Request
	prefixes []uint64
	observed map[kvevents.Place]int
	allowed  filter
}

// leave removes a request from the wait queue and records its waiting time. The lock must be held.
func (p *Pool) leave(r *request, now time.Time) {
	if r.queued != nil {
		p.decisionSums.AddWait(r.queued.Leave(now))
		r.queued = nil
	}
}

// leaveQueue removes a request from the wait queue when its goroutine stops waiting.
func (p *Pool) leaveQueue(r *request) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.leave(r, p.now())
}

// mustWait reports whether a request waits for the ranks of a plan. It enqueues the request if going now would give up
// a better rank. A request that is sent again keeps its rank and does not wait. With several plans no request waits:
// plans are compared, and waiting favors the plan with more requests.
func (p *Pool) mustWait(g *group, plan *scheduled, r *request, allowed filter) bool {
	if plan.queue == nil || len(p.groups) > 1 || !r.mayWait || r.forecast.scores == nil || r.scheduler != nil {
		return false
	}
	s := r.queued
	if s == nil {
		if !plan.queue.Arrive(allowed.now) {
			return false
		}
		s = &waitqueue.Entry[waiting]{}
	}
	asked := r.ask(plan)
	asked.Scores = r.forecast.scores
	s.Known = waiting{asked, r.prefixes, r.observed, allowed}
	if s.MustGo || p.mayGo(g, plan, &s.Known) {
		return false
	}
	plan.queue.Enqueue(s, allowed.now)
	r.queued = s
	return !s.MustGo
}

// mayGo is dispatch.Scheduler.MayGo for a queued request. If no place is available, it reports true.
func (p *Pool) mayGo(g *group, plan *scheduled, w *waiting) bool {
	if !p.gather(g, w.allowed, plan.layout.Ranks) {
		return true
	}
	p.match(w.prefixes, w.observed)
	return plan.scheduler.MayGo(&w.asked, p.places)
}

// maxEvaluatedPlaces bounds the places that are evaluated for queued requests whenever a place is reserved. The bound
// takes some hundred microseconds, and covers the whole queue for up to a thousand places.
const maxEvaluatedPlaces = 1 << 14

// wakeNext wakes the first queued request that gives up nothing by going now. It is called after a place was reserved.
func (p *Pool) wakeNext(g *group, plan *scheduled, now time.Time) {
	if plan.queue != nil && plan.queue.Len() > 0 {
		plan.queue.WakeNext(1+maxEvaluatedPlaces/max(1, len(p.places)), func(w waiting) bool {
			w.allowed.now = now
			return p.mayGo(g, plan, &w)
		})
	}
}
