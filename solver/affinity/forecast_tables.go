// SPDX-License-Identifier: Apache-2.0

package affinity

import (
	"context"
	"math"
	"slices"

	"github.com/semmoe/operator/solver/trace"
)

// ScoreScale is the quantisation of shares: share = stored score / ScoreScale.
const ScoreScale = math.MaxUint16

// Hosts contains, for each expert of one layer, the ranks that hold a copy of it.
type Hosts [][]int

// RankTable scores the ranks for a token id with attention data parallelism: the expected local share of the token's
// activations, over all MoE layers, if the rank serves its request. The row of an unseen token id is the prior, the
// mean over all tokens.
type RankTable struct {
	// Ranks is the number of ranks.
	Ranks int
	// Score contains shares times ScoreScale [V, ranks].
	Score []uint16
}

// TokenTable scores the ranks for a token id with attention tensor parallelism, by layer. It stores only the best ranks
// of each token.
type TokenTable struct {
	// Layers, Vocabulary and Best are the shape: Best ranks are stored for each layer and token id.
	Layers, Vocabulary, Best int
	// Ranks is the number of ranks.
	Ranks int
	// Rank contains the best ranks in descending order, Score their shares times ScoreScale [layers, V, best].
	Rank  []uint16
	Score []uint16
}

// Estimator converts counts into shares: (counts + Shrinkage occurrences of the prior) / (occurrences + Shrinkage).
// With Shrinkage 0 the shares are the relative frequencies. An unseen token gets the mean of its neighbours' shares, or
// the prior if it has none.
type Estimator struct {
	Shrinkage  float32
	Neighbours *Neighbours
}

// rankShares fills dst with the expected local share of one token id per rank, given the prior's shares.
func (e Estimator) rankShares(dst []float32, c *Counts, token int, hosts Hosts, prior []float32) {
	if c.Occurrences[token] > 0 || e.Neighbours == nil || len(e.Neighbours.Nearest[token]) == 0 {
		e.ownShares(dst, c, token, hosts, prior)
		return
	}
	near := e.Neighbours.Nearest[token]
	sum := make([]float32, len(dst))
	for _, id := range near {
		e.ownShares(dst, c, int(id), hosts, prior)
		for rank, share := range dst {
			sum[rank] += share / float32(len(near))
		}
	}
	copy(dst, sum)
}

// ownShares fills dst with the shares by the token's own counts.
func (e Estimator) ownShares(dst []float32, c *Counts, token int, hosts Hosts, prior []float32) {
	total := c.Occurrences[token] + e.Shrinkage
	if total == 0 {
		copy(dst, prior)
		return
	}
	for i := range dst {
		dst[i] = e.Shrinkage * prior[i] / total
	}
	experts, counts := c.Row(token)
	weight := 1 / (total * float32(c.TopK))
	for i, expert := range experts {
		for _, rank := range hosts[expert] {
			dst[rank] += counts[i] * weight
		}
	}
}

// priorShares returns the shares of a token without information.
func priorShares(c *Counts, hosts Hosts, ranks int) []float32 {
	prior := make([]float32, ranks)
	sum := 0.0
	totals := c.ExpertTotals()
	for _, n := range totals {
		sum += n
	}
	if sum == 0 {
		return prior
	}
	for expert, n := range totals {
		for _, rank := range hosts[expert] {
			prior[rank] += float32(n / sum)
		}
	}
	return prior
}

func quantise(share float32) uint16 {
	return uint16(math.Round(float64(min(max(share, 0), 1)) * ScoreScale))
}

// NewRankTable returns the table for attention data parallelism from the counts of every layer.
func NewRankTable(layers []Counts, hosts []Hosts, ranks int, estimator Estimator) *RankTable {
	vocabulary := layers[0].Vocabulary()
	table := &RankTable{Ranks: ranks, Score: make([]uint16, vocabulary*ranks)}
	priors := make([][]float32, len(layers))
	for l := range layers {
		priors[l] = priorShares(&layers[l], hosts[l], ranks)
	}
	sum, shares := make([]float32, ranks), make([]float32, ranks)
	for token := range vocabulary {
		clear(sum)
		for l := range layers {
			estimator.rankShares(shares, &layers[l], token, hosts[l], priors[l])
			for i, share := range shares {
				sum[i] += share
			}
		}
		for i, s := range sum {
			table.Score[token*ranks+i] = quantise(s / float32(len(layers)))
		}
	}
	return table
}

