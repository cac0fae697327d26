// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/semmoe/operator/solver/affinity"
)

// printedInstance is a small profile in the notation of the papers: requests of token IDs, and the activations T
// [layers][tokens][experts].
type printedInstance struct {
	prompts [][]int32
	counts  [][][]float32
	topK    int
}

// newPrintedInstance draws a profile in which every occurrence of a token id activates topK experts.
func newPrintedInstance(random *rand.Rand, requests, tokens, experts, layers int) *printedInstance {
	in := &printedInstance{topK: 2, counts: make([][][]float32, layers)}
	for l := range in.counts {
		in.counts[l] = make([][]float32, tokens)
		for j := range in.counts[l] {
			in.counts[l][j] = make([]float32, experts)
		}
	}
	for range requests {
		prompt := make([]int32, 1+random.IntN(6))
		for i := range prompt {
			prompt[i] = int32(random.IntN(tokens))
			for l := range layers {
				for _, e := range random.Perm(experts)[:in.topK] {
					in.counts[l][prompt[i]][e]++
				}
			}
		}
		in.prompts = append(in.prompts, prompt)
	}
	return in
}

// problem returns the profile as a Problem.
func (in *printedInstance) problem(attention Attention, algorithm Algorithm, ranks int) Problem {
	experts := len(in.counts[0][0])
	p := Problem{Attention: attention, Algorithm: algorithm, Ranks: ranks, Prompts: in.prompts, Seed: 1, Requests: &affinity.RequestCounts{
		Layers: len(in.counts), Experts: experts, TopK: in.topK,
	}}
	for l, tokens := range in.counts {
		c := affinity.Counts{Experts: experts, TopK: in.topK, Start: []int{0}}
		for j, row := range tokens {
			for e, n := range row {
				if n > 0 {
					c.Expert, c.Count = append(c.Expert, uint16(e)), append(c.Count, n)
				}
			}
			c.Start, c.Occurrences = append(c.Start, len(c.Expert)), append(c.Occurrences, in.occurrences(j))
		}
		p.Layers, p.Tokens = append(p.Layers, l), append(p.Tokens, c)
	}
	for _, prompt := range in.prompts {
		row := make([]float32, len(in.counts)*experts)
		for l := range in.counts {
			for _, j := range prompt {
				for e := range experts {
					row[l*experts+e] += float32(in.chance(l, int(j), e)) * float32(in.topK)
				}
			}
		}
		p.Requests.Tokens, p.Requests.Rows = append(p.Requests.Tokens, float32(len(prompt))), append(p.Requests.Rows, row)
	}
	return p
}

// occurrences is a_j.
func (in *printedInstance) occurrences(token int) float32 {
	n := float32(0)
	for _, prompt := range in.prompts {
		for _, j := range prompt {
			if int(j) == token {
				n++
			}
		}
	}
	return n
}

// chance is C_p,jk = T_jk / Σ_k T_jk.
func (in *printedInstance) chance(layer, token, expert int) float64 {
	all := float32(0)
	for _, n := range in.counts[layer][token] {
		all += n
	}
	if all == 0 {
		return 0
	}
	return float64(in.counts[layer][token][expert] / all)
}

// forecast is P_rk.
func (in *printedInstance) forecast(layer, request, expert int) float64 {
	sum := 0.0
	for _, j := range in.prompts[request] {
		sum += in.chance(layer, int(j), expert)
	}
	return sum
}

// hotness is L_k.
func (in *printedInstance) hotness(layer, expert int) float64 {
	sum := 0.0
	for r := range in.prompts {
		sum += in.forecast(layer, r, expert)
	}
	return sum
}

// potential is Φ of a layer, by the definition at expertPlacing.gain.
func (in *printedInstance) potential(layer int, rankOf, rowRank []int, ranks int) float64 {
	sum, total, load := 0.0, 0.0, make([]float64, ranks)
	for e, rank := range rankOf {
		for r, of := range rowRank {
			if of == rank {
				sum += in.forecast(layer, r, e)
			}
		}
		for k := range e {
			if rankOf[k] != rank {
				continue
			}
			for j := range in.counts[layer] {
				sum += float64(in.occurrences(j)) * in.chance(layer, j, e) * in.chance(layer, j, k)
			}
		}
		load[rank] += in.hotness(layer, e)
		total += in.hotness(layer, e)
	}
	for _, n := range load {
		sum -= n * n / (2 * total)
	}
	return sum
}

