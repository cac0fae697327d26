// SPDX-License-Identifier: Apache-2.0

package simulate

import "github.com/semmoe/operator/solver/placement"

// routes maps a token's experts to the slots that compute them in one MoE layer.
type routes struct {
	// slots are the slots with a copy of each expert, ascending. home is the only slot of an expert with one copy, and
	// -1 for experts with several copies.
	slots [][]int
	home  []int
	// rankOf is the rank of each slot, nodeOf the node of each rank.
	rankOf, nodeOf []int
	// turn is the number of the current token. It distributes tokens round-robin over the copies of remote experts, and
	// marks the ranks [ranks] for which the token has been counted.
	turn  int
	marks []int
}

func newRoutes(p *placement.Placement, layer, ranksPerNode int) *routes {
	r := &routes{slots: make([][]int, p.Experts), home: make([]int, p.Experts), rankOf: make([]int, p.Ranks*p.SlotsPerRank), nodeOf: make([]int, p.Ranks), marks: make([]int, p.Ranks)}
	for slot, expert := range p.Layers[layer].Slots {
		r.slots[expert] = append(r.slots[expert], slot)
		r.rankOf[slot] = slot / p.SlotsPerRank
	}
	for expert, slots := range r.slots {
		r.home[expert] = slots[0]
		if len(slots) > 1 {
			r.home[expert] = -1
		}
	}
	for rank := range r.nodeOf {
		r.nodeOf[rank] = rank / ranksPerNode
	}
	return r
}

// nearest returns the slot that computes an expert with several copies for a token on a rank: on the same rank, else on
// the same node, else round-robin.
func (r *routes) nearest(expert, own int) int {
	near := -1
	for _, slot := range r.slots[expert] {
		if r.rankOf[slot] == own {
			return slot
		}
		if near < 0 && r.nodeOf[r.rankOf[slot]] == r.nodeOf[own] {
			near = slot
		}
	}
	if near >= 0 {
		return near
	}
	slots := r.slots[expert]
	return slots[r.turn%len(slots)]
}

// add counts a token on its rank.
func (r *routes) add(c *Counts, experts []uint16, own int) {
	r.turn++
	ranks := len(c.Tokens)
	c.Tokens[own]++
	rows, distinct := c.Rows[own*ranks:(own+1)*ranks], c.Distinct[own*ranks:(own+1)*ranks]
	for _, expert := range experts {
		slot := r.home[expert]
		if slot < 0 {
			slot = r.nearest(int(expert), own)
		}
		rank := r.rankOf[slot]
		c.Experts[slot]++
		rows[rank]++
		if r.marks[rank] != r.turn {
			r.marks[rank] = r.turn
			distinct[rank]++
		}
	}
}
