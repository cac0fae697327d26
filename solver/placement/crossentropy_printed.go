// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"math/rand/v2"
	"slices"
)

// crossEntropyPrinted is the cross-entropy method of Speculative MoE (the versions of arXiv 2503.04398 before Sem-MoE).
// It samples the ranks of rows and experts jointly, from separate probability matrices, whereas crossEntropy samples
// only experts. For t rows j of a_j tokens, N experts k and E ranks i, one round
//
//   - draws samples (R, C): row j has rank i with probability P_ji, expert k with probability Q_ki. Both matrices
//     are initially uniform. A rank has N/E experts, and at most the balance factor times S/E tokens, S = Σ_j a_j.
//   - scores each sample by the objective of section 3.3 (see printedObjective).
//   - selects the elite, the samples with the lowest objective, and smooths the matrices: P ← (1-η)·P + η·(frequency
//     among the elite).
//
// The result is the sample with the lowest objective of all rounds. Balance factor and elite share are those of the
// paper. It does not publish the numbers of rounds and samples, η and θ, which are here the same as in crossEntropy and
// alternate. It also does not define how samples are balanced. Here, rows and experts are drawn in random order, each
// among the ranks with room, and a row that fits on no rank is assigned to the least loaded rank.
//
// The paper covers only attention TP, where rows are token IDs and each layer is solved independently. With attention
// DP the rows are requests, and one sample covers all layers.
func crossEntropyPrinted(r *rows, random *rand.Rand, stop limit) (rankOf [][]int, rowRank []int) {
	n, layers, ranks := r.experts, len(r.layers), r.ranks
	ofExperts, ofRows := uniform(layers*n*ranks, ranks), uniform(len(r.sizes)*ranks, ranks)
	type sample struct {
		rankOf    [][]int
		rowRank   []int
		objective float64
	}
	best := sample{rankOf: slices.Repeat([][]int{contiguousRanks(n, ranks)}, layers), rowRank: r.spread()}
	best.objective = r.printedObjective(best.rankOf, best.rowRank)
	elite := max(1, int(crossEntropyElite*crossEntropySamples))
	for range crossEntropyRounds {
		samples := make([]sample, 0, crossEntropySamples)
		for len(samples) < crossEntropySamples && !stop.reached() {
			s := sample{rankOf: make([][]int, layers), rowRank: r.draw(ofRows, random)}
			for l := range layers {
				s.rankOf[l] = drawPlacement(ofExperts[l*n*ranks:(l+1)*n*ranks], n, ranks, random)
			}
			s.objective = r.printedObjective(s.rankOf, s.rowRank)
			samples = append(samples, s)
		}
		slices.SortStableFunc(samples, func(a, b sample) int { return compareDescending(b.objective, a.objective) })
		if len(samples) > 0 && samples[0].objective < best.objective {
			best = samples[0]
		}
		if len(samples) < crossEntropySamples {
			break
		}
		decay(ofExperts)
		decay(ofRows)
		share := crossEntropySmoothing / float64(elite)
		for _, s := range samples[:elite] {
			for i, rank := range s.rowRank {
				ofRows[i*ranks+rank] += share
			}
			for l, of := range s.rankOf {
				for e, rank := range of {
					ofExperts[(l*n+e)*ranks+rank] += share
				}
			}
		}
	}
	return best.rankOf, best.rowRank
}

// uniform returns equal probabilities for all ranks.
func uniform(size, ranks int) []float64 { return slices.Repeat([]float64{1 / float64(ranks)}, size) }

// decay scales the probabilities by the weight that a round retains.
func decay(probability []float64) {
	for i := range probability {
		probability[i] *= 1 - crossEntropySmoothing
	}
}

// draw draws a rank for each row, in random order, among the ranks with room.
func (r *rows) draw(probability []float64, random *rand.Rand) []int {
	rank, load := make([]int, len(r.sizes)), make([]float64, r.ranks)
	limit := crossEntropySlack * r.tokens() / float64(r.ranks)
	for _, i := range random.Perm(len(r.sizes)) {
		size, total := float64(r.sizes[i]), 0.0
		row := probability[i*r.ranks : (i+1)*r.ranks]
		for c, p := range row {
			if load[c]+size <= limit {
				total += p
			}
		}
		pick, chosen := random.Float64()*total, -1
		for c, p := range row {
			if load[c]+size > limit {
				continue
			}
			chosen = c
			if pick -= p; pick < 0 {
				break
			}
		}
		if chosen < 0 {
			chosen = lowest(load)
		}
		rank[i] = chosen
		load[chosen] += size
	}
	return rank
}

// printedObjective returns the objective of both papers (section 3.3), where lower is better:
//
//	θ·Σ_i |Σ_j R_ij a_j − S/E| + (1−θ)·Σ_{i1≠i2} Σ_j Σ_k R_{i1,j} C_{i2,k} C_p,jk a_j
//
// R_ij and C_ik are 1 where row j and expert k have rank i, a_j are the tokens of row j, S = Σ_j a_j, E is the number
// of ranks, and C_p,jk is the probability that an activation of row j is of expert k. Over several layers the
// right-hand term is the mean.
func (r *rows) printedObjective(rankOf [][]int, rowRank []int) float64 {
	load, remote := make([]float64, r.ranks), 0.0
	for i, rank := range rowRank {
		load[rank] += float64(r.sizes[i])
		for l := range r.layers {
			experts, counts := r.layers[l].row(i)
			all, away := float32(0), float32(0)
			for k, e := range experts {
				all += counts[k]
				if rankOf[l][e] != rank {
					away += counts[k]
				}
			}
			if all > 0 {
				remote += float64(r.sizes[i]) * float64(away/all)
			}
		}
	}
	fair, imbalance := r.tokens()/float64(r.ranks), 0.0
	for _, n := range load {
		imbalance += max(n-fair, fair-n)
	}
	return theta*imbalance + (1-theta)*remote/float64(len(r.layers))
}
