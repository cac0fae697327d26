// SPDX-License-Identifier: Apache-2.0

package solver_test

import (
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/embedding"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

func recorded(t *testing.T) *trace.Trace {
	t.Helper()
	tr, err := trace.Open(t.Context(), "testdata/tiny-32e-top4.safetensors.zst")
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// vectors returns embeddings by which tokens are similar that activate the same experts in a trace, and embeddings
// without a meaning.
func vectors(t *testing.T, tr *trace.Trace) (similar, random *embedding.Table) {
	t.Helper()
	counted, err := affinity.CountTokens(t.Context(), tr, tr.AllRequests())
	if err != nil {
		t.Fatal(err)
	}
	size := len(counted) * tr.Model.Experts
	similar = &embedding.Table{Tokens: tr.Model.Vocabulary, Size: size, Values: make([]float32, tr.Model.Vocabulary*size)}
	for position, token := range tr.Tokens {
		for l := range counted {
			for _, expert := range tr.Row(position, l) {
				similar.Vector(token)[l*tr.Model.Experts+int(expert)]++
			}
		}
	}
	source := rand.New(rand.NewPCG(5, 6))
	random = &embedding.Table{Tokens: tr.Model.Vocabulary, Size: 4, Values: make([]float32, tr.Model.Vocabulary*4)}
	for i := range random.Values {
		random.Values[i] = float32(source.NormFloat64())
	}
	return similar, random
}

// TestNeighboursAreUsedUnlessWorse checks that tables have neighbours of unseen tokens only if held-out requests are
// not worse off, in rate and in time.
func TestNeighboursAreUsedUnlessWorse(t *testing.T) {
	tr := recorded(t)
	similar, random := vectors(t, tr)
	options := solver.Options{Ranks: 4, Attention: placement.TensorParallel, Algorithm: placement.ContiguousAlgorithm, Forecast: solver.Table, TrainPercent: 20, Seed: 1}
	plain, err := solver.Solve(t.Context(), tr, options)
	if err != nil || plain.Neighbours != nil {
		t.Fatalf("%+v, %v", plain, err)
	}
	options.Embeddings = similar
	better, err := solver.Solve(t.Context(), tr, options)
	if err != nil {
		t.Fatal(err)
	}
	if n := better.Neighbours; n == nil || !n.Used || n.Tokens == 0 || n.LAR <= n.LARWithout || n.LayerUS > n.LayerUSWithout || better.Report.LAR <= plain.Report.LAR {
		t.Errorf("similar tokens: %+v, rate %.4f, without %.4f", n, better.Report.LAR, plain.Report.LAR)
	}
	options.Embeddings = random
	same, err := solver.Solve(t.Context(), tr, options)
	if err != nil {
		t.Fatal(err)
	}
	if n := same.Neighbours; n == nil || n.Used || !strings.Contains(n.Text(), "they are not used") {
		t.Errorf("random vectors: %+v", n)
	}
	if !slices.Equal(same.Plan.Tokens.Score, plain.Plan.Tokens.Score) || same.Report.LAR != plain.Report.LAR {
		t.Error("the plan differs from the plan without embeddings, although they are not used")
	}
	options.Embeddings = &embedding.Table{Tokens: 3, Size: 1, Values: make([]float32, 3)}
	if err := solver.Check(tr, options); err == nil || !strings.Contains(err.Error(), "embeddings are of 3 tokens") {
		t.Errorf("another vocabulary: %v", err)
	}
	options.Embeddings, options.Unshuffled = similar, true
	options.Algorithm, options.Objective = placement.Auto, placement.RankDedup
	if unread, err := solver.Solve(t.Context(), tr, options); err != nil || unread.Neighbours != nil {
		t.Errorf("without token shuffle no table is read: %+v, %v", unread, err)
	}
}

// TestReplanUsesNeighbours checks re-plans from traces and from counts, with both kinds of attention.
func TestReplanUsesNeighbours(t *testing.T) {
	tr := recorded(t)
	similar, random := vectors(t, tr)
	for _, attention := range []placement.Attention{placement.DataParallel, placement.TensorParallel} {
		base, err := solver.Solve(t.Context(), tr, solver.Options{
			Ranks: 4, Attention: attention, Algorithm: placement.ContiguousAlgorithm, Forecast: solver.Table, TrainPercent: 20, Seed: 1, Objective: placement.Activation,
		})
		if err != nil {
			t.Fatal(err)
		}
		var plain []*solver.Plan
		for _, given := range []struct {
			name       string
			embeddings *embedding.Table
		}{{"none", nil}, {"similar", similar}, {"random", random}} {
			name, embeddings := given.name, given.embeddings
			options := solver.ReplanOptions{
				Options:      solver.Options{TrainPercent: 30, Seed: 2, Embeddings: embeddings},
				ReplanPolicy: solver.ReplanPolicy{BatchTokens: []int{4096}},
			}
			found, err := solver.Replan(t.Context(), tr, nil, base.Plan, options)
			if err != nil {
				t.Fatal(err)
			}
			counted, err := affinity.CountTokens(t.Context(), tr, tr.AllRequests())
			if err != nil {
				t.Fatal(err)
			}
			byCounts, err := solver.ReplanCounts(t.Context(), solver.CountedProfile{Layers: counted}, nil, base.Plan, options)
			if err != nil {
				t.Fatal(err)
			}
			for i, of := range []solver.Candidate{found.Tables, found.Layout, byCounts.Tables} {
				kind, n := []string{"trace, tables", "trace, layout", "counts, tables"}[i], of.Neighbours
				if embeddings == nil {
					plain = append(plain, of.Plan)
				} else if !n.Used && !reflect.DeepEqual(of.Plan, plain[i]) {
					t.Errorf("%s, %s, %s: the plan differs from the plan without embeddings, although they are not used", attention, name, kind)
				}
				switch {
				case embeddings == nil && n != nil, embeddings != nil && n == nil:
					t.Errorf("%s, %s, %s: %+v", attention, name, kind, n)
				case n != nil && n.Used && (n.LAR < n.LARWithout || n.LayerUS > n.LayerUSWithout):
					t.Errorf("%s, %s, %s: used although worse: %+v", attention, name, kind, n)
				case name == "similar" && attention == placement.TensorParallel && !n.Used:
					t.Errorf("%s, %s: not used: %+v", attention, kind, n)
				}
			}
		}
	}
}

// TestNeighboursWithinTimeBudget checks that a search for neighbours which exceeds its part of the time budget ends, that
// the result reports it, and that the tables have no neighbours.
func TestNeighboursWithinTimeBudget(t *testing.T) {
	tr := recorded(t)
	similar, _ := vectors(t, tr)
	for _, attention := range []placement.Attention{placement.DataParallel, placement.TensorParallel} {
		options := solver.Options{
			Ranks: 4, Attention: attention, Algorithm: placement.ContiguousAlgorithm, Forecast: solver.Table, TrainPercent: 20, Seed: 1, TimeBudget: 1,
		}
		plain, err := solver.Solve(t.Context(), tr, options)
		if err != nil {
			t.Fatal(err)
		}
		options.Embeddings = similar
		cut, err := solver.Solve(t.Context(), tr, options)
		if err != nil {
			t.Fatal(err)
		}
		if n := cut.Neighbours; n == nil || !n.Truncated || n.Used || !cut.Truncated || !strings.Contains(n.Text(), "time budget") {
			t.Errorf("%s: %+v, truncated %t", attention, n, cut.Truncated)
		}
		if !reflect.DeepEqual(cut.Plan, plain.Plan) {
			t.Errorf("%s: the plan differs from the plan without embeddings", attention)
		}
		again := solver.ReplanOptions{
			Options: solver.Options{TrainPercent: 30, Seed: 2, Embeddings: similar, TimeBudget: 1}, ReplanPolicy: solver.ReplanPolicy{BatchTokens: []int{4096}},
		}
		found, err := solver.Replan(t.Context(), tr, nil, plain.Plan, again)
		if err != nil {
			t.Fatal(err)
		}
		counted, err := affinity.CountTokens(t.Context(), tr, tr.AllRequests())
		if err != nil {
			t.Fatal(err)
		}
		byCounts, err := solver.ReplanCounts(t.Context(), solver.CountedProfile{Layers: counted}, nil, plain.Plan, again)
		if err != nil {
			t.Fatal(err)
		}
		for kind, of := range map[string]*solver.Replanned{"trace": found, "counts": byCounts} {
			if n := of.Tables.Neighbours; n == nil || !n.Truncated || n.Used || !of.Truncated {
				t.Errorf("%s, %s: %+v, truncated %t", attention, kind, n, of.Truncated)
			}
		}
	}
}
