package router

import (
	"cmp"
	"math/rand/v2"
	"time"

	"github.com/semmoe/operator/solver/dispatch"
)

// choose takes a rank: first the plan, by the request's id, then a rank of it by forecast and price, then the pod with
// the fewest outstanding tokens there. Without a forecast it is the rank with the fewest outstanding tokens. Where a
// forecast is possible but not made, it returns the layout to make it with, and takes nothing.
func (p *Pool) choose(r *request, tried map[string]bool) (lease *Lease, ok bool, unknown *Layout) {
	p.mu.Lock()
	defer p.mu.Unlock()
	allowed := filter{tried: tried, eligible: r.eligible, now: p.now()}
	if r.asksExperts {
		allowed.told = p.plans
	}
	g := p.chooseGroup(r.id, allowed)
	if g == nil {
		// Backends that were just found unreachable are taken only where there is no other.
		allowed.ejected = true
		if g = p.chooseGroup(r.id, allowed); g == nil {
			return nil, false, nil
		}
	}
	plan := p.plans[g.plan]
	if r.inference && plan != nil && r.forecast.layout != plan.layout {
		return nil, false, plan.layout
	}
	return p.take(g, plan, r, allowed), true, nil
}

// filter tells which ranks of which backends a request may go to.
type filter struct {
	// tried are endpoints, and eligible tells those that there are to choose from; nil where all are.
	tried    map[string]bool
	eligible func(endpoint string) bool
	now      time.Time
	ejected  bool
	// told leaves out backends whose reported experts cannot be told by logical ids with these plans; nil where none are
	// asked for.
	told map[string]*scheduled
}

func (f filter) admits(b *backend) bool {
	if f.told != nil {
		var layout *Layout
		if plan := f.told[b.PlanDigest]; plan != nil {
			layout = plan.layout
		}
		if !b.tellsLogical(layout) {
			return false
		}
	}
	return f.ejected || !f.now.Before(b.ejectedUntil)
}

// admitsRank reports whether a rank of a backend that is admitted is admitted too.
func (f filter) admitsRank(b *backend, rank int) bool {
	endpoint := b.Endpoint(rank)
	return endpoint != "" && !f.tried[endpoint] && (f.eligible == nil || f.eligible(endpoint))
}

// ranks is the number of ranks of a backend that are admitted.
func (f filter) ranks(b *backend) int {
	if !f.admits(b) {
		return 0
	}
	if len(b.RankAddresses) == 0 { // all ranks have one endpoint
		if f.admitsRank(b, 0) {
			return len(b.outstanding)
		}
		return 0
	}
	n := 0
	for rank := range b.outstanding {
		if f.admitsRank(b, rank) {
			n++
		}
	}
	return n
}

// ranks is the number of ranks that are admitted.
func (g *group) ranks(allowed filter) uint64 {
	var n uint64
	for _, b := range g.backends {
		n += uint64(allowed.ranks(b))
	}
	return n
}

// chooseGroup chooses by a hash of the request's id, weighted by ranks: while a new plan is rolled out, old and new are
// given a fair sample of the same requests, whatever either would score them. It returns nil where no backend is
// admitted.
func (p *Pool) chooseGroup(id string, allowed filter) *group {
	var total uint64
	for _, g := range p.groups {
		total += g.ranks(allowed)
	}
	if total == 0 {
		return nil
	}
	at := groupHash(id) % total
	for _, g := range p.groups {
		ranks := g.ranks(allowed)
		if at < ranks {
			return g
		}
		at -= ranks
	}
	return nil
}

// groupHash must have nothing in common with what sampled computes from the same id: else the sample would come from one
// plan more than from another.
func groupHash(id string) uint64 {
	hash := uint64(14695981039346656037)
	for i := range len(id) {
		hash = (hash ^ uint64(id[i])) * 1099511628211
	}
	hash = (hash ^ hash>>30) * 0xbf58476d1ce4e5b9
	hash = (hash ^ hash>>27) * 0x94d049bb133111eb
	return hash ^ hash>>31
}

