// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"context"
	"errors"
	"math"
	"reflect"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
	"github.com/semmoe/operator/test/tier"
)

// A window has whole documents of the train requests, drawn with replacement, and as many requests as the variance of
// the difference between a step and the profile requires.
func TestWindowsResampleDocuments(t *testing.T) {
	recorded := openTiny(t)
	for _, c := range []struct {
		attention placement.Attention
		sizes     []int
	}{{placement.DataParallel, nil}, {placement.TensorParallel, []int{4096, 16384, 65536}}, {placement.TensorParallel, []int{1}}} {
		s, err := newSearch(recorded, Options{
			Ranks: 8, Attention: c.attention, Algorithm: placement.Auto, Forecast: Table, TrainPercent: 50, Seed: 1, BatchTokens: c.sizes,
		})
		if err != nil {
			t.Fatal(err)
		}
		n, step := float64(len(s.train)), float64(dispatch.Arrivals)
		if c.attention == placement.TensorParallel {
			step = float64(c.sizes[len(c.sizes)/2]) * n / float64(s.trace.TokenCount(s.train))
		}
		want := step * n / (step + n)
		const count = 64
		documents := s.windows(count)
		drawn, largest, requests, repeated := make([]float64, count), 0.0, 0, false
		for _, d := range documents {
			requests += len(d.requests)
			largest = max(largest, float64(len(d.requests)))
			for i, w := range d.windows {
				drawn[w] += float64(len(d.requests))
				repeated = repeated || i > 0 && d.windows[i-1] == w
			}
			for _, r := range d.requests {
				if recorded.Documents[r] != recorded.Documents[d.requests[0]] {
					t.Errorf("request %d is with another document", r)
				}
			}
		}
		if requests != len(s.train) {
			t.Errorf("attention %s: the documents have %d requests; want %d", c.attention, requests, len(s.train))
		}
		for w, of := range drawn {
			if of < want || of >= math.Ceil(want)+largest {
				t.Errorf("attention %s: window %d has %v requests; want %v and at most a document more", c.attention, w, of, want)
			}
		}
		if want > 30 && !repeated {
			t.Errorf("attention %s: no window contains a document twice", c.attention)
		}
		if !reflect.DeepEqual(documents, s.windows(count)) {
			t.Errorf("attention %s: windows differ between two calls", c.attention)
		}
	}
}

// Candidates of large problems are scored on a part of the test requests and layers, candidates of small ones on all.
func TestSampleIsBounded(t *testing.T) {
	small := tracetest.Generate(tracetest.Small, 1)
	large := tracetest.Generate(tracetest.Shape{
		Experts: 64, TopK: 1, Layers: 40, Vocabulary: 100, Domains: 2, DocumentsPerDomain: 60, RequestsPerDocument: 2, TokensPerRequest: 500, Noise: 30,
	}, 1)
	for name, c := range map[string]struct {
		of                     *trace.Trace
		attention              placement.Attention
		ranks, batch           int
		layers                 int
		minTokens, extraTokens int
	}{
		"small, tp":             {small, placement.TensorParallel, 4, 65536, 3, 0, 0},
		"small, dp":             {small, placement.DataParallel, 4, 65536, 0, 0, 0},
		"large, tp, few ranks":  {large, placement.TensorParallel, 8, 4096, 16, 1 << 15, 1 << 10},
		"large, tp, many ranks": {large, placement.TensorParallel, 64, 65536, 16, 1 << 14, 1 << 10},
		"large, dp":             {large, placement.DataParallel, 64, 65536, 0, sampledRowsOfRequests / 40, 1 << 10},
	} {
		s := &search{trace: c.of, test: c.of.AllRequests(), options: Options{Attention: c.attention, Ranks: c.ranks, Seed: 1}}
		requests, layers := s.sample(c.batch)
		tokens := c.of.TokenCount(requests)
		if len(layers) != c.layers || !slices.IsSorted(layers) {
			t.Errorf("%s: layers %d; want %d", name, layers, c.layers)
		}
		if c.minTokens == 0 && len(requests) != c.of.Requests() {
			t.Errorf("%s: %d requests; want all %d", name, len(requests), c.of.Requests())
		}
		if c.minTokens > 0 && (tokens < c.minTokens || tokens > c.minTokens+c.extraTokens) {
			t.Errorf("%s: %d tokens; want %d and at most a request more", name, tokens, c.minTokens)
		}
	}
}

// A verdict on many documents samples whole documents.
func TestSampleDocuments(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	requests := tr.AllRequests()
	if all, fraction := sampleDocuments(tr, requests, 1, 1<<20); len(all) != len(requests) || fraction != 1 {
		t.Errorf("%d of %d requests, fraction %v; want all", len(all), len(requests), fraction)
	}
	some, fraction := sampleDocuments(tr, requests, 1, 1)
	documents := map[int32]int{}
	for _, r := range some {
		documents[tr.Documents[r]]++
	}
	if len(documents) != 2*JackknifeParts || fraction != 2*JackknifeParts/24.0 {
		t.Errorf("%d documents, fraction %v; want %d of 24", len(documents), fraction, 2*JackknifeParts)
	}
	for d, n := range documents {
		if n != tracetest.Small.RequestsPerDocument {
			t.Errorf("document %d has %d requests; want all %d", d, n, tracetest.Small.RequestsPerDocument)
		}
	}
}

// countdown is a context that is cancelled when it is asked for its error for the last time.
type countdown struct {
	context.Context
	left atomic.Int64
}

func (c *countdown) Err() error {
	if c.left.Add(-1) < 0 {
		return context.Canceled
	}
	return nil
}

// A solve that is cancelled in any phase returns the context's error, and one with any time budget a valid placement.
func TestSolveEnds(t *testing.T) {
	tr := someLayers(openTiny(t))
	parts := tier.Choose(2, 4, 8) // of the checks of a whole solve, and of half its time
	for _, attention := range []placement.Attention{placement.DataParallel, placement.TensorParallel} {
		o := Options{Ranks: 8, Attention: attention, Algorithm: placement.Auto, Objective: placement.Time, Forecast: Table, TrainPercent: 80, Seed: 1}
		const asked = 1 << 40
		ctx := &countdown{Context: t.Context()}
		ctx.left.Store(asked)
		begin := time.Now()
		if _, err := Solve(ctx, tr, o); err != nil {
			t.Fatal(err)
		}
		whole, times := time.Since(begin), asked-ctx.left.Load()
		for part := range parts {
			ctx.left.Store(times * int64(part+1) / int64(parts+1))
			if _, err := Solve(ctx, tr, o); !errors.Is(err, context.Canceled) {
				t.Errorf("attention %s, cancelled after %d of %d parts of %d checks: error %v", attention, part+1, parts+1, times, err)
			}
			o.TimeBudget = whole * time.Duration(part+1) / time.Duration(2*parts)
			solution, err := Solve(t.Context(), tr, o)
			if err != nil {
				t.Fatal(err)
			}
			if err := solution.Plan.Placement.Validate(); err != nil {
				t.Errorf("attention %s, budget of %d of %d parts: %v", attention, part+1, 2*parts, err)
			}
			o.TimeBudget = 0
		}
	}
}
