// SPDX-License-Identifier: Apache-2.0

package dispatch

import "fmt"

// Options are the settings of a Scheduler.
type Options struct {
	// Policy is a policy that decides at arrival; for the others see Queue and WaitQueue.
	Policy Policy
	// Ranks is the number of ranks of a pod.
	Ranks int
	// Cap is the maximum load of a rank over the last Arrivals requests, as a multiple of its share, for the policies
	// Price and Prefix. The minimum is 1.
	Cap float64
	// Capacity contains the ranks' shares of the load, in any unit; nil means equal shares. Policies that assign equal
	// numbers of requests accept only nil.
	Capacity []float64
	// Weights and Costs define the value of a place.
	Weights Weights
	Costs   Costs
	// Patient reduces the price step of the policy Price for requests that wait until they may go (see MayGo).
	Patient bool
	// First is the index of the place that wins ties in the first decision. Schedulers that share places get different
	// values.
	First int
}

func (o *Options) validate() error {
	switch {
	case o.Capacity != nil && !o.Policy.Weighs():
		return fmt.Errorf("policy %s assigns equal numbers of requests and does not support rank capacities", o.Policy)
	case !o.Policy.AtOnce():
		return fmt.Errorf("policy %s decides on queues of requests, not on one at a time", o.Policy)
	case o.Ranks < 1:
		return fmt.Errorf("%d ranks; at least 1 is needed", o.Ranks)
	case !(o.Cap >= 1):
		return fmt.Errorf("cap is %v; it must be at least 1", o.Cap)
	case !(o.Costs.Exchange >= 0 && o.Costs.Compute >= 0):
		return fmt.Errorf("costs are %v and %v microseconds; they must be at least 0", o.Costs.Exchange, o.Costs.Compute)
	}
	if err := o.Weights.validate(); err != nil {
		return err
	}
	_, err := ParsePolicy(string(o.Policy))
	return err
}

// Scheduler assigns a stream of requests to places under a policy that decides at arrival. Prices and the cap apply to
// ranks: all pods hold the same experts on a rank, and differ only in cached prefixes and outstanding load.
type Scheduler struct {
	policy  Policy
	cap     float64
	weights Weights
	costs   Costs
	// shares are the target shares of the load by rank; they sum to 1.
	shares []float64
	recent *recent
	// prices are the components of the prices that integrate the ranks' load beyond their shares, in local shares.
	prices []float64
	// rooms, asks and values belong to the current decision, by rank: the largest request below the cap, the price in
	// local shares, and the value of an idle place there with an empty cache.
	rooms, asks, values []float64
	// notAhead marks the ranks that had a place in the latest decision with an outstanding load not far ahead of the
	// others.
	notAhead []bool
	// taken marks the ranks that have received a request in the current round, takenCount is their number.
	taken      []bool
	takenCount int
	// turn is the next rank of RoundRobin. first is the place at which the current search begins, so that equal places
	// are chosen round-robin.
	turn, first int
	// sizes/sized is the mean request size. spreads/scored is the mean lead of the best rank over the mean of all
	// ranks, over requests with scores. Prices are relative to both.
	sizes, sized, spreads, scored float64
	// step is the price increment under the cap.
	step float64
}

// NewScheduler returns a scheduler without load, or an error if the options are invalid.
func NewScheduler(o Options) (*Scheduler, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	step := stepOf(o.Cap)
	if o.Patient {
		step *= patientStep
	}
	return &Scheduler{
		policy: o.Policy, cap: o.Cap, weights: o.Weights, costs: o.Costs, shares: sharesOf(o.Capacity, o.Ranks), recent: newRecent(o.Ranks),
		prices: make([]float64, o.Ranks), rooms: make([]float64, o.Ranks), asks: make([]float64, o.Ranks),
		values: make([]float64, o.Ranks), notAhead: make([]bool, o.Ranks), step: step, taken: make([]bool, o.Ranks), first: o.First - 1,
	}, nil
}

// Load returns the rank's load over the last requests, in tokens.
func (s *Scheduler) Load(rank int) int { return s.recent.load[rank] }

