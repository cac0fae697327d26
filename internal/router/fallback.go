// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"math/rand/v2"
	"slices"

	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/plans"
)

// candidate is a place that could take a request instead of the chosen place.
type candidate struct {
	place
	// otherRank is 1 if the rank is not the chosen one, which has the experts of the request. tie orders equal
	// candidates.
	otherRank int
	tie       uint32
}

func (c candidate) compare(other candidate) int {
	return cmp.Or(cmp.Compare(c.otherRank, other.otherRank),
		cmp.Compare(c.on.outstanding[c.rank], other.on.outstanding[other.rank]), cmp.Compare(c.tie, other.tie))
}

// fallbacks returns at most limit endpoints that can take the request of the lease, best first: the same rank of other
// pods, then other ranks. They serve under the same plan and accept the same headers, because a gateway that forwards
// the request to a fallback does not ask the picker again.
func (p *Pool) fallbacks(l *Lease, r *request, limit int) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	allowed := filter{eligible: r.eligible, lacking: r.lacking, now: p.now(), trials: p.options.Breaker.HalfOpenRequests}
	if r.inference {
		allowed.limit = p.options.PendingLimitPerRank
	}
	if r.asksExperts {
		allowed.logicalPlans = p.plans
	}
	if !l.spread {
		allowed.pins = func(b *backend) bool { return p.pins(b, r) }
	}
	best := make([]candidate, 0, limit+1)
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
				// If ranks share a port, the header selects the rank, and it names the chosen rank.
				if b == l.on && chosen || !chosen && len(b.RankAddresses) == 0 || !allowed.takes(b, rank) {
					continue
				}
				next := candidate{place: place{b, rank}, tie: rand.Uint32()}
				if !chosen {
					next.otherRank = 1
				}
				if at, _ := slices.BinarySearchFunc(best, next, candidate.compare); at < limit {
					best = slices.Insert(best, at, next)
					best = best[:min(limit, len(best))]
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

// move assigns the lease to the endpoint that served the request, with its load and its observations. An endpoint that
// is not in the pool has neither. The pod that the gateway skipped is ejected like an unreachable pod of a proxy:
// without requests it would look idle and attract all of them. It is not ejected if it has answered other requests
// since the place was reserved, because the gateway may have skipped it minutes ago. move must be called before
// Release.
func (l *Lease) move(endpoint string) {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	pinned := discovery.NoRank
	if l.Backend.PinsByHeader(l.Rank) {
		pinned = l.Rank
	}
	to, layout := l.pool.find(endpoint, pinned)
	if to.on != l.on && !l.on.answered.After(l.taken) {
		l.eject()
	}
	l.leave()
	l.place, l.spread = max(0, to.rank), to.rank == discovery.NoRank && to.on.Ranks > 0
	l.charge(to.on.outstanding, l.tokens)
	l.inFlight = to.on.requests()
	to.on.pending[l.place] += l.pending
	// The tables may have been replaced since. The forecast is still valid for the placement of these pods.
	l.scored = l.scored && layout != nil && layout.Digest == l.layout.Digest && to.rank != discovery.NoRank
	l.on, l.Backend, l.Rank, l.layout = to.on, to.on.Backend, to.rank, layout
	l.pool.prefixes.Match(l.prefixes)
	l.recordCached(l.prefixes)
}

// markAnswering records that the pod of the lease answers.
func (l *Lease) markAnswering() {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	l.on.answered = l.pool.now()
}

// find returns the place of an endpoint, and the layout of its plan if that is loaded. For an unknown endpoint it
// returns a new place. The lock must be held.
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

// rankAt returns the rank that serves at an endpoint of the pod. If ranks share a port, it is the rank pinned by the
// header.
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
