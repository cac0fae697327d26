package dispatch

import (
	"fmt"
	"strings"
)

// Policy names a way to choose ranks for requests.
type Policy string

// The policies.
const (
	// Price takes the best score less the rank's price, among ranks below the cap; prices rise with load.
	Price Policy = "price"
	// Masked takes the best score among ranks that have not yet had a request in the present round.
	Masked Policy = "masked"
	// Window assigns a queue of requests exactly, the same number to each rank.
	Window Policy = "window"
	// RoundRobin takes one rank after the other.
	RoundRobin Policy = "round-robin"
	// LeastLoaded takes the rank with the fewest tokens among the last requests.
	LeastLoaded Policy = "least-loaded"
	// Prefix takes the rank that served the longest known prefix of the request, while it is below the cap.
	Prefix Policy = "prefix"
)

// Policies lists all policies.
var Policies = []Policy{Price, Masked, Window, RoundRobin, LeastLoaded, Prefix}

// ParsePolicy returns the policy of that name.
func ParsePolicy(name string) (Policy, error) {
	for _, p := range Policies {
		if string(p) == name {
			return p, nil
		}
	}
	return "", fmt.Errorf("policy %q is unknown; allowed is %s", name, strings.Trim(fmt.Sprint(Policies), "[]"))
}

// Weighs reports whether the policy can give ranks unequal shares of the load.
func (p Policy) Weighs() bool { return p == Price || p == LeastLoaded || p == Prefix }

// Arrivals is the number of most recent requests over which load is measured.
const Arrivals = 128

// Request is what is known about a request when it arrives.
type Request struct {
	// Scores are the forecast local shares per rank.
	Scores []float32
	// Tokens is the size of the request.
	Tokens int
	// Prefixes identify ever longer beginnings of the request (see PrefixHashes); only the prefix policy reads them.
	Prefixes []uint64
}

// Scheduler chooses ranks for a stream of requests under one of the policies that decide at once.
type Scheduler struct {
	policy Policy
	cap    float64
	// shares are the parts of the load that ranks are to have; they sum to 1.
	shares []float64
	recent *recent
	prices []float64
	// taken marks the ranks that have had a request in the present round, takenCount how many.
	taken      []bool
	takenCount int
	turn       int
	// sizes, spreads and requests estimate the mean size of a request and the mean lead of its best rank over the mean of
	// all ranks; the price step is relative to both.
	sizes, spreads, requests float64
	prefixes                 *prefixTable
}

// NewScheduler returns a scheduler for a policy other than Window (see Queue). loadCap bounds, for the policies price
// and prefix, a rank's load over the last Arrivals requests, as a multiple of the fair share.
func NewScheduler(policy Policy, ranks int, loadCap float64) (*Scheduler, error) {
	return NewWeightedScheduler(policy, ranks, loadCap, nil)
}

// NewWeightedScheduler returns a scheduler for ranks of those capacities, in any unit; nil is equal shares. Policies that deal out
// equal numbers of requests know no others.
func NewWeightedScheduler(policy Policy, ranks int, loadCap float64, capacity []float64) (*Scheduler, error) {
	switch {
	case capacity != nil && !policy.Weighs():
		return nil, fmt.Errorf("policy %s deals out equal numbers of requests; it knows no rank capacities", policy)
	case policy == Window:
		return nil, fmt.Errorf("policy %s decides on queues of requests, not on one at a time", policy)
	case ranks < 1:
		return nil, fmt.Errorf("%d ranks; at least 1 is needed", ranks)
	case !(loadCap >= 1):
		return nil, fmt.Errorf("cap is %v; it must be at least 1", loadCap)
	}
	if _, err := ParsePolicy(string(policy)); err != nil {
		return nil, err
	}
	s := &Scheduler{
		policy: policy, cap: loadCap, shares: sharesOf(capacity, ranks), recent: newRecent(ranks),
		prices: make([]float64, ranks), taken: make([]bool, ranks),
	}
	if policy == Prefix {
		s.prefixes = newPrefixTable()
	}
	return s, nil
}

// Assign chooses the rank of the next request and takes its load into account.
func (s *Scheduler) Assign(r Request) int {
	s.recent.expire()
	rank := s.choose(r)
	s.recent.add(rank, r.Tokens)
	s.account(rank, r)
	return rank
}

func (s *Scheduler) choose(r Request) int {
	switch s.policy {
	case Masked:
		return s.bestFree(r.Scores)
	case RoundRobin:
		return s.turn
	case LeastLoaded:
		return s.leastLoaded()
	case Prefix:
		if rank, known := s.prefixes.lookup(r.Prefixes); known && rank < len(s.prices) && !s.refuses(rank, r.Tokens) {
			return rank
		}
		return s.leastLoaded()
	default:
		return s.bestPriced(r)
	}
}

