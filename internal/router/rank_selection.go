// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/kvevents"
	"github.com/semmoe/operator/internal/router/plans"
	"github.com/semmoe/operator/solver/dispatch"
)

// missing describes what must be computed before a place can be chosen, because it takes time: the forecast of a
// layout, or the hashes of the prefixes.
type missing struct {
	layout   *plans.Layout
	prefixes bool
}

// choose reserves a place: it selects the plan by the random number of the request, then a rank of one of the plan's
// pods by the policy. If something must be computed first, it returns that as unknown and reserves nothing.
func (p *Pool) choose(r *request, tried map[string]bool) (lease *Lease, ok bool, unknown missing) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r.refused = nil
	allowed := filter{tried: tried, eligible: r.eligible, lacking: r.lacking, now: p.now(), trials: p.options.Breaker.HalfOpenRequests}
	if r.inference {
		allowed.limit = p.options.PendingLimitPerRank
	}
	if r.asksExperts {
		allowed.logicalPlans = p.plans
	}
	g := p.chooseGroup(r.planRandom, allowed)
	if g == nil {
		// Ejected backends are used only if there is no other backend or all others are full.
		allowed.ejected = true
		g = p.chooseGroup(r.planRandom, allowed)
	}
	if g == nil {
		wanted := allowed
		if allowed.limit = 0; p.chooseGroup(r.planRandom, allowed) != nil {
			if r.refused = errAllFull; p.waiters != nil {
				p.queueForPlace(r, wanted)
			}
		} else if allowed.lacking = nil; r.lacking != nil && p.chooseGroup(r.planRandom, allowed) != nil {
			r.refused = errLacksRoute
		}
		return nil, false, missing{}
	}
	if p.waitsForPlace(r, allowed) {
		return nil, false, missing{}
	}
	plan := p.plans[g.plan]
	unpinned := r.inference && p.someUnpinned(g, r)
	if r.inference {
		if plan != nil && r.forecast.layout != plan.layout {
			return nil, false, missing{layout: plan.layout}
		}
		if p.options.Policy.ReadsPrefixes() && (!r.hashed || p.mustObserve(r, allowed.now)) {
			return nil, false, missing{prefixes: true}
		}
		if plan != nil && !unpinned && p.mustWait(g, plan, r, allowed) {
			return nil, false, missing{}
		}
	}
	return p.take(g, plan, r, allowed, unpinned), true, missing{}
}

// someUnpinned reports whether the engine picks the rank of a request on at least one backend of a group.
func (p *Pool) someUnpinned(g *group, r *request) bool {
	return slices.ContainsFunc(g.backends, func(b *backend) bool { return !p.pins(b, r) })
}

// filter selects the ranks and backends that a request may go to.
type filter struct {
	// tried contains endpoints, or single ranks as rankAt. eligible limits the endpoints; nil allows all.
	tried    map[string]bool
	eligible func(endpoint string) bool
	now      time.Time
	// ejected admits ejected backends. trials is the maximum number of requests of a half-open breaker; 0 means no limit.
	ejected bool
	trials  int
	// logicalPlans excludes backends with reported experts that cannot be converted to logical ids with these plans. It
	// is nil if the client does not request experts.
	logicalPlans map[string]*scheduled
	// lacking contains the engine types that lack the route of the request.
	lacking map[string]bool
	// limit is the number of pending requests at which a rank is full; 0 means no limit.
	limit int
	// pins excludes backends on which the request cannot be pinned to a rank; nil excludes none.
	pins func(*backend) bool
}

func (f filter) admits(b *backend) bool {
	if f.logicalPlans != nil {
		var layout *plans.Layout
		if plan := f.logicalPlans[b.PlanDigest]; plan != nil {
			layout = plan.layout
		}
		if !reportsLogicalExperts(b.Backend, layout) {
			return false
		}
	}
	return !f.lacking[b.Engine] && !f.now.Before(b.check.holdUntil) && (f.ejected || b.breaker.Admits(f.now, f.trials)) && (f.pins == nil || f.pins(b))
}

// hasTried reports whether an endpoint, or this rank of it, was tried.
func (f filter) hasTried(endpoint string, rank int) bool {
	return len(f.tried) > 0 && (f.tried[endpoint] || f.tried[rankAt(endpoint, rank)])
}