// printedDirectly returns the terms of the objective of section 3.3, with the loads of ranks: θ·|imbalance| +
// (1−θ)·remote, as the mean over the layers, where row i of the problem has sizes[i] tokens.
func printedDirectly(layers int, sizes []float32, chance func(layer, row, expert int) float64, rankOf [][]int, rowRank []int, ranks int) (imbalance, fullest, remote float64) {
	total := 0.0
	for _, n := range sizes {
		total += float64(n)
	}
	for i := range ranks {
		load := 0.0
		for j, rank := range rowRank {
			if rank == i {
				load += float64(sizes[j])
			}
		}
		imbalance += math.Abs(load - total/float64(ranks))
		fullest = max(fullest, load)
		for other := range ranks {
			if other == i {
				continue
			}
			for l := range layers {
				for j, rank := range rowRank {
					for k, of := range rankOf[l] {
						if rank == i && of == other {
							remote += float64(sizes[j]) * chance(l, j, k) / float64(layers)
						}
					}
				}
			}
		}
	}
	return imbalance, fullest, remote
}

func near(a, b float64) bool { return math.Abs(a-b) <= 1e-4*max(1, math.Abs(a), math.Abs(b)) }

// TestFineTuningNeverLosesAffinity compares the gain of every swap with the difference of the potential, which is
// computed from the definition of each term.
func TestFineTuningNeverLosesAffinity(t *testing.T) {
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 0))
		in, ranks := newPrintedInstance(random, 7, 6, 6, 2), 2+int(seed%2)
		p := in.problem(DataParallel, AlternatingPrinted, ranks)
		r := p.rows(0, 2)
		rowRank := r.clusterPrompts(random)
		for l := range 2 {
			s := r.placePrinted(l, rowRank, random)
			for e := range s.rankOf {
				for f := range e {
					if s.rankOf[e] == s.rankOf[f] {
						continue
					}
					before, gain := in.potential(l, s.rankOf, rowRank, ranks), s.gain(e, f)
					s.swap(e, f)
					if after := in.potential(l, s.rankOf, rowRank, ranks); !near(after-before, gain) {
						t.Fatalf("seed %d: swap of %d and %d gains %v; the potential rises by %v", seed, e, f, gain, after-before)
					}
					s.swap(e, f)
					if gain > 1e-4 {
						t.Errorf("seed %d: after fine-tuning a swap of %d and %d still gains %v", seed, e, f, gain)
					}
				}
			}
		}
	}
}

// TestSchedulingFollowsTheListing reimplements lines 28 to 42 of Algorithm 1 from the token IDs.
func TestSchedulingFollowsTheListing(t *testing.T) {
	withoutRequests := 0
	for seed := range uint64(30) {
		random := rand.New(rand.NewPCG(seed, 1))
		const experts, requests = 6, 9
		in, ranks := newPrintedInstance(random, requests, 8, experts, 2), 2+int(seed%2)
		p := in.problem(DataParallel, AlternatingPrinted, ranks)
		rankOf := [][]int{shuffledRanks(random, experts, ranks), shuffledRanks(random, experts, ranks)}
		listing := func(weight float64) []int {
			order := make([]int, requests)
			for r := range order {
				order[r] = r
			}
			slices.SortStableFunc(order, func(a, b int) int { return len(in.prompts[b]) - len(in.prompts[a]) })
			rank, count := slices.Repeat([]int{-1}, requests), make([]int, ranks)
			for _, r := range order {
				best, bestScore := -1, 0.0
				for i := range ranks {
					if float64(count[i]) >= float64(requests)/float64(ranks) {
						continue
					}
					score := 0.0
					for l := range 2 {
						for k := range experts {
							for q, of := range rank {
								if of == i {
									score += weight * in.forecast(l, r, k) * in.forecast(l, q, k) / max(in.hotness(l, k), 1e-9)
								}
							}
							if rankOf[l][k] == i {
								score += in.forecast(l, r, k)
							}
						}
					}
					if best < 0 || score > bestScore+1e-5 {
						best, bestScore = i, score
					}
				}
				rank[r] = best
				count[best]++
			}
			return rank
		}
		got := p.rows(0, 2).schedulePrompts(rankOf)
		if want := listing(printedAlphaR); !slices.Equal(got, want) {
			t.Errorf("seed %d: ranks of requests %v; the listing has %v", seed, got, want)
		}
		if slices.Equal(got, listing(0)) {
			withoutRequests++
		}
	}
	if withoutRequests == 30 {
		t.Error("the affinity between requests decides nothing")
	}
}

