// SPDX-License-Identifier: Apache-2.0

package affinity_test

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

const ranks = 4

func count(t *testing.T, tr *trace.Trace, requests []int) []affinity.Counts {
	t.Helper()
	counts, err := affinity.CountTokens(t.Context(), tr, requests)
	if err != nil {
		t.Fatal(err)
	}
	return counts
}

func hosts(tr *trace.Trace) []affinity.Hosts {
	p := placement.RoundRobin(tr.Model.Layers, tr.Model.Experts, ranks)
	list := make([]affinity.Hosts, len(p.Layers))
	for l := range list {
		list[l] = p.Hosts(l)
	}
	return list
}

func TestCountsMatchTheTrace(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	requests := []int{0, 3, 9}
	type cell struct{ layer, token, expert int }
	want, occurrences := map[cell]float32{}, map[int32]float32{}
	for _, r := range requests {
		for p := tr.Offsets[r]; p < tr.Offsets[r+1]; p++ {
			occurrences[tr.Tokens[p]]++
			for l := range tr.Model.Layers {
				for _, e := range tr.Row(int(p), l) {
					want[cell{l, int(tr.Tokens[p]), int(e)}]++
				}
			}
		}
	}
	got := map[cell]float32{}
	for l, c := range count(t, tr, requests) {
		for token := range c.Vocabulary() {
			experts, counts := c.Row(token)
			for i, e := range experts {
				if i > 0 && experts[i-1] >= e {
					t.Fatalf("experts of token %d are not in ascending order: %v", token, experts)
				}
				got[cell{l, token, int(e)}] = counts[i]
			}
			if c.Occurrences[token] != occurrences[int32(token)] {
				t.Fatalf("token %d occurs %v times; want %v", token, c.Occurrences[token], occurrences[int32(token)])
			}
		}
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateComparable(cell{})); diff != "" {
		t.Error(diff)
	}
}

func TestMergeIsUnion(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	a, b, both := count(t, tr, []int{0, 1})[0], count(t, tr, []int{2, 3, 4})[0], count(t, tr, []int{0, 1, 2, 3, 4})[0]
	merged, err := affinity.Merge(&a, &b, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(both, merged); diff != "" {
		t.Error(diff)
	}
	faded, err := affinity.Merge(&a, &b, 0, 0.5)
	if err != nil {
		t.Fatal(err)
	}
	for token, n := range faded.Occurrences {
		if n != b.Occurrences[token]/2 {
			t.Fatalf("token %d: %v occurrences; want half of %v", token, n, b.Occurrences[token])
		}
	}
	other := b
	other.TopK++
	if _, err := affinity.Merge(&a, &other, 1, 1); err == nil {
		t.Error("profiles of different models were merged")
	}
	if _, err := affinity.Merge(&a, &b, -1, 1); err == nil {
		t.Error("a negative weight was accepted")
	}
}

func TestRequestCountsSumToTokenCounts(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	requests := []int{1, 5, 6}
	got, err := affinity.CountRequests(t.Context(), tr, requests)
	if err != nil {
		t.Fatal(err)
	}
	for l, c := range count(t, tr, requests) {
		want := c.ExpertTotals()
		for e, n := range want {
			sum := 0.0
			for _, row := range got.Rows {
				sum += float64(row[l*got.Experts+e])
			}
			if sum != n {
				t.Fatalf("layer %d, expert %d: %v activations; want %v", l, e, sum, n)
			}
		}
	}
	for i, r := range requests {
		if int(got.Tokens[i]) != tr.Length(r) {
			t.Errorf("request %d has %v tokens; want %d", r, got.Tokens[i], tr.Length(r))
		}
	}
}

func TestRankTableHoldsExpectedShares(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	counts, hosts := count(t, tr, tr.AllRequests()[:20]), hosts(tr)
	table := affinity.NewRankTable(counts, hosts, ranks, affinity.Estimator{})
	prior := make([]float64, ranks)
	for l := range counts {
		for e, n := range counts[l].ExpertTotals() {
			prior[hosts[l][e][0]] += n / sum(counts[l].ExpertTotals()) / float64(len(counts))
		}
	}
	for token := range table.Vocabulary() {
		got, want := make([]float32, ranks), make([]float64, ranks)
		table.ScoreTokens(got, []int32{int32(token)})
		for l, c := range counts {
			experts, n := c.Row(token)
			for i, e := range experts {
				want[hosts[l][e][0]] += float64(n[i]) / float64(c.Occurrences[token]) / float64(c.TopK*len(counts))
			}
		}
		if counts[0].Occurrences[token] == 0 {
			want = prior
		}
		for i := range want {
			if math.Abs(float64(got[i])-want[i]) > 1e-4 {
				t.Fatalf("token %d: shares %v; want %v", token, got, want)
			}
		}
	}
}

func sum(values []float64) float64 {
	total := 0.0
	for _, v := range values {
		total += v
	}
	return total
}

func TestRequestScoreIsTheMeanOfItsTokens(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	table := affinity.NewRankTable(count(t, tr, tr.AllRequests()), hosts(tr), ranks, affinity.Estimator{Shrinkage: 1})
	got, want := make([]float32, ranks), make([]float32, ranks)
	table.Forecast(tr).Score(got, 3)
	share := make([]float32, ranks)
	for _, token := range tr.Request(3) {
		table.ScoreTokens(share, []int32{token})
		for i := range want {
			want[i] += share[i]
		}
	}
	for i := range want {
		if math.Abs(float64(got[i]-want[i]/float32(tr.Length(3)))) > 1e-6 {
			t.Fatalf("score %v; want %v / %d", got, want, tr.Length(3))
		}
	}
	for _, tokens := range [][]int32{nil, {-1}, {1 << 30}} {
		table.ScoreTokens(got, tokens)
		if diff := cmp.Diff(make([]float32, ranks), got); diff != "" {
			t.Errorf("tokens %v: %s", tokens, diff)
		}
	}
	if n := testing.AllocsPerRun(10, func() { table.ScoreTokens(got, tr.Request(3)) }); n != 0 {
		t.Errorf("%v allocations per request", n)
	}
}

// Sums over blocks of ranks and runs of tokens equal the direct sums.
func TestRequestScoreOfAnySize(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 7))
	for _, ranks := range []int{1, 7, 8, 11, 64, 75} {
		table := &affinity.RankTable{Ranks: ranks, Score: make([]uint16, 50*ranks)}
		for i := range table.Score {
			table.Score[i] = affinity.ScoreScale - uint16(random.IntN(3)) // near the maximum
		}
		for _, length := range []int{1, 127, 128, 129, 140_000} {
			tokens, want, got := make([]int32, length), make([]uint64, ranks), make([]float32, ranks)
			for i := range tokens {
				tokens[i] = random.Int32N(52) - 1 // from below to beyond the table
				for rank := range want {
					if id := int(tokens[i]); id >= 0 && id < 50 {
						want[rank] += uint64(table.Score[id*ranks+rank])
					}
				}
			}
			table.ScoreTokens(got, tokens)
			for rank := range want {
				if share := float32(float64(want[rank]) / (affinity.ScoreScale * float64(length))); got[rank] != share {
					t.Fatalf("%d ranks, %d tokens: rank %d has %v, want %v", ranks, length, rank, got[rank], share)
				}
			}
		}
	}
}

