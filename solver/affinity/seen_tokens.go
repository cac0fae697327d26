// SPDX-License-Identifier: Apache-2.0

package affinity

import (
	"math/bits"

	"github.com/semmoe/operator/solver/trace"
)

// Seen records the tokens and pairs of successive tokens of a plan's profile. A table scores other tokens with the
// average of all tokens and does not identify them. Text of another kind contains other tokens, or the same tokens in
// another order.
type Seen struct {
	// Tokens has one bit per token id, the lowest of a word first [⌈V/16⌉].
	Tokens []uint16
	// Pairs has one bit per value of pairHash, in the same order; its length is a power of two. Pairs with the same bit
	// are indistinguishable: about a sixteenth of unseen pairs count as seen.
	Pairs []uint16
}

const (
	// bitsPerPair is the number of bits of Pairs for each pair of the profile, repetitions included; about half of the
	// pairs of text are repetitions.
	bitsPerPair = 8
	// minPairBits and maxPairBits bound the logarithm of the number of bits: 4 MiB is less than the size of score
	// tables.
	minPairBits, maxPairBits = 10, 25
)

// NewSeen returns the tokens and pairs of the listed requests.
func NewSeen(t *trace.Trace, requests []int) *Seen {
	width := min(max(bits.Len(uint(bitsPerPair*t.TokenCount(requests))), minPairBits), maxPairBits)
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

// pairHash returns the bit of a pair: the highest bits of the finaliser of SplitMix64 (Steele, Lea and Flood 2014) of
// both ids.
func (s *Seen) pairHash(first, second int32) uint64 {
	x := uint64(uint32(first))<<32 | uint64(uint32(second))
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	x ^= x >> 31
	return x >> (64 - bits.TrailingZeros(uint(16*len(s.Pairs))))
}

// Known reports whether the profile contains a token id; ids beyond the vocabulary are unknown.
func (s *Seen) Known(token int32) bool {
	return token >= 0 && int(token)/16 < len(s.Tokens) && has(s.Tokens, uint64(token))
}

// Shares returns the shares of the tokens, and of the pairs of successive tokens, that the profile contains; 1 for
// none. The share of pairs is meaningful only if the tokens are successive tokens of a text.
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
