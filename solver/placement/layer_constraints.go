// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"math"
	"math/rand/v2"
	"slices"

	"github.com/semmoe/operator/solver/assign"
)

// limits are the constraints of one layer, with sums that allow to check a swap of two experts in O(1). If ranks
// contain whole groups, the experts here are the groups.
type limits struct {
	ranks, groups int
	// pinned is the rank of a pinned expert, or -1.
	pinned []int
	// held reports which rank contains which expert in the current placement [experts × ranks]; nil without a current
	// placement.
	held []bool
	// each is the number of experts that move with one expert here, base the number of unavoidable moves, budget the
	// maximum number of moves.
	each, base, budget int
	// extra is the number of slots of a rank in excess of the experts that it contains. This many experts move to the
	// rank in any case, including those that change rank, because copies of experts that the rank contains leave these
	// slots free.
	extra int
	// stay reports whether the default placement is the current one.
	stay bool
	// cost is the cost of a move.
	cost float64
	// loads are the activations of the experts, most the maximum load of a rank.
	loads   []float64
	maxLoad float64
	// moved and load belong to the placement being searched. missing is the number of experts that each rank receives
	// and does not contain yet.
	moved   int
	missing []int
	load    []float64
}

// begin sets the placement from which the search starts.
func (l *limits) begin(rankOf []int) {
	l.moved, l.missing, l.load = l.base, make([]int, l.ranks), make([]float64, l.ranks)
	for e, rank := range rankOf {
		l.missing[rank] += l.moves(e, rank)
		l.load[rank] += l.loads[e]
	}
	for _, n := range l.missing {
		l.moved += max(n, l.extra)
	}
}

// moves returns the number of experts that a rank receives and does not contain if e moves to it.
func (l *limits) moves(e, rank int) int {
	if l.held == nil || l.held[e*l.ranks+rank] {
		return 0
	}
	return l.each
}

// moreMoves returns the number of additional moves if e, on rank p, and f, on rank q, are swapped.
func (l *limits) moreMoves(e, f, p, q int) int {
	if l.held == nil {
		return 0
	}
	return l.moreOn(p, l.moves(f, p)-l.moves(e, p)) + l.moreOn(q, l.moves(e, q)-l.moves(f, q))
}

// moreOn returns the number of additional moves to a rank if the number of its missing experts increases.
func (l *limits) moreOn(rank, missing int) int {
	return max(l.missing[rank]+missing, l.extra) - max(l.missing[rank], l.extra)
}

// allows reports whether e and f may be swapped. A violated limit may only improve.
func (l *limits) allows(e, f, p, q int) bool {
	if l.pinned[e] >= 0 || l.pinned[f] >= 0 {
		return false
	}
	if more := l.moreMoves(e, f, p, q); more > 0 && l.moved+more > l.budget {
		return false
	}
	return math.IsInf(l.maxLoad, 1) || l.excessReduction(e, f, p, q) >= 0
}

// excessReduction returns the reduction of the loads' excess by the swap.
func (l *limits) excessReduction(e, f, p, q int) float64 {
	d := l.loads[f] - l.loads[e]
	return l.above(l.load[p]) + l.above(l.load[q]) - l.above(l.load[p]+d) - l.above(l.load[q]-d)
}

// above returns the excess of a load over the limit, beyond rounding.
func (l *limits) above(load float64) float64 {
	if load <= l.maxLoad*(1+1e-9) {
		return 0
	}
	return load - l.maxLoad
}

// swapped records that e and f were swapped.
func (l *limits) swapped(e, f, p, q int) {
	l.moved += l.moreMoves(e, f, p, q)
	l.missing[p] += l.moves(f, p) - l.moves(e, p)
	l.missing[q] += l.moves(e, q) - l.moves(f, q)
	l.load[p] += l.loads[f] - l.loads[e]
	l.load[q] += l.loads[e] - l.loads[f]
}

// excess returns the excess of a placement's loads over the limit, summed over all ranks.
func (l *limits) excess(rankOf []int) float64 {
	l.begin(rankOf)
	sum := 0.0
	for _, load := range l.load {
		sum += l.above(load)
	}
	return sum
}

// migration returns the cost of the moves of a placement.
func (l *limits) migration(rankOf []int) float64 {
	l.begin(rankOf)
	return l.cost * float64(l.moved)
}

// nearest returns the placement that maximizes the sum of like over the experts' ranks [experts × ranks], with pins
// respected.
func (l *limits) nearest(like []float32) []int {
	scores := slices.Clone(like)
	for e, rank := range l.pinned {
		if rank >= 0 {
			scores[e*l.ranks+rank] += pinScore
		}
	}
	var exact exactRanks
	return exact.assign(scores, l.ranks, l.groups)
}

// pinScore exceeds the sum of all other scores.
const pinScore = 1 << 20

