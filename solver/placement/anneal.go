// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"math"
	"math/rand/v2"

	"github.com/semmoe/operator/solver/affinity"
)

// gram is a symmetric matrix of affinities between the experts of one layer [N × N], with zero diagonal. A token's
// contribution to a pair is the product of its activations of the two experts, divided by its occurrences. The sum of a
// placement's affinities within ranks measures in the 2-norm what the local activation rate measures in the maximum
// norm, and does not need tokens during the search.
type gram struct {
	n      int
	values []float32
}

func newGram(n int) *gram { return &gram{n, make([]float32, n*n)} }

func (g *gram) row(e int) []float32 { return g.values[e*g.n : (e+1)*g.n] }

// mirror copies the upper triangle to the lower triangle.
func (g *gram) mirror() {
	for e := range g.n {
		g.values[e*g.n+e] = 0
		for f := range e {
			g.values[e*g.n+f] = g.values[f*g.n+e]
		}
	}
}

// tokenGram returns the Gram matrix of a layer's token rows. shrinkage is the same as in newSample.
func tokenGram(c *affinity.Counts, shrinkage float32) *gram {
	return rowGram(c.Experts, sparseRows{c.Start, c.Expert, c.Count}, c.RowOccurrences(), shrinkage)
}

// rowGram returns the Gram matrix of rows. sizes are the occurrences of the rows.
func rowGram(n int, rows sparseRows, sizes []float32, shrinkage float32) *gram {
	g := newGram(n)
	for r, size := range sizes {
		if size == 0 {
			continue
		}
		worth := reliability(size, shrinkage)
		scale := worth * worth / size
		experts, counts := rows.row(r)
		counts = counts[:len(experts)]
		for i, e := range experts {
			row, weight := g.row(int(e)), counts[i]*scale
			for j := i + 1; j < len(experts); j++ {
				row[experts[j]] += weight * counts[j]
			}
		}
	}
	g.mirror()
	return g
}

// togetherWeight is the weight of single occurrences in mixedGram.
const togetherWeight = 2

// mixedGram returns the affinities that a forecast with more than the token ID can exploit: the similarity of different
// occurrences of a token, without the bias from noise of the token row in tokenGram, plus the co-activations of single
// occurrences with weight togetherWeight. By held-out locality with the forecast prefill, the best weight is two to
// three.
func mixedGram(c *affinity.Counts, pairs *affinity.Pairs) *gram {
	g := newGram(c.Experts)
	for token := range c.Vocabulary() {
		if c.Occurrences[token] < 2 {
			continue
		}
		experts, counts := c.Row(token)
		for i, e := range experts {
			weight := counts[i] / (c.Occurrences[token] - 1)
			row := g.row(int(e))
			for j := i + 1; j < len(experts); j++ {
				row[experts[j]] += weight * counts[j]
			}
		}
	}
	for e := range c.Experts {
		row := g.row(e)
		for f := e + 1; f < c.Experts; f++ {
			row[f] += togetherWeight*pairs.Together[e*c.Experts+f] - pairs.Within[e*c.Experts+f]
		}
	}
	g.mirror()
	return g
}

// requestGram returns the Gram matrix of one layer of request rows.
func requestGram(c *affinity.RequestCounts, layer int) *gram {
	g := newGram(c.Experts)
	for r, full := range c.Rows {
		counts := full[layer*c.Experts : (layer+1)*c.Experts]
		for e, count := range counts {
			if count == 0 {
				continue
			}
			weight := count / c.Tokens[r]
			row := g.row(e)
			for f := e + 1; f < c.Experts; f++ {
				row[f] += weight * counts[f]
			}
		}
	}
	g.mirror()
	return g
}

// partition is a placement of one layer during search, with sums that make the gain of a swap O(1).
type partition struct {
	gram  *gram
	ranks int
	// size is the number of experts in a group. Swaps stay within consecutive runs of that length.
	size int
	// rankOf is the rank of each expert.
	rankOf []int
	// connection[i*n+e] is the affinity of expert e to the experts on rank i.
	connection []float32
}

func newPartition(g *gram, rankOf []int, ranks, groups int) *partition {
	p := &partition{gram: g, ranks: ranks, size: g.n / groups, rankOf: rankOf, connection: make([]float32, ranks*g.n)}
	for e, rank := range rankOf {
		connection := p.connection[rank*g.n : (rank+1)*g.n]
		for f, affinity := range g.row(e) {
			connection[f] += affinity
		}
	}
	return p
}

