// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// ownKinds returns a trace in which each request activates separate experts, independent of its tokens: no placement
// helps other requests.
func ownKinds(requests, tokens int, seed uint64) *trace.Trace {
	const experts, layers, vocabulary = 16, 2, 50
	random := rand.New(rand.NewPCG(seed, 0))
	t := &trace.Trace{Offsets: []int64{0}, Model: trace.Model{Experts: experts, TopK: 2, Vocabulary: vocabulary, Layers: []int{1, 2}, HiddenLayers: 3}}
	for r := range requests {
		var own [layers][]int
		for l := range own {
			own[l] = random.Perm(experts)[:4]
		}
		for range tokens/2 + random.IntN(tokens) {
			t.Tokens = append(t.Tokens, int32(random.IntN(vocabulary)))
			for _, of := range own {
				first := random.IntN(len(of))
				second := (first + 1 + random.IntN(len(of)-1)) % len(of)
				t.Experts = append(t.Experts, uint16(of[first]), uint16(of[second]))
			}
		}
		t.Offsets = append(t.Offsets, int64(len(t.Tokens)))
		t.Documents = append(t.Documents, int32(r))
	}
	return t
}

// With attention DP the activations of a request are local together. A placement that suits the held-out requests by
// chance is not a gain.
func TestRequestNoiseIsNoGain(t *testing.T) {
	runs := 100
	if testing.Short() {
		runs = 20
	}
	for _, requests := range []int{160, 240} { // a quarter of them are held out
		worth := 0
		for seed := range uint64(runs) {
			tr := ownKinds(requests+2, 40, seed)
			o := options(placement.DataParallel, 4)
			o.Seed, o.TrainPercent = seed, 99
			s, err := newSearch(tr, o)
			if err != nil {
				t.Fatal(err)
			}
			preferred, _, err := s.validate(t.Context(), time.Time{})
			if err != nil {
				t.Fatal(err)
			}
			if preferred == "" {
				worth++
			}
		}
		t.Logf("%d requests: a placement seems worth having %d times in %d", requests, worth, runs)
		if worth > runs/6 {
			t.Errorf("%d requests: a worthless placement seems worth having %d times in %d", requests, worth, runs)
		}
	}
}

// The weighted rates of single requests sum to the overall rates.
func TestRatesByRequest(t *testing.T) {
	s, err := newSearch(tracetest.Generate(tracetest.Small, 1), options(placement.DataParallel, 4))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.count(t.Context()); err != nil {
		t.Fatal(err)
	}
	report, err := s.score(t.Context(), placement.Contiguous(s.trace.Model.Layers, s.trace.Model.Experts, 4), placement.ContiguousAlgorithm)
	if err != nil {
		t.Fatal(err)
	}
	sum, all := report.Rates(), float64(s.trace.TokenCount(s.test))
	for i, request := range s.test {
		weight := float64(s.trace.Length(request)) / all
		sum.LAR -= weight * report.ByRequest[i].LAR
		sum.RemoteRanksPerToken -= weight * report.ByRequest[i].RemoteRanksPerToken
		sum.RemoteNodesPerToken -= weight * report.ByRequest[i].RemoteNodesPerToken
	}
	if off := math.Abs(sum.LAR) + math.Abs(sum.RemoteRanksPerToken) + math.Abs(sum.RemoteNodesPerToken); off > 1e-9 || report.LAR == 0 {
		t.Errorf("rates %+v; those of single requests are off by %+v", report.Rates(), sum)
	}
}

// If token IDs carry no information, the table shows no gain for a placement of co-activated experts, while a forecast
// with more context does.
func TestPlacementIsValidatedWithItsForecast(t *testing.T) {
	shape := tracetest.Small
	shape.DocumentsPerDomain, shape.TokensPerRequest, shape.Noise = 12, 100, 10
	tr := tracetest.Generate(shape, 1)
	clear(tr.Tokens)
	tracetest.AddLookAhead(tr, 4, 0, 1)
	for _, test := range []struct {
		forecast Forecast
		fallBack bool
	}{{Table, true}, {RawLookAhead, false}, {LookAhead, false}} {
		o := options(placement.TensorParallel, 4)
		o.Forecast = test.forecast
		s, err := Solve(t.Context(), tr, o)
		if err != nil {
			t.Fatal(err)
		}
		if (s.FallBack != "") != test.fallBack || !test.fallBack && s.Report.LAR < 1.2*s.Report.BaselineLAR {
			t.Errorf("forecast %s: fall-back %q, local activation rate %.3f, without a plan %.3f", test.forecast, s.FallBack, s.Report.LAR, s.Report.BaselineLAR)
		}
	}
}