// rankAt returns the key of one rank of an endpoint that several ranks share.
func rankAt(endpoint string, rank int) string { return fmt.Sprintf("%s/%d", endpoint, rank) }

// takes reports whether a rank of an admitted backend may be chosen and is not full.
func (f filter) takes(b *backend, rank int) bool {
	endpoint := b.Endpoint(rank)
	return endpoint != "" && !f.hasTried(endpoint, rank) && (f.eligible == nil || f.eligible(endpoint)) && (f.limit == 0 || b.pending[rank] < f.limit)
}

// ranks returns the number of ranks of the admitted backends without full ranks. It includes ranks that do not accept
// pinned requests.
func (g *group) ranks(allowed filter) uint64 {
	var n uint64
	for _, b := range g.backends {
		if !allowed.admits(b) {
			continue
		}
		for rank := range b.outstanding {
			if allowed.takes(b, rank) {
				n += uint64(b.width())
			}
		}
	}
	return n
}

// chooseGroup selects a group by a random number, weighted by the number of ranks. During a rollout, the old and the
// new plan therefore get a fair sample of the same requests. Clients cannot choose. It returns nil if no backend is
// admitted.
func (p *Pool) chooseGroup(planRandom uint64, allowed filter) *group {
	var few [8]uint64 // plans at a time: nearly always one or two
	ranks, total := few[:0], uint64(0)
	for _, g := range p.groups {
		ranks = append(ranks, g.ranks(allowed))
		total += ranks[len(ranks)-1]
	}
	if total == 0 {
		return nil
	}
	at := planRandom % total
	for i, g := range p.groups {
		if at < ranks[i] {
			return g
		}
		at -= ranks[i]
	}
	return nil
}

// place is one rank of one backend.
type place struct {
	on   *backend
	rank int
}

// take reserves a place of the group. At least one place must be admitted. unpinned is true if the engine picks the
// rank on some backends.
func (p *Pool) take(g *group, plan *scheduled, r *request, allowed filter, unpinned bool) *Lease {
	lease := &Lease{pool: p, tokens: r.tokens, taken: allowed.now, route: r.route}
	var at place
	switch {
	case !r.inference:
		at = g.leastLoaded(allowed)
	case unpinned:
		if at = g.leastLoaded(allowed); p.pins(at.on, r) {
			allowed.pins = func(b *backend) bool { return p.pins(b, r) }
			at = p.bySchedule(g, plan, r, allowed, lease)
			break
		}
		asked := r.ask(plan)
		lease.tokens, lease.spread = int64(asked.Tokens), true // the engine picks the rank
		if g.plan != "" {
			lease.unscored = unscoredRoute
		}
	default:
		at = p.bySchedule(g, plan, r, allowed, lease)
	}
	lease.Backend, lease.on, lease.Rank, lease.place = at.on.Backend, at.on, at.rank, at.rank
	if at.on.Ranks == 0 || lease.spread {
		lease.Rank = discovery.NoRank
	}
	lease.charge(at.on.outstanding, lease.tokens)
	if r.inference {
		lease.inFlight = at.on.requests()
		at.on.pending[at.rank]++
		lease.pending = 1
		lease.trial = at.on.breaker.Begin(allowed.now)
		lease.charge(at.on.next, max(0, lease.tokens-r.output))
	}
	p.leave(r, allowed.now)
	p.stopWaiting(r, waitServed, allowed.now)
	p.wakeWaiter()
	if plan != nil {
		lease.layout = plan.layout
		p.wakeNext(g, plan, allowed.now)
	}
	return lease
}

