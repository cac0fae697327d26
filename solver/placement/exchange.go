// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"cmp"
	"math"
	"slices"

	"github.com/semmoe/operator/solver/assign"
)

const (
	// exchangeRounds is the maximum number of rounds of swaps for one placement. The search ends earlier without a
	// gain.
	exchangeRounds = 4
	// exchangeTries is the number of swaps per expert that a round tries.
	exchangeTries = 1
	// exchangeMinGain is the minimum gain of a swap as a share of all activations, above rounding errors.
	exchangeMinGain = 1e-7
)

// exchange is a placement of one layer during local search at given prices. The value of a swap is exact: every token
// ID that activates one of the two experts is reassigned to its best rank. The Gram matrix and the assignment for given
// token ranks do not model this reassignment, and stop at placements that this search still improves.
type exchange struct {
	search  *layerSearch
	columns columns
	rankOf  []int
	// net is the value of each token ID on each rank, minus the price of its size [token IDs × ranks]. best are its
	// best ranks.
	net  []float32
	best []choice
	// tokens are the token IDs that a swap changes. deltas are the gain of each on the first rank, and its loss on
	// the second.
	tokens []int32
	deltas []float32
}

// choice contains a token's three best ranks, best first, with their values. At least one of three is not changed by a
// swap. Missing ranks have value -Inf.
type choice struct {
	rank  [3]int32
	value [3]float32
}

// columns is a sparse matrix by expert: the rows that activate it, ascending, and their counts.
type columns struct {
	start []int
	row   []int32
	count []float32
}

func (s *sparseRows) columns(experts int) columns {
	c := columns{make([]int, experts+1), make([]int32, len(s.expert)), make([]float32, len(s.expert))}
	for _, e := range s.expert {
		c.start[e+1]++
	}
	for e := range experts {
		c.start[e+1] += c.start[e]
	}
	next := slices.Clone(c.start)
	for r := range len(s.start) - 1 {
		experts, counts := s.row(r)
		for i, e := range experts {
			c.row[next[e]], c.count[next[e]] = int32(r), counts[i]
			next[e]++
		}
	}
	return c
}

func (c *columns) column(e int) ([]int32, []float32) {
	return c.row[c.start[e]:c.start[e+1]], c.count[c.start[e]:c.start[e+1]]
}

func (s *layerSearch) newExchange() *exchange {
	return &exchange{
		search: s, columns: s.rows.columns(s.counts.Experts), net: make([]float32, len(s.tokens)*s.ranks), best: make([]choice, len(s.tokens)),
	}
}

// exchanged improves a placement by rounds of swaps, as long as recomputed prices confirm a gain.
func (s *layerSearch) exchanged(c candidate) candidate {
	if s.ranks < 2 {
		return c
	}
	x := s.newExchange()
	for range exchangeRounds {
		if s.stop.reached() {
			break
		}
		x.rankOf = slices.Clone(c.rankOf)
		if !x.round(c.prices) {
			break
		}
		prices, value := s.valueIn(s.steps()/3, x.rankOf, c.prices)
		if value <= c.value*(1+1e-6) {
			break
		}
		c = candidate{x.rankOf, prices, value}
	}
	return c
}

// round tries the most promising swaps, and takes those with a gain.
func (x *exchange) round(prices assign.Prices) (taken bool) {
	weight := x.search.affinities(x.rankOf, prices)
	x.settle(prices)
	for _, swap := range x.promising(weight) {
		if x.rankOf[swap.e] == x.rankOf[swap.f] {
			continue
		}
		x.change(swap.e, swap.f)
		if x.gain(swap.e, swap.f) > exchangeMinGain*x.search.activations {
			x.swap(swap.e, swap.f)
			taken = true
		}
	}
	return taken
}

// settle computes net and best from the current scores of the search.
func (x *exchange) settle(prices assign.Prices) {
	ranks := x.search.ranks
	price := make([]float32, ranks)
	for rank, p := range prices {
		price[rank] = float32(p)
	}
	for token, size := range x.search.sizes {
		net := x.net[token*ranks : (token+1)*ranks]
		for rank, p := range price {
			net[rank] = -size * p
		}
		x.search.balance.AddScores(net, token)
		x.best[token] = choose(net)
	}
}

// choose returns the three best ranks.
func choose(net []float32) choice {
	lowest := float32(math.Inf(-1))
	c := choice{[3]int32{-1, -1, -1}, [3]float32{lowest, lowest, lowest}}
	for rank, v := range net {
		if v > c.value[2] {
			c.insert(int32(rank), v)
		}
	}
	return c
}

// insert adds a rank whose value is above the third one.
func (c *choice) insert(rank int32, v float32) {
	at := 2
	for at > 0 && v > c.value[at-1] {
		c.rank[at], c.value[at] = c.rank[at-1], c.value[at-1]
		at--
	}
	c.rank[at], c.value[at] = rank, v
}

