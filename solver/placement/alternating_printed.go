// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"math/rand/v2"
	"slices"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/assign"
)

// Weights of Algorithm 1 as printed. The paper does not publish them. Every term is a fraction between 0 and 1, and all
// weights are 1.
const (
	printedAlphaE, printedBetaE, printedGammaE = 1.0, 1.0, 1.0
	printedAlphaR, printedBetaR                = 1.0, 1.0
)

// alternatePrinted is Algorithm 1 of Sem-MoE (arXiv 2503.04398v5, appendix B), line by line. It alternates between
// clustering requests and clustering experts.
//
// The inputs, for N experts, E ranks, K requests r and t token ids j:
//
//	C_jk = T_jk / Σ_k T_jk     probability that token j activates expert k; T are the counts of the profile
//	a_j                        occurrences of token j
//	P_rk = Σ_{j in r} C_jk     activations of expert k that the table forecasts for request r
//	L_k  = Σ_r P_rk            hotness of expert k (line 4)
//	B_ek = Σ_j a_j C_je C_jk   co-activation of the experts e and k
//
// The steps:
//
//   - Line 44 clusters the requests by their affinity to experts. See clusterPrompts.
//   - Lines 3 to 26 place the experts, hottest first, for given ranks of requests. See expertPlacing.
//   - Lines 28 to 42 schedule the requests, longest first, for given ranks of experts. See schedulePrompts.
//   - Lines 48 to 50 keep the pair with the lowest score. See printedScore.
//
// The listing leaves the following open, which this implementation resolves as follows:
//
//   - A request has one rank in all layers with attention DP (S_r in section 3.3). Its affinities are sums over the
//     layers there. With attention TP each layer is solved independently.
//   - The weights, the number of steps and the number of swaps are unpublished: see the constants of this function
//     and of alternate.
//   - Line 13 prints α_r and β_r where the parameters of the function are α_e and β_e.
//   - Line 14 takes the arg max over all clusters. The text masks saturated ones, which the constraints of section 3.3 require.
//   - "Affinity" has no formula. Each affinity is the share of the row's activations that the cluster has: see the functions.
func alternatePrinted(r *rows, random *rand.Rand, stop limit) (rankOf [][]int, rowRank []int) {
	requests := r.clusterPrompts(random)
	bestScore := 0.0
	for range alternatingRounds {
		experts := make([][]int, len(r.layers))
		for l := range r.layers {
			experts[l] = r.placePrinted(l, requests, random).rankOf
		}
		requests = r.schedulePrompts(experts)
		if score := r.printedScore(experts, requests); rankOf == nil || score < bestScore {
			rankOf, rowRank, bestScore = experts, requests, score
		}
		if stop.reached() {
			break
		}
	}
	return rankOf, rowRank
}

// promptRows returns the rows P of the requests in the MoE layers from first up to last, with the co-activations B of
// these layers.
func (p *Problem) promptRows(first, last int) *rows {
	n, layers := p.experts(), p.Tokens[first:last]
	c := &affinity.RequestCounts{
		Layers: len(layers), Experts: n, TopK: 1, Tokens: make([]float32, len(p.Prompts)), Rows: make([][]float32, len(p.Prompts)),
	}
	tokens := 0.0
	for r, prompt := range p.Prompts {
		c.Tokens[r], c.Rows[r] = float32(len(prompt)), make([]float32, len(layers)*n)
		tokens += float64(len(prompt))
		for l := range layers {
			row := c.Rows[r][l*n : (l+1)*n]
			for _, token := range prompt {
				experts, counts := layers[l].Row(int(token))
				all := layers[l].Occurrences[token] * float32(layers[l].TopK)
				for k, e := range experts {
					row[e] += counts[k] / all
				}
			}
		}
	}
	out := requestRows(c, p.Ranks)
	out.profile = newProfile(c)
	for l := range layers {
		// Counts are a_j·topk·C_jk, of all requests of the profile.
		counts := &layers[l]
		g := tokenGram(counts, 0)
		scale := float32(tokens / counts.Tokens() / float64(counts.TopK*counts.TopK))
		for i := range g.values {
			g.values[i] *= scale
		}
		out.grams = append(out.grams, g)
	}
	return out
}