// Token ids follow Zipf's law, over a table of realistic size.
func BenchmarkScoreTokens(b *testing.B) {
	const vocabulary, prompts = 151_000, 8
	for _, ranks := range []int{8, 64} {
		random := rand.New(rand.NewPCG(1, 8))
		table := &affinity.RankTable{Ranks: ranks, Score: make([]uint16, vocabulary*ranks)}
		for i := range table.Score {
			table.Score[i] = uint16(random.Uint32())
		}
		ids, zipf := random.Perm(vocabulary), rand.NewZipf(random, 1.1, 4, vocabulary-1)
		for _, length := range []int{1_000, 32_768} {
			tokens := make([]int32, prompts*length)
			for i := range tokens {
				tokens[i] = int32(ids[zipf.Uint64()])
			}
			scores, next := make([]float32, ranks), 0
			b.Run(fmt.Sprintf("ranks=%d/tokens=%d", ranks, length), func(b *testing.B) {
				for b.Loop() {
					table.ScoreTokens(scores, tokens[next*length:][:length])
					next = (next + 1) % prompts
				}
			})
		}
	}
}

func TestTokenTableKeepsTheBestRanks(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	counts := count(t, tr, tr.AllRequests()[:20])
	full := affinity.NewTokenTable(counts, hosts(tr), ranks, ranks, affinity.Estimator{Shrinkage: 1})
	short := affinity.NewTokenTable(counts, hosts(tr), ranks, 2, affinity.Estimator{Shrinkage: 1})
	a, b := make([]float32, ranks), make([]float32, ranks)
	for layer := range counts {
		for token := range int32(tracetest.Small.Vocabulary) {
			full.ScoreToken(a, layer, token)
			short.ScoreToken(b, layer, token)
			total := float32(0)
			kept := 0
			for i := range a {
				total += b[i]
				if a[i] == b[i] {
					kept++
				}
			}
			if kept < 2 || math.Abs(float64(total)-1) > 1e-3 {
				t.Fatalf("layer %d, token %d: shares %v of %v: %d ranks kept, sum %v", layer, token, b, a, kept, total)
			}
		}
	}
	full.ScoreToken(a, 0, -1)
	if diff := cmp.Diff([]float32{.25, .25, .25, .25}, a); diff != "" {
		t.Errorf("unknown token: %s", diff)
	}
}

func TestShrinkagePullsTowardsThePrior(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	counts := count(t, tr, tr.AllRequests()[:20])
	raw := affinity.NewRankTable(counts, hosts(tr), ranks, affinity.Estimator{})
	shrunk := affinity.NewRankTable(counts, hosts(tr), ranks, affinity.Estimator{Shrinkage: 1e6})
	unseen := -1
	for token, n := range counts[0].Occurrences {
		if n == 0 {
			unseen = token
		}
	}
	if unseen < 0 {
		t.Fatal("the trace contains every token")
	}
	prior, got := make([]float32, ranks), make([]float32, ranks)
	raw.ScoreTokens(prior, []int32{int32(unseen)})
	shrunk.ScoreTokens(got, []int32{0})
	for i := range got {
		if math.Abs(float64(got[i]-prior[i])) > 1e-3 {
			t.Fatalf("shares %v; want the prior %v", got, prior)
		}
	}
}

func TestParallelStopsWhenCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := affinity.Parallel(ctx, 100, func(int) { t.Error("called after cancellation") }); err == nil {
		t.Error("no error")
	}
	called := make([]bool, 100)
	if err := affinity.Parallel(t.Context(), 100, func(i int) { called[i] = true }); err != nil {
		t.Fatal(err)
	}
	for i, c := range called {
		if !c {
			t.Errorf("call %d is missing", i)
		}
	}
}
