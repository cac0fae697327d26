package placement

import (
	"cmp"
	"slices"
)

// namingTries bounds how many other names of ranks are valued for one placement.
const namingTries = 64

// canonical is the placement that stands for all that are worth the same: ranks are named in the order of their first experts where
// names do not matter.
func (s *layerSearch) canonical(rankOf []int) []int {
	if s.named {
		return rankOf
	}
	return renamed(rankOf)
}

// valued is a placement with its ranks named so that it is worth most, and its value.
func (s *layerSearch) valued(rankOf []int) candidate {
	prices, value := s.value(rankOf, nil)
	return s.bestNames(candidate{rankOf, prices, value}, s.steps())
}

// bestNames renames the ranks of a placement as long as that is worth more, by so many price steps, where ranks have unequal shares of
// the tokens. No placement is worth more than the tokens' best choices at any prices and what the shares cost at these: the former stay
// as they are when experts take their rank's price along, so that the latter bound what new names gain.
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

// names are new names of all ranks, and what they gain at most.
type names struct {
	of   []int
	gain float64
}

// promisingNames are those in which two ranks, or the ranks of two groups, change names, and which may gain; best first.
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
