package placement

import (
	"math"
	"math/rand/v2"
	"slices"

	"github.com/semmoe/operator/solver/assign"
)

// limits are the constraints of one layer, with the sums that tell in O(1) whether two experts may change places. Where
// ranks hold whole groups, the groups are the experts here.
type limits struct {
	ranks, groups int
	// pinned is the rank of an expert that may not move, or -1.
	pinned []int
	// held says which rank holds which expert in the current placement [experts × ranks]; nil where there is none.
	held []bool
	// each is how many experts move with one here, base how many move whatever is chosen, budget how many may.
	each, base, budget int
	// extra is how many slots a rank has beyond the experts that it holds. So many move to it whatever is chosen, and those that change
	// their rank are among them: copies of what it holds leave these slots free.
	extra int
	// stay says that the placement of least effort is the current one.
	stay bool
	// cost is what a move costs.
	cost float64
	// loads are the experts' activations, most what a rank may have of them.
	loads []float64
	most  float64
	// moved and load are those of the placement under search, missing how many experts each rank is given that it does not hold.
	moved   int
	missing []int
	load    []float64
}

// begin takes over a placement that is to be searched from.
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

// moves is how many experts a rank is given that it does not hold when e goes to it.
func (l *limits) moves(e, rank int) int {
	if l.held == nil || l.held[e*l.ranks+rank] {
		return 0
	}
	return l.each
}

// moreMoves is how many more experts have moved when e, on rank p, and f, on rank q, change places.
func (l *limits) moreMoves(e, f, p, q int) int {
	if l.held == nil {
		return 0
	}
	return l.moreOn(p, l.moves(f, p)-l.moves(e, p)) + l.moreOn(q, l.moves(e, q)-l.moves(f, q))
}

// moreOn is how many more experts have moved to a rank that is given so many more that it does not hold.
func (l *limits) moreOn(rank, missing int) int {
	return max(l.missing[rank]+missing, l.extra) - max(l.missing[rank], l.extra)
}

// allows reports whether they may. What breaks a limit already may only get better.
func (l *limits) allows(e, f, p, q int) bool {
	if l.pinned[e] >= 0 || l.pinned[f] >= 0 {
		return false
	}
	if more := l.moreMoves(e, f, p, q); more > 0 && l.moved+more > l.budget {
		return false
	}
	return math.IsInf(l.most, 1) || l.lessExcess(e, f, p, q) >= 0
}

// lessExcess is by how much loads exceed the limit less after the change.
func (l *limits) lessExcess(e, f, p, q int) float64 {
	d := l.loads[f] - l.loads[e]
	return l.above(l.load[p]) + l.above(l.load[q]) - l.above(l.load[p]+d) - l.above(l.load[q]-d)
}

// above is what a load exceeds the limit by, beyond rounding.
func (l *limits) above(load float64) float64 {
	if load <= l.most*(1+1e-9) {
		return 0
	}
	return load - l.most
}

// swapped notes that they have changed places.
func (l *limits) swapped(e, f, p, q int) {
	l.moved += l.moreMoves(e, f, p, q)
	l.missing[p] += l.moves(f, p) - l.moves(e, p)
	l.missing[q] += l.moves(e, q) - l.moves(f, q)
	l.load[p] += l.loads[f] - l.loads[e]
	l.load[q] += l.loads[e] - l.loads[f]
}

// excess is by how much a placement's loads exceed the limit, over all ranks.
func (l *limits) excess(rankOf []int) float64 {
	l.begin(rankOf)
	sum := 0.0
	for _, load := range l.load {
		sum += l.above(load)
	}
	return sum
}

// migration is what the moves of a placement cost.
func (l *limits) migration(rankOf []int) float64 {
	l.begin(rankOf)
	return l.cost * float64(l.moved)
}

// nearest is the placement with the most experts on the ranks that like says [experts × ranks, larger is better], pins kept.
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

// pinScore is more than all experts together are worth where they are liked.
const pinScore = 1 << 20

// fewestMoves is the placement of the fewest moves, and the most like another one among those [experts × ranks, at most 1]. The slots
// that a rank has beyond the experts that it holds are a bin of their own, in which all experts are as welcome as those that stay.
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

// simple is the placement of least effort: the current one where that is to stay, else the contiguous one, as far as pins and loads
// allow.
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

// towards is the placement nearest to another, with names of ranks as they are.
func (l *limits) towards(rankOf []int, random *rand.Rand) []int {
	like := make([]float32, len(rankOf)*l.ranks)
	for e, rank := range rankOf {
		like[e*l.ranks+rank] = 1
	}
	near := l.nearest(like)
	l.repair(near, random)
	return near
}

// keeps reports whether pins and budget hold.
func (l *limits) keeps(rankOf []int) bool {
	l.begin(rankOf)
	for e, rank := range l.pinned {
		if rank >= 0 && rankOf[e] != rank {
			return false
		}
	}
	return l.moved <= l.budget
}

// repairRounds is how often repair begins again after it got stuck, repairKicks how many changes it makes at random then.
const (
	repairRounds = 60
	repairKicks  = 4
)

// repair changes places until no rank's load exceeds the limit, as far as it finds a way: the best change first, and a few
// at random where none is better. It leaves the best placement that it has seen.
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

// swapAny changes two experts' places where pins and budget allow, whatever the loads.
func (l *limits) swapAny(rankOf []int, e, f int) {
	p, q := rankOf[e], rankOf[f]
	more := l.moreMoves(e, f, p, q)
	if p == q || l.pinned[e] >= 0 || l.pinned[f] >= 0 || more > 0 && l.moved+more > l.budget {
		return
	}
	l.swapped(e, f, p, q)
	rankOf[e], rankOf[f] = q, p
}

// lower takes the change that lowers the excess most until none does by more than rounding.
func (l *limits) lower(rankOf []int) {
	size := len(rankOf) / l.groups
	for {
		bestE, bestF, none := 0, 0, 1e-9*l.most
		best := none
		for e, p := range rankOf {
			for f := e - e%size; f < e; f++ {
				q := rankOf[f]
				if p == q || l.load[p] <= l.most && l.load[q] <= l.most || !l.allows(e, f, p, q) {
					continue
				}
				if less := l.lessExcess(e, f, p, q); less > best {
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
