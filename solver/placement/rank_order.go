// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"cmp"
	"slices"
)

// namingTries is the maximum number of permutations of ranks to value for one placement.
const namingTries = 64

// canonical returns the representative of all equivalent placements: if ranks are interchangeable, they are numbered in
// the order of their first experts.
func (s *layerSearch) canonical(rankOf []int) []int {
	if s.named {
		return rankOf
	}
	return renamed(rankOf)
}

// valued returns a placement with the best permutation of its ranks, and its value.
func (s *layerSearch) valued(rankOf []int) candidate {
	prices, value := s.value(rankOf, nil)
	return s.bestNames(candidate{rankOf, prices, value}, s.steps())
}

// bestNames permutes the ranks of a placement while its value increases, by the given number of price steps, if ranks
// have unequal shares of the tokens. At any prices, the sum of the tokens' best scores and the price of the shares is
// an upper bound of the value. The scores do not change if experts keep the prices of their ranks, so the price of the
// shares bounds the gain of a permutation.
func (s *layerSearch) bestNames(c candidate, steps int) candidate {
	if !s.named {
		return c
	}
	tries := 0
	for taken := true; taken; {
		taken = false
		for _, name := range s.promisingNames(c) {
			if tries++; tries > namingTries || s.stop.reached() {
				return c
			}
			rankOf := make([]int, len(c.rankOf))
			for e, rank := range c.rankOf {
				rankOf[e] = name.of[rank]
			}
			if prices, value := s.valueIn(steps, rankOf, nil); value > c.value*(1+1e-6) {
				c, taken = candidate{rankOf, prices, value}, true
				break
			}
		}
	}
	return c
}

// names is a permutation of the ranks, with an upper bound of its gain.
type names struct {
	of   []int
	gain float64
}

// promisingNames returns the permutations that swap two ranks, or the ranks of two groups, and may have a gain; best
// first.
func (s *layerSearch) promisingNames(c candidate) []names {
	var found []names
	span := s.ranks / s.groups
	add := func(p, q, n int) {
		to := names{of: make([]int, s.ranks)}
		for rank := range to.of {
			to.of[rank] = rank
		}
		for i := range n {
			p, q := p+i, q+i
			to.of[p], to.of[q] = q, p
			to.gain += (c.prices[p] - c.prices[q]) * (s.balance.Limits[q] - s.balance.Limits[p])
		}
		if to.gain > 1e-6*c.value*s.activations {
			found = append(found, to)
		}
	}
	for p := range s.ranks {
		for q := p - p%span; q < p; q++ {
			add(q, p, 1)
		}
	}
	for g := range s.groups {
		for h := range g {
			add(h*span, g*span, span)
		}
	}
	slices.SortStableFunc(found, func(a, b names) int { return cmp.Compare(b.gain, a.gain) })
	return found
}