// bySchedule selects a place with the policy. If the plan is loaded and pods have its number of ranks, it uses these
// pods and the forecast of the request, if there is one. If not, it uses any place of the group.
func (p *Pool) bySchedule(g *group, plan *scheduled, r *request, allowed filter, lease *Lease) place {
	scheduler, asked := g.scheduler, r.ask(plan)
	planned := plan != nil && p.gather(g, allowed, plan.layout.Ranks)
	if planned {
		scheduler, asked.Scores = plan.scheduler, r.forecast.scores
	} else {
		p.gather(g, allowed, anyRanks)
	}
	p.match(r.prefixes, r.observed)
	again := r.scheduler == scheduler
	if again {
		p.keepRank(r.rank)
	}
	d := scheduler.Decide(&asked, p.places)
	if !again {
		scheduler.Take(&asked, &d)
		r.scheduler, r.rank = scheduler, d.Rank
		p.decisionSums.Add(&d, asked.Tokens)
	}
	at := p.at[d.Place]
	lease.on, lease.place = at.on, at.rank
	lease.recordCached(r.prefixes)
	p.countObserved(r, at)
	lease.tokens = int64(d.Tokens)
	switch {
	case asked.Scores != nil:
		lease.scored = true
	case g.plan == "":
	case plan == nil:
		lease.unscored = unscoredPending
	default:
		lease.unscored = cmp.Or(r.forecast.unscored, unscoredRanks)
	}
	return at
}

// Reasons why a request to pods with a plan was not scored, in addition to the reasons of plans.Layout.
const (
	unscoredPending = "plan_pending" // the plan is not loaded yet
	unscoredRanks   = "ranks_differ" // no pod has the plan's number of ranks
	unscoredRoute   = "not_pinned"   // the pod ignores the rank on the request's route
)

// anyRanks matches any number of ranks.
const anyRanks = -1

// gather lists the places of the admitted backends of the group that have this number of ranks. It reports whether
// there are any.
func (p *Pool) gather(g *group, allowed filter, ranks int) bool {
	p.places, p.at = p.places[:0], p.at[:0]
	for _, b := range g.backends {
		if ranks != anyRanks && b.Ranks != ranks || !allowed.admits(b) {
			continue
		}
		for rank, load := range b.outstanding {
			if allowed.takes(b, rank) {
				p.places = append(p.places, dispatch.Place{Rank: rank, Outstanding: load / b.width(), Next: b.next[rank] / b.width()})
				p.at = append(p.at, place{b, rank})
			}
		}
	}
	return len(p.places) > 0
}

// match records how much of a request each place has cached: as observed where the KV events of the place are known, and
// estimated from the requests sent elsewhere.
func (p *Pool) match(prefixes []uint64, observed map[kvevents.Place]int) {
	if len(prefixes) == 0 && len(observed) == 0 {
		return
	}
	p.prefixes.Match(prefixes)
	for i, at := range p.at {
		if tokens, known := observed[placeOf(at)]; known {
			p.places[i].Cached = dispatch.Hit{Tokens: tokens, Due: p.prefixes.Due(tokens)}
		} else {
			p.places[i].Cached = p.prefixes.Hit(at.on.caches[at.rank])
		}
	}
}

// keepRank keeps only places of a rank, if there are any. A request that is sent again was charged to that rank before.
func (p *Pool) keepRank(rank int) {
	if !slices.ContainsFunc(p.places, func(at dispatch.Place) bool { return at.Rank == rank }) {
		return
	}
	n := 0
	for i := range p.places {
		if p.places[i].Rank == rank {
			p.places[n], p.at[n] = p.places[i], p.at[i]
			n++
		}
	}
	p.places, p.at = p.places[:n], p.at[:n]
}

// backendUnder returns the backend with the fewest outstanding tokens among the backends of a plan that are not
// ejected.
func (p *Pool) backendUnder(plan string) (backend discovery.Backend, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, g := range p.groups {
		if allowed := (filter{now: p.now(), trials: p.options.Breaker.HalfOpenRequests}); g.plan == plan && g.ranks(allowed) > 0 {
			return g.leastLoaded(allowed).on.Backend, true
		}
	}
	return discovery.Backend{}, false
}

// leastLoaded returns the rank with the fewest outstanding tokens. Ties are broken at random, so that several routers
// do not make the same choice.
func (g *group) leastLoaded(allowed filter) place {
	var best place
	ties := 0
	for _, b := range g.backends {
		if !allowed.admits(b) {
			continue
		}
		for rank, load := range b.outstanding {
			switch {
			case !allowed.takes(b, rank):
			case best.on == nil || load*best.on.width() < best.on.outstanding[best.rank]*b.width():
				best, ties = place{b, rank}, 1
			case load*best.on.width() == best.on.outstanding[best.rank]*b.width():
				if ties++; rand.IntN(ties) == 0 {
					best = place{b, rank}
				}
			}
		}
	}
	return best
}
