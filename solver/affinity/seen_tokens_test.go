// SPDX-License-Identifier: Apache-2.0

package affinity

import (
	"math/rand/v2"
	"testing"

	"github.com/semmoe/operator/solver/trace"
)

func TestSeen(t *testing.T) {
	recorded := &trace.Trace{
		Model:   trace.Model{Vocabulary: 40},
		Tokens:  []int32{1, 2, 3, 39, 1, 2, 5},
		Offsets: []int64{0, 4, 6, 7},
	}
	s := NewSeen(recorded, []int{0, 1})
	for name, tc := range map[string]struct {
		tokens       []int32
		known, pairs float64
	}{
		"seen text":                  {[]int32{1, 2, 3, 39}, 1, 1},
		"known tokens reversed":      {[]int32{39, 3, 2, 1}, 1, 0},
		"pair across two requests":   {[]int32{39, 1}, 1, 0},
		"half new":                   {[]int32{1, 2, 7, 8}, .5, 1. / 3},
		"request not listed":         {[]int32{5}, 0, 1},
		"beyond the vocabulary":      {[]int32{40, -1, 1 << 30, 1}, .25, 0},
		"no tokens":                  {nil, 1, 1},
		"last token of a vocabulary": {[]int32{39}, 1, 1},
	} {
		if known, pairs := s.Shares(tc.tokens); known != tc.known || pairs != tc.pairs {
			t.Errorf("%s: known and pairs are %v and %v, want %v and %v", name, known, pairs, tc.known, tc.pairs)
		}
	}
}

// All seen pairs are recognised, and few new pairs are taken for seen, for any profile size.
func TestSeenPairs(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for _, tokens := range []int{2, 100, 10_000, 300_000} {
		recorded := &trace.Trace{Model: trace.Model{Vocabulary: 1 << 15}, Tokens: make([]int32, tokens), Offsets: []int64{0, int64(tokens)}}
		for i := range recorded.Tokens {
			recorded.Tokens[i] = random.Int32N(1 << 15)
		}
		s := NewSeen(recorded, []int{0})
		if known, pairs := s.Shares(recorded.Tokens); known != 1 || pairs != 1 {
			t.Errorf("%d tokens: shares %v and %v of the profile itself are known", tokens, known, pairs)
		}
		other := make([]int32, 10_000)
		for i := range other {
			other[i] = random.Int32N(1 << 15)
		}
		// All pairs of the profile differ here, which sets twice as many bits as text does.
		if _, pairs := s.Shares(other); pairs > .16 {
			t.Errorf("%d tokens: %v of new pairs are taken for seen", tokens, pairs)
		}
	}
}
