package dispatch

import "math"

// Preferences are the ranks that the tokens of a vocabulary favour in a layer, as a plan's table has them.
type Preferences struct {
	// Ranks are the best ranks of each token id, the best first, Scores their shares of its activations times math.MaxUint16 [vocabulary × Best]. What they
	// leave of the whole is spread evenly over the other ranks.
	Ranks, Scores []uint16
	// Best is how many ranks are kept of each token id.
	Best int
}

// Aligner assigns the tokens of a batch to ranks so that each has exactly its share, as Shards does, by the rule that the token-shuffle
// consumer follows on GPUs: Algorithm 3's groups of tokens by rank, aligned to the shares by moving those that lose least.
//
// Tokens ask for their best rank. A rank that more ask for than it has room for keeps those who would lose most by going to their next best
// rank with room, the earlier token among equals; the others ask again among the ranks with room. Each round fills a rank or places all
// tokens. Shards finds the highest sum of scores; this comes close to it in a fraction of the time, and in the same way everywhere.
type Aligner struct {
	ranks  int
	shares []float64
	room   []int
	rankOf []uint16
	// open are the tokens without a rank, asks the ranks that they ask for, regrets what they would lose elsewhere, in the same order.
	open    []int32
	asks    []uint16
	regrets []int32
	// coarse and fine count the regrets of those who ask for a rank, by their upper and lower bits (of those at the limit).
	coarse, fine []int32
	limits       []limit
	// hasRoom is all ones for a rank with room, and 0 for the others; choices are those of one token.
	hasRoom, choices []choice
}

// limit is what a rank keeps in a round: regrets above atLeast (-1 where it keeps all), and so many of those equal to it. Before that is
// known, bucket holds the upper bits of atLeast (-1 as well), and below is what the rank keeps of that bucket.
type limit struct{ atLeast, bucket, below, equals int32 }

const (
	fineBits = 8
	// coarseBuckets hold regrets up to 65,536: the highest score less the -1 of a token that no other rank has room for.
	coarseBuckets = 1<<16>>fineBits + 1
)

// NewAligner returns an Aligner for ranks of those capacities, in any unit; nil is equal shares.
func NewAligner(ranks int, capacity []float64) *Aligner {
	return &Aligner{
		ranks: ranks, shares: sharesOf(capacity, ranks), room: make([]int, ranks), hasRoom: make([]choice, ranks), choices: make([]choice, ranks), limits: make([]limit, ranks),
		coarse: make([]int32, ranks*coarseBuckets), fine: make([]int32, ranks<<fineBits),
	}
}

// Align returns the rank of each token of a batch, given their ids, which must lie within the vocabulary of the preferences. Where equal
// shares do not divide the batch, the first ranks have one token more. The result is valid until the next call.
func (a *Aligner) Align(p Preferences, tokens []int32) []uint16 {
	deal(a.room, len(tokens), a.shares)
	a.reset(len(tokens))
	for len(a.open) > 0 {
		a.ask(p, tokens)
		a.limit()
		a.keep()
	}
	return a.rankOf
}

func (a *Aligner) reset(tokens int) {
	a.open = resize(a.open, tokens)
	for i := range a.open {
		a.open[i] = int32(i)
	}
	if cap(a.rankOf) < tokens {
		a.rankOf, a.asks, a.regrets = make([]uint16, tokens), make([]uint16, tokens), make([]int32, tokens)
	}
	a.rankOf = a.rankOf[:tokens]
}

// ask finds the rank that each open token asks for, and counts regrets.
func (a *Aligner) ask(p Preferences, tokens []int32) {
	clear(a.coarse)
	for rank, room := range a.room {
		a.hasRoom[rank] = 0
		if room > 0 {
			a.hasRoom[rank] = math.MaxUint64
		}
	}
	asks, regrets := a.asks[:len(a.open)], a.regrets[:len(a.open)]
	for i, token := range a.open {
		best, second := a.best(p, int(tokens[token]))
		rank, regret := best.rank(), best.over(second)
		asks[i], regrets[i] = rank, regret
		a.coarse[int(rank)*coarseBuckets+int(regret>>fineBits)]++
	}
}

