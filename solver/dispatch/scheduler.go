package dispatch

import "fmt"

// Options are the settings of a Scheduler.
type Options struct {
	// Policy is one that decides at once; for the others see Queue and Line.
	Policy Policy
	// Ranks is the number of ranks of a pod.
	Ranks int
	// Cap bounds, for the policies Price and Prefix, a rank's load over the last Arrivals requests as a multiple of its share; at
	// least 1.
	Cap float64
	// Capacity are the ranks' shares of the load, in any unit; nil is equal shares. Policies that deal out equal numbers of
	// requests know no others.
	Capacity []float64
	// Weights and Costs make the value of a place.
	Weights Weights
	Costs   Costs
	// Patient tells, of the policy Price, that requests wait until they may go (see MayGo).
	Patient bool
	// First is the place that comes first of equals in the first decision: schedulers that share places are given different ones.
	First int
}

func (o *Options) validate() error {
	switch {
	case o.Capacity != nil && !o.Policy.Weighs():
		return fmt.Errorf("policy %s deals out equal numbers of requests; it knows no rank capacities", o.Policy)
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

// Scheduler chooses places for a stream of requests under one of the policies that decide at once. Prices and the cap are by
// rank: the pods of a rank hold the same experts, and differ by what they have cached and outstanding.
type Scheduler struct {
	policy  Policy
	cap     float64
	weights Weights
	costs   Costs
	// shares are the parts of the load that ranks are to have; they sum to 1.
	shares []float64
	recent *recent
	// prices are the parts of the prices that add up what ranks have had beyond their shares, in local shares.
	prices []float64
	// rooms, asks and values are those of the present decision, by rank: how much it has room for, its price in local shares, and
	// what an idle place there is worth that holds nothing.
	rooms, asks, values []float64
	// inLine marks the ranks with a place, in the latest decision, that is not far ahead of the others in what it has yet to do.
	inLine []bool
	// taken marks the ranks that have had a request in the present round, takenCount how many.
	taken      []bool
	takenCount int
	// turn is the next rank of RoundRobin, first the place at which the present search begins: equals take turns.
	turn, first int
	// sizes over sized requests is their mean size, spreads over those that were scored the mean lead of the best rank over the mean
	// of all ranks; prices are relative to both.
	sizes, sized, spreads, scored float64
	// step is the rise of prices under the cap.
	step float64
}

// NewScheduler returns a scheduler.
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
		values: make([]float64, o.Ranks), inLine: make([]bool, o.Ranks), step: step, taken: make([]bool, o.Ranks), first: o.First - 1,
	}, nil
}

// Load is the rank's load over the last requests, in tokens.
func (s *Scheduler) Load(rank int) int { return s.recent.load[rank] }

// Decide chooses one of the places, of which there must be at least one, for a request. It changes nothing that later
// decisions depend on but which of equals comes first: the rest is for Take.
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
		at = s.soonest(r, places, c) // nothing speaks for a place but that it is idle
	}
	return s.weigh(r, at, &places[at], c)
}

// begin readies a decision among that many places.
func (s *Scheduler) begin(places int) {
	s.first = (s.first + 1) % places
	s.measure()
}

// Take accounts for a request at the place that was decided on. A request that is sent again counts once.
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

// best is the place that no allowed one is better than, of equals the first in turn; -1 where none is allowed.
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

// anyRank stands for all ranks.
const anyRank = -1

// idlestOf is the place of a rank with the fewest outstanding tokens for the rank's share.
func (s *Scheduler) idlestOf(rank int, places []Place) int {
	return s.best(places,
		func(i int) bool { return rank == anyRank || places[i].Rank == rank },
		func(i, than int) bool { return s.idler(&places[i], &places[than]) })
}

// soonest is the place where a request waits least, and makes others wait least; of several the one with the fewest outstanding tokens.
func (s *Scheduler) soonest(r *Request, places []Place, c crowd) int {
	wait := func(i int) float64 { d := s.weigh(r, i, &places[i], c); return d.Load + d.Wait }
	return s.best(places, func(int) bool { return true }, func(i, than int) bool {
		if own, other := wait(i), wait(than); own != other {
			return own < other
		}
		return s.idler(&places[i], &places[than])
	})
}

// idler reports whether a place has fewer outstanding tokens than another, for the shares of their ranks.
func (s *Scheduler) idler(place, than *Place) bool {
	return float64(place.Outstanding)*s.shares[than.Rank] < float64(than.Outstanding)*s.shares[place.Rank]
}

// bestFree is the rank of the best score among those that have not had a request in the round and have a place; among all
// that have a place where no other is left.
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

// nextInTurn is the next rank that has a place.
func (s *Scheduler) nextInTurn(places []Place) int {
	ranks := len(s.prices)
	wait := func(i int) int { return (places[i].Rank - s.turn + ranks) % ranks }
	at := s.best(places, func(int) bool { return true }, func(i, than int) bool { return wait(i) < wait(than) })
	return places[at].Rank
}

// mostCached is the place that holds most of the request among those below the cap, then the one with the fewest outstanding
// tokens.
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

// measure notes what ranks have room for and cost.
func (s *Scheduler) measure() {
	for rank, share := range s.shares {
		s.rooms[rank] = s.recent.room(rank, share, s.cap)
		s.asks[rank] = s.price(rank)
	}
}

// open reports whether the request leaves the place's rank at or below the cap.
func (s *Scheduler) open(r *Request, place *Place) bool {
	return float64(r.Tokens-cachedOf(r, place)) <= s.rooms[place.Rank]
}

// mostValuable is the place of the highest value whose rank is below the cap. Where all are above it, it is one on the rank
// with the least load for its share. The cap is about tokens sent and does not see that a rank has stopped answering: where
// the place is far ahead of the others in what it has yet to do, it is waived.
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

// candidates are the places of the highest value: of those below the cap, -1 where there is none, and of all.
type candidates struct{ open, any int }

// compare values all places. There may be thousands: what is the same for all places of a rank is computed once. Values are those
// of weigh, and equal ones are told apart by outstanding tokens.
func (s *Scheduler) compare(r *Request, places []Place, c crowd) candidates {
	length := s.weights.Affinity * s.costs.Exchange * float64(r.Tokens)
	for i, ask := range s.asks {
		s.values[i] = -length * ask
		if r.Scores != nil {
			s.values[i] += length * float64(r.Scores[i])
		}
		s.inLine[i] = false
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
			s.inLine[place.Rank] = true
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

// leastServed is the rank with the least load for its share over the last requests, of those that have a place.
func (s *Scheduler) leastServed(places []Place) int {
	load := func(i int) float64 { return float64(s.recent.load[places[i].Rank]) / s.shares[places[i].Rank] }
	at := s.best(places, func(int) bool { return true }, func(i, than int) bool { return load(i) < load(than) })
	return places[at].Rank
}
