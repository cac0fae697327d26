// SPDX-License-Identifier: Apache-2.0

package placement_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
)

// messagesByHand counts with maps, independently of the search's increments.
func messagesByHand(o *affinity.Occurrences, rankOf []int, own []int32, m affinity.Messages) float64 {
	total := 0.0
	for at := range o.Len() {
		ranks, nodes := map[int]bool{}, map[int]bool{}
		for _, e := range o.Layers[0][at*o.TopK : (at+1)*o.TopK] {
			ranks[rankOf[e]] = true
			nodes[rankOf[e]/m.RanksPerNode] = true
		}
		delete(ranks, int(own[at]))
		delete(nodes, int(own[at])/m.RanksPerNode)
		total += float64(m.Rank)*float64(len(ranks)) + float64(m.Node)*float64(len(nodes))
	}
	return total
}

// TestDistinctGainsAreExact swaps at random, and compares every gain with a recomputed count. Occurrences may repeat an
// expert, as with groups. There are more experts than bits in a word.
func TestDistinctGainsAreExact(t *testing.T) {
	random := rand.New(rand.NewPCG(21, 21))
	for range 200 {
		ranks := []int{2, 4, 6, 8}[random.IntN(4)]
		experts, topK := ranks*(1+random.IntN(20)), 1+random.IntN(6)
		m := affinity.Messages{Rank: float32(random.IntN(3)), Node: float32(random.IntN(4)), RanksPerNode: 1 + random.IntN(ranks)}
		o := &affinity.Occurrences{Experts: experts, TopK: topK, Layers: make([][]uint16, 1), Unit: make([]int32, 20), Units: 1, Scale: 1}
		for range o.Len() * topK {
			o.Layers[0] = append(o.Layers[0], uint16(random.IntN(experts)))
		}
		rankOf, own := make([]int, experts), make([]int32, o.Len())
		for i, e := range random.Perm(experts) {
			rankOf[e] = i % ranks
		}
		for i := range own {
			own[i] = int32(random.IntN(ranks))
		}
		d := placement.NewDistinct(o, rankOf, own, ranks, m)
		for range 30 {
			e, f := random.IntN(experts), random.IntN(experts)
			before := messagesByHand(o, rankOf, own, m)
			if got := d.Total(); math.Abs(got-before) > 1e-9 {
				t.Fatalf("%d ranks, %+v: messages cost %v, counted by hand %v", ranks, m, got, before)
			}
			if rankOf[e] == rankOf[f] {
				continue
			}
			swapped := slices.Clone(rankOf)
			swapped[e], swapped[f] = swapped[f], swapped[e]
			if want, got := before-messagesByHand(o, swapped, own, m), d.Gain(e, f); math.Abs(got-want) > 1e-9 {
				t.Fatalf("%d ranks, %+v: the swap of %d and %d gains %v; counted by hand %v", ranks, m, e, f, got, want)
			}
			d.Swap(e, f)
		}
	}
}