// choice is a rank with a token's score there. A higher score is the larger number, and among equal ones the lower rank is; 0 is none. So the
// best two of several are found without a branch, which the processor could not foretell.
type choice uint64

func newChoice(score uint64, rank uint16) choice {
	return choice(score+1)<<16 | choice(math.MaxUint16-rank)
}

func (c choice) rank() uint16 { return math.MaxUint16 - uint16(c) }

// over is the score less the other's, where that of no choice is -1.
func (c choice) over(other choice) int32 { return int32(c>>16 - other>>16) }

// best are the best and the second best choice of a token id among the ranks with room. Most often these are the first two of the table's
// that have room: where the second has more than the ranks that are not in the table, and less than the first.
func (a *Aligner) best(p Preferences, id int) (best, second choice) {
	ranks, scores := p.Ranks[id*p.Best:(id+1)*p.Best], p.Scores[id*p.Best:(id+1)*p.Best]
	sum := uint64(0)
	for _, score := range scores {
		sum += uint64(score)
	}
	left, others := math.MaxUint16-min(sum, math.MaxUint16), uint64(a.ranks-p.Best)
	first := a.nextWithRoom(ranks, 0)
	if next := a.nextWithRoom(ranks, first+1); next < len(ranks) && scores[first] > scores[next] && (others == 0 || uint64(scores[next])*others > left) {
		return newChoice(uint64(scores[first]), ranks[first]), newChoice(uint64(scores[next]), ranks[next])
	}
	return a.bestOfAll(ranks, scores, left/max(others, 1))
}

// nextWithRoom is the index, from one on, of the first rank that has room.
func (a *Aligner) nextWithRoom(ranks []uint16, from int) int {
	for from < len(ranks) && a.hasRoom[ranks[from]] == 0 {
		from++
	}
	return from
}

// bestOfAll is best in all cases, given what each rank scores that is not in the table.
func (a *Aligner) bestOfAll(ranks, scores []uint16, rest uint64) (best, second choice) {
	for rank := range a.choices {
		a.choices[rank] = newChoice(rest, uint16(rank))
	}
	for i, rank := range ranks {
		a.choices[rank] = newChoice(uint64(scores[i]), rank)
	}
	for rank, c := range a.choices {
		c &= a.hasRoom[rank]
		best, second = max(best, c), max(second, min(best, c))
	}
	return best, second
}

// limit finds, for each rank that more tokens ask for than it has room for, the regret below which it keeps none.
func (a *Aligner) limit() {
	for rank := range a.limits {
		l := &a.limits[rank]
		l.bucket, l.below = crossing(a.coarse[rank*coarseBuckets:(rank+1)*coarseBuckets], int32(a.room[rank]))
		l.atLeast, l.equals = -1, 0
	}
	clear(a.fine)
	for i, regret := range a.regrets[:len(a.open)] {
		if rank := int(a.asks[i]); regret>>fineBits == a.limits[rank].bucket {
			a.fine[rank<<fineBits+int(regret&(1<<fineBits-1))]++
		}
	}
	for rank := range a.limits {
		if l := &a.limits[rank]; l.bucket >= 0 {
			value, left := crossing(a.fine[rank<<fineBits:(rank+1)<<fineBits], l.below)
			l.atLeast, l.equals = l.bucket<<fineBits|value, left
		}
	}
}

// crossing is the bucket in which counts, from the last bucket on, exceed a room, and what is left of the room for that bucket; -1 where
// they never do.
func crossing(counts []int32, room int32) (bucket, left int32) {
	for i := len(counts) - 1; i >= 0; i-- {
		if counts[i] > room {
			return int32(i), room
		}
		room -= counts[i]
	}
	return -1, room
}

// keep places the tokens that their ranks keep; the others stay open.
func (a *Aligner) keep() {
	left := a.open[:0]
	for i, token := range a.open {
		rank, regret := a.asks[i], a.regrets[i]
		if l := &a.limits[rank]; regret <= l.atLeast {
			if regret < l.atLeast || l.equals == 0 {
				left = append(left, token)
				continue
			}
			l.equals--
		}
		a.rankOf[token] = rank
		a.room[rank]--
	}
	a.open = left
}
