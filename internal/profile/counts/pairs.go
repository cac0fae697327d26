// SPDX-License-Identifier: Apache-2.0

package counts

import (
	"math"
	"slices"
)

// minPending is the minimum number of activations of a layer that are merged at once.
const minPending = 1 << 12

// pair is a token ID and an expert, ordered by token, then by expert.
type pair uint64

func pairOf(token int32, expert uint16) pair { return pair(token)<<16 | pair(expert) }
func (p pair) token() int32                  { return int32(p >> 16) }
func (p pair) expert() uint16                { return uint16(p) }

// run contains different pairs in ascending order, and their numbers of occurrences.
type run struct {
	pairs  []pair
	counts []uint32
}

// pairCounts counts pairs. It contains a run, and pairs that are not merged into the run yet.
type pairCounts struct {
	run
	pending []pair
}

func (c *pairCounts) add(p pair) {
	c.pending = append(c.pending, p)
	// A merge takes time proportional to the length of the run, so it waits for at least half as many new pairs.
	if len(c.pending) >= max(minPending, len(c.pairs)/2) {
		c.merge()
	}
}

func (c *pairCounts) merge() {
	c.run, c.pending = c.merged(), c.pending[:0]
}

// merged returns the run including the pending pairs.
func (c *pairCounts) merged() run {
	if len(c.pending) == 0 {
		return c.run
	}
	slices.Sort(c.pending)
	return mergeRuns(c.run, runOf(c.pending))
}

// runOf counts sorted pairs.
func runOf(sorted []pair) run {
	var r run
	for i, p := range sorted {
		if i > 0 && p == sorted[i-1] {
			r.counts[len(r.counts)-1]++
			continue
		}
		r.pairs, r.counts = append(r.pairs, p), append(r.counts, 1)
	}
	return r
}

// mergeRuns returns the sum of two runs.
func mergeRuns(a, b run) run {
	sum := run{make([]pair, 0, len(a.pairs)+len(b.pairs)), make([]uint32, 0, len(a.pairs)+len(b.pairs))}
	i, j := 0, 0
	for i < len(a.pairs) || j < len(b.pairs) {
		switch {
		case j == len(b.pairs) || i < len(a.pairs) && a.pairs[i] < b.pairs[j]:
			sum.pairs, sum.counts = append(sum.pairs, a.pairs[i]), append(sum.counts, a.counts[i])
			i++
		case i == len(a.pairs) || b.pairs[j] < a.pairs[i]:
			sum.pairs, sum.counts = append(sum.pairs, b.pairs[j]), append(sum.counts, b.counts[j])
			j++
		default:
			sum.pairs, sum.counts = append(sum.pairs, a.pairs[i]), append(sum.counts, saturated(a.counts[i], b.counts[j]))
			i, j = i+1, j+1
		}
	}
	return sum
}

// saturated returns a + b, or the maximum of the type if the sum overflows.
func saturated(a, b uint32) uint32 {
	if a > math.MaxUint32-b {
		return math.MaxUint32
	}
	return a + b
}