// fewestMoves returns the placement with the minimum number of moves, and among those the one that maximizes like
// [experts × ranks, at most 1]. The slots of a rank in excess of the experts that it contains form a separate bin, in
// which all experts have the same score as experts that stay.
func (l *limits) fewestMoves(like []float32) []int {
	n := len(l.pinned)
	tie := 1 / float32(4*n)
	stay := make([]float32, len(like))
	for i, held := range l.held {
		stay[i] = tie * like[i]
		if held {
			stay[i] += 1 + tie
		}
	}
	if l.extra == 0 {
		return l.nearest(stay)
	}
	extra := min(l.extra, n/l.ranks)
	capacity := slices.Repeat([]int{n/l.ranks - extra, extra}, l.ranks)
	scores := make([]float32, 2*len(stay))
	for i, worth := range stay {
		if l.pinned[i/l.ranks] == i%l.ranks {
			worth += pinScore
		}
		scores[2*i], scores[2*i+1] = worth, worth
		if !l.held[i] {
			scores[2*i+1]++
		}
	}
	var exact assign.Solver
	rankOf := slices.Clone(exact.Assign(scores, capacity))
	for e := range rankOf {
		rankOf[e] /= 2
	}
	return rankOf
}

// simple returns the default placement: the current one if stay is set, else the contiguous one, as far as pins and
// loads allow.
func (l *limits) simple(random *rand.Rand) []int {
	n := len(l.pinned)
	like := make([]float32, n*l.ranks)
	for e, rank := range contiguousRanks(n, l.ranks) {
		like[e*l.ranks+rank] = 1
	}
	var rankOf []int
	if l.stay {
		rankOf = l.fewestMoves(like)
	} else {
		rankOf = l.nearest(like)
	}
	l.repair(rankOf, random)
	return rankOf
}

// towards returns the feasible placement nearest to another, with ranks as numbered there.
func (l *limits) towards(rankOf []int, random *rand.Rand) []int {
	like := make([]float32, len(rankOf)*l.ranks)
	for e, rank := range rankOf {
		like[e*l.ranks+rank] = 1
	}
	near := l.nearest(like)
	l.repair(near, random)
	return near
}

// keeps reports whether the placement respects pins and budget.
func (l *limits) keeps(rankOf []int) bool {
	l.begin(rankOf)
	for e, rank := range l.pinned {
		if rank >= 0 && rankOf[e] != rank {
			return false
		}
	}
	return l.moved <= l.budget
}

// repairRounds is the maximum number of restarts of repair, and repairKicks the number of random swaps before each
// restart.
const (
	repairRounds = 60
	repairKicks  = 4
)

// repair is an iterated local search that swaps experts until no rank's load exceeds the limit, if possible. It takes
// the best swap first, and random swaps in a local optimum. It leaves the best placement found.
func (l *limits) repair(rankOf []int, random *rand.Rand) {
	best := slices.Clone(rankOf)
	least := l.excess(rankOf)
	for range repairRounds {
		if least == 0 {
			break
		}
		l.lower(rankOf)
		if left := l.excess(rankOf); left < least {
			least = left
			copy(best, rankOf)
		}
		for range repairKicks {
			e, f := l.draw(random)
			l.swapAny(rankOf, e, f)
		}
	}
	copy(rankOf, best)
	l.begin(rankOf)
}

// draw picks two experts of one group.
func (l *limits) draw(random *rand.Rand) (e, f int) {
	n := len(l.pinned)
	size := n / l.groups
	e = random.IntN(n)
	return e, e - e%size + random.IntN(size)
}

// swapAny swaps two experts if pins and budget allow it, regardless of loads.
func (l *limits) swapAny(rankOf []int, e, f int) {
	p, q := rankOf[e], rankOf[f]
	more := l.moreMoves(e, f, p, q)
	if p == q || l.pinned[e] >= 0 || l.pinned[f] >= 0 || more > 0 && l.moved+more > l.budget {
		return
	}
	l.swapped(e, f, p, q)
	rankOf[e], rankOf[f] = q, p
}

// lower takes the swap with the largest reduction of the excess until none exceeds rounding.
func (l *limits) lower(rankOf []int) {
	size := len(rankOf) / l.groups
	for {
		bestE, bestF, none := 0, 0, 1e-9*l.maxLoad
		best := none
		for e, p := range rankOf {
			for f := e - e%size; f < e; f++ {
				q := rankOf[f]
				if p == q || l.load[p] <= l.maxLoad && l.load[q] <= l.maxLoad || !l.allows(e, f, p, q) {
					continue
				}
				if less := l.excessReduction(e, f, p, q); less > best {
					bestE, bestF, best = e, f, less
				}
			}
		}
		if best == none {
			return
		}
		l.swapAny(rankOf, bestE, bestF)
	}
}