// Decide selects a place for a request; there must be at least one place. The only state it changes is the order of
// equal places; Take accounts for the request.
func (s *Scheduler) Decide(r *Request, places []Place) Decision {
	s.begin(len(places))
	c := newCrowd(places)
	at := 0
	switch s.policy {
	case Masked:
		at = s.idlestOf(s.bestFree(r, places), places)
	case RoundRobin:
		at = s.idlestOf(s.nextInTurn(places), places)
	case LeastLoaded:
		at = s.idlestOf(anyRank, places)
	case Prefix:
		at = s.mostCached(r, places)
	default:
		at = s.mostValuable(r, places, c)
	}
	if s.policy == Price && r.Scores == nil && places[at].Cached.Tokens <= 0 {
		at = s.shortestWait(r, places, c) // without scores and prefix, only the load distinguishes places
	}
	return s.weigh(r, at, &places[at], c)
}

// begin prepares a decision among the given number of places.
func (s *Scheduler) begin(places int) {
	s.first = (s.first + 1) % places
	s.measure()
}

// Take accounts for a request at its chosen place. A retried request is counted once.
func (s *Scheduler) Take(r *Request, d *Decision) {
	s.recent.add(d.Rank, d.Tokens)
	switch s.policy {
	case Price:
		s.raise(d.Rank, d.Tokens, r.Scores)
	case Masked:
		if !s.taken[d.Rank] {
			s.taken[d.Rank] = true
			s.takenCount++
		}
		if s.takenCount == len(s.taken) {
			clear(s.taken)
			s.takenCount = 0
		}
	case RoundRobin:
		s.turn = (d.Rank + 1) % len(s.prices)
	}
}

// best returns the index of the best allowed place, or -1 if none is allowed. Ties are broken round-robin, starting at
// first.
func (s *Scheduler) best(places []Place, allowed func(i int) bool, better func(i, than int) bool) int {
	best := -1
	for n := range places {
		i := s.first + n
		if i >= len(places) {
			i -= len(places)
		}
		if allowed(i) && (best < 0 || better(i, best)) {
			best = i
		}
	}
	return best
}

// anyRank matches all ranks.
const anyRank = -1

// idlestOf returns the place of the rank with the fewest outstanding tokens relative to the rank's share.
func (s *Scheduler) idlestOf(rank int, places []Place) int {
	return s.best(places,
		func(i int) bool { return rank == anyRank || places[i].Rank == rank },
		func(i, than int) bool { return s.idler(&places[i], &places[than]) })
}

// shortestWait returns the place where the request waits the shortest time and delays other requests least, and of
// equal places the one with the fewest outstanding tokens.
func (s *Scheduler) shortestWait(r *Request, places []Place, c crowd) int {
	wait := func(i int) float64 { d := s.weigh(r, i, &places[i], c); return d.Load + d.Wait }
	return s.best(places, func(int) bool { return true }, func(i, than int) bool {
		if own, other := wait(i), wait(than); own != other {
			return own < other
		}
		return s.idler(&places[i], &places[than])
	})
}

// idler reports whether a place has fewer outstanding tokens than another, relative to the shares of their ranks.
func (s *Scheduler) idler(place, than *Place) bool {
	return float64(place.Outstanding)*s.shares[than.Rank] < float64(than.Outstanding)*s.shares[place.Rank]
}

// bestFree returns the rank with the best score among the ranks with a place that have not received a request in this
// round, or among all ranks with a place if all have.
func (s *Scheduler) bestFree(r *Request, places []Place) int {
	better := func(i, than int) bool {
		return r.Scores != nil && r.Scores[places[i].Rank] > r.Scores[places[than].Rank]
	}
	at := s.best(places, func(i int) bool { return !s.taken[places[i].Rank] }, better)
	if at < 0 {
		at = s.best(places, func(int) bool { return true }, better)
	}
	return places[at].Rank
}

// nextInTurn returns the next rank in cyclic order that has a place.
func (s *Scheduler) nextInTurn(places []Place) int {
	ranks := len(s.prices)
	wait := func(i int) int { return (places[i].Rank - s.turn + ranks) % ranks }
	at := s.best(places, func(int) bool { return true }, func(i, than int) bool { return wait(i) < wait(than) })
	return places[at].Rank
}

