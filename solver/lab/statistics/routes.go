// SPDX-License-Identifier: Apache-2.0

package statistics

import "github.com/semmoe/operator/solver/trace"

// Guess is the quality of a prediction of the rank that holds most of a token's experts in a layer.
type Guess struct {
	// Confidence is the share of the predicted rank in the profile, averaged over its occurrences: the expected
	// accuracy. Accuracy is the share of correct predictions among test occurrences; unseen keys count as wrong.
	Confidence float64 `json:"confidence"`
	Accuracy   float64 `json:"accuracy"`
	// Known is the share of test occurrences with a key in the profile.
	Known float64 `json:"known"`
}

// LookBack predicts the rank in a layer from the ranks in the n previous layers, by the most frequent successor of the
// same sequence in the train requests (Sem-MoE's transition table, which looks back 2 layers). layer must be at least
// n, and n at most 5.
func LookBack(t *trace.Trace, train, test []int, routes [][]uint16, layer, n, ranks int) Guess {
	return guess(t, train, test, routes[layer], ranks, func(position int) uint64 {
		key := uint64(0)
		for back := range n {
			key = key*uint64(ranks) + uint64(routes[layer-1-back][position])
		}
		return key
	})
}

// ByToken predicts the rank from the token id only: the accuracy of the paper's token table.
func ByToken(t *trace.Trace, train, test []int, routes []uint16, ranks int) Guess {
	return guess(t, train, test, routes, ranks, func(position int) uint64 { return uint64(t.Tokens[position]) })
}

// guess learns the most frequent rank of each key, the lowest one on ties.
func guess(t *trace.Trace, train, test []int, routes []uint16, ranks int, key func(position int) uint64) Guess {
	seen := map[uint64][]int{}
	occurrences := 0
	each(t, train, func(p int) {
		k := key(p)
		if seen[k] == nil {
			seen[k] = make([]int, ranks)
		}
		seen[k][routes[p]]++
		occurrences++
	})
	guesses := make(map[uint64]uint16, len(seen))
	agreed := 0
	for k, counts := range seen {
		best := 0
		for rank, n := range counts {
			if n > counts[best] {
				best = rank
			}
		}
		guesses[k] = uint16(best)
		agreed += counts[best]
	}
	right, known, all := 0, 0, 0
	each(t, test, func(p int) {
		all++
		rank, ok := guesses[key(p)]
		if !ok {
			return
		}
		known++
		if rank == routes[p] {
			right++
		}
	})
	return Guess{Confidence: ratio(agreed, occurrences), Accuracy: ratio(right, all), Known: ratio(known, all)}
}
