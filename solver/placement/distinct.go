// SPDX-License-Identifier: Apache-2.0

package placement

import "github.com/semmoe/operator/solver/affinity"

// distinct is a placement of one layer during search, for objectives that count the distinct ranks and nodes of a
// token. It stores single occurrences with the number of their experts on each rank, which makes the gain of a swap
// exact.
type distinct struct {
	cost  affinity.Messages
	ranks int
	nodes int
	// rankOf is the rank of each expert.
	rankOf []int
	// own is the rank of each occurrence.
	own []int32
	// of are the occurrences of each expert. has is the set of experts of each occurrence, as a bit set of words words.
	of    [][]int32
	words int
	has   []uint64
	// onRank and onNode are the numbers of an occurrence's experts on each rank [occurrences × ranks] and node
	// [occurrences × nodes]. Its own rank and node, to which nothing is sent, have the number home added.
	onRank, onNode []uint8
}

// home exceeds the maximum number of experts of a token, and 2·home fits into 8 bits.
const home = 1 << 7

func newDistinct(o *affinity.Occurrences, layer int, rankOf []int, own []int32, ranks int, cost affinity.Messages) *distinct {
	d := &distinct{
		cost: cost, ranks: ranks, nodes: (ranks-1)/cost.RanksPerNode + 1, rankOf: rankOf,
		own: own, of: make([][]int32, o.Experts), words: (o.Experts + 63) / 64,
	}
	d.has = make([]uint64, o.Len()*d.words)
	d.onRank, d.onNode = make([]uint8, o.Len()*ranks), make([]uint8, o.Len()*d.nodes)
	for at, rank := range own {
		d.onRank[at*ranks+int(rank)] = home
		d.onNode[at*d.nodes+int(rank)/cost.RanksPerNode] = home
	}
	for i, e := range o.Layers[layer] {
		at := i / o.TopK
		word, bit := &d.has[at*d.words+int(e)/64], uint64(1)<<(e%64)
		if *word&bit != 0 {
			continue // experts of one group repeat
		}
		*word |= bit
		d.of[e] = append(d.of[e], int32(at))
		d.onRank[at*ranks+rankOf[e]]++
		d.onNode[at*d.nodes+rankOf[e]/cost.RanksPerNode]++
	}
	return d
}

func (d *distinct) ranksOf() []int { return d.rankOf }

// gain returns the saved message cost if e and f, on different ranks, are swapped.
func (d *distinct) gain(e, f int, _ float64) float64 {
	p, q := d.rankOf[e], d.rankOf[f]
	return d.moved(e, f, p, q) + d.moved(f, e, q, p)
}

// moved returns the gain of the occurrences of expert e, but not of other, if e moves between two ranks. Occurrences of
// both experts do not change.
func (d *distinct) moved(e, other, from, to int) float64 {
	word, bit := other/64, uint64(1)<<(other%64)
	fromNode, toNode := from/d.cost.RanksPerNode, to/d.cost.RanksPerNode
	withNodes := d.cost.Node > 0 && fromNode != toNode
	ranks, nodes := 0, 0
	for _, at := range d.of[e] {
		if d.has[int(at)*d.words+word]&bit != 0 {
			continue
		}
		row := d.onRank[int(at)*d.ranks : (int(at)+1)*d.ranks]
		if row[from] == 1 {
			ranks++
		}
		if row[to] == 0 {
			ranks--
		}
		if !withNodes {
			continue
		}
		row = d.onNode[int(at)*d.nodes : (int(at)+1)*d.nodes]
		if row[fromNode] == 1 {
			nodes++
		}
		if row[toNode] == 0 {
			nodes--
		}
	}
	return float64(d.cost.Rank)*float64(ranks) + float64(d.cost.Node)*float64(nodes)
}

func (d *distinct) swap(e, f int) {
	p, q := d.rankOf[e], d.rankOf[f]
	d.move(e, p, q)
	d.move(f, q, p)
}

func (d *distinct) move(e, from, to int) {
	fromNode, toNode := from/d.cost.RanksPerNode, to/d.cost.RanksPerNode
	for _, at := range d.of[e] {
		d.onRank[int(at)*d.ranks+from]--
		d.onRank[int(at)*d.ranks+to]++
		d.onNode[int(at)*d.nodes+fromNode]--
		d.onNode[int(at)*d.nodes+toNode]++
	}
	d.rankOf[e] = to
}

// total returns the cost of all messages.
func (d *distinct) total() float64 {
	ranks, nodes := 0, 0
	for _, n := range d.onRank {
		if n > 0 && n < home {
			ranks++
		}
	}
	for _, n := range d.onNode {
		if n > 0 && n < home {
			nodes++
		}
	}
	return float64(d.cost.Rank)*float64(ranks) + float64(d.cost.Node)*float64(nodes)
}

// soleMessageCost returns the message cost of an occurrence to a rank that only one expert causes.
func (d *distinct) soleMessageCost(at, rank int) float64 {
	if d.onRank[at*d.ranks+rank] != 1 {
		return 0
	}
	cost := float64(d.cost.Rank)
	if d.onNode[at*d.nodes+rank/d.cost.RanksPerNode] == 1 {
		cost += float64(d.cost.Node)
	}
	return cost
}
