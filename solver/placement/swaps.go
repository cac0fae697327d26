// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"math"
	"math/rand/v2"
)

// swapper is a placement of one layer during local search by swaps of experts on different ranks.
type swapper interface {
	// ranksOf returns the ranks of the experts.
	ranksOf() []int
	// gain returns the improvement of the objective if two experts on different ranks are swapped. If the improvement is
	// at most floor, it may return any value up to floor.
	gain(e, f int, floor float64) float64
	swap(e, f int)
}

// weighted is a search with a given value of each expert on each rank [experts × ranks].
type weighted struct {
	weight []float32
	rankOf []int
	ranks  int
}

func (w *weighted) ranksOf() []int { return w.rankOf }

func (w *weighted) gain(e, f int, _ float64) float64 {
	p, q := w.rankOf[e], w.rankOf[f]
	ofE, ofF := w.weight[e*w.ranks:], w.weight[f*w.ranks:]
	return float64(ofE[q]) - float64(ofE[p]) + float64(ofF[p]) - float64(ofF[q])
}

func (w *weighted) swap(e, f int) { w.rankOf[e], w.rankOf[f] = w.rankOf[f], w.rankOf[e] }

// related is a search by the affinities of a Gram matrix. The sum of products of activations over occurrences, divided
// by top-k, approximates the number of local activations.
type related struct {
	*partition
	topK float64
}

func (r related) ranksOf() []int { return r.rankOf }

func (r related) gain(e, f int, _ float64) float64 { return float64(r.partition.gain(e, f)) / r.topK }

// proposals is the number of proposed swaps for each expert, and hot the initial temperature, in units of a swap's mean
// absolute gain, for annealing a placement that is already good.
const (
	proposals = 100
	hot       = 0.1
)

// annealSwaps proposes random swaps at a falling temperature, and then takes swaps while there is a gain.
func annealSwaps(s swapper, within *limits, random *rand.Rand, stop limit) {
	const coldest, block = 0.01 * hot, 64
	rankOf := s.ranksOf()
	within.begin(rankOf)
	scale, seen := 0.0, 0
	for range 4 * len(rankOf) {
		if e, f := within.draw(random); rankOf[e] != rankOf[f] {
			scale += math.Abs(s.gain(e, f, math.Inf(-1)))
			seen++
		}
	}
	temperature := hot * scale / float64(max(seen, 1))
	steps := proposals * len(rankOf)
	cooling := math.Pow(coldest/hot, block/float64(steps))
	for step := range steps {
		if step%block == 0 {
			if stop.reached() {
				return
			}
			temperature *= cooling
		}
		e, f := within.draw(random)
		p, q := rankOf[e], rankOf[f]
		if p == q || !within.allows(e, f, p, q) {
			continue
		}
		floor := within.cost*float64(within.moreMoves(e, f, p, q)) - temperature*random.ExpFloat64()
		if s.gain(e, f, floor) > floor {
			s.swap(e, f)
			within.swapped(e, f, p, q)
		}
	}
	descendSwaps(s, within, stop)
}

// descendSwaps takes swaps with a gain until there is none. Gains below the constant least count as rounding. With sums
// of large numbers, rounding may be larger, so the number of rounds is also limited.
func descendSwaps(s swapper, within *limits, stop limit) {
	const least, rounds = 1e-3, 100
	rankOf := s.ranksOf()
	size := len(rankOf) / within.groups
	within.begin(rankOf)
	for range rounds {
		improved := false
		for e := range rankOf {
			for f := e - e%size; f < e; f++ {
				p, q := rankOf[e], rankOf[f]
				if p == q || !within.allows(e, f, p, q) {
					continue
				}
				floor := least + within.cost*float64(within.moreMoves(e, f, p, q))
				if s.gain(e, f, floor) > floor {
					s.swap(e, f)
					within.swapped(e, f, p, q)
					improved = true
				}
			}
		}
		if !improved || stop.reached() {
			return
		}
	}
}
