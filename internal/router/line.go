package router

import (
	"time"

	"github.com/semmoe/operator/internal/router/line"
	"github.com/semmoe/operator/solver/dispatch"
)

// waiting describes a queued request. The request itself belongs to the goroutine that waits.
type waiting struct {
	asked    dispatch.Request
	prefixes []uint64
	allowed  filter
}

// leave removes a request from the wait queue and records its waiting time. The lock must be held.
func (p *Pool) leave(r *request, now time.Time) {
	if r.standing != nil {
		p.spent.AddWait(r.standing.Leave(now))
		r.standing = nil
	}
}

// giveUp removes a request from the wait queue when its goroutine stops waiting.
func (p *Pool) giveUp(r *request) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.leave(r, p.now())
}

// waits reports whether a request waits for the ranks of a plan. It enqueues the request if going now would give up a
// better rank. A request that is sent again keeps its rank and does not wait. With several plans no request waits:
// plans are compared, and waiting favors the plan with more requests.
func (p *Pool) waits(g *group, plan *scheduled, r *request, allowed filter) bool {
	if plan.line == nil || len(p.groups) > 1 || !r.patient || r.forecast.scores == nil || r.scheduler != nil {
		return false
	}
	s := r.standing
	if s == nil {
		if !plan.line.Come(allowed.now) {
			return false
		}
		s = &line.Standing[waiting]{}
	}
	asked := r.ask(plan)
	asked.Scores = r.forecast.scores
	s.Known = waiting{asked, r.forecast.prefixes, allowed}
	if s.Must || p.mayGo(g, plan, &s.Known) {
		return false
	}
	plan.line.Stand(s, allowed.now)
	r.standing = s
	return !s.Must
}

// mayGo is dispatch.Scheduler.MayGo for a queued request. If no place is available, it reports true.
func (p *Pool) mayGo(g *group, plan *scheduled, w *waiting) bool {
	if !p.gather(g, w.allowed, plan.layout.Ranks) {
		return true
	}
	p.match(w.prefixes)
	return plan.scheduler.MayGo(&w.asked, p.places)
}

// mostLooked bounds the places that are evaluated for queued requests whenever a place is reserved. The bound takes
// some hundred microseconds, and covers the whole queue for up to a thousand places.
const mostLooked = 1 << 14

// callNext wakes the first queued request that gives up nothing by going now. It is called after a place was reserved.
func (p *Pool) callNext(g *group, plan *scheduled, now time.Time) {
	if plan.line != nil && plan.line.Len() > 0 {
		plan.line.CallNext(1+mostLooked/max(1, len(p.places)), func(w waiting) bool {
			w.allowed.now = now
			return p.mayGo(g, plan, &w)
		})
	}
}