// clusterPrompts clusters the requests by the principal directions of their rows P, with at most ⌈K/E⌉ per cluster. It
// implements line 44: "cluster based on expert affinity". The paper names no method; this implementation uses balanced
// k-means.
func (r *rows) clusterPrompts(random *rand.Rand) []int {
	const rounds = 12
	capacity := slices.Repeat([]int{r.quota()}, r.ranks)
	centers := r.profile.spread(r.ranks, random)
	scores := make([]float32, len(r.sizes)*r.ranks)
	var exact assign.Solver
	var rank []int
	for range rounds {
		for i, point := range r.profile.points {
			for c, centre := range centers {
				scores[i*r.ranks+c] = -squaredDistance(point, centre)
			}
		}
		next := exact.Assign(scores, capacity)
		if slices.Equal(next, rank) {
			break
		}
		rank = slices.Clone(next)
		r.profile.means(centers, rank, r.sizes)
	}
	return rank
}

// quota is the number of requests at which a cluster is masked (line 40): the first number that is not below K/E.
func (r *rows) quota() int { return (len(r.sizes) + r.ranks - 1) / r.ranks }

// expertPlacing places the experts of one layer (expert_place, lines 3 to 26). Its affinity score of expert e and
// cluster i is
//
//	α·Σ_{k in i} B_ek / L_e  +  β·Σ_{r in i} P_re / L_e  −  γ·Σ_{k in i} L_k / Σ_k L_k
//
// EAfE, EAfR and loads_cls of the listing: the share of co-activations, the share of activations, and the share of the
// load.
type expertPlacing struct {
	ranks int
	pairs *gram
	// requests are Σ_{r in i} P_re [experts × ranks].
	requests []float32
	hotness  []float64
	total    float64
	// rankOf is -1 for an expert without a rank; load are the ranks' loads.
	rankOf []int
	load   []float64
}

// placePrinted places a layer's experts for the given ranks of the requests.
func (r *rows) placePrinted(layer int, rowRank []int, random *rand.Rand) *expertPlacing {
	n := r.experts
	s := &expertPlacing{
		ranks: r.ranks, pairs: r.grams[layer], requests: make([]float32, n*r.ranks), hotness: r.loads(layer),
		rankOf: slices.Repeat([]int{-1}, n), load: make([]float64, r.ranks),
	}
	r.affinities(s.requests, layer, rowRank)
	order := make([]int, n)
	for e := range order {
		order[e] = e
		s.total += s.hotness[e]
	}
	slices.SortStableFunc(order, func(a, b int) int { return compareDescending(s.hotness[a], s.hotness[b]) })
	members := make([][]int, r.ranks)
	for _, e := range order {
		coactivations := s.coactivations(e)
		best, bestScore := -1, 0.0
		for rank := range r.ranks {
			if len(members[rank]) == n/r.ranks {
				continue
			}
			score := s.score(e, rank, coactivations[rank], s.load[rank])
			if best < 0 || score > bestScore {
				best, bestScore = rank, score
			}
		}
		s.rankOf[e] = best
		s.load[best] += s.hotness[e]
		members[best] = append(members[best], e)
	}
	for range alternatingSwaps {
		p, q := random.IntN(r.ranks), random.IntN(r.ranks)
		a, b := random.IntN(n/r.ranks), random.IntN(n/r.ranks)
		e, f := members[p][a], members[q][b]
		if p != q && s.gain(e, f) > 0 {
			members[p][a], members[q][b] = f, e
			s.swap(e, f)
		}
	}
	return s
}

// coactivations returns Σ_{k in i} B_ek for each cluster i, without e.
func (s *expertPlacing) coactivations(e int) []float64 {
	coactivations := make([]float64, s.ranks)
	for k, weight := range s.pairs.row(e) {
		if rank := s.rankOf[k]; rank >= 0 && k != e {
			coactivations[rank] += float64(weight)
		}
	}
	return coactivations
}

// score returns the affinity score of an expert and a cluster with the given co-activations and load.
func (s *expertPlacing) score(e, rank int, coactivations, load float64) float64 {
	hot := max(s.hotness[e], 1e-9)
	return printedAlphaE*coactivations/hot + printedBetaE*float64(s.requests[e*s.ranks+rank])/hot - printedGammaE*load/max(s.total, 1e-9)
}

