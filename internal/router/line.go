package router

import (
	"time"

	"github.com/semmoe/operator/internal/router/line"
	"github.com/semmoe/operator/solver/dispatch"
)

// waiting is what is known of a request in line. The request itself belongs to the goroutine that waits.
type waiting struct {
	asked    dispatch.Request
	prefixes []uint64
	allowed  filter
}

// leave takes a request out of line, and counts how long it has stood there. The lock must be held.
func (p *Pool) leave(r *request, now time.Time) {
	if r.standing != nil {
		p.spent.AddWait(r.standing.Leave(now))
		r.standing = nil
	}
}

// giveUp is leave for a request that nobody waits for any more.
func (p *Pool) giveUp(r *request) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.leave(r, p.now())
}

// waits reports whether a request stands in line for the ranks of a plan, and has it do so where it gave something up by going now. One that
// is sent again has its rank. With several plans none waits: they are compared, and the one with more requests gained more by waiting.
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

// mayGo is dispatch.Scheduler.MayGo for a request in line. Where nothing may be chosen there is nothing to wait for.
func (p *Pool) mayGo(g *group, plan *scheduled, w *waiting) bool {
	if !p.gather(g, w.allowed, plan.layout.Ranks) {
		return true
	}
	p.match(w.prefixes)
	return plan.scheduler.MayGo(&w.asked, p.places)
}

// mostLooked bounds the places that are looked at, whenever one is taken, for those in line: that takes some hundred microseconds, and with
// up to a thousand places it is all in line.
const mostLooked = 1 << 14

// callNext calls the first request in line that gives up nothing any more, if there is one: another has just taken a place.
func (p *Pool) callNext(g *group, plan *scheduled, now time.Time) {
	if plan.line != nil && plan.line.Len() > 0 {
		plan.line.CallNext(1+mostLooked/max(1, len(p.places)), func(w waiting) bool {
			w.allowed.now = now
			return p.mayGo(g, plan, &w)
		})
	}
}