// update corrects the choice after the values of two ranks have changed.
func (c *choice) update(net []float32, p, q int) {
	if c.contains(int32(p)) || c.contains(int32(q)) {
		*c = choose(net)
		return
	}
	for _, rank := range [2]int{p, q} {
		if net[rank] > c.value[2] {
			c.insert(int32(rank), net[rank])
		}
	}
}

func (c *choice) contains(rank int32) bool {
	return c.rank[0] == rank || c.rank[1] == rank || c.rank[2] == rank
}

// valueExcept returns the value of the best rank other than two given ranks.
func (c *choice) valueExcept(p, q int32) float32 {
	for i, rank := range c.rank {
		if rank != p && rank != q {
			return c.value[i]
		}
	}
	return c.value[2]
}

// change lists the token IDs that a swap of two experts changes.
func (x *exchange) change(e, f int) {
	x.tokens, x.deltas = x.tokens[:0], x.deltas[:0]
	ofE, countE := x.columns.column(e)
	ofF, countF := x.columns.column(f)
	i, j := 0, 0
	for i < len(ofE) || j < len(ofF) {
		switch {
		case j == len(ofF) || i < len(ofE) && ofE[i] < ofF[j]:
			x.tokens, x.deltas = append(x.tokens, ofE[i]), append(x.deltas, -countE[i])
			i++
		case i == len(ofE) || ofF[j] < ofE[i]:
			x.tokens, x.deltas = append(x.tokens, ofF[j]), append(x.deltas, countF[j])
			j++
		default:
			x.tokens, x.deltas = append(x.tokens, ofE[i]), append(x.deltas, countF[j]-countE[i])
			i++
			j++
		}
	}
}

// gain returns the value of the listed swap in activations.
func (x *exchange) gain(e, f int) float64 {
	p, q := int32(x.rankOf[e]), int32(x.rankOf[f])
	ranks, sum := x.search.ranks, 0.0
	for i, token := range x.tokens {
		net, best, d := x.net[int(token)*ranks:], &x.best[token], x.deltas[i]
		sum += float64(max(net[p]+d, net[q]-d, best.valueExcept(p, q)) - best.value[0])
	}
	return sum
}

// swap performs the listed swap.
func (x *exchange) swap(e, f int) {
	p, q, ranks := x.rankOf[e], x.rankOf[f], x.search.ranks
	for i, token := range x.tokens {
		net := x.net[int(token)*ranks : int(token+1)*ranks]
		net[p] += x.deltas[i]
		net[q] -= x.deltas[i]
		x.best[token].update(net, p, q)
	}
	x.rankOf[e], x.rankOf[f] = q, p
}

// pair is a candidate swap of two experts, with a lower bound of its gain: the gain without reassigning tokens.
type pair struct {
	e, f int
	gain float32
}

// promising lists the swaps with the largest gains without reassigning tokens, which include each expert's best swap
// with every other rank. weight contains each expert's activations by the tokens of each rank.
func (x *exchange) promising(weight []float32) []pair {
	n, ranks := len(x.rankOf), x.search.ranks
	size := n / x.search.groups
	lists := make([]pair, ranks)
	var pairs []pair
	for e, p := range x.rankOf {
		for rank := range lists {
			lists[rank].f = -1
		}
		ofE := weight[e*ranks : (e+1)*ranks]
		for f := e - e%size; f < e-e%size+size; f++ {
			q := x.rankOf[f]
			if q == p {
				continue
			}
			gain := ofE[q] - ofE[p] + weight[f*ranks+p] - weight[f*ranks+q]
			if lists[q].f < 0 || gain > lists[q].gain {
				lists[q] = pair{min(e, f), max(e, f), gain}
			}
		}
		for _, best := range lists {
			if best.f >= 0 {
				pairs = append(pairs, best)
			}
		}
	}
	pairs = highestGains(pairs, 2*exchangeTries*n) // each pair is listed at most twice
	slices.SortFunc(pairs, func(a, b pair) int {
		return cmp.Or(cmp.Compare(b.gain, a.gain), cmp.Compare(a.e, b.e), cmp.Compare(a.f, b.f))
	})
	pairs = slices.CompactFunc(pairs, func(a, b pair) bool { return a.e == b.e && a.f == b.f })
	return pairs[:min(len(pairs), exchangeTries*n)]
}

// highestGains keeps at least the given number of pairs, those of the highest gains, because sorting all is slow.
func highestGains(pairs []pair, count int) []pair {
	if len(pairs) <= count {
		return pairs
	}
	gains := make([]float32, len(pairs))
	for i := range pairs {
		gains[i] = pairs[i].gain
	}
	slices.Sort(gains)
	least := gains[len(gains)-count]
	return slices.DeleteFunc(pairs, func(p pair) bool { return p.gain < least })
}
