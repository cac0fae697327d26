// SPDX-License-Identifier: Apache-2.0

package placement

import "slices"

// extras are redundant copies: extras[e] are the additional ranks that contain expert e. It is nil without copies.
type extras [][]int

// bestCopies gives every rank copies of the experts that its rows activate most among those that it does not contain.
// For fixed ranks of the rows this is the optimum, because slots do not compete. weight is [experts × ranks].
func bestCopies(weight []float32, rankOf []int, ranks, perRank int) extras {
	if perRank == 0 {
		return nil
	}
	copies := make(extras, len(rankOf))
	order := make([]int, 0, len(rankOf))
	for rank := range ranks {
		order = order[:0]
		for e, own := range rankOf {
			if own != rank {
				order = append(order, e)
			}
		}
		slices.SortStableFunc(order, func(a, b int) int {
			return compareDescending(float64(weight[a*ranks+rank]), float64(weight[b*ranks+rank]))
		})
		for _, e := range order[:perRank] {
			copies[e] = append(copies[e], rank)
		}
	}
	return copies
}

// hottestCopies gives every rank the experts with the highest load that it does not contain.
func hottestCopies(loads []float64, rankOf []int, ranks, perRank int) extras {
	weight := make([]float32, len(rankOf)*ranks)
	for e, load := range loads {
		for rank := range ranks {
			weight[e*ranks+rank] = float32(load)
		}
	}
	return bestCopies(weight, rankOf, ranks, perRank)
}

// layerOf returns a layer, given each expert's rank and its copies. Experts ascend within a rank.
func layerOf(layer int, rankOf []int, copies extras, ranks int) Layer {
	var slots []int
	for rank := range ranks {
		for e, own := range rankOf {
			if own == rank || copies != nil && slices.Contains(copies[e], rank) {
				slots = append(slots, e)
			}
		}
	}
	return Layer{Layer: layer, Slots: slots}
}

// placement returns a placement of this problem's shape without layers.
func (p *Problem) placement() *Placement {
	return &Placement{
		Ranks: p.Ranks, Experts: p.experts(), SlotsPerRank: p.experts()/p.Ranks + p.RedundantSlots, Layers: make([]Layer, len(p.Layers)),
	}
}

// simple returns a placement by a fixed rule, with copies of the hottest experts.
func (p *Problem) simple(rankOf func(expert int) int) *Placement {
	out := p.placement()
	of := make([]int, p.experts())
	for e := range of {
		of[e] = rankOf(e)
	}
	for l, layer := range p.Layers {
		out.Layers[l] = layerOf(layer, of, hottestCopies(p.layerLoads(l), of, p.Ranks, p.RedundantSlots), p.Ranks)
	}
	return out
}

// WithHottestCopies extends a placement without copies: every rank gets the experts with the highest load that it does
// not contain.
func (p *Problem) WithHottestCopies(of *Placement) *Placement {
	out := p.placement()
	out.CopyRule = p.CopyRule
	for l, layer := range p.Layers {
		rankOf := p.oneCopy(of, l)
		out.Layers[l] = layerOf(layer, rankOf, hottestCopies(p.layerLoads(l), rankOf, p.Ranks, p.RedundantSlots), p.Ranks)
	}
	return out
}

// replicate is the replication step of DeepSeek's EPLB. It repeatedly adds a copy of the expert with the highest load
// per copy until all slots are used. Then it packs copies, heaviest first, on the least loaded rank that has room and
// no copy of the expert.
func replicate(loads []float64, ranks, perRank int) []int {
	slots := len(loads) + ranks*perRank
	count := slices.Repeat([]int{1}, len(loads))
	for range slots - len(loads) {
		most := -1
		for e, load := range loads {
			if count[e] < ranks && (most < 0 || load/float64(count[e]) > loads[most]/float64(count[most])) {
				most = e
			}
		}
		count[most]++
	}
	var copies []int
	for e, n := range count {
		copies = append(copies, slices.Repeat([]int{e}, n)...)
	}
	each := func(e int) float64 { return loads[e] / float64(count[e]) }
	// Experts with the most copies have the fewest possible ranks: they are packed first, then experts by load.
	slices.SortStableFunc(copies, func(a, b int) int {
		if full := compareDescending(float64(count[a]/ranks), float64(count[b]/ranks)); full != 0 {
			return full
		}
		return compareDescending(each(a), each(b))
	})
	size := slots / ranks
	on, load := make([][]int, ranks), make([]float64, ranks)
	for _, e := range copies {
		best := -1
		for rank := range ranks {
			if len(on[rank]) < size && !slices.Contains(on[rank], e) && (best < 0 || load[rank] < load[best]) {
				best = rank
			}
		}
		if best < 0 {
			best = makeRoom(on, load, e, size, each)
		}
		on[best] = append(on[best], e)
		load[best] += each(e)
	}
	for _, experts := range on {
		slices.Sort(experts)
	}
	return slices.Concat(on...)
}

// makeRoom is called if every rank with room already contains e. A full rank without e moves one of its experts to a
// rank with room that lacks the expert. Such a pair of ranks exists, because the full rank contains more distinct
// experts than the other.
func makeRoom(on [][]int, load []float64, e, size int, each func(int) float64) int {
	for full := range on {
		if len(on[full]) < size || slices.Contains(on[full], e) {
			continue
		}
		for open := range on {
			if len(on[open]) >= size {
				continue
			}
			for i, f := range on[full] {
				if slices.Contains(on[open], f) {
					continue
				}
				on[full] = slices.Delete(on[full], i, i+1)
				on[open] = append(on[open], f)
				load[full] -= each(f)
				load[open] += each(f)
				return full
			}
		}
	}
	panic("placement: copies of an expert outnumber the ranks")
}
