// SPDX-License-Identifier: Apache-2.0

package counts

import (
	"cmp"
	"slices"
)

// bound drops the rarest tokens if there are more different pairs than the limit, until half of the limit is left.
func (c *Counts) bound() {
	if c.limit == 0 || c.size() <= c.limit {
		return
	}
	for layer := range c.layers {
		c.layers[layer].merge()
	}
	size := c.size()
	if size <= c.limit {
		return
	}
	pairs := make([]int32, len(c.occurrences)) // by token ID, over all layers
	var tokens []int32
	for layer := range c.layers {
		for _, p := range c.layers[layer].pairs {
			if pairs[p.token()]++; pairs[p.token()] == 1 {
				tokens = append(tokens, p.token())
			}
		}
	}
	// Equally rare tokens are ordered by a hash, so that small IDs are not preferred.
	slices.SortFunc(tokens, func(a, b int32) int {
		return cmp.Or(cmp.Compare(c.occurrences[a], c.occurrences[b]), cmp.Compare(mix(uint64(a)), mix(uint64(b))))
	})
	var highest uint32
	for _, token := range tokens {
		if size <= c.limit/2 {
			break
		}
		size -= int(pairs[token])
		highest = c.occurrences[token]
		c.dropped += int64(highest)
		c.tokens -= int64(highest)
		c.occurrences[token] = 0
	}
	c.undercount += int64(highest)
	for layer := range c.layers {
		c.layers[layer].keep(func(token int32) bool { return c.occurrences[token] > 0 })
	}
}

// size returns the number of stored pairs, including each pair that is not merged yet.
func (c *Counts) size() int {
	n := 0
	for layer := range c.layers {
		n += len(c.layers[layer].pairs) + len(c.layers[layer].pending)
	}
	return n
}

// keep drops the pairs of other tokens, and releases their memory.
func (c *pairCounts) keep(wanted func(token int32) bool) {
	var left run
	for i, p := range c.pairs {
		if wanted(p.token()) {
			left.pairs, left.counts = append(left.pairs, p), append(left.counts, c.counts[i])
		}
	}
	c.run = left
}