// gain returns the affinity gain of swapping two experts (aff_gain, line 23): the scores of both on the other's cluster
// minus the scores on their current clusters, each weighted by the expert's hotness L and computed without both
// experts. With these weights, the sum over all swaps is the difference of one potential, so fine-tuning never
// decreases it:
//
//	Φ = α·Σ_{e<k, same cluster} B_ek + β·Σ_e Σ_{r in the cluster of e} P_re − γ·Σ_i (Σ_{k in i} L_k)² / (2·Σ_k L_k)
func (s *expertPlacing) gain(e, f int) float64 {
	p, q := s.rankOf[e], s.rankOf[f]
	ofE, ofF, pair := s.coactivations(e), s.coactivations(f), float64(s.pairs.row(e)[f])
	hotE, hotF := s.hotness[e], s.hotness[f]
	worth := func(x, rank int, hot, coactivations, load float64) float64 {
		return hot * s.score(x, rank, coactivations, load)
	}
	// A rank's load is taken at the midpoint between its values without and with the expert: hot·(load + hot/2) is the
	// difference of load²/2.
	restP, restQ := s.load[p]-hotE, s.load[q]-hotF
	return worth(e, q, hotE, ofE[q]-pair, restQ+hotE/2) + worth(f, p, hotF, ofF[p]-pair, restP+hotF/2) -
		worth(e, p, hotE, ofE[p], restP+hotE/2) - worth(f, q, hotF, ofF[q], restQ+hotF/2)
}

func (s *expertPlacing) swap(e, f int) {
	p, q := s.rankOf[e], s.rankOf[f]
	s.rankOf[e], s.rankOf[f] = q, p
	s.load[p] += s.hotness[f] - s.hotness[e]
	s.load[q] += s.hotness[e] - s.hotness[f]
}

// schedulePrompts assigns the requests to ranks for the given ranks of the experts (request_schedule, lines 28 to 42):
// longest first, each to the cluster with the highest affinity score among those with fewer than K/E requests. The
// score of request r and cluster i is
//
//	α·Σ_{q in i} Σ_k P_rk P_qk / L_k / |r|  +  β·Σ_{k in i} P_rk / |r|
//
// RAfR and RAfE of the listing, where |r| is the sum of the row. RAfR is the share of r's affinity with requests of the
// cluster: the probability, given a random activation of r and another one of the same expert, that the second one
// belongs to a request in i. RAfE is the share of r's activations that are local in i.
func (r *rows) schedulePrompts(rankOf [][]int) []int {
	local := make([]float32, len(r.sizes)*r.ranks)
	r.local(local, rankOf)
	hotness := make([][]float64, len(r.layers))
	sums := make([][]float64, len(r.layers)) // Σ_{q in i} P_qk [experts × ranks]
	for l := range r.layers {
		hotness[l], sums[l] = r.loads(l), make([]float64, r.experts*r.ranks)
	}
	rank, count := make([]int, len(r.sizes)), make([]int, r.ranks)
	for _, i := range r.bySize() {
		coactivations := make([]float64, r.ranks)
		for l := range r.layers {
			experts, counts := r.layers[l].row(i)
			for k, e := range experts {
				weight := float64(counts[k]) / hotness[l][e]
				for c, sum := range sums[l][int(e)*r.ranks : (int(e)+1)*r.ranks] {
					coactivations[c] += weight * sum
				}
			}
		}
		best, bestScore := -1, 0.0
		for c := range r.ranks {
			score := printedAlphaR*coactivations[c] + printedBetaR*float64(local[i*r.ranks+c])
			if count[c] < r.quota() && (best < 0 || score > bestScore) {
				best, bestScore = c, score
			}
		}
		rank[i] = best
		count[best]++
		for l := range r.layers {
			experts, counts := r.layers[l].row(i)
			for k, e := range experts {
				sums[l][int(e)*r.ranks+best] += float64(counts[k])
			}
		}
	}
	return rank
}

// printedScore returns "the max load and communication cost" (line 48), where lower is better: the tokens of the
// fullest rank, plus the right-hand term of the objective of section 3.3 without its weight, Σ_r Σ_{k not on the rank
// of r} P_rk, as a mean over the layers. Both are in tokens.
func (r *rows) printedScore(rankOf [][]int, rowRank []int) float64 {
	load, remote := make([]float64, r.ranks), 0.0
	for i, rank := range rowRank {
		load[rank] += float64(r.sizes[i])
		for l := range r.layers {
			experts, counts := r.layers[l].row(i)
			for k, e := range experts {
				if rankOf[l][e] != rank {
					remote += float64(counts[k])
				}
			}
		}
	}
	return slices.Max(load) + remote/float64(len(r.layers))
}
