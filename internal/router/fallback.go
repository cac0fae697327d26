package router

import (
	"cmp"
	"math/rand/v2"
	"slices"

	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/plans"
)

// candidate is a place that could take a request in another's stead.
type candidate struct {
	place
	// otherRank is 1 where the rank is not the chosen one, whose experts are the request's; tie orders what is equal.
	otherRank int
	tie       uint32
}

func (c candidate) compare(other candidate) int {
	return cmp.Or(cmp.Compare(c.otherRank, other.otherRank),
		cmp.Compare(c.on.outstanding[c.rank], other.on.outstanding[other.rank]), cmp.Compare(c.tie, other.tie))
}

// fallbacks are endpoints that can take the lease's request in its stead, the best first, at most so many: the same rank of
// other pods, then other ranks. They serve under the same plan and take the same headers, because who sends the request on
// does not come back to ask for another.
func (p *Pool) fallbacks(l *Lease, r *request, most int) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	allowed := filter{eligible: r.eligible, lacking: r.lacking, now: p.now()}
	if r.inference {
		allowed.limit = p.options.PendingLimitPerRank
	}
	if r.asksExperts {
		allowed.told = p.plans
	}
	if !l.spread {
		allowed.pins = func(b *backend) bool { return p.pins(b, r) }
	}
	best := make([]candidate, 0, most+1)
	for _, g := range p.groups {
		if g.plan != l.Backend.PlanDigest {
			continue
		}
		for _, b := range g.backends {
			if b.Ranks != l.Backend.Ranks || b.PinsByHeader(l.Rank) != l.Backend.PinsByHeader(l.Rank) || !allowed.admits(b) {
				continue
			}
			for rank := range b.outstanding {
				chosen := rank == max(0, l.Rank)
				// Behind one port it is the header that decides, which names the chosen rank.
				if b == l.on && chosen || !chosen && len(b.RankAddresses) == 0 || !allowed.takes(b, rank) {
					continue
				}
				next := candidate{place: place{b, rank}, tie: rand.Uint32()}
				if !chosen {
					next.otherRank = 1
				}
				if at, _ := slices.BinarySearchFunc(best, next, candidate.compare); at < most {
					best = slices.Insert(best, at, next)
					best = best[:min(most, len(best))]
				}
			}
		}
	}
	var endpoints []string
	for _, c := range best {
		endpoints = append(endpoints, c.on.Endpoint(c.rank))
	}
	return endpoints
}

// move makes the lease one of the endpoint that has really served: its load, and what is observed, are that one's. An
// endpoint that the pool does not know has neither. The pod that the gateway has left for it is ejected, as one that a proxy cannot
// reach: without requests it would look idle, and draw all of them. But the gateway may have left it minutes ago, and a pod that has
// answered others since is back. It must come before Release.
func (l *Lease) move(endpoint string) {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	pinned := discovery.NoRank
	if l.Backend.PinsByHeader(l.Rank) {
		pinned = l.Rank
	}
	to, layout := l.pool.find(endpoint, pinned)
	if to.on != l.on && !l.on.answered.After(l.taken) {
		l.eject(ejection)
	}
	l.leave()
	l.place, l.spread = max(0, to.rank), to.rank == discovery.NoRank && to.on.Ranks > 0
	l.charge(to.on.outstanding, l.tokens)
	l.inFlight = to.on.requests()
	to.on.pending[l.place] += l.pending
	// New tables may have been swapped in since: the forecast is still one for where these pods have their experts.
	l.scored = l.scored && layout != nil && layout.Digest == l.layout.Digest && to.rank != discovery.NoRank
	l.on, l.Backend, l.Rank, l.layout = to.on, to.on.Backend, to.rank, layout
	l.pool.prefixes.Match(l.prefixes)
	l.give(l.prefixes)
}

// heard notes that the lease's pod answers.
func (l *Lease) heard() {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	l.on.answered = l.pool.now()
}

// find is the place of an endpoint, and the layout of its plan where that is loaded. What the pool does not know is a
// place of its own. The lock must be held.
func (p *Pool) find(endpoint string, pinned int) (place, *plans.Layout) {
	for _, g := range p.groups {
		for _, b := range g.backends {
			rank, found := b.rankAt(endpoint, pinned)
			if !found {
				continue
			}
			if plan := p.plans[g.plan]; plan != nil {
				return place{b, rank}, plan.layout
			}
			return place{b, rank}, nil
		}
	}
	return place{&backend{pins: map[string]pin{}, outstanding: make([]int64, 1), next: make([]int64, 1), pending: make([]int, 1)}, discovery.NoRank}, nil
}

// rankAt is the rank that serves at an endpoint of the pod; behind one port it is the one that a header has pinned.
func (b *backend) rankAt(endpoint string, pinned int) (rank int, found bool) {
	switch {
	case len(b.RankAddresses) > 0:
		rank = slices.Index(b.RankAddresses, endpoint)
		return rank, rank >= 0
	case b.Address != endpoint:
		return discovery.NoRank, false
	case b.Ranks == 0:
		return discovery.NoRank, true
	}
	return pinned, pinned < b.Ranks // NoRank: the engine picks the rank
}