// refuses reports whether the request would take the rank above the cap over the last requests, this one included. A
// window that is not yet full is filled up in part: otherwise the first requests would find every rank above the cap, and be
// placed by load alone.
func (s *Scheduler) refuses(rank, tokens int) bool {
	missing := s.recent.missing(tokens)
	fair := (float64(s.recent.total+tokens) + missing) * s.shares[rank]
	return float64(s.recent.load[rank]+tokens)+missing*s.shares[rank] > s.cap*fair
}

func (s *Scheduler) bestPriced(r Request) int {
	best, bestValue := -1, 0.0
	for rank, price := range s.prices {
		if s.refuses(rank, r.Tokens) {
			continue
		}
		if value := float64(r.Scores[rank]) - price; best < 0 || value > bestValue {
			best, bestValue = rank, value
		}
	}
	if best < 0 {
		return s.leastLoaded()
	}
	return best
}

// bestFree masks the ranks that already have a request of the round; the mask is lifted when all have one.
func (s *Scheduler) bestFree(scores []float32) int {
	best := -1
	for rank, taken := range s.taken {
		if !taken && (best < 0 || scores[rank] > scores[best]) {
			best = rank
		}
	}
	return best
}

// priceStep is the rise of a rank's price for one request of mean size, as a fraction of the mean lead of a request's
// best rank: models differ in how far their scores spread. Chosen by cross-validation within profiles: between 0.1 and 0.25
// locality differs by half a percent.
const priceStep = 0.15

func (s *Scheduler) account(rank int, r Request) {
	switch s.policy {
	case Price:
		s.raise(rank, r)
	case Masked:
		s.taken[rank] = true
		if s.takenCount++; s.takenCount == len(s.taken) {
			clear(s.taken)
			s.takenCount = 0
		}
	case RoundRobin:
		s.turn = (s.turn + 1) % len(s.prices)
	case Prefix:
		s.prefixes.remember(r.Prefixes, rank)
	}
}

// raise lets the price of the chosen rank follow its load; the mean of all prices stays.
func (s *Scheduler) raise(rank int, r Request) {
	s.requests++
	s.sizes += float64(r.Tokens)
	s.spreads += spread(r.Scores[:len(s.prices)])
	if s.sizes == 0 {
		return
	}
	rise := priceStep * (s.spreads / s.requests) * float64(r.Tokens) / (s.sizes / s.requests)
	s.prices[rank] += rise
	for i := range s.prices {
		s.prices[i] -= rise * s.shares[i]
	}
}

// spread is the lead of the best score over the mean.
func spread(scores []float32) float64 {
	best, sum := scores[0], float64(0)
	for _, score := range scores {
		best = max(best, score)
		sum += float64(score)
	}
	return float64(best) - sum/float64(len(scores))
}

// recent holds the load of the last requests, the one to be decided included: at most Arrivals-1 earlier ones.
type recent struct {
	ranks, tokens [Arrivals]int
	next, count   int
	load          []int
	total         int
}

func newRecent(ranks int) *recent { return &recent{load: make([]int, ranks)} }

// expire makes room for the next request.
func (r *recent) expire() {
	if r.count < Arrivals {
		return
	}
	oldest := (r.next - r.count + Arrivals) % Arrivals
	r.load[r.ranks[oldest]] -= r.tokens[oldest]
	r.total -= r.tokens[oldest]
	r.count--
}

func (r *recent) add(rank, tokens int) {
	r.ranks[r.next], r.tokens[r.next] = rank, tokens
	r.load[rank] += tokens
	r.total += tokens
	r.next = (r.next + 1) % Arrivals
	r.count++
}

// fillUp is the share of a window's missing requests that counts as served evenly: more locality at the start for less
// balance. In full, a rank may have 1.5 times its share after 40 requests at a cap of 1.15; by half, 1.25 times. By
// cross-validation within profiles the other half is worth 0.5% of locality at 8 ranks, which is not worth that.
const fillUp = 0.5

// missing is the load that stands for the requests that a full window would hold besides those seen and the next one, at
// the mean size of these.
func (r *recent) missing(next int) float64 {
	return fillUp * float64(Arrivals-1-r.count) * float64(r.total+next) / float64(r.count+1)
}

// leastLoaded is the rank with the least load for its share.
func (s *Scheduler) leastLoaded() int {
	best := 0
	for rank, load := range s.recent.load {
		if float64(load)*s.shares[best] < float64(s.recent.load[best])*s.shares[rank] {
			best = rank
		}
	}
	return best
}
