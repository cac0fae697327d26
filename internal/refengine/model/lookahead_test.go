// SPDX-License-Identifier: Apache-2.0

package model

import (
	"slices"
	"strings"
	"testing"
)

// A look-ahead does not depend on the split of tokens into steps, and does not change the results of other requests.
func TestLookAheadDoesNotDependOnBatching(t *testing.T) {
	m := tiny(t)
	tokens := goldenCases(t)[0].PromptIDs
	const width = 6
	whole := newSequence(m, len(tokens)).chunk(m, tokens)
	whole.LookAhead = m.NewLookAhead(width, len(tokens))
	plain := newSequence(m, len(tokens)).chunk(m, tokens)
	if err := m.NewRunner(2).Step([]Chunk{plain, whole}); err != nil {
		t.Fatal(err)
	}
	alone := newSequence(m, len(tokens)).chunk(m, tokens)
	if err := m.NewRunner(1).Step([]Chunk{alone}); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(plain.Routes, alone.Routes) || !slices.Equal(whole.Routes, alone.Routes) || !slices.Equal(whole.Logits, alone.Logits) {
		t.Error("a look-ahead changes routes or logits")
	}
	r, s := m.NewRunner(1), newSequence(m, len(tokens))
	cut := m.NewLookAhead(width, 0)
	one := m.NewLookAhead(width, 1)
	for i := range tokens {
		chunk := s.chunk(m, tokens[i:i+1])
		chunk.LookAhead = one
		if err := r.Step([]Chunk{chunk}); err != nil {
			t.Fatal(err)
		}
		cut.Experts, cut.Probability = append(cut.Experts, one.Experts...), append(cut.Probability, one.Probability...)
	}
	if !slices.Equal(whole.LookAhead.Experts, cut.Experts) || !slices.Equal(whole.LookAhead.Probability, cut.Probability) {
		t.Error("the look-ahead of single tokens differs from that of the prompt")
	}
}

func TestLookAheadRefuses(t *testing.T) {
	m := tiny(t)
	for _, test := range []struct {
		ahead *LookAhead
		want  string
	}{
		{&LookAhead{Width: 0}, "allowed is 1 to 32"},
		{m.NewLookAhead(33, 2), "allowed is 1 to 32"},
		{m.NewLookAhead(4, 1), "look-ahead has length 16 and 16, want 32"},
	} {
		chunk := newSequence(m, 2).chunk(m, []int32{1, 2})
		chunk.LookAhead = test.ahead
		if err := m.NewRunner(1).Step([]Chunk{chunk}); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("error %v; want %q", err, test.want)
		}
		if chunk.Cache.Len() != 0 {
			t.Error("a refused step has moved the cache")
		}
	}
}
