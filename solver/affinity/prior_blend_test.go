// SPDX-License-Identifier: Apache-2.0

package affinity_test

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

func TestBlendIsBoundedByItsParts(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	recent, prior := count(t, tr, []int{0, 1, 2})[0], count(t, tr, []int{3, 4, 5, 6, 7})[0]
	blend := func(trust affinity.Trust) affinity.Counts {
		t.Helper()
		c, err := affinity.Blend(&recent, &prior, trust)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	if diff := cmp.Diff(recent, blend(0)); diff != "" {
		t.Errorf("without trust:\n%s", diff)
	}
	sum, err := affinity.Merge(&recent, &prior, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(sum, blend(affinity.Trust(math.Inf(1)))); diff != "" {
		t.Errorf("with full trust:\n%s", diff)
	}
	last := blend(0)
	for _, trust := range []affinity.Trust{0.5, 1, 4, 64} {
		c := blend(trust)
		for token, n := range c.Occurrences {
			added := float64(n - recent.Occurrences[token])
			if most := min(float64(trust), float64(prior.Occurrences[token])); added > most*(1+1e-5) || n < last.Occurrences[token] {
				t.Fatalf("trust %v, token %d: the prior adds %v of %v occurrences", trust, token, added, prior.Occurrences[token])
			}
			activations := float32(0)
			_, counts := c.Row(token)
			for _, x := range counts {
				activations += x
			}
			if math.Abs(float64(activations-n*float32(c.TopK))) > 1e-3 {
				t.Fatalf("trust %v, token %d: %v activations of %v occurrences", trust, token, activations, n)
			}
		}
		last = c
	}
	other := prior
	other.Experts++
	if _, err := affinity.Blend(&recent, &other, 1); err == nil {
		t.Error("profiles of different models were blended")
	}
}

func TestFade(t *testing.T) {
	for _, test := range []struct {
		recent, prior, percent float64
		want                   float32
	}{
		{100, 1000, 25, 0.025}, {1000, 100, 25, 1}, {100, 0, 25, 0}, {0, 100, 25, 0}, {100, 100, 0, 0},
	} {
		if got := affinity.Fade(test.recent, test.prior, test.percent); got != test.want {
			t.Errorf("%+v: %v", test, got)
		}
	}
}

// TestTrustDependsOnTheTraffic has a prior of the same traffic, which is as good as recent counts, and one of other
// experts per token.
func TestTrustDependsOnTheTraffic(t *testing.T) {
	shape := tracetest.Small
	shape.DocumentsPerDomain = 30
	tr := tracetest.Generate(shape, 1)
	n := tr.Requests()
	first, second, prior := count(t, tr, every(0, n)), count(t, tr, every(1, n)), count(t, tr, every(2, n))
	same, err := affinity.FitTrust(t.Context(), first, second, prior)
	if err != nil {
		t.Fatal(err)
	}
	foreign := count(t, tracetest.Generate(shape, 2), every(2, n))
	other, err := affinity.FitTrust(t.Context(), first, second, foreign)
	if err != nil {
		t.Fatal(err)
	}
	if same < 64 || other > 8 {
		t.Errorf("trust %v in counts of the same traffic, %v in counts of another model", same, other)
	}
	if _, err := affinity.FitTrust(t.Context(), first, second[:1], prior); err == nil {
		t.Error("halves of different layers were accepted")
	}
}

// every returns every third of n requests.
func every(from, n int) (requests []int) {
	for r := from; r < n; r += 3 {
		requests = append(requests, r)
	}
	return requests
}

func TestMergedRequestsCountByWeight(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	a, err := affinity.CountRequests(t.Context(), tr, []int{1, 2})
	if err != nil {
		t.Fatal(err)
	}
	b, err := affinity.CountRequests(t.Context(), tr, []int{5})
	if err != nil {
		t.Fatal(err)
	}
	merged, err := a.Merge(b, 0.5)
	if err != nil {
		t.Fatal(err)
	}
	if len(a.Rows) != 2 || len(merged.Rows) != 3 || merged.Tokens[2] != b.Tokens[0]/2 {
		t.Fatalf("%d merged requests of %d and %v tokens", len(merged.Rows), len(a.Rows), merged.Tokens)
	}
	for i, n := range b.Rows[0] {
		if merged.Rows[2][i] != n/2 {
			t.Fatalf("entry %d is %v; want half of %v", i, merged.Rows[2][i], n)
		}
	}
	b.TopK++
	if _, err := a.Merge(b, 1); err == nil {
		t.Error("requests of different models were merged")
	}
}

// TestRequestsOfLowWeight has a few requests of full weight among many of weight 0.01.
func TestRequestsOfLowWeight(t *testing.T) {
	requests := func(n int, tokens float32) *affinity.RequestCounts {
		c := &affinity.RequestCounts{Layers: 1, Experts: 2, TopK: 1}
		for range n {
			c.Tokens, c.Rows = append(c.Tokens, tokens), append(c.Rows, []float32{tokens, 0})
		}
		return c
	}
	all, err := requests(20, 5).Merge(requests(1000, 10), 0.01)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{30, 100, 1019} {
		thin := all.Thinned(rand.New(rand.NewPCG(1, 1)).Perm(1020), n)
		if d := len(thin.Rows) - n; d < -1 || d > 1 || len(thin.Tokens) != len(thin.Rows) || len(thin.Weight) != len(thin.Rows) {
			t.Errorf("%d of %d requests", len(thin.Rows), n)
		}
		for r := range 20 {
			if thin.Tokens[r] != 5 || thin.Weight[r] != 1 {
				t.Errorf("%d requests: a request of full weight has %v of 5 tokens, weight %v", n, thin.Tokens[r], thin.Weight[r])
			}
		}
		light := 0.0
		for r, row := range thin.Rows[20:] {
			if tokens := thin.Tokens[20+r]; tokens != row[0] || math.Abs(float64(tokens/thin.Weight[20+r])-10) > 1e-4 {
				t.Fatalf("%d requests: %v tokens, row %v, weight %v", n, tokens, row, thin.Weight[20+r])
			}
			light += float64(row[0])
		}
		if math.Abs(light-100) > 10 {
			t.Errorf("%d requests: the others have %v tokens of 100", n, light)
		}
	}
	if alike := requests(10, 1).Thinned(rand.New(rand.NewPCG(1, 1)).Perm(10), 4); len(alike.Rows) != 4 {
		t.Errorf("%d of 10 requests of equal weight; want 4", len(alike.Rows))
	}
}

// Both parts contain counts of whole occurrences, and their sum equals the original counts.
func TestPartsAddUp(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	whole := count(t, tr, tr.AllRequests())
	first, second, err := affinity.PartLayers(t.Context(), whole, 70, 1)
	if err != nil {
		t.Fatal(err)
	}
	sum, err := affinity.MergeLayers(first, second, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(whole, sum); diff != "" {
		t.Error(diff)
	}
	for l := range whole {
		if share := first[l].Tokens() / whole[l].Tokens(); math.Abs(share-0.7) > 0.05 {
			t.Errorf("layer %d: the first part has %v of the tokens; want .7", l, share)
		}
		for token, n := range first[l].Occurrences {
			activations := float32(0)
			_, counts := first[l].Row(token)
			for _, x := range counts {
				activations += x
			}
			if activations != n*float32(first[l].TopK) || n != first[0].Occurrences[token] {
				t.Fatalf("layer %d, token %d: %v activations of %v occurrences; %v in the first layer", l, token, activations, n, first[0].Occurrences[token])
			}
		}
	}
}
