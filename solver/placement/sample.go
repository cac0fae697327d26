// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"math"
	"slices"

	"github.com/semmoe/operator/solver/affinity"
)

const (
	// valuedScores is the maximum number of scores (token IDs × ranks) for valuing placements, unless fewer than
	// minTokens token IDs would remain. With few token IDs, a search on many ranks overfits the sample. Annealing
	// uses all token IDs through the Gram matrix.
	valuedScores = 1 << 17
	minTokens    = 1 << 13
	// gramTokens is the number of token IDs in the Gram matrix if the search starts from a placement in service.
	gramTokens = 1 << 14
)

// valuedTokens returns the maximum number of token IDs for valuing placements.
func valuedTokens(ranks int) int { return max(valuedScores/ranks, minTokens) }

// sample contains token IDs that represent all token IDs of a layer.
type sample struct {
	tokens []int
	// rows are their activations and sizes their occurrences. A token ID that represents several counts for all of
	// them.
	rows  sparseRows
	sizes []float32
}

// newSample selects at most the allowed number of token IDs. A token ID with a occurrences has a/(a+shrinkage) of its
// activations. The remainder is that of the mean token, which is equally local on all ranks, and is omitted.
func newSample(c *affinity.Counts, allowed int, shrinkage float32) sample {
	tokens, scale := sampleTokens(c, allowed)
	entries := 0
	for _, token := range tokens {
		experts, _ := c.Row(token)
		entries += len(experts)
	}
	rows := sparseRows{make([]int, 1, len(tokens)+1), make([]uint16, 0, entries), make([]float32, 0, entries)}
	sizes := make([]float32, len(tokens))
	for i, token := range tokens {
		experts, counts := c.Row(token)
		rows.expert = append(rows.expert, experts...)
		worth := scale[i] * reliability(c.Occurrences[token], shrinkage)
		for _, n := range counts {
			rows.count = append(rows.count, n*worth)
		}
		rows.start = append(rows.start, len(rows.expert))
		sizes[i] = c.Occurrences[token] * scale[i]
	}
	return sample{tokens, rows, sizes}
}

// split returns the sample with each token ID that has more than the given number of occurrences divided into equal
// parts, which can be on different ranks.
func (s sample) split(most float32) sample {
	to := sample{rows: sparseRows{start: []int{0}}}
	for i, token := range s.tokens {
		experts, counts := s.rows.row(i)
		parts := max(1, int(math.Ceil(float64(s.sizes[i]/max(most, 1e-9)))))
		for range parts {
			to.tokens, to.sizes = append(to.tokens, token), append(to.sizes, s.sizes[i]/float32(parts))
			to.rows.expert = append(to.rows.expert, experts...)
			for _, n := range counts {
				to.rows.count = append(to.rows.count, n/float32(parts))
			}
			to.rows.start = append(to.rows.start, len(to.rows.expert))
		}
	}
	return to
}

// reliability returns the share of a token ID's activations that is expected to repeat. The activations of a rare token
// ID are mostly noise, and a search that ignores this overfits the profile.
func reliability(occurrences, shrinkage float32) float32 {
	return occurrences / (occurrences + shrinkage)
}

// sampleTokens lists the token IDs that occur, and how many similar ones each represents. If there are too many, it
// keeps the most frequent token IDs for half of the allowed number, and every k'th of the others by frequency, which
// represents its neighbors.
func sampleTokens(c *affinity.Counts, allowed int) (tokens []int, scale []float32) {
	for token, n := range c.Occurrences {
		if n > 0 {
			tokens = append(tokens, token)
		}
	}
	if len(tokens) <= allowed {
		return tokens, slices.Repeat([]float32{1}, len(tokens))
	}
	sortByFrequency(tokens, c.Occurrences)
	kept := slices.Clone(tokens[:allowed/2])
	scale = slices.Repeat([]float32{1}, len(kept))
	rest := tokens[allowed/2:]
	for i := range allowed / 2 {
		group := rest[i*len(rest)/(allowed/2) : (i+1)*len(rest)/(allowed/2)]
		if len(group) == 0 {
			continue
		}
		total, middle := float32(0), group[len(group)/2]
		for _, token := range group {
			total += c.Occurrences[token]
		}
		kept, scale = append(kept, middle), append(scale, total/c.Occurrences[middle])
	}
	return kept, scale
}

// sortByFrequency sorts the token IDs by descending frequency, then ascending ID. Frequencies are positive, so their
// bit patterns have the same order.
func sortByFrequency(tokens []int, occurrences []float32) {
	keys := make([]uint64, len(tokens))
	for i, token := range tokens {
		keys[i] = uint64(^math.Float32bits(occurrences[token]))<<32 | uint64(token)
	}
	slices.Sort(keys)
	for i, key := range keys {
		tokens[i] = int(uint32(key))
	}
}

// gram returns the Gram matrix of the sample.
func (s *sample) gram(experts int) *gram { return rowGram(experts, s.rows, s.sizes, 0) }
