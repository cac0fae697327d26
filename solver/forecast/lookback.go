package forecast

import (
	"fmt"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/trace"
)

const (
	// mostLookBack is the longest sequence of earlier MoE layers that is looked at: longer ones are too rare to be counted.
	mostLookBack = 4
	// MaxLookBackRanks bounds the ranks of a look-back, and its square the factors of a layer, so that the table of the longest
	// sequences stays small enough for a processor's cache beside the engine's work: 256 KiB.
	MaxLookBackRanks = 1 << 8
	// largestFactor keeps products of shares and factors far from the bounds of single precision.
	largestFactor = 1e4
)

// LookBack corrects a token's shares by the ranks that held most of its experts in the MoE layers before: the papers' table of device
// sequences (Sem-MoE, Algorithm 3), with whole distributions in the place of the best rank, and for any number of layers. A token's
// score of a rank is its share times the sequence's factor; what all ranks have together stays as it was.
//
// A factor is how much larger the rank's share is after the sequence than on average, to the power of a weight that each layer
// learns. A sequence that the profile lacks is judged by its nearest layers, and with none of these all factors are 1.
type LookBack struct {
	// Layers (MoE layers) and Ranks are the shape, Depth the number of layers of a sequence.
	Layers, Ranks, Depth int
	// Factor [layers, ranks^Depth, ranks]. A sequence is a number to the base Ranks whose first digit is the rank in the layer
	// before; layers that there are none of have the digit 0.
	Factor []float32
}

// LookBackDepth is the number of earlier layers that a look-back sees for a number of ranks: as many as a table has room for, at most 4,
// and 0 above MaxLookBackRanks.
func LookBackDepth(ranks int) int {
	depth := 0
	for factors := ranks * ranks; depth < mostLookBack && factors <= MaxLookBackRanks*MaxLookBackRanks; factors *= ranks {
		depth++
	}
	return depth
}

// checkDepth refuses a table that is too large.
func checkDepth(depth, ranks int) error {
	if most := LookBackDepth(ranks); depth < 1 || depth > most {
		return fmt.Errorf("the look-back is %d layers for %d ranks; allowed is 1 to %d", depth, ranks, most)
	}
	return nil
}

// Sequences is the number of sequences of a layer.
func (m *LookBack) Sequences() int { return power(m.Ranks, m.Depth) }

func power(base, exponent int) int {
	product := 1
	for range exponent {
		product *= base
	}
	return product
}

// Validate checks the shape, and that the factors are such as training makes them.
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

// sequence is the number of a sequence of that length, given the rank in the layer that is back layers earlier (1 to length).
func sequence(ranks, length int, rank func(back int) int) int {
	number := 0
	for back := 1; back <= length; back++ {
		number = number*ranks + rank(back)
	}
	return number
}

// apply multiplies a token's shares by the factors of a sequence, and scales them to what they were together; a share is at most 1.
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

// LookBackForecast scores the tokens of a trace. Positions of one layer must be asked for by one goroutine at a time.
type LookBackForecast struct {
	model   *LookBack
	tokens  *affinity.TokenTable
	hosts   []affinity.Hosts
	trace   *trace.Trace
	scratch [][]float32
}

// Bind readies the look-back for a trace. hosts are the placement's, layer by layer: they turn routes into ranks.
func (m *LookBack) Bind(tokens *affinity.TokenTable, hosts []affinity.Hosts, of *trace.Trace) *LookBackForecast {
	f := &LookBackForecast{model: m, tokens: tokens, hosts: hosts, trace: of, scratch: make([][]float32, m.Layers)}
	for l := range f.scratch {
		f.scratch[l] = make([]float32, m.Ranks)
	}
	return f
}

// Score fills dst with the expected local share, on each rank, of the token at a position of the trace in a MoE layer
// (counted among the MoE layers).
func (f *LookBackForecast) Score(dst []float32, layer, position int) {
	f.tokens.ScoreToken(dst, layer, f.trace.Tokens[position])
	length := min(f.model.Depth, layer)
	number := sequence(f.model.Ranks, length, func(back int) int {
		return affinity.MainRank(f.trace.Row(position, layer-back), f.hosts[layer-back], f.scratch[layer])
	})
	f.model.apply(dst, layer, number*power(f.model.Ranks, f.model.Depth-length))
}
