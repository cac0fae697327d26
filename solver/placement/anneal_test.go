// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"context"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// within returns the affinity within ranks, recomputed.
func within(g *gram, rankOf []int) float64 {
	sum := 0.0
	for e := range g.n {
		for f := range e {
			if rankOf[e] == rankOf[f] {
				sum += float64(g.row(e)[f])
			}
		}
	}
	return sum
}

func randomGram(n int, random *rand.Rand) *gram {
	g := newGram(n)
	for e := range n {
		for f := e + 1; f < n; f++ {
			g.values[e*n+f] = random.Float32()
		}
	}
	g.mirror()
	return g
}

func TestGainIsTheChangeOfTheSum(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	for range 50 {
		ranks := 2 + random.IntN(4)
		g := randomGram(ranks*(1+random.IntN(5)), random)
		p := randomPartition(g, ranks, 1, random)
		for range 50 {
			e, f := random.IntN(g.n), random.IntN(g.n)
			if p.rankOf[e] == p.rankOf[f] {
				continue
			}
			before, gain := within(g, p.rankOf), p.gain(e, f)
			p.swap(e, f)
			if after := within(g, p.rankOf); math.Abs(after-before-float64(gain)) > 1e-3 {
				t.Fatalf("swap of %d and %d: gain %v, the sum went from %v to %v", e, f, gain, before, after)
			}
		}
	}
}

func TestAnnealKeepsSizesAndEndsInALocalOptimum(t *testing.T) {
	random := rand.New(rand.NewPCG(2, 2))
	g := randomGram(24, random)
	p := randomPartition(g, 4, 1, random)
	before := within(g, p.rankOf)
	p.anneal(random, limit{ctx: context.Background()}, cold)
	if after := within(g, p.rankOf); after <= before {
		t.Errorf("affinity within ranks went from %v to %v", before, after)
	}
	load := make([]int, 4)
	for _, rank := range p.rankOf {
		load[rank]++
	}
	for rank, n := range load {
		if n != 6 {
			t.Errorf("rank %d has %d experts", rank, n)
		}
	}
	for e := range g.n {
		for f := range e {
			if p.rankOf[e] != p.rankOf[f] && p.gain(e, f) > 1e-3 {
				t.Errorf("swapping %d and %d still gains %v", e, f, p.gain(e, f))
			}
		}
	}
}

func TestGramIsTheProductOfTheRows(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	tokens, err := affinity.CountTokens(t.Context(), tr, tr.AllRequests())
	if err != nil {
		t.Fatal(err)
	}
	requests, err := affinity.CountRequests(t.Context(), tr, tr.AllRequests())
	if err != nil {
		t.Fatal(err)
	}
	n := tr.Model.Experts
	wantTokens, wantRequests := make([]float64, n*n), make([]float64, n*n)
	for token := range tokens[1].Vocabulary() {
		experts, counts := tokens[1].Row(token)
		for i, e := range experts {
			for j, f := range experts {
				wantTokens[int(e)*n+int(f)] += float64(counts[i]*counts[j]) / float64(tokens[1].Occurrences[token])
			}
		}
	}
	for r, row := range requests.Rows {
		for e := range n {
			for f := range n {
				wantRequests[e*n+f] += float64(row[n+e]*row[n+f]) / float64(requests.Tokens[r])
			}
		}
	}
	for name, pair := range map[string]struct {
		got  *gram
		want []float64
	}{"tokens": {tokenGram(&tokens[1], 0), wantTokens}, "requests": {requestGram(requests, 1), wantRequests}} {
		for i, want := range pair.want {
			if i/n == i%n {
				want = 0
			}
			if got := float64(pair.got.values[i]); math.Abs(got-want) > 1e-3*(1+want) {
				t.Fatalf("%s: entry %d, %d is %v; want %v", name, i/n, i%n, got, want)
			}
		}
	}
}

// TestJointValueIsCounted recomputes, from the rows, the value that the joint search reports for its solution.
func TestJointValueIsCounted(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 3)
	requests, err := affinity.CountRequests(t.Context(), tr, tr.AllRequests())
	if err != nil {
		t.Fatal(err)
	}
	s := newJointSearch(&Problem{Requests: requests, Ranks: 4}, limit{ctx: t.Context()})
	random := rand.New(rand.NewPCG(4, 4))
	rankOf := make([][]int, requests.Layers)
	for l := range rankOf {
		rankOf[l] = randomPartition(newGram(requests.Experts), 4, 1, random).rankOf
	}
	ranks, value := s.bestRequests(rankOf, make([]extras, len(rankOf)))
	local, all := 0.0, 0.0
	for r, row := range requests.Rows {
		for x, n := range row {
			all += float64(n)
			if rankOf[x/requests.Experts][x%requests.Experts] == ranks[r] {
				local += float64(n)
			}
		}
	}
	if math.Abs(value-local/all) > 1e-6 {
		t.Errorf("value %v; counted %v", value, local/all)
	}
	improved := s.alternate(ranks)
	if improved.value < value {
		t.Errorf("alternation went from %v to %v", value, improved.value)
	}
}