// Vocabulary returns the number of token ids.
func (t *RankTable) Vocabulary() int { return len(t.Score) / t.Ranks }

const (
	// scoreBlock is the number of ranks that are summed together in registers.
	scoreBlock = 8
	// scoreRun is the number of tokens that are summed for one group of scoreRanks ranks before the next group, with
	// scores are adjacent in memory: few enough for the nearest processor cache, and enough for the processor to fetch
	// many at a time.
	scoreRun   = 128
	scoreRanks = 8 * scoreBlock
)

// ScoreTokens fills dst with the mean share per rank over the tokens of a request. Token ids beyond the table have
// share 0 on every rank.
func (t *RankTable) ScoreTokens(dst []float32, tokens []int32) {
	var rows [scoreRun]int
	var sums [scoreRanks]uint64
	for first := 0; first < t.Ranks; first += scoreRanks {
		clear(sums[:])
		n := min(scoreRanks, t.Ranks-first)
		for run := range slices.Chunk(tokens, scoreRun) {
			t.addRun(sums[:n], t.rows(&rows, first, run))
		}
		for i, sum := range sums[:n] {
			dst[first+i] = float32(float64(sum) / (ScoreScale * float64(max(len(tokens), 1))))
		}
	}
}

// rows returns the offsets of the scores of a rank for a run of tokens, without tokens beyond the table.
func (t *RankTable) rows(buffer *[scoreRun]int, rank int, run []int32) []int {
	n := 0
	for _, token := range run {
		// Negative ids are beyond the table as well.
		if at := uint64(uint32(token)) * uint64(t.Ranks); at < uint64(len(t.Score)) {
			buffer[n] = int(at) + rank
			n++
		}
	}
	return buffer[:n]
}

// addRun adds the scores of consecutive ranks over a run of tokens, given the offsets of the first rank's scores.
func (t *RankTable) addRun(sums []uint64, rows []int) {
	rank := 0
	for ; rank+scoreBlock <= len(sums); rank += scoreBlock {
		addBlock((*[scoreBlock]uint64)(sums[rank:]), t.Score[rank:], rows)
	}
	for ; rank < len(sums); rank++ {
		for _, at := range rows {
			sums[rank] += uint64(t.Score[at+rank])
		}
	}
}

// addBlock adds the scores of scoreBlock ranks over a run of tokens. Four scores are read as one word (the compiler
// emits one load), and added as two pairs of 32-bit sums, which cannot overflow within scoreRun tokens.
func addBlock(sums *[scoreBlock]uint64, scores []uint16, rows []int) {
	const pair = 0x0000ffff_0000ffff
	var even0, odd0, even1, odd1 uint64
	for _, at := range rows {
		row := (*[scoreBlock]uint16)(scores[at:])
		low := uint64(row[0]) | uint64(row[1])<<16 | uint64(row[2])<<32 | uint64(row[3])<<48
		high := uint64(row[4]) | uint64(row[5])<<16 | uint64(row[6])<<32 | uint64(row[7])<<48
		even0 += low & pair
		odd0 += low >> 16 & pair
		even1 += high & pair
		odd1 += high >> 16 & pair
	}
	for i, s := range [...]uint64{even0, odd0, even1, odd1} {
		first := i/2*4 + i%2
		sums[first] += s & math.MaxUint32
		sums[first+2] += s >> 32
	}
}

// Forecast returns the table's scores of the requests of a trace.
func (t *RankTable) Forecast(of *trace.Trace) RequestForecast { return RequestForecast{t, of} }

// RequestForecast scores whole requests of a trace.
type RequestForecast struct {
	table *RankTable
	trace *trace.Trace
}

// Score fills dst with the expected local share of the request on each rank.
func (f RequestForecast) Score(dst []float32, request int) {
	f.table.ScoreTokens(dst, f.trace.Request(request))
}

