// SPDX-License-Identifier: Apache-2.0

package forecast

import (
	"fmt"
	"math"
	"math/bits"
	"slices"

	"github.com/semmoe/operator/solver/affinity"
)

// lookBack is the number of earlier MoE layers used by a layer's forecast.
const lookBack = 4

// Sources of evidence: one vector of shares per rank each.
const (
	tokenSource = iota
	pairSource
	slowContext
	fastContext
	// promptSource is the mean over the whole prompt, without history only.
	promptSource
	// slowHistory, fastHistory and sameToken are routes of earlier positions, with history only.
	slowHistory
	fastHistory
	sameToken
	sources
)

// largestWeight keeps sums of weighted evidence finite.
const largestWeight = 1e6

// levels is the number of weights of a source: the value of a source depends on its number of occurrences.
const levels = 12

// level returns the index of the weight for evidence from n occurrences.
func level(n int) int { return min(bits.Len(uint(n)), levels-1) }

// VectorWeights is the number of weights of sources per layer.
const VectorWeights = sources * levels

// Model scores the ranks for single tokens. It uses the token rows of a plan's token table, which is stored separately.
type Model struct {
	// History selects the forecast for decoding: routes of earlier positions are known, and later tokens are not.
	History bool
	// Ranks, Layers (MoE layers), Experts, TopK and Vocabulary are the shape.
	Ranks, Layers, Experts, TopK, Vocabulary int
	// TokenLevel is the bit length of the number of occurrences of each token id [V].
	TokenLevel []uint8
	// PairStart contains the bounds of each token id's pairs [V+1]. PairPrevious contains the previous ids of the
	// pairs, ascending, PairLevel the bit length of the number of occurrences, PairScore the shares per rank times
	// affinity.ScoreScale [layers, pairs, ranks].
	PairStart    []int32
	PairPrevious []int32
	PairLevel    []uint8
	PairScore    []uint16
	// Vector contains the weights of the sources [layers, VectorWeights], Bias the scores without evidence [layers,
	// ranks], Expert the contribution of an expert of an earlier layer [layers, ExpertRows, ranks].
	Vector, Bias, Expert []float32
}

// ExpertRows returns the number of rows of a layer in Expert: one per earlier layer, distinguished position in the
// order of gate weights, and expert.
func ExpertRows(topK, experts int) int { return lookBack * places(topK) * experts }

// places returns the number of distinguished positions in the order of gate weights.
func places(topK int) int { return min(topK, 3) }

// expertRow returns the row of the k-th expert of the layer that is back layers earlier (1 to lookBack).
func (m *Model) expertRow(back, k, expert int) int {
	n := places(m.TopK)
	place := 0
	switch {
	case k > 0 && 2*k < m.TopK:
		place = 1
	case k > 0:
		place = n - 1
	}
	return ((back-1)*n+min(place, n-1))*m.Experts + expert
}

// Pairs returns the number of stored pairs.
func (m *Model) Pairs() int { return len(m.PairPrevious) }

// pair returns the index of a pair of token ids, or -1.
func (m *Model) pair(previous, token int32) int {
	if token < 0 || int(token) >= m.Vocabulary {
		return -1
	}
	begin, end := m.PairStart[token], m.PairStart[token+1]
	i, found := slices.BinarySearch(m.PairPrevious[begin:end], previous)
	if !found {
		return -1
	}
	return int(begin) + i
}

// Validate checks that shapes and indices are consistent with one another and with the token table.
func (m *Model) Validate(tokens *affinity.TokenTable) error {
	pairs := m.Pairs()
	switch {
	case tokens == nil || tokens.Ranks != m.Ranks || tokens.Layers != m.Layers || tokens.Vocabulary != m.Vocabulary:
		return fmt.Errorf("the forecast does not match the token table")
	case m.Ranks < 1 || m.Experts < 1 || m.TopK < 1 || m.Layers < 1 || m.TopK > m.Experts:
		return fmt.Errorf("the forecast is for %d layers, %d ranks and top-%d of %d experts", m.Layers, m.Ranks, m.TopK, m.Experts)
	case len(m.TokenLevel) != m.Vocabulary || len(m.PairStart) != m.Vocabulary+1 || len(m.PairLevel) != pairs || len(m.PairScore) != m.Layers*pairs*m.Ranks:
		return fmt.Errorf("the forecast's tables do not match a vocabulary of %d and %d pairs", m.Vocabulary, pairs)
	case len(m.Vector) != m.Layers*VectorWeights || len(m.Bias) != m.Layers*m.Ranks || len(m.Expert) != m.Layers*ExpertRows(m.TopK, m.Experts)*m.Ranks:
		return fmt.Errorf("the forecast's weights do not match %d layers, %d experts and %d ranks", m.Layers, m.Experts, m.Ranks)
	case m.PairStart[0] != 0 || int(m.PairStart[m.Vocabulary]) != pairs || !slices.IsSorted(m.PairStart):
		return fmt.Errorf("the bounds of the forecast's pairs do not ascend from 0 to %d", pairs)
	}
	for _, values := range [][]float32{m.Vector, m.Bias, m.Expert} {
		for _, v := range values {
			if !(math.Abs(float64(v)) < largestWeight) {
				return fmt.Errorf("a weight of the forecast is %v", v)
			}
		}
	}
	for token := range m.Vocabulary {
		if m.TokenLevel[token] >= levels {
			return fmt.Errorf("token %d has level %d; allowed is 0 to %d", token, m.TokenLevel[token], levels-1)
		}
		row := m.PairPrevious[m.PairStart[token]:m.PairStart[token+1]]
		for i, previous := range row {
			if previous < 0 || i > 0 && previous <= row[i-1] {
				return fmt.Errorf("the pairs of token %d are not in ascending order", token)
			}
		}
	}
	for i, l := range m.PairLevel {
		if l >= levels {
			return fmt.Errorf("pair %d has level %d; allowed is 0 to %d", i, l, levels-1)
		}
	}
	return nil
}
