// SPDX-License-Identifier: Apache-2.0

package affinity

import (
	"cmp"
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/embedding"
)

// TestNearestSeen compares with the definition, for sizes that fill no block, and for any number of processors.
func TestNearestSeen(t *testing.T) {
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 5))
		occurrences := make([]float32, 1+r.IntN(500))
		e := &embedding.Table{Tokens: len(occurrences), Size: 1 + r.IntN(9)}
		for id := range occurrences {
			if r.IntN(3) == 0 {
				occurrences[id] = float32(1 + r.IntN(4))
			}
			zero := r.IntN(20) == 0
			for range e.Size {
				v := float32(r.NormFloat64())
				if zero {
					v = 0
				}
				e.Values = append(e.Values, v)
			}
		}
		before := runtime.GOMAXPROCS(1 + int(seed)%4)
		got, err := NearestSeen(t.Context(), e, occurrences, nil)
		runtime.GOMAXPROCS(before)
		if err != nil {
			t.Fatal(err)
		}
		for id := range occurrences {
			want := nearestByDefinition(e, occurrences, int32(id))
			if len(got.Nearest[id]) != len(want) {
				t.Fatalf("seed %d, token %d: %d neighbours, want %d", seed, id, len(got.Nearest[id]), len(want))
			}
			for i, near := range got.Nearest[id] {
				// Rounding may swap two similar neighbours.
				if occurrences[near] == 0 || math.Abs(cosine(e, int32(id), near)-cosine(e, int32(id), want[i])) > 1e-5 {
					t.Fatalf("seed %d, token %d: neighbours %v, want %v", seed, id, got.Nearest[id], want)
				}
			}
		}
	}
}

func cosine(e *embedding.Table, a, b int32) float64 {
	product := 0.0
	for d, v := range e.Vector(a) {
		product += float64(v) * float64(e.Vector(b)[d])
	}
	return product / (norm(e.Vector(a)) * norm(e.Vector(b)))
}

func nearestByDefinition(e *embedding.Table, occurrences []float32, id int32) []int32 {
	if occurrences[id] > 0 || norm(e.Vector(id)) == 0 {
		return nil
	}
	var seen []int32
	for other, n := range occurrences {
		if n > 0 && norm(e.Vector(int32(other))) > 0 {
			seen = append(seen, int32(other))
		}
	}
	slices.SortStableFunc(seen, func(a, b int32) int { return cmp.Compare(cosine(e, id, b), cosine(e, id, a)) })
	return seen[:min(len(seen), neighbours)]
}

func TestNearestSeenRefuses(t *testing.T) {
	if _, err := NearestSeen(t.Context(), &embedding.Table{Tokens: 3, Size: 2, Values: make([]float32, 5)}, make([]float32, 3), nil); err == nil || !strings.Contains(err.Error(), "do not match the vocabulary of 3 tokens") {
		t.Errorf("error %v", err)
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	e := &embedding.Table{Tokens: 2, Size: 1, Values: []float32{1, 1}}
	if _, err := NearestSeen(cancelled, e, []float32{1, 0}, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v; want the context's error", err)
	}
}

// TestUnseenTokensTakeTheirNeighbours compares rows of both tables with values computed by hand.
func TestUnseenTokensUseNeighbours(t *testing.T) {
	// Token 0 always activates expert 0, token 1 expert 1; tokens 2 and 3 were not seen.
	c := Counts{Experts: 2, TopK: 1, Start: []int{0, 1, 2, 2, 2}, Expert: []uint16{0, 1}, Count: []float32{3, 1}, Occurrences: []float32{3, 1, 0, 0}}
	hosts := []Hosts{{{0}, {1}}}
	e := Estimator{Neighbours: &Neighbours{Nearest: [][]int32{nil, nil, {1}, nil}}}
	want := []uint16{ScoreScale, 0, 0, ScoreScale, 0, ScoreScale, 49151, 16384}
	if diff := gocmp.Diff(want, NewRankTable([]Counts{c}, hosts, 2, e).Score); diff != "" {
		t.Error(diff)
	}
	tokens := NewTokenTable([]Counts{c}, hosts, 2, 1, e)
	if diff := gocmp.Diff([]uint16{0, 1, 1, 0}, tokens.Rank); diff != "" {
		t.Error(diff)
	}
	e.Neighbours.Nearest[2] = []int32{0, 1}
	if got := NewRankTable([]Counts{c}, hosts, 2, e).Score[4:6]; got[0] != 32768 || got[1] != 32768 {
		t.Errorf("the mean of two neighbours is %v", got)
	}
}

func BenchmarkNearest(b *testing.B) {
	const dim, rows, seen = 1024, 64, 4096
	random := rand.New(rand.NewPCG(1, 1))
	fill := func(n int) []float32 {
		values := make([]float32, n*dim)
		for i := range values {
			values[i] = random.Float32()
		}
		return values
	}
	vectors, known := fill(rows), fill(seen)
	for b.Loop() {
		nearest(vectors, known, seen, dim)
	}
	b.ReportMetric(float64(rows*seen*dim)*float64(b.N)/b.Elapsed().Seconds()/1e9, "Gmul/s")
}
