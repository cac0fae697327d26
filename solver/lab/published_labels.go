// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"slices"

	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// Names of the forecasts by a published algorithm's own tables.
const (
	// labelVotes counts each token of a request as one vote for its label, S_r = arg max_i Σ_{j in r} R_ij (Sem-MoE,
	// section 3.3).
	labelVotes = "its labels, votes"
	// labelShares sums the rows of the table from which the labels are derived (Sem-MoE, Algorithm 2 line 3, with
	// scores in place of labels).
	labelShares = "its labels, shares"
	// tokenLabels sends a token to its label (Sem-MoE, Algorithm 3 without the table of device sequences).
	tokenLabels = "its labels"
)

// labelTable is the papers' token table of one MoE layer, or of all with attention DP. An entry is the share of a token
// ID's occurrences on a rank, where an occurrence has the rank of its row (Sem-MoE, Algorithm 1 lines 54 and 55). The
// label 𝒯 of a token ID is the rank with the highest share, its confidence 𝒯_p is that share. A token ID that does not
// occur in the profile has no label. The papers use the label of its nearest neighbor by embedding, but a trace
// contains no embeddings.
type labelTable struct {
	ranks  int
	shares []float32
}

func (t labelTable) row(token int32) []float32 {
	return t.shares[int(token)*t.ranks : (int(token)+1)*t.ranks]
}

// label returns the rank and the confidence of a token ID, 0 and 0 if it has no label.
func (t labelTable) label(token int32) (rank int, confidence float32) {
	for i, share := range t.row(token) {
		if share > confidence {
			rank, confidence = i, share
		}
	}
	return rank, confidence
}

// labels returns the table of a MoE layer, or of all with attention DP, for the ranks of the rows that an algorithm
// clustered.
func (s *study) labels(algorithm placement.Algorithm, layer int, rowRank []int) labelTable {
	t := labelTable{s.options.Ranks, make([]float32, s.trace.Model.Vocabulary*s.options.Ranks)}
	if algorithm == placement.CrossEntropyPrinted && s.options.Attention == placement.TensorParallel {
		row := 0
		for token, n := range s.steps.Tokens()[layer].Occurrences {
			if n > 0 {
				t.row(int32(token))[rowRank[row]] = 1
				row++
			}
		}
		return t
	}
	for i, r := range s.steps.Clustered() {
		for _, token := range s.trace.Request(r) {
			t.row(token)[rowRank[i]]++
		}
	}
	for token := range s.trace.Model.Vocabulary {
		row, total := t.row(int32(token)), float32(0)
		for _, n := range row {
			total += n
		}
		for i := range row {
			row[i] /= max(total, 1)
		}
	}
	return t
}

// requestLabels scores a request by the labels of its tokens.
type requestLabels struct {
	trace *trace.Trace
	table labelTable
	votes bool
}

// Score fills dst with the votes for each rank, or with sums of shares.
func (f requestLabels) Score(dst []float32, request int) {
	clear(dst)
	tokens := f.trace.Request(request)
	for _, token := range tokens {
		if f.votes {
			if rank, confidence := f.table.label(token); confidence > 0 {
				dst[rank]++
			}
			continue
		}
		for i, share := range f.table.row(token) {
			dst[i] += share
		}
	}
	for i := range dst {
		dst[i] /= float32(max(len(tokens), 1))
	}
}

// tokenRank is the label of a token ID in one layer.
type tokenRank struct {
	rank       uint16
	confidence float32
}

// layerLabels scores a token by its label in a layer [layers][vocabulary].
type layerLabels struct {
	trace  *trace.Trace
	layers [][]tokenRank
}

// Score fills dst with the confidence of the token's label at its rank, and 0 elsewhere.
func (f layerLabels) Score(dst []float32, layer, position int) {
	clear(dst)
	label := f.layers[layer][f.trace.Tokens[position]]
	dst[label.rank] = label.confidence
}

// layerLabels returns the labels of all MoE layers.
func (s *study) layerLabels(algorithm placement.Algorithm, rowRanks [][]int) layerLabels {
	f := layerLabels{s.trace, make([][]tokenRank, len(rowRanks))}
	for l, rowRank := range rowRanks {
		table := s.labels(algorithm, l, rowRank)
		f.layers[l] = make([]tokenRank, s.trace.Model.Vocabulary)
		for token := range f.layers[l] {
			rank, confidence := table.label(int32(token))
			f.layers[l][token] = tokenRank{uint16(rank), confidence}
		}
	}
	return f
}

// ownLabels reports whether the scores are computed from a published algorithm's own tables.
func (c *Comparison) ownLabels() bool {
	return slices.Contains([]string{labelVotes, labelShares, tokenLabels}, c.Forecast)
}
