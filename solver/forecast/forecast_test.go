// SPDX-License-Identifier: Apache-2.0

package forecast_test

import (
	"math"
	"runtime"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/forecast"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

const ranks = 4

func hosts(tr *trace.Trace) []affinity.Hosts {
	p := placement.RoundRobin(tr.Model.Layers, tr.Model.Experts, ranks)
	list := make([]affinity.Hosts, len(p.Layers))
	for l := range list {
		list[l] = p.Hosts(l)
	}
	return list
}

// trained returns a model of the first half of the requests and its token table.
func trained(t *testing.T, tr *trace.Trace, history bool) (*forecast.Model, *affinity.TokenTable) {
	t.Helper()
	train := tr.AllRequests()[:tr.Requests()/2]
	counts, err := affinity.CountTokens(t.Context(), tr, train)
	if err != nil {
		t.Fatal(err)
	}
	table := affinity.NewTokenTable(counts, hosts(tr), ranks, ranks, affinity.Estimator{Shrinkage: 1})
	m, err := forecast.Train(t.Context(), tr, train, hosts(tr), ranks, history, 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Validate(table); err != nil {
		t.Fatal(err)
	}
	return m, table
}

func score(m *forecast.Model, table *affinity.TokenTable, tr *trace.Trace, layer, position int) []float32 {
	dst := make([]float32, ranks)
	m.Bind(table, hosts(tr), tr).Score(dst, layer, position)
	return dst
}

// change returns a copy of a trace in which every route, and with tokens every token, of the selected positions and
// layers is different.
func change(tr *trace.Trace, tokens bool, which func(position, layer int) bool) *trace.Trace {
	c := *tr
	c.Tokens, c.Experts = slices.Clone(tr.Tokens), slices.Clone(tr.Experts)
	for p := range c.Tokens {
		for l := range c.Model.Layers {
			if !which(p, l) {
				continue
			}
			for k, expert := range c.Row(p, l) {
				c.Row(p, l)[k] = (expert + 5) % uint16(c.Model.Experts)
			}
			if tokens {
				c.Tokens[p] = (c.Tokens[p] + 7) % int32(c.Model.Vocabulary)
			}
		}
	}
	return &c
}

// TestNothingUnknownIsUsed changes all information that a forecast must not use and expects unchanged scores. Changes
// of information that it may use must change scores, as a control.
func TestOnlyAvailableInformationIsUsed(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 2)
	request := tr.Requests() - 1
	for tr.Length(request) < 12 {
		request--
	}
	position, layer := int(tr.Offsets[request])+tr.Length(request)/2, 1
	first, last := int(tr.Offsets[request]), int(tr.Offsets[request+1])-1
	for _, history := range []bool{false, true} {
		m, table := trained(t, tr, history)
		want := score(m, table, tr, layer, position)
		for name, test := range map[string]struct {
			tokens  bool
			which   func(p, l int) bool
			prefill bool
			decode  bool
		}{
			"routes of the layer":         {false, func(p, l int) bool { return p == position && l == layer }, false, false},
			"routes of later layers":      {false, func(p, l int) bool { return p == position && l > layer }, false, false},
			"routes of later positions":   {false, func(p, _ int) bool { return p > position }, false, false},
			"other requests":              {true, func(p, _ int) bool { return p < first || p > last }, false, false},
			"later tokens":                {true, func(p, _ int) bool { return p > position && p <= last }, true, false},
			"routes of earlier layers":    {false, func(p, l int) bool { return p == position && l < layer }, true, true},
			"earlier tokens":              {true, func(p, _ int) bool { return p < position && p >= first }, true, true},
			"routes of earlier positions": {false, func(p, l int) bool { return p < position && p >= first && l == layer }, false, true},
		} {
			expected := test.prefill
			if history {
				expected = test.decode
			}
			got := score(m, table, change(tr, test.tokens, test.which), layer, position)
			if moved := !slices.Equal(want, got); moved != expected {
				t.Errorf("history %v: %s: score changed: %v, want %v", history, name, moved, expected)
			}
		}
	}
}

// TestScoresAreShares also scores positions in arbitrary order.
func TestScoresAreShares(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 3)
	m, table := trained(t, tr, true)
	f := m.Bind(table, hosts(tr), tr)
	dst := make([]float32, ranks)
	for i := range tr.Tokens {
		position := (i * 7919) % len(tr.Tokens)
		f.Score(dst, i%m.Layers, position)
		sum := float32(0)
		for _, s := range dst {
			if !(s >= 0 && s <= 1) {
				t.Fatalf("score %v", s)
			}
			sum += s
		}
		if math.Abs(float64(sum)-1) > 1e-4 {
			t.Fatalf("the scores %v sum to %v", dst, sum)
		}
		if i%97 == 0 && !slices.Equal(dst, score(m, table, tr, i%m.Layers, position)) {
			t.Fatalf("position %d has a different score when scored separately", position)
		}
	}
}

