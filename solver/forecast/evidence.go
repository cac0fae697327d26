// SPDX-License-Identifier: Apache-2.0

package forecast

import (
	"math"
	"slices"
)

const (
	slowDecay = 0.97
	fastDecay = 0.7
	// minShare keeps logarithms of shares finite.
	minShare = 1e-3
	// sameTokenPrior is the weight of a token's row relative to its occurrences in the same request, in occurrences.
	sameTokenPrior = 2
)

// rows provides the tables of one layer, as stored or as counted without one document.
type rows interface {
	// token fills dst with the shares per rank of a token id and returns its level.
	token(dst []float32, id int32) int
	// pair fills dst with the shares per rank of the token at an index of the request together with the previous token.
	// Level 0 means unknown.
	pair(dst []float32, index int) int
}

// request contains the input of a forecast: the tokens of one request and, with history, their routes as shares per
// rank.
type request struct {
	tokens []int32
	// routed are the shares of the layer's activations per rank at each index [tokens × ranks]. The shares at an index
	// are used for later indices only.
	routed []float32
}

// evidence contains the vectors of one request in one layer.
type evidence struct {
	ranks int
	// logs are logarithms of shares [tokens, sources, ranks]. weight is the index of each source's weight, or -1 if the
	// source has no information [tokens, sources].
	logs   []float32
	weight []int16

	row, slow, fast, prompt, slowRouted, fastRouted []float32
	seen                                            map[int32]*occurrences
}

// occurrences sums the routes of a token id within a request.
type occurrences struct {
	n      int
	routed []float32
}

func newEvidence(ranks int) *evidence {
	vectors := make([][]float32, 6)
	for i := range vectors {
		vectors[i] = make([]float32, ranks)
	}
	return &evidence{
		ranks: ranks, row: vectors[0], slow: vectors[1], fast: vectors[2], prompt: vectors[3], slowRouted: vectors[4], fastRouted: vectors[5],
		seen: map[int32]*occurrences{},
	}
}

// gather fills logs and weight for all tokens of a request.
func (e *evidence) gather(r request, from rows, history bool) {
	n := len(r.tokens)
	e.logs = slices.Grow(e.logs[:0], n*sources*e.ranks)[:n*sources*e.ranks]
	e.weight = slices.Grow(e.weight[:0], n*sources)[:n*sources]
	for _, sum := range [][]float32{e.slow, e.fast, e.prompt, e.slowRouted, e.fastRouted} {
		clear(sum)
	}
	clear(e.seen)
	if !history {
		for _, id := range r.tokens {
			from.token(e.row, id)
			decayInto(e.prompt, e.row, 1)
		}
	}
	for i, id := range r.tokens {
		weights := e.weight[i*sources : (i+1)*sources]
		for s := range weights {
			weights[s] = -1
		}
		e.put(i, slowContext, e.slow, level(i), i > 0)
		e.put(i, fastContext, e.fast, level(i), i > 0)
		known := from.pair(e.row, i)
		e.put(i, pairSource, e.row, known, known > 0)
		known = from.token(e.row, id)
		e.put(i, tokenSource, e.row, known, true)
		decayInto(e.slow, e.row, slowDecay)
		decayInto(e.fast, e.row, fastDecay)
		if !history {
			e.put(i, promptSource, e.prompt, level(n), true)
			continue
		}
		e.put(i, slowHistory, e.slowRouted, level(i), i > 0)
		e.put(i, fastHistory, e.fastRouted, level(i), i > 0)
		e.putSameToken(i, id)
		e.remember(id, r.routed[i*e.ranks:(i+1)*e.ranks])
	}
}

// put stores the logarithm of a vector, scaled to sum to 1, as one source.
func (e *evidence) put(i, source int, shares []float32, level int, known bool) {
	if !known {
		return
	}
	e.weight[i*sources+source] = int16(source*levels + level)
	total := float32(0)
	for _, s := range shares {
		total += s
	}
	scale := 1 / max(total, 1e-9)
	logs := e.logs[(i*sources+source)*e.ranks : (i*sources+source+1)*e.ranks]
	for rank, s := range shares {
		logs[rank] = float32(math.Log(float64(s*scale + minShare)))
	}
}

func decayInto(sum, row []float32, decay float32) {
	for i, v := range row {
		sum[i] = decay*sum[i] + v
	}
}

// putSameToken merges the token's row, which is in e.row, with its previous routes in the request.
func (e *evidence) putSameToken(i int, id int32) {
	before := e.seen[id]
	if before == nil {
		return
	}
	for rank := range e.row {
		e.row[rank] = sameTokenPrior*e.row[rank] + before.routed[rank]
	}
	e.put(i, sameToken, e.row, level(before.n), true)
}

// remember adds the routes of a position to the history of later positions.
func (e *evidence) remember(id int32, routed []float32) {
	decayInto(e.slowRouted, routed, slowDecay)
	decayInto(e.fastRouted, routed, fastDecay)
	before := e.seen[id]
	if before == nil {
		before = &occurrences{routed: make([]float32, e.ranks)}
		e.seen[id] = before
	}
	before.n++
	decayInto(before.routed, routed, 1)
}
