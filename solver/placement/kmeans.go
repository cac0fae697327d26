// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"math/rand/v2"
	"slices"

	"github.com/semmoe/operator/solver/assign"
)

const kmeans2DRounds = 15

// kmeans2D is balanced two-dimensional k-means. Rows are clustered by their expert shares, in clusters of equal size in
// tokens. Experts are clustered by their shares over those clusters, in clusters of equal number. The two clusterings
// are matched, and the steps are repeated.
func kmeans2D(r *rows, random *rand.Rand, stop limit) [][]int {
	n, layers := r.experts, len(r.layers)
	rowRank := make([]int, len(r.sizes))
	for i := range rowRank {
		rowRank[i] = random.IntN(r.ranks)
	}
	balance := assign.Weighted{
		Sizes: r.sizes, Scores: make([]float32, len(r.sizes)*r.ranks), Limits: slices.Repeat([]float64{r.tokens() / float64(r.ranks)}, r.ranks),
	}
	centers := make([]float32, r.ranks*layers*n)
	for range kmeans2DRounds {
		r.centers(centers, rowRank)
		norms := make([]float32, r.ranks)
		for rank := range norms {
			row := centers[rank*layers*n : (rank+1)*layers*n]
			norms[rank] = dot(row, row)
		}
		for i, size := range r.sizes {
			scores := balance.Scores[i*r.ranks : (i+1)*r.ranks]
			for rank := range scores {
				// -(distance² - |row|²), weighted by size.
				scores[rank] = -size * norms[rank]
			}
			for l := range layers {
				experts, counts := r.layers[l].row(i)
				for k, e := range experts {
					for rank := range scores {
						scores[rank] += 2 * counts[k] * centers[(rank*layers+l)*n+int(e)]
					}
				}
			}
		}
		prices, _ := balance.PriceExact(priceSteps, nil)
		next, _ := balance.Take(prices)
		if slices.Equal(next, rowRank) || stop.reached() {
			break
		}
		rowRank = next
	}
	rankOf := make([][]int, layers)
	for l := range rankOf {
		rankOf[l] = r.clusterExperts(l, rowRank)
	}
	return rankOf
}

// centres computes each rank's mean shares, with rows weighted by size.
func (r *rows) centers(centers []float32, rowRank []int) {
	n, layers := r.experts, len(r.layers)
	clear(centers)
	weight := make([]float32, r.ranks)
	for i, rank := range rowRank {
		weight[rank] += r.sizes[i]
		for l := range layers {
			experts, counts := r.layers[l].row(i)
			for k, e := range experts {
				centers[(rank*layers+l)*n+int(e)] += counts[k]
			}
		}
	}
	for rank, w := range weight {
		for x := range layers * n {
			centers[rank*layers*n+x] /= max(w, 1)
		}
	}
}

// clusterExperts clusters experts by their shares over the clusters of rows, in groups of equal number, and matches
// groups with clusters.
func (r *rows) clusterExperts(layer int, rowRank []int) []int {
	n := r.experts
	weight := make([]float32, n*r.ranks)
	r.affinities(weight, layer, rowRank)
	for e := range n {
		row := weight[e*r.ranks : (e+1)*r.ranks]
		total := float32(1e-9)
		for _, w := range row {
			total += w
		}
		for rank := range row {
			row[rank] /= total
		}
	}
	var exact assign.Solver
	capacity := slices.Repeat([]int{n / r.ranks}, r.ranks)
	group := slices.Clone(exact.Assign(weight, capacity))
	for range kmeans2DRounds {
		means := make([]float32, r.ranks*r.ranks)
		for e, g := range group {
			add(means[g*r.ranks:(g+1)*r.ranks], weight[e*r.ranks:(e+1)*r.ranks], float32(r.ranks)/float32(n))
		}
		scores := make([]float32, n*r.ranks)
		for e := range n {
			for g := range r.ranks {
				scores[e*r.ranks+g] = -squaredDistance(weight[e*r.ranks:(e+1)*r.ranks], means[g*r.ranks:(g+1)*r.ranks])
			}
		}
		next := slices.Clone(exact.Assign(scores, capacity))
		if slices.Equal(next, group) {
			break
		}
		group = next
	}
	// A group is assigned to the cluster of rows that activates it most.
	match := make([]float32, r.ranks*r.ranks)
	for e, g := range group {
		add(match[g*r.ranks:(g+1)*r.ranks], weight[e*r.ranks:(e+1)*r.ranks], 1)
	}
	rankOfGroup := slices.Clone(exact.Assign(match, slices.Repeat([]int{1}, r.ranks)))
	for e, g := range group {
		group[e] = rankOfGroup[g]
	}
	return group
}