// TestFinishedLayersFreeScores scores a long request layer by layer. Afterwards less memory than the scores of one
// layer remains. The intermediate data of a layer, many times as much, was shared by all layers in sequence.
func TestFinishedLayersFreeScores(t *testing.T) {
	shape := tracetest.Small
	shape.Layers = 12
	m, table := trained(t, tracetest.Generate(shape, 3), true)
	shape.Domains, shape.DocumentsPerDomain, shape.RequestsPerDocument, shape.TokensPerRequest = 1, 1, 1, 1<<15
	long := tracetest.Generate(shape, 4)
	f, dst := m.Bind(table, hosts(long), long), make([]float32, ranks)
	held := func() int64 {
		var now runtime.MemStats
		for range 3 { // the second collection empties a pool
			runtime.GC()
		}
		runtime.ReadMemStats(&now)
		return int64(now.HeapAlloc)
	}
	before := held()
	for l := range m.Layers {
		for p := range long.Tokens {
			f.Score(dst, l, p)
		}
	}
	if more, layer := held()-before, int64(4*ranks*len(long.Tokens)); more > layer {
		t.Errorf("%d bytes remain for finished layers; the scores of one layer have %d", more, layer)
	}
	f.Score(dst, 0, 0)
}

// TestScoresAreCalibrated compares the scores of positions outside the training data with the actual shares:
// information beyond the token must reduce the error.
func TestScoresAreCalibrated(t *testing.T) {
	tr, err := trace.Open(t.Context(), "../testdata/tiny-32e-top4.safetensors.zst")
	if err != nil {
		t.Fatal(err)
	}
	squares := func(score func(dst []float32, layer, position int)) float64 {
		sum, n := 0.0, 0
		dst, h := make([]float32, ranks), hosts(tr)
		for p := int(tr.Offsets[tr.Requests()/2]); p < len(tr.Tokens); p++ {
			for l := range tr.Model.Layers {
				score(dst, l, p)
				for _, expert := range tr.Row(p, l) {
					for _, rank := range h[l][expert] {
						dst[rank] -= 1 / float32(tr.Model.TopK)
					}
				}
				for _, d := range dst {
					sum += float64(d * d)
				}
				n++
			}
		}
		return sum / float64(n)
	}
	prefill, table := trained(t, tr, false)
	decode, _ := trained(t, tr, true)
	byTable := squares(table.Forecast(tr).Score)
	byPrefill := squares(prefill.Bind(table, hosts(tr), tr).Score)
	byDecode := squares(decode.Bind(table, hosts(tr), tr).Score)
	if byPrefill > 0.9*byTable || byDecode > byPrefill {
		t.Errorf("mean squared error: token table %.4f, prefill %.4f, decode %.4f", byTable, byPrefill, byDecode)
	}
}

func TestTrainingIsDeterministic(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 4)
	before := runtime.GOMAXPROCS(1)
	first, _ := trained(t, tr, true)
	runtime.GOMAXPROCS(4)
	again, _ := trained(t, tr, true)
	runtime.GOMAXPROCS(before)
	if diff := cmp.Diff(first, again); diff != "" {
		t.Error(diff)
	}
}

func TestUnknownTokensAreScored(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 5)
	m, table := trained(t, tr, false)
	other := *tr
	other.Tokens = slices.Clone(tr.Tokens)
	for p := range other.Tokens {
		other.Tokens[p] += int32(m.Vocabulary) // beyond all tables
	}
	for _, s := range score(m, table, &other, 2, len(other.Tokens)-1) {
		if !(s > 0 && s < 1) {
			t.Errorf("score %v", s)
		}
	}
}