// randomPartition assigns the experts of each group in random order, the same number to each of the group's ranks.
func randomPartition(g *gram, ranks, groups int, random *rand.Rand) *partition {
	rankOf := make([]int, g.n)
	size := g.n / groups
	for first := 0; first < g.n; first += size {
		for i, e := range random.Perm(size) {
			rankOf[first+e] = (first + i) * ranks / g.n
		}
	}
	return newPartition(g, rankOf, ranks, groups)
}

// gain returns the increase of the affinity within ranks if e and f, on different ranks, are swapped.
func (p *partition) gain(e, f int) float32 {
	n := p.gram.n
	ofE, ofF := p.connection[p.rankOf[e]*n:], p.connection[p.rankOf[f]*n:]
	return ofF[e] - ofE[e] + ofE[f] - ofF[f] - 2*p.gram.values[e*n+f]
}

func (p *partition) swap(e, f int) {
	n := p.gram.n
	rankE, rankF := p.rankOf[e], p.rankOf[f]
	rowE, rowF := p.gram.row(e), p.gram.row(f)[:n]
	ofE, ofF := p.connection[rankE*n : (rankE+1)*n][:n], p.connection[rankF*n : (rankF+1)*n][:n]
	for x, affinity := range rowE[:n] {
		d := rowF[x] - affinity
		ofE[x] += d
		ofF[x] -= d
	}
	p.rankOf[e], p.rankOf[f] = rankF, rankE
}

// inside returns the affinity within ranks.
func (p *partition) inside() float64 {
	sum := 0.0
	for e, rank := range p.rankOf {
		sum += float64(p.connection[rank*p.gram.n+e])
	}
	return sum / 2
}

// stepsPerExpert is the number of proposed swaps per expert in one annealing run.
const stepsPerExpert = 2000

// schedule is the cooling schedule of an annealing run. The temperature falls geometrically from hottest to coldest, as
// fractions of the mean affinity between an expert and a rank, within steps proposed swaps per expert.
type schedule struct {
	hottest float64
	steps   int
}

var (
	cold = schedule{1, stepsPerExpert}
	// warm starts from a placement that is already good, at a temperature that preserves it.
	warm = schedule{0.1, stepsPerExpert / 2}
)

// anneal is simulated annealing (Kirkpatrick, Gelatt, Vecchi 1983): it proposes random swaps at a falling temperature.
// Afterwards it takes every swap with a gain. It ends early after as many consecutive rejections as there are ordered
// pairs, because the temperature only falls.
func (p *partition) anneal(random *rand.Rand, stop limit, how schedule) {
	const coldest = 0.01
	n := p.gram.n
	if p.ranks < 2 {
		return
	}
	total := 0.0
	for _, v := range p.gram.values {
		total += float64(v)
	}
	temperature := how.hottest * total / float64(n*n) * float64(n/p.ranks)
	steps := how.steps * n
	// A swap whose loss exceeds this multiple of the temperature has an acceptance probability of 1e-7.
	const hopeless = 16
	const block = 1024
	cooling := math.Pow(coldest/how.hottest, float64(block)/float64(steps))
	taken := 0
	for step := 0; step < steps; step++ {
		if step%block == 0 {
			if stop.reached() {
				return
			}
			if step-taken > n*n {
				break
			}
			temperature *= cooling
		}
		// Both experts are drawn from one random number, which has many more bits than n.
		bits := random.Uint64()
		e := int(bits >> 32 * uint64(n) >> 32)
		f := e - e%p.size + int(bits&math.MaxUint32*uint64(p.size)>>32)
		if p.rankOf[e] == p.rankOf[f] {
			continue
		}
		gain := float64(p.gain(e, f))
		if gain >= 0 || gain > -hopeless*temperature && gain > -temperature*random.ExpFloat64() {
			p.swap(e, f)
			taken = step
		}
	}
	p.descend(stop)
}

// descend takes swaps with a gain until there is none. Gains below the rounding error of the sums do not count, because
// they could repeat endlessly.
func (p *partition) descend(stop limit) {
	n := p.gram.n
	largest := float32(0)
	for _, v := range p.gram.values {
		largest = max(largest, v)
	}
	for improved := true; improved && !stop.reached(); {
		improved = false
		for e := range n {
			for f := e - e%p.size; f < e; f++ {
				if p.rankOf[e] != p.rankOf[f] && p.gain(e, f) > 1e-4*largest {
					p.swap(e, f)
					improved = true
				}
			}
		}
	}
}
