// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"math/rand/v2"
	"slices"
)

// Parameters of the cross-entropy method of Speculative MoE. Balance factor and elite share are those of the paper.
const (
	crossEntropyRounds  = 40
	crossEntropySamples = 40
	crossEntropyElite   = 0.2
	crossEntropySlack   = 1.1
	// crossEntropySmoothing is the weight of the elite's frequencies in the probability update of a round.
	crossEntropySmoothing = 0.7
)

// crossEntropy is a practical variant of the cross-entropy method of Speculative MoE (see Rubinstein and Kroese, "The
// Cross-Entropy Method", 2004). It samples placements from probabilities of each expert on each rank, assigns rows
// greedily, and updates the probabilities with the samples of highest locality. crossEntropyPrinted also samples the
// rows, and scores a sample by the objective.
func crossEntropy(r *rows, random *rand.Rand, stop limit) [][]int {
	n, layers := r.experts, len(r.layers)
	probability := make([]float64, layers*n*r.ranks)
	for i := range probability {
		probability[i] = 1 / float64(r.ranks)
	}
	type draw struct {
		rankOf [][]int
		local  float64
	}
	scores := make([]float32, len(r.sizes)*r.ranks)
	var best draw
	elite := max(1, int(crossEntropyElite*crossEntropySamples))
	for range crossEntropyRounds {
		draws := make([]draw, crossEntropySamples)
		for i := range draws {
			draws[i].rankOf = make([][]int, layers)
			for l := range layers {
				draws[i].rankOf[l] = drawPlacement(probability[l*n*r.ranks:(l+1)*n*r.ranks], n, r.ranks, random)
			}
			r.local(scores, draws[i].rankOf)
			_, draws[i].local = r.greedy(scores, crossEntropySlack)
			if stop.reached() {
				break
			}
		}
		slices.SortStableFunc(draws, func(a, b draw) int { return compareDescending(a.local, b.local) })
		if draws[0].local > best.local {
			best = draws[0]
		}
		if stop.reached() {
			break
		}
		for i := range probability {
			probability[i] *= 1 - crossEntropySmoothing
		}
		for _, d := range draws[:elite] {
			for l, rankOf := range d.rankOf {
				for e, rank := range rankOf {
					probability[(l*n+e)*r.ranks+rank] += crossEntropySmoothing / float64(elite)
				}
			}
		}
	}
	if best.rankOf == nil {
		best.rankOf = slices.Repeat([][]int{contiguousRanks(n, r.ranks)}, layers)
	}
	return best.rankOf
}

// drawPlacement draws each expert's rank, in random order, among the ranks with room.
func drawPlacement(probability []float64, n, ranks int, random *rand.Rand) []int {
	rankOf, room := make([]int, n), slices.Repeat([]int{n / ranks}, ranks)
	for _, e := range random.Perm(n) {
		total := 0.0
		for rank, p := range probability[e*ranks : (e+1)*ranks] {
			if room[rank] > 0 {
				total += p + 1e-6
			}
		}
		pick, chosen := random.Float64()*total, -1
		for rank, p := range probability[e*ranks : (e+1)*ranks] {
			if room[rank] == 0 {
				continue
			}
			chosen = rank
			if pick -= p + 1e-6; pick < 0 {
				break
			}
		}
		rankOf[e] = chosen
		room[chosen]--
	}
	return rankOf
}