func shuffledRanks(random *rand.Rand, experts, ranks int) []int {
	rankOf := contiguousRanks(experts, ranks)
	random.Shuffle(experts, func(a, b int) { rankOf[a], rankOf[b] = rankOf[b], rankOf[a] })
	return rankOf
}

// TestFirstRoundStartsFromClusters checks that the first round of Algorithm 1 places the experts for the clusters of
// line 44, and schedules the requests for this placement.
func TestFirstRoundStartsFromClusters(t *testing.T) {
	stopped, stop := context.WithCancel(t.Context())
	stop()
	for seed := range uint64(6) {
		const experts, layers = 6, 2
		in, ranks := newPrintedInstance(rand.New(rand.NewPCG(seed, 5)), 9, 8, experts, layers), 2+int(seed%2)
		p := in.problem(DataParallel, AlternatingPrinted, ranks)
		r := p.rows(0, layers)
		random := rand.New(rand.NewPCG(seed, 6))
		clusters := r.clusterPrompts(random)
		var want [][]int
		for l := range layers {
			want = append(want, r.placePrinted(l, clusters, random).rankOf)
		}
		rankOf, rowRank := alternatePrinted(r, rand.New(rand.NewPCG(seed, 6)), limit{ctx: stopped})
		if scheduled := r.schedulePrompts(want); !slices.EqualFunc(rankOf, want, slices.Equal) || !slices.Equal(rowRank, scheduled) {
			t.Errorf("seed %d: ranks of experts %v, of requests %v; want %v, %v", seed, rankOf, rowRank, want, scheduled)
		}
	}
}

// TestPrintedScoresAreThoseOfTheFormulas computes the score of line 48 and the objective of section 3.3 from the token
// ids.
func TestPrintedScoresAreThoseOfTheFormulas(t *testing.T) {
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 2))
		const experts, layers = 6, 3
		in, ranks := newPrintedInstance(random, 8, 7, experts, layers), 2+int(seed%2)
		rankOf := make([][]int, layers)
		for l := range rankOf {
			rankOf[l] = shuffledRanks(random, experts, ranks)
		}
		draw := func(rows int) []int {
			rank := make([]int, rows)
			for i := range rank {
				rank[i] = random.IntN(ranks)
			}
			return rank
		}
		p := in.problem(DataParallel, AlternatingPrinted, ranks)
		ofRequest := func(l, r, k int) float64 { return in.forecast(l, r, k) / float64(len(in.prompts[r])) }
		rowRank := draw(len(in.prompts))
		imbalance, fullest, remote := printedDirectly(layers, p.Requests.Tokens, ofRequest, rankOf, rowRank, ranks)
		if got := p.rows(0, layers).printedScore(rankOf, rowRank); !near(got, fullest+remote) {
			t.Errorf("seed %d: score %v; want %v", seed, got, fullest+remote)
		}
		p.Algorithm = CrossEntropyPrinted
		if got := p.rows(0, layers).printedObjective(rankOf, rowRank); !near(got, theta*imbalance+(1-theta)*remote) {
			t.Errorf("seed %d: objective over requests %v; want %v", seed, got, theta*imbalance+(1-theta)*remote)
		}

		p.Attention = TensorParallel
		rows := p.rows(1, 2)
		var occurring []int
		for j := range in.counts[1] {
			if in.occurrences(j) > 0 {
				occurring = append(occurring, j)
			}
		}
		rowRank = draw(len(occurring))
		ofToken := func(_, row, k int) float64 { return in.chance(1, occurring[row], k) }
		imbalance, _, remote = printedDirectly(1, rows.sizes, ofToken, rankOf[1:2], rowRank, ranks)
		if got := rows.printedObjective(rankOf[1:2], rowRank); !near(got, theta*imbalance+(1-theta)*remote) {
			t.Errorf("seed %d: objective over tokens %v; want %v", seed, got, theta*imbalance+(1-theta)*remote)
		}
	}
}

