// SPDX-License-Identifier: Apache-2.0

package affinity

import (
	"context"
	"slices"

	"github.com/semmoe/operator/solver/trace"
)

// MaxTransitionRanks is the maximum number of ranks of a transition table, which has one row per pair of ranks.
const MaxTransitionRanks = 128

// Transitions is the papers' table of device sequences (A, A_p): the rank of a token's experts as a function of their
// ranks in the two previous MoE layers. A token's rank in a layer is the rank that holds most of its experts, the
// lowest one on ties. In the second layer, the first layer counts twice; in the first layer nothing is known.
type Transitions struct {
	// Layers (MoE layers) and Ranks are the shape.
	Layers, Ranks int
	// Rank is the expected rank. Confidence is the share of the token's activations on it times ScoreScale [layers,
	// ranks in the previous layer, ranks in the layer before].
	Rank, Confidence []uint16
}

// CountRankTransitions returns the table of the listed requests for a placement, given by its hosts in each layer, or
// nil for more than MaxTransitionRanks ranks.
func CountRankTransitions(ctx context.Context, t *trace.Trace, requests []int, hosts []Hosts, ranks int) (*Transitions, error) {
	if ranks > MaxTransitionRanks {
		return nil, nil
	}
	rows := ranks * ranks
	table := &Transitions{Layers: len(hosts), Ranks: ranks, Rank: make([]uint16, len(hosts)*rows), Confidence: make([]uint16, len(hosts)*rows)}
	err := Parallel(ctx, len(hosts), func(l int) {
		sums, counts := make([]float32, (rows+1)*ranks), make([]float32, rows+1)
		shares, scratch := make([]float32, ranks), make([]float32, ranks)
		for _, r := range requests {
			for p := int(t.Offsets[r]); p < int(t.Offsets[r+1]); p++ {
				RankShares(shares, t.Row(p, l), hosts[l])
				// The last row is the mean over all tokens, for unseen sequences.
				for _, row := range []int{sequence(t, hosts, l, p, scratch), rows} {
					counts[row]++
					for rank, share := range shares {
						sums[row*ranks+rank] += share
					}
				}
			}
		}
		for row := range rows {
			from := row
			if counts[row] == 0 {
				from = rows
			}
			best := 0
			for rank, sum := range sums[from*ranks : (from+1)*ranks] {
				if sum > sums[from*ranks+best] {
					best = rank
				}
			}
			table.Rank[l*rows+row] = uint16(best)
			table.Confidence[l*rows+row] = quantise(sums[from*ranks+best] / max(counts[from], 1))
		}
	})
	return table, err
}

// RankShares fills dst with the share of a token's activations on each rank.
func RankShares(dst []float32, experts []uint16, hosts Hosts) {
	clear(dst)
	for _, expert := range experts {
		for _, rank := range hosts[expert] {
			dst[rank] += 1 / float32(len(experts))
		}
	}
}

// MainRank returns the rank that holds most of a token's experts, the lowest one on ties. scratch has one element per
// rank.
func MainRank(experts []uint16, hosts Hosts, scratch []float32) int {
	RankShares(scratch, experts, hosts)
	return slices.Index(scratch, slices.Max(scratch))
}

// sequence returns the row of a position in a layer.
func sequence(t *trace.Trace, hosts []Hosts, layer, position int, scratch []float32) int {
	at := func(l int) int { return MainRank(t.Row(position, l), hosts[l], scratch) }
	switch layer {
	case 0:
		return 0
	case 1:
		return at(0) * (len(scratch) + 1)
	default:
		return at(layer-1)*len(scratch) + at(layer-2)
	}
}

// Forecast combines both tables for the tokens of a trace by line 2 of Algorithm 3 (arXiv 2503.04398v5): the table of
// higher confidence determines the rank. The printed merge uses labels only. Here the token's scores of other ranks
// remain, so that a token that must move for equal shards goes to its next best rank. The token table contains shares
// of activations, the papers' table shares of the rows' ranks. hosts are the placement's.
func (t *Transitions) Forecast(tokens *TokenTable, hosts []Hosts, of *trace.Trace) *TransitionForecast {
	f := &TransitionForecast{table: t, tokens: tokens, hosts: hosts, trace: of, scratch: make([][]float32, t.Layers)}
	for l := range f.scratch {
		f.scratch[l] = make([]float32, t.Ranks)
	}
	return f
}

// TransitionForecast scores single tokens of a trace. Only one goroutine at a time may score positions of one layer.
type TransitionForecast struct {
	table   *Transitions
	tokens  *TokenTable
	hosts   []Hosts
	trace   *trace.Trace
	scratch [][]float32
}

// Score fills dst with the expected local share on each rank of the token at a position of the trace, in a MoE layer
// (index among the MoE layers).
func (f *TransitionForecast) Score(dst []float32, layer, position int) {
	f.tokens.ScoreToken(dst, layer, f.trace.Tokens[position])
	row := layer*f.table.Ranks*f.table.Ranks + sequence(f.trace, f.hosts, layer, position, f.scratch[layer])
	if confidence := float32(f.table.Confidence[row]) / ScoreScale; confidence > slices.Max(dst) {
		dst[f.table.Rank[row]] = confidence
	}
}
