// SPDX-License-Identifier: Apache-2.0

package assign

import (
	"math"
	"math/bits"
	"slices"
)

// groups are the sets of items with equal scores, in the order of their first items.
type groups struct {
	// of are the groups of the items, sizes the numbers of items of the groups, and rows their scores [groups × bins].
	of    []int32
	sizes []int32
	rows  []float32
	// table is an open hash table of the groups by their scores: 1 + the group, or 0.
	table []int32
}

func (g *groups) row(group, bins int) []float32 { return g.rows[group*bins : (group+1)*bins] }

// find groups the items by scores [items × bins].
func (g *groups) find(scores []float32, bins int) {
	items := len(scores) / bins
	size := 1 << bits.Len(uint(2*items))
	g.of, g.table = resized(g.of, items), resized(g.table, size)
	g.sizes, g.rows = g.sizes[:0], g.rows[:0]
	clear(g.table)
	for item := range items {
		row := scores[item*bins : (item+1)*bins]
		at := hash(row) & uint64(size-1)
		for ; g.table[at] != 0; at = (at + 1) & uint64(size-1) {
			if slices.Equal(g.row(int(g.table[at]-1), bins), row) {
				break
			}
		}
		if g.table[at] == 0 {
			g.sizes, g.rows = append(g.sizes, 0), append(g.rows, row...)
			g.table[at] = int32(len(g.sizes))
		}
		g.of[item] = g.table[at] - 1
		g.sizes[g.of[item]]++
	}
}

// hash returns a hash of scores. Equal scores have equal hashes, except zeros of different sign.
func hash(row []float32) uint64 {
	h := uint64(len(row))
	for _, score := range row {
		h = (h ^ uint64(math.Float32bits(score))) * 0x9e3779b97f4a7c15
		h ^= h >> 29
	}
	return h
}