// TestPrintedAlgorithmsKeepTheBest checks that the full run is at least as good as a run that stops at once, that no
// run is better than the best of all assignments, and that the numbers of experts and requests per rank are preserved.
func TestPrintedAlgorithmsKeepTheBest(t *testing.T) {
	for seed := range uint64(12) {
		random := rand.New(rand.NewPCG(seed, 3))
		const experts, requests, ranks = 6, 6, 2
		in := newPrintedInstance(random, requests, 5, experts, 1)
		for _, algorithm := range []Algorithm{AlternatingPrinted, CrossEntropyPrinted} {
			p := in.problem(DataParallel, algorithm, ranks)
			rows := p.rows(0, 1)
			value := rows.printedScore
			if algorithm == CrossEntropyPrinted {
				value = rows.printedObjective
			}
			run := func(deadline time.Time) (Result, float64) {
				p.Deadline = deadline
				result, err := Solve(t.Context(), p)
				if err != nil {
					t.Fatal(err)
				}
				rankOf := make([]int, experts)
				for e, hosts := range result.Placement.Hosts(0) {
					rankOf[e] = hosts[0]
				}
				return result, value([][]int{rankOf}, result.RowRanks[0])
			}
			whole, got := run(time.Time{})
			cut, early := run(time.Now().Add(-time.Second))
			if whole.Truncated || !cut.Truncated || got > early+1e-6 {
				t.Errorf("seed %d, %s: %v in all rounds, %v at once; truncated %v and %v", seed, algorithm, got, early, whole.Truncated, cut.Truncated)
			}
			for _, result := range []Result{whole, cut} {
				if err := result.Placement.Validate(); err != nil {
					t.Error(err)
				}
				if len(result.RowRanks) != 1 || len(result.RowRanks[0]) != requests {
					t.Fatalf("%s: ranks of requests %v", algorithm, result.RowRanks)
				}
				if on := count(result.RowRanks[0], ranks); algorithm == AlternatingPrinted && slices.Max(on) > requests/ranks {
					t.Errorf("seed %d: requests on ranks %v", seed, on)
				}
			}
			least := math.Inf(1)
			for placed := range 1 << experts {
				rankOf := bits(placed, experts)
				if count(rankOf, ranks)[0] != experts/ranks {
					continue
				}
				for scheduled := range 1 << requests {
					least = min(least, value([][]int{rankOf}, bits(scheduled, requests)))
				}
			}
			if got < least-1e-6 {
				t.Errorf("seed %d, %s: %v is below the least of all assignments, %v", seed, algorithm, got, least)
			}
			// On such a small instance the cross-entropy method finds the optimum.
			if algorithm == CrossEntropyPrinted && got > least*1.05 {
				t.Errorf("seed %d: the cross-entropy method ends at %v, the least is %v", seed, got, least)
			}
		}
	}
}

func bits(of, n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = of >> i & 1
	}
	return out
}

func count(ranks []int, of int) []int {
	n := make([]int, of)
	for _, rank := range ranks {
		n[rank]++
	}
	return n
}

// TestJointSamplingLearnsTheRanksOfRows solves profiles of two kinds of requests, which activate different experts. There
// are too many assignments of requests to ranks to find the best one by samples of uniform probabilities.
func TestJointSamplingLearnsTheRanksOfRows(t *testing.T) {
	const experts, requests, ranks = 6, 24, 2
	local, all := 0, 0
	for seed := range uint64(8) {
		in := &printedInstance{topK: 2, counts: [][][]float32{{}}}
		for r := range requests {
			in.prompts = append(in.prompts, []int32{int32(r)})
			row := make([]float32, experts)
			for i := range in.topK {
				row[r/(requests/2)*experts/2+(r+i)%(experts/2)] = 1
			}
			in.counts[0] = append(in.counts[0], row)
		}
		p := in.problem(DataParallel, CrossEntropyPrinted, ranks)
		p.Seed = seed
		result, err := Solve(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		for r, rank := range result.RowRanks[0] {
			for e, hosts := range result.Placement.Hosts(0) {
				if in.counts[0][r][e] > 0 && hosts[0] == rank {
					local++
				}
			}
		}
		all += requests * in.topK
	}
	// Without what it learns of rows, it samples 76% of these activations on the ranks of their experts.
	if local < all*9/10 {
		t.Errorf("%d of %d activations are local", local, all)
	}
}

// TestDrawnRowsKeepTheBalance checks that no rank exceeds the balance factor if every row fits.
func TestDrawnRowsKeepTheBalance(t *testing.T) {
	r := &rows{ranks: 4, sizes: slices.Repeat([]float32{1, 2, 3}, 40)}
	random := rand.New(rand.NewPCG(1, 4))
	// The first rank is drawn whenever it has room.
	probability := slices.Repeat([]float64{1, 0, 0, 0}, len(r.sizes))
	for range 20 {
		load := make([]float64, r.ranks)
		for i, rank := range r.draw(probability, random) {
			load[rank] += float64(r.sizes[i])
		}
		if most := crossEntropySlack * 60; slices.Max(load) > most || load[0] < most-3 {
			t.Errorf("tokens on ranks %v; the limit is %v", load, most)
		}
	}
}
