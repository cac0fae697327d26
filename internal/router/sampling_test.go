// SPDX-License-Identifier: Apache-2.0

package router

import (
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/plans"
	"github.com/semmoe/operator/internal/router/plans/planstest"
	"github.com/semmoe/operator/internal/router/wire"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/test/tier"
)

var (
	// sampledRequests is the number of requests of the run that the sampled rate is tested with.
	sampledRequests = tier.Choose(140, 140, 2800)
	sampledTrace    = flag.String("sampled-trace", "", "routing trace that the sampled rate is tested with, on 8 ranks, in place of the small model's")
)

func TestSampledPercentage(t *testing.T) {
	const requests = 100_000
	for _, percent := range []int{0, 1, 5, 50, 100} {
		count := 0
		random := rand.New(rand.NewPCG(1, uint64(percent)))
		for range requests {
			if sampled(random.Uint64(), percent) {
				count++
			}
		}
		p := float64(percent) / 100
		if off := math.Abs(float64(count)/requests - p); off > 4*math.Sqrt(p*(1-p)/requests) {
			t.Errorf("%d%% sampled as %d of %d", percent, count, requests)
		}
	}
}

// TestSampledRateOfARun sends a run through the router and compares it with the engine's own counters. The rate of the
// sampled requests is within three standard errors of the engine's rate, and so are the rates for other request ids.
// The 95% interval covers the engine's rate in at least 93% of such resamples. If half of the run has 700 requests or
// more, the rate of every such half is within 0.01.
func TestSampledRateOfARun(t *testing.T) {
	p, _ := solved(t)
	address := startReferenceEngine(t, string(p.Artifact.Files["engine/sglang.json"]))
	adapter := adapterOf(t, "SGLang")
	recorded, err := trace.Open(t.Context(), planstest.Trace)
	if err != nil {
		t.Fatal(err)
	}
	serve := func(percent int) (string, *Observations) {
		pool := NewPool()
		pool.Set([]discovery.Backend{{Pod: "p", Address: address, Ranks: 4, Revision: "r", PlanDigest: p.Artifact.Digest, Shape: &planstest.Shape}})
		pool.AddLayout(p.layout)
		return proxyServer(t, pool, ProxyOptions{
			RankHeader: adapter.RankHeader, RankRoutes: adapter.RankRoutes, RoutedExperts: adapter.RoutedExperts, SamplePercent: percent, MaxBodyBytes: 1 << 20, EndpointWait: time.Second,
		})
	}
	everything, all := serve(100)
	const percent = 25
	part, sample := serve(percent)

	// The same requests go through a router that observes all of them and one that samples. Their ids are the same, so
	// the sample of the second router is a subset of the observations of the first one.
	random := rand.New(rand.NewPCG(1, 1))
	var counts []lar.Activations
	before := engineActivations(t, address)
	var exact, exactOfPart lar.Activations
	for i := range sampledRequests {
		body := excerpt(t, recorded, random)
		id := fmt.Sprintf("run-%d", i)
		send(t, everything, id, body)
		last := all.recent()
		counts = append(counts, last[len(last)-1].Activations)
		middle := engineActivations(t, address)
		send(t, part, id, body)
		after := engineActivations(t, address)
		exact.Local, exact.Total = exact.Local+middle.Local-before.Local, exact.Total+middle.Total-before.Total
		exactOfPart.Local, exactOfPart.Total = exactOfPart.Local+after.Local-middle.Local, exactOfPart.Total+after.Total-middle.Total
		before = after
	}
	var sum lar.Ratio
	for _, c := range counts {
		sum.Add(c)
	}
	if sum.Activations != exact {
		t.Fatalf("the router has observed %+v, the engine has computed %+v", sum.Activations, exact)
	}
	got := sample.report().Last.All().Overall
	truth := float64(exactOfPart.Local) / float64(exactOfPart.Total)
	t.Logf("LAR %.4f; %d of %d requests sampled: %.4f, standard error %.4f", truth, got.Requests, len(counts), got.Value(), got.StandardError())
	if distance := math.Abs(got.Value() - truth); distance > 3*got.StandardError() || got.Requests < int64(len(counts))/6 {
		t.Errorf("%d sampled requests have the rate %.4f, all have %.4f: %.1f standard errors of %.4f", got.Requests, got.Value(), truth, distance/got.StandardError(), got.StandardError())
	}
	resample(t, counts, percent)
	if len(counts) >= 1400 {
		if farthest := resample(t, counts, 50); farthest > 0.01 {
			t.Errorf("half of the requests have a rate that is off by %.4f", farthest)
		}
	}
}

