// SPDX-License-Identifier: Apache-2.0

package forecast

import (
	"fmt"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/trace"
)

const (
	// maxLookBack is the maximum length of a sequence of earlier MoE layers; longer sequences are too rare to be
	// counted.
	maxLookBack = 4
	// MaxLookBackRanks is the maximum number of ranks of a look-back. Its square bounds the factors of a layer, so that
	// the table of the longest sequences fits into a processor cache next to the engine's work: 256 KiB.
	MaxLookBackRanks = 1 << 8
	// largestFactor keeps products of shares and factors within single precision.
	largestFactor = 1e4
)

// LookBack corrects a token's shares by the ranks that held most of its experts in the previous MoE layers. It is the
// papers' table of device sequences (Sem-MoE, Algorithm 3), with whole distributions instead of the best rank, for any
// number of layers. A token's score of a rank is its share times the sequence's factor; the sum over all ranks is
// unchanged.
//
// A factor is the ratio of the rank's share after the sequence to its average share, raised to a weight that is learnt
// per layer. Sequences missing in the profile use their nearest layers, and if these are missing as well, all factors
// are 1.
type LookBack struct {
	// Layers (MoE layers) and Ranks are the shape, Depth is the number of layers of a sequence.
	Layers, Ranks, Depth int
	// Factor is indexed [layers, ranks^Depth, ranks]. A sequence is a number to the base Ranks; its first digit is the
	// rank in the previous layer; digits of layers that do not exist are 0.
	Factor []float32
}

// LookBackDepth returns the number of earlier layers in a look-back for a number of ranks: as many as fit in a table,
// at most 4, and 0 above MaxLookBackRanks.
func LookBackDepth(ranks int) int {
	depth := 0
	for factors := ranks * ranks; depth < maxLookBack && factors <= MaxLookBackRanks*MaxLookBackRanks; factors *= ranks {
		depth++
	}
	return depth
}

// checkDepth returns an error for a table that is too large.
func checkDepth(depth, ranks int) error {
	if maxDepth := LookBackDepth(ranks); depth < 1 || depth > maxDepth {
		return fmt.Errorf("the look-back is %d layers for %d ranks; allowed is 1 to %d", depth, ranks, maxDepth)
	}
	return nil
}

// Sequences returns the number of sequences of a layer.
func (m *LookBack) Sequences() int { return power(m.Ranks, m.Depth) }

func power(base, exponent int) int {
	product := 1
	for range exponent {
		product *= base
	}
	return product
}

// Validate checks the shape and the range of the factors.
func (m *LookBack) Validate() error {
	if err := checkDepth(m.Depth, m.Ranks); err != nil {
		return err
	}
	if want := m.Layers * m.Sequences() * m.Ranks; len(m.Factor) != want {
		return fmt.Errorf("the look-back has %d factors; %d layers of %d ranks need %d", len(m.Factor), m.Layers, m.Ranks, want)
	}
	for _, factor := range m.Factor {
		if !(factor >= 1/float32(largestFactor) && factor <= largestFactor) {
			return fmt.Errorf("a factor of the look-back is %v; allowed is %v to %v", factor, 1/float32(largestFactor), float32(largestFactor))
		}
	}
	return nil
}

// sequence returns the number of a sequence of the given length; rank returns the rank in the layer that is back layers
// earlier (1 to length).
func sequence(ranks, length int, rank func(back int) int) int {
	number := 0
	for back := 1; back <= length; back++ {
		number = number*ranks + rank(back)
	}
	return number
}

// apply multiplies a token's shares by the factors of a sequence and rescales them to their previous sum; a share is at
// most 1.
func (m *LookBack) apply(shares []float32, layer, sequence int) {
	at := (layer*m.Sequences() + sequence) * m.Ranks
	before, after := float32(0), float32(0)
	for rank, factor := range m.Factor[at : at+m.Ranks] {
		before += shares[rank]
		shares[rank] *= factor
		after += shares[rank]
	}
	if after == 0 {
		return
	}
	for rank := range shares {
		shares[rank] = min(shares[rank]*(before/after), 1)
	}
}

// LookBackForecast scores the tokens of a trace. Only one goroutine at a time may score positions of one layer.
type LookBackForecast struct {
	model   *LookBack
	tokens  *affinity.TokenTable
	hosts   []affinity.Hosts
	trace   *trace.Trace
	scratch [][]float32
}

// Bind returns the scores of the look-back for a trace. hosts are the placement's, by layer; they map routes to ranks.
func (m *LookBack) Bind(tokens *affinity.TokenTable, hosts []affinity.Hosts, of *trace.Trace) *LookBackForecast {
	f := &LookBackForecast{model: m, tokens: tokens, hosts: hosts, trace: of, scratch: make([][]float32, m.Layers)}
	for l := range f.scratch {
		f.scratch[l] = make([]float32, m.Ranks)
	}
	return f
}

// Score fills dst with the expected local share on each rank of the token at a position of the trace, in a MoE layer
// (index among the MoE layers).
func (f *LookBackForecast) Score(dst []float32, layer, position int) {
	f.tokens.ScoreToken(dst, layer, f.trace.Tokens[position])
	length := min(f.model.Depth, layer)
	number := sequence(f.model.Ranks, length, func(back int) int {
		return affinity.MainRank(f.trace.Row(position, layer-back), f.hosts[layer-back], f.scratch[layer])
	})
	f.model.apply(dst, layer, number*power(f.model.Ranks, f.model.Depth-length))
}