// mostCached returns the place below the cap with the longest cached prefix of the request, and of equal places the one
// with the fewest outstanding tokens.
func (s *Scheduler) mostCached(r *Request, places []Place) int {
	at := s.best(places,
		func(i int) bool { return s.open(r, &places[i]) },
		func(i, than int) bool {
			if places[i].Cached.Tokens != places[than].Cached.Tokens {
				return places[i].Cached.Tokens > places[than].Cached.Tokens
			}
			return places[i].Outstanding < places[than].Outstanding
		})
	if at < 0 {
		return s.idlestOf(anyRank, places)
	}
	return at
}

// measure updates the room and the price of each rank.
func (s *Scheduler) measure() {
	for rank, share := range s.shares {
		s.rooms[rank] = s.recent.room(rank, share, s.cap)
		s.asks[rank] = s.price(rank)
	}
}

// open reports whether the place's rank stays at or below the cap with the request.
func (s *Scheduler) open(r *Request, place *Place) bool {
	return float64(r.Tokens-cachedOf(r, place)) <= s.rooms[place.Rank]
}

// mostValuable returns the place with the highest value among the ranks below the cap. If all ranks are above the cap,
// it selects a place on the rank with the lowest load relative to its share. The cap limits tokens sent and does not
// detect a rank that has stopped answering. It is therefore waived if the outstanding load of the selected place is far
// ahead of the others.
func (s *Scheduler) mostValuable(r *Request, places []Place, c crowd) int {
	best := s.compare(r, places, c)
	at := best.open
	if at < 0 {
		rank := s.leastServed(places)
		value := func(i int) float64 { d := s.weigh(r, i, &places[i], c); return d.Value() }
		at = s.best(places, func(i int) bool { return places[i].Rank == rank }, func(i, than int) bool { return value(i) > value(than) })
	}
	if s.weights.Load > 0 && c.ahead(places[at].Outstanding, r.Tokens) > 0 {
		at = best.any
	}
	return at
}

// candidates are the places with the highest value: open among the ranks below the cap (-1 if none), any among all.
type candidates struct{ open, any int }

// compare evaluates all places. There may be thousands, so terms common to all places of a rank are computed once. The
// values equal those of weigh. Ties are broken by outstanding tokens.
func (s *Scheduler) compare(r *Request, places []Place, c crowd) candidates {
	length := s.weights.Affinity * s.costs.Exchange * float64(r.Tokens)
	for i, ask := range s.asks {
		s.values[i] = -length * ask
		if r.Scores != nil {
			s.values[i] += length * float64(r.Scores[i])
		}
		s.notAhead[i] = false
	}
	perCached, perAhead, perLonger := s.weights.Prefix*s.costs.Compute, s.weights.Load*s.costs.Compute, s.perLonger()
	slope, threshold := c.aheadLine(r.Tokens)
	best, bestOpen, bestAny := candidates{-1, -1}, 0.0, 0.0
	for n := range places {
		i := s.first + n
		if i >= len(places) {
			i -= len(places)
		}
		place := &places[i]
		value, cached := s.values[place.Rank], 0
		if place.Cached.Tokens > 0 {
			cached = min(place.Cached.Tokens, r.Tokens)
			value += perCached * min(place.Cached.Due, float64(cached))
		}
		load := perAhead * (slope*float64(place.Outstanding) - threshold)
		if load > 0 {
			value -= load
		} else {
			s.notAhead[place.Rank] = true
		}
		value -= perLonger * c.longer(r, place)
		if float64(r.Tokens-cached) <= s.rooms[place.Rank] &&
			(best.open < 0 || value > bestOpen || value == bestOpen && place.Outstanding < places[best.open].Outstanding) {
			best.open, bestOpen = i, value
		}
		if best.any < 0 || value > bestAny || value == bestAny && place.Outstanding < places[best.any].Outstanding {
			best.any, bestAny = i, value
		}
	}
	return best
}

// leastServed returns the rank with the lowest load over the last requests relative to its share, among the ranks with
// a place.
func (s *Scheduler) leastServed(places []Place) int {
	load := func(i int) float64 { return float64(s.recent.load[places[i].Rank]) / s.shares[places[i].Rank] }
	at := s.best(places, func(int) bool { return true }, func(i, than int) bool { return load(i) < load(than) })
	return places[at].Rank
}