// TestSampledRateOfATrace checks the same for the recorded routing of a model, dispatched by price: a small trace,
// which is cut into requests because it has few, or the held-out requests of a given trace.
func TestSampledRateOfATrace(t *testing.T) {
	if *sampledTrace == "" {
		p, _ := solved(t)
		recorded, err := trace.Open(t.Context(), planstest.Trace)
		if err != nil {
			t.Fatal(err)
		}
		const length = 64
		var pieces [][2]int
		for end := length; end <= len(recorded.Tokens); end += length {
			pieces = append(pieces, [2]int{end - length, end})
		}
		counts, _ := dispatched(t, p.layout, recorded, pieces, promptIDs)
		resample(t, counts, 20)
		return
	}
	recorded, err := trace.Open(t.Context(), *sampledTrace)
	if err != nil {
		t.Fatal(err)
	}
	solution, err := solver.Solve(t.Context(), recorded, solver.Options{
		Ranks: 8, Attention: placement.DataParallel, Algorithm: placement.Auto, Forecast: solver.Table, TrainPercent: 20, Seed: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	_, held, err := trace.Split(recorded, 20, 1)
	if err != nil {
		t.Fatal(err)
	}
	var requests [][2]int
	for _, i := range held {
		requests = append(requests, [2]int{int(recorded.Offsets[i]), int(recorded.Offsets[i+1])})
	}
	counts, sketch := dispatched(t, plans.New(strings.Repeat("d", 64), solution.Plan, nil), recorded, requests, promptIDs)
	bias, biasError := sketch.Forecast.Bias()
	slope, slopeError := sketch.Forecast.Slope()
	t.Logf("%d requests: LAR %.4f, standard error %.4f; forecast %.4f, bias %.4f (%.4f), slope %.2f (%.2f); %.2f remote ranks per token", len(counts),
		sketch.Overall.Value(), sketch.Overall.StandardError(), sketch.Forecast.Predicted(), bias, biasError, slope, slopeError, sketch.RemoteRanksPerToken())
	tested := 0
	for _, percent := range []int{5, 10, 20} {
		if expected := len(counts) * percent / 100; expected < minSampled {
			t.Logf("%d%% of %d requests are only %d: not tested", percent, len(counts), expected)
			continue
		}
		tested++
		resample(t, counts, percent)
	}
	if tested == 0 {
		t.Fatalf("-sampled-trace has %d held-out requests: at least %d are needed", len(counts), 5*minSampled)
	}
	const drawn = 700
	if len(counts) < drawn {
		return // a property of a trace with that many different requests
	}
	random := rand.New(rand.NewPCG(4, 4))
	beyond := 0
	for range 1000 {
		var r lar.Ratio
		for range drawn {
			r.Add(counts[random.IntN(len(counts))])
		}
		if math.Abs(r.Value()-sketch.Overall.Value()) > 0.01 {
			beyond++
		}
	}
	t.Logf("700 requests drawn with replacement are off by more than .01 in %d of 1000 draws", beyond)
	if beyond > 10 {
		t.Error("700 requests do not determine the rate within 0.01")
	}
}

// minSampled is the expected number of sampled requests below which a sample may be empty, and the distribution of its rate
// is not normal, so that its standard error covers nothing.
const minSampled = 10

// promptIDs returns the members of a request for its tokens.
func promptIDs(ids []int32) string {
	list, err := json.Marshal(ids)
	if err != nil {
		panic(err) // a list of numbers
	}
	return `"input_ids":` + string(list)
}

// dispatched sends requests, given by their bounds in the tokens of a trace, to the ranks of a pool in random order,
// and counts the activations of each. prompt returns the members of a body with the prompt of a request.
func dispatched(t *testing.T, l *plans.Layout, recorded *trace.Trace, requests [][2]int, prompt func([]int32) string) (counts []lar.Activations, all lar.Sketch) {
	t.Helper()
	m := recorded.Model
	shape := lar.Shape{Layers: m.HiddenLayers, MoELayers: m.Layers, Experts: m.Experts, ExpertsPerToken: m.TopK}
	pool := NewPool()
	pool.Set([]discovery.Backend{{Pod: "p", Address: "x:1", Ranks: l.Ranks, Revision: "r", PlanDigest: l.Digest, Shape: &shape}})
	pool.AddLayout(l)
	for _, i := range rand.New(rand.NewPCG(2, 2)).Perm(len(requests)) {
		begin, end := requests[i][0], requests[i][1]
		r := requestOf("/generate", fmt.Sprint(i), fmt.Appendf(nil, `{%s,"sampling_params":{"max_new_tokens":1}}`, prompt(recorded.Tokens[begin:end])))
		lease, ok := pool.acquire(r, nil)
		if !ok || !lease.scored {
			t.Fatalf("request %d is not scored", i)
		}
		at, err := lease.locality()
		if err != nil {
			t.Fatal(err)
		}
		count, err := lar.CountActivations(reportedExperts(recorded, begin, end), shape, at, nil)
		if err != nil {
			t.Fatal(err)
		}
		counts = append(counts, count.Activations)
		all.Add(lar.Observation{Rank: lease.Rank, Count: count, Forecast: r.forecast.on(lease.Rank)})
		lease.Release()
	}
	return counts, all
}

// reportedExperts returns what an engine reports for tokens of a trace [tokens, layers, experts per token].
func reportedExperts(recorded *trace.Trace, begin, end int) []int32 {
	m := recorded.Model
	experts := make([]int32, (end-begin)*m.HiddenLayers*m.TopK)
	for position := begin; position < end; position++ {
		for i, layer := range m.Layers {
			row := experts[((position-begin)*m.HiddenLayers+layer)*m.TopK:]
			for k, expert := range recorded.Row(position, i) {
				row[k] = int32(expert)
			}
		}
	}
	return experts
}

// resample draws other ids for the requests of a run and compares the sampled rates with the rate of all requests. It
// returns the largest deviation.
func resample(t *testing.T, counts []lar.Activations, percent int) (farthest float64) {
	t.Helper()
	var all lar.Ratio
	for _, c := range counts {
		all.Add(c)
	}
	const runs = 1000
	random := rand.New(rand.NewPCG(3, 3))
	covered, within3 := 0, 0
	for range runs {
		var r lar.Ratio
		for _, c := range counts {
			if sampled(random.Uint64(), percent) {
				r.Add(c)
			}
		}
		distance := math.Abs(r.Value() - all.Value())
		if distance <= 1.96*r.StandardError() {
			covered++
		}
		if distance <= 3*r.StandardError() {
			within3++
		}
		farthest = max(farthest, distance)
	}
	t.Logf("LAR %.4f of %d requests; %d%% sampled: the 95%% interval covers it in %d of %d resamples, three standard errors in %d; farthest %.4f",
		all.Value(), len(counts), percent, covered, runs, within3, farthest)
	if covered < runs*93/100 {
		t.Errorf("the 95%% interval covers the rate in %d of %d resamples", covered, runs)
	}
	if within3 < runs*99/100 {
		t.Errorf("three standard errors cover the rate in %d of %d resamples", within3, runs)
	}
	return farthest
}

// excerpt returns a request with consecutive tokens of the trace.
func excerpt(t *testing.T, recorded *trace.Trace, random *rand.Rand) string {
	t.Helper()
	tokens := recorded.Request(random.IntN(recorded.Requests()))
	length := min(len(tokens), 8+random.IntN(40))
	begin := random.IntN(len(tokens) - length + 1)
	ids, err := json.Marshal(tokens[begin : begin+length])
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf(`{"input_ids":%s,"sampling_params":{"temperature":0,"max_new_tokens":1}}`, ids)
}

// send posts a request with an id.
func send(t *testing.T, url, id, body string) {
	t.Helper()
	request, err := http.NewRequest(http.MethodPost, url+"/generate", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set(HeaderRequestID, id)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		t.Fatal(response.Status)
	}
}

// TestIDsChooseNothing checks that neither the sample nor the plan of a request follows from its id, because clients
// choose ids.
func TestIDsChooseNothing(t *testing.T) {
	const requests = 200
	s := newStages(NewPool(), prometheus.NewRegistry(), ProxyOptions{RankHeader: rankHeader, RoutedExperts: adapterOf(t, "SGLang").RoutedExperts, SamplePercent: 50})
	inSample, plans := 0, map[uint64]bool{}
	for range requests {
		r := s.reader.read(t.Context(), engine.APIOf("/v1/completions"), "the same id", nil, wire.ParseBody([]byte(`{"prompt":"x"}`)))
		if plans[r.planRandom] = true; r.sampled {
			inSample++
		}
	}
	if inSample < requests/4 || inSample > 3*requests/4 || len(plans) < requests/2 {
		t.Errorf("of %d requests with one id, %d are sampled at 50%%, and they draw %d numbers for their plan", requests, inSample, len(plans))
	}
}
