package affinity

import (
	"math/bits"

	"github.com/semmoe/operator/solver/trace"
)

// Seen is what a plan's tables have learnt from: which tokens, and which pairs of successive tokens. A table scores other tokens by
// what tokens are like on average, and cannot itself tell which these are. Text of another kind is made of other tokens, or of the
// same ones in another order.
type Seen struct {
	// Tokens has a bit for each token id, the lowest of a word first [⌈V/16⌉].
	Tokens []uint16
	// Pairs has a bit for each value of pairHash, in the same order; its length is a power of two. Pairs that share a bit are taken
	// for one another: of the pairs that were not seen, a sixteenth or so counts as seen.
	Pairs []uint16
}

const (
	// bitsPerPair is the number of bits of Pairs for each pair of the profile, counting repeated ones, of which text has about half.
	bitsPerPair = 8
	// leastPairs and mostPairs bound the logarithm of the number of bits: 4 MiB is less than tables of scores have.
	leastPairs, mostPairs = 10, 25
)

// NewSeen is what the listed requests hold.
func NewSeen(t *trace.Trace, requests []int) *Seen {
	width := min(max(bits.Len(uint(bitsPerPair*t.TokenCount(requests))), leastPairs), mostPairs)
	s := &Seen{Tokens: make([]uint16, (t.Model.Vocabulary+15)/16), Pairs: make([]uint16, 1<<width/16)}
	for _, r := range requests {
		tokens := t.Request(r)
		for i, token := range tokens {
			set(s.Tokens, uint64(token))
			if i > 0 {
				set(s.Pairs, s.pairHash(tokens[i-1], token))
			}
		}
	}
	return s
}

func set(words []uint16, bit uint64) { words[bit/16] |= 1 << (bit % 16) }

func has(words []uint16, bit uint64) bool { return words[bit/16]>>(bit%16)&1 == 1 }

// pairHash is the bit of a pair: the highest bits of the finaliser of SplitMix64 (Steele, Lea and Flood 2014) of both ids.
func (s *Seen) pairHash(first, second int32) uint64 {
	x := uint64(uint32(first))<<32 | uint64(uint32(second))
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	x ^= x >> 31
	return x >> (64 - bits.TrailingZeros(uint(16*len(s.Pairs))))
}

// Known reports whether the profile has a token id; it has none beyond the vocabulary.
func (s *Seen) Known(token int32) bool {
	return token >= 0 && int(token)/16 < len(s.Tokens) && has(s.Tokens, uint64(token))
}

// Shares are the shares of the tokens, and of the pairs of successive ones, that the profile has; 1 where there are none. Tokens
// that do not follow one another in a text make pairs that say nothing.
func (s *Seen) Shares(tokens []int32) (known, pairs float64) {
	if len(tokens) == 0 {
		return 1, 1
	}
	seen, seenPairs := 0, 0
	for i, token := range tokens {
		if s.Known(token) {
			seen++
		}
		if i > 0 && has(s.Pairs, s.pairHash(tokens[i-1], token)) {
			seenPairs++
		}
	}
	known = float64(seen) / float64(len(tokens))
	if len(tokens) == 1 {
		return known, 1
	}
	return known, float64(seenPairs) / float64(len(tokens)-1)
}