// ScoreFirst fills dst with the expected local share on each rank by the first tokens of the request only.
func (f RequestForecast) ScoreFirst(dst []float32, request, tokens int) {
	f.table.ScoreTokens(dst, f.trace.Request(request)[:tokens])
}

// NewTokenTable returns the table for attention tensor parallelism with the best ranks of each token.
func NewTokenTable(layers []Counts, hosts []Hosts, ranks, best int, estimator Estimator) *TokenTable {
	return new(TokenTable).Rebuild(layers, hosts, ranks, best, estimator)
}

// Rebuild builds the table in the memory of a table that is no longer used, as far as that is enough.
func (t *TokenTable) Rebuild(layers []Counts, hosts []Hosts, ranks, best int, estimator Estimator) *TokenTable {
	vocabulary := layers[0].Vocabulary()
	best = min(best, ranks)
	size := len(layers) * vocabulary * best
	if cap(t.Rank) < size || cap(t.Score) < size {
		t.Rank, t.Score = make([]uint16, size), make([]uint16, size)
	}
	table := &TokenTable{Layers: len(layers), Vocabulary: vocabulary, Best: best, Ranks: ranks, Rank: t.Rank[:size], Score: t.Score[:size]}
	// Parallel returns only the error of its context.
	_ = Parallel(context.Background(), len(layers), func(l int) {
		shares, order := make([]float32, ranks), make([]int, 0, best+1)
		prior := priorShares(&layers[l], hosts[l], ranks)
		unseen := -1 // offset of the first token id without a row and without neighbours; all such ids have equal scores
		for token := range vocabulary {
			at := (l*vocabulary + token) * best
			if layers[l].Occurrences[token] == 0 && estimator.Neighbours == nil {
				if unseen >= 0 {
					copy(table.Rank[at:at+best], table.Rank[unseen:unseen+best])
					copy(table.Score[at:at+best], table.Score[unseen:unseen+best])
					continue
				}
				unseen = at
			}
			estimator.rankShares(shares, &layers[l], token, hosts[l], prior)
			order = highestRanks(order[:0], shares, best)
			for i, rank := range order {
				table.Rank[at+i], table.Score[at+i] = uint16(rank), quantise(shares[rank])
			}
		}
	})
	return table
}

// highestRanks appends the given number of ranks with the highest shares to order, highest first, the lower rank first
// among equals.
func highestRanks(order []int, shares []float32, n int) []int {
	for rank, share := range shares {
		at := len(order)
		for at > 0 && share > shares[order[at-1]] {
			at--
		}
		if at == n {
			continue
		}
		if len(order) < n {
			order = append(order, 0)
		}
		copy(order[at+1:], order[at:])
		order[at] = rank
	}
	return order
}

// ScoreToken fills dst with the expected local share per rank of a token id in a layer. The remainder of the stored
// ranks is distributed evenly over the others. A token id beyond the table has equal scores on all ranks.
func (t *TokenTable) ScoreToken(dst []float32, layer int, token int32) {
	if token < 0 || int(token) >= t.Vocabulary {
		for i := range dst {
			dst[i] = 1 / float32(t.Ranks)
		}
		return
	}
	at := (layer*t.Vocabulary + int(token)) * t.Best
	scores := t.Score[at : at+t.Best]
	if t.Best < t.Ranks {
		rest := float32(ScoreScale)
		for _, s := range scores {
			rest -= float32(s)
		}
		rest = max(rest, 0) / (ScoreScale * float32(t.Ranks-t.Best))
		for i := range dst {
			dst[i] = rest
		}
	}
	for i, rank := range t.Rank[at : at+t.Best] {
		dst[rank] = float32(scores[i]) / ScoreScale
	}
}

// Forecast returns the table's scores of the tokens of a trace.
func (t *TokenTable) Forecast(of *trace.Trace) TokenForecast { return TokenForecast{t, of} }

// TokenForecast scores single tokens of a trace by their id only.
type TokenForecast struct {
	table *TokenTable
	trace *trace.Trace
}

// Score fills dst with the expected local share on each rank of the token at a position of the trace, in a MoE layer
// (index among the MoE layers).
func (f TokenForecast) Score(dst []float32, layer, position int) {
	f.table.ScoreToken(dst, layer, f.trace.Tokens[position])
}
