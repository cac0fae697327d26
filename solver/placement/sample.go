package placement

import (
	"math"
	"slices"

	"github.com/semmoe/operator/solver/affinity"
)

const (
	// valuedScores is how many scores (token ids × ranks) placements are valued by at most, unless that leaves fewer token ids
	// than leastTokens: with few, the search on many ranks learns the sample by heart. The annealing sees all token ids through
	// the Gram matrix, whatever their number.
	valuedScores = 1 << 17
	leastTokens  = 1 << 13
	// gramTokens is how many token ids the Gram matrix is made of where the search starts from a placement in service.
	gramTokens = 1 << 14
)

// valuedTokens is the largest number of token ids by which placements are valued.
func valuedTokens(ranks int) int { return max(valuedScores/ranks, leastTokens) }

// sample holds token ids that stand for all that occur in a layer.
type sample struct {
	tokens []int
	// rows are their activations and sizes their occurrences; one that stands for several counts for them all.
	rows  sparseRows
	sizes []float32
}

// newSample takes at most that many token ids. A token id that occurs a times has a/(a+shrinkage) of its activations: the rest is
// what the mean token would activate, which is local on all ranks alike, and left out.
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

// reliability is the share of a token id's activations that is expected of it again. Those of a rare one are chance for the most
// part, and a search that takes them at their face value fits the profile and not the traffic that it stands for.
func reliability(occurrences, shrinkage float32) float32 {
	return occurrences / (occurrences + shrinkage)
}

// sampleTokens lists the token ids that occur, and how many of their like each stands for. Where they are too many, the more
// frequent half of what is allowed is kept, and of the others, in the order of their frequency, every so many'th stands for
// its neighbours.
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

// sortByFrequency puts the more frequent token ids first, ids of one frequency in ascending order. Frequencies are positive:
// their bits are ordered as they are.
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

// gram is the Gram matrix of the sample.
func (s *sample) gram(experts int) *gram { return rowGram(experts, s.rows, s.sizes, 0) }
