package affinity

import (
	"context"
	"slices"

	"github.com/semmoe/operator/solver/trace"
)

// MaxTransitionRanks bounds the ranks of a transition table, which has a row for every two of them.
const MaxTransitionRanks = 128

// Transitions is the papers' table of device sequences (A, A_p): where a token's experts will be, given where they were in
// the two MoE layers before. A token's rank in a layer is the one that holds most of its experts there, the lowest among
// equals. Before the third layer the layer before stands for both, before the second nothing is known.
type Transitions struct {
	// Layers (MoE layers) and Ranks are the shape.
	Layers, Ranks int
	// Rank is the rank to expect, Confidence the share of the token's activations on it times ScoreScale [layers, ranks in the
	// layer before, ranks in the one before that].
	Rank, Confidence []uint16
}

// CountRankTransitions builds the table from the listed requests for a placement, given by its hosts layer by layer; nil
// where there are more than MaxTransitionRanks ranks.
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
				// The last row is the mean over all tokens, for what was never seen.
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

// MainRank is the rank that holds most of a token's experts, the lowest among equals. scratch has an element for each rank.
func MainRank(experts []uint16, hosts Hosts, scratch []float32) int {
	RankShares(scratch, experts, hosts)
	return slices.Index(scratch, slices.Max(scratch))
}

// sequence is the row for a position in a layer.
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

// Forecast binds both tables to the tokens of a trace and merges them by line 2 of Algorithm 3 (arXiv 2503.04398v5): the table of higher
// confidence names the rank. The printed merge takes labels only. Here the token's scores of other ranks stay, so that a token that must move
// for equal shards goes to its next best rank. The token table holds shares of activations, where the papers' holds shares of the rows'
// ranks. hosts are the placement's.
func (t *Transitions) Forecast(tokens *TokenTable, hosts []Hosts, of *trace.Trace) *TransitionForecast {
	f := &TransitionForecast{table: t, tokens: tokens, hosts: hosts, trace: of, scratch: make([][]float32, t.Layers)}
	for l := range f.scratch {
		f.scratch[l] = make([]float32, t.Ranks)
	}
	return f
}

// TransitionForecast scores single tokens of a trace. Positions of one layer must be asked for by one goroutine at a time.
type TransitionForecast struct {
	table   *Transitions
	tokens  *TokenTable
	hosts   []Hosts
	trace   *trace.Trace
	scratch [][]float32
}

// Score fills dst with the expected local share, on each rank, of the token at a position of the trace in a MoE layer
// (counted among the MoE layers).
func (f *TransitionForecast) Score(dst []float32, layer, position int) {
	f.tokens.ScoreToken(dst, layer, f.trace.Tokens[position])
	row := layer*f.table.Ranks*f.table.Ranks + sequence(f.trace, f.hosts, layer, position, f.scratch[layer])
	if confidence := float32(f.table.Confidence[row]) / ScoreScale; confidence > slices.Max(dst) {
		dst[f.table.Rank[row]] = confidence
	}
}