// place is one rank of one backend.
type place struct {
	on   *backend
	rank int
}

// take takes a rank of the group. At least one of its backends is admitted.
func (p *Pool) take(g *group, plan *scheduled, r *request, allowed filter) *Lease {
	tokens, scored := r.tokens, false
	var at place
	if plan != nil && r.inference && r.forecast.scores != nil {
		at, scored = g.byForecast(plan, &r.forecast, allowed)
	}
	if scored {
		tokens = r.forecast.tokens
	} else {
		at = g.leastLoaded(allowed)
	}
	at.on.outstanding[at.rank] += tokens
	lease := &Lease{Backend: at.on.Backend, Rank: at.rank, scored: scored, pool: p, on: at.on, tokens: tokens}
	if at.on.Ranks == 0 {
		lease.Rank = NoRank
	}
	switch {
	case scored:
		lease.predicted = float64(r.forecast.scores[at.rank])
	case g.plan == "" || !r.inference:
	case plan == nil:
		lease.unscored = unscoredPending
	default:
		lease.unscored = cmp.Or(r.forecast.unscored, unscoredRanks)
	}
	if plan != nil {
		lease.layout = plan.layout
	}
	return lease
}

// slack is the number of requests of the present one's size that a rank may be ahead of all others before it is avoided:
// at low load, chance alone puts a few on one rank.
const slack = 4

// byForecast lets the scheduler choose the rank. Its prices balance over time; they do not see that a rank has stopped
// answering. So a rank that has far more outstanding than the others is left out, in favour of the one with least. It
// reports false where no admitted backend has the ranks of the plan.
func (g *group) byForecast(plan *scheduled, f *forecast, allowed filter) (place, bool) {
	if f.rank == NoRank {
		f.rank = plan.scheduler.Assign(dispatch.Request{Scores: f.scores, Tokens: int(f.tokens)})
	}
	chosen, least := place{rank: f.rank}, place{}
	var total, places int64
	ties := 0
	for _, b := range g.backends {
		if b.Ranks != plan.layout.ranks || !allowed.admits(b) {
			continue
		}
		switch {
		case !allowed.admitsRank(b, f.rank):
		case chosen.on == nil || b.outstanding[f.rank] < chosen.on.outstanding[f.rank]:
			chosen.on, ties = b, 1
		case b.outstanding[f.rank] == chosen.on.outstanding[f.rank]:
			if ties++; rand.IntN(ties) == 0 { // or a quiet service would use one pod alone
				chosen.on = b
			}
		}
		for rank, load := range b.outstanding {
			if !allowed.admitsRank(b, rank) {
				continue
			}
			if least.on == nil || load < least.on.outstanding[least.rank] {
				least = place{b, rank}
			}
			total += load
			places++
		}
	}
	if chosen.on == nil { // no pod has the plan's ranks, or only some of them are admitted
		return least, least.on != nil
	}
	load := chosen.on.outstanding[f.rank]
	if others := places - 1; others > 0 && load > 2*(total-load)/others+slack*f.tokens {
		return least, true
	}
	return chosen, true
}

// leastLoaded is the rank with the fewest outstanding tokens. Ties are broken at random, so that several routers do not
// all choose alike.
func (g *group) leastLoaded(allowed filter) place {
	var best place
	ties := 0
	for _, b := range g.backends {
		if !allowed.admits(b) {
			continue
		}
		for rank, load := range b.outstanding {
			switch {
			case !allowed.admitsRank(b, rank):
			case best.on == nil || load < best.on.outstanding[best.rank]:
				best, ties = place{b, rank}, 1
			case load == best.on.outstanding[best.rank]:
				if ties++; rand.IntN(ties) == 0 {
					best = place{b, rank}
				}
			}
		}
	}
	return best
}
