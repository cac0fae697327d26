// SPDX-License-Identifier: Apache-2.0

package solver_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/drift"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

var (
	driftSteps     = flag.Int("drift-steps", 30_000, "simulated requests in which false alarms are counted")
	driftTrace     = flag.String("drift-trace", "", "routing trace of which drift tests are made from few requests (default: a generated one)")
	driftEP        = flag.Int("drift-ep", 4, "EP size of the plan that they are of")
	driftSizes     = flag.String("drift-sizes", "50,75,100", "numbers of requests that they are made from")
	driftResamples = flag.Int("drift-resamples", 2, "drift tests for each number, each from other requests")
	driftAllowed   = flag.Float64("drift-allowed", 1e-6, "false alarms per request that are allowed")
)

// The drift test meets its goals for a plan that is solved from four domains and then serves two others with different
// tokens.
func TestDriftGoals(t *testing.T) {
	figures(t)
	recorded := tracetest.Generate(tracetest.Shape{
		Experts: 16, TopK: 2, Layers: 3, Vocabulary: 600, Domains: 6, DocumentsPerDomain: 60, RequestsPerDocument: 1, TokensPerRequest: 150,
		Noise: 20, Groups: 4,
	}, 1)
	var usual, other []int
	for r, domain := range recorded.Domains {
		if domain < 4 {
			usual = append(usual, r)
		} else {
			other = append(other, r)
		}
	}
	part := recorded.Subset(usual)
	for _, tc := range []struct {
		attention   placement.Attention
		drop, shift int
	}{{placement.TensorParallel, 100, 25}, {placement.DataParallel, 550, 80}} {
		solution, err := solver.Solve(t.Context(), part, solver.Options{
			Ranks: 4, Attention: tc.attention, Algorithm: placement.Auto, Forecast: solver.Table, TrainPercent: 20, Seed: 1,
		})
		if err != nil {
			t.Fatal(err)
		}
		c, err := solver.CalibrateDrift(t.Context(), part, solution.Plan, solution.HeldOut, 0)
		if err != nil || c == nil {
			t.Fatalf("attention %s: calibration %v, error %v", tc.attention, c, err)
		}
		serve := func(of *trace.Trace, requests []int) []drift.Request {
			served, err := solver.DriftRequests(t.Context(), of, solution.Plan, requests)
			if err != nil {
				t.Fatal(err)
			}
			return served
		}
		before, after := serve(part, solution.HeldOut), serve(recorded, other)
		for _, order := range []drift.Order{{Sticky: 0, Seed: 77}, {Sticky: .9, Seed: 77}} {
			alarms, err := c.Alarms(t.Context(), before, order, *driftSteps)
			if err != nil {
				t.Fatal(err)
			}
			if allowed := *driftSteps / 1_000_000; alarms > allowed {
				t.Errorf("attention %s, %+v: %d false alarms in %d requests; %d are allowed", tc.attention, order, alarms, *driftSteps, allowed)
			}
			for name, found := range map[string]struct {
				change drift.Change
				within int
			}{"a drop of 10%": {drift.Change{Drop: .1}, tc.drop}, "other domains": {drift.Change{To: after}, tc.shift}} {
				delays, err := c.Delays(t.Context(), before, found.change, order, 60, 2000)
				if err != nil {
					t.Fatal(err)
				}
				t.Logf("attention %s, sticky %v, %s: found after %d requests, in 95%% of runs %d", tc.attention, order.Sticky, name, delays[30], delays[56])
				if delays[56] > found.within {
					t.Errorf("attention %s, %+v, %s: found after %d requests in 95%% of runs; %d are allowed", tc.attention, order, name, delays[56], found.within)
				}
			}
		}
	}
}

// The drift test is deterministic in the seed, and nil with too few held-out requests.
func TestCalibrateDrift(t *testing.T) {
	recorded, err := trace.Open(t.Context(), "testdata/tiny-32e-top4.safetensors.zst")
	if err != nil {
		t.Fatal(err)
	}
	solution, err := solver.Solve(t.Context(), recorded, solver.Options{
		Ranks: 4, Attention: placement.DataParallel, Algorithm: placement.ContiguousAlgorithm, Forecast: solver.Table, TrainPercent: 20, Seed: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	recorded.Domains = nil // live traffic has no domains, so kinds are the best ranks
	first, err := solver.CalibrateDrift(t.Context(), recorded, solution.Plan, solution.HeldOut, 0)
	if err != nil {
		t.Fatal(err)
	}
	again, err := solver.CalibrateDrift(t.Context(), recorded, solution.Plan, solution.HeldOut, 0)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(first, again); diff != "" || first.Validate() != nil {
		t.Errorf("the same requests lead to (%v):\n%s", first.Validate(), diff)
	}
	tight, err := solver.CalibrateDrift(t.Context(), recorded, solution.Plan, solution.HeldOut, 1.01)
	if err != nil {
		t.Fatal(err)
	}
	if tight.Usual.Served > first.Usual.Served-0.001 {
		t.Errorf("%v is usually local where no rank may have more than its share, %v with the usual cap", tight.Usual.Served, first.Usual.Served)
	}
	few, err := solver.CalibrateDrift(t.Context(), recorded, solution.Plan, solution.HeldOut[:drift.MinRequests-1], 0)
	if few != nil || err != nil {
		t.Errorf("few requests: calibration %v, error %v", few, err)
	}
}

// A test from few requests may be slow but not wrong: other requests of the same kinds raise no alarm, and a
// sufficiently large change is detected.
func TestDriftFromFewRequests(t *testing.T) {
	figures(t)
	recorded := tracetest.Generate(tracetest.Shape{
		Experts: 16, TopK: 2, Layers: 3, Vocabulary: 600, Domains: 6, DocumentsPerDomain: 120, RequestsPerDocument: 1, TokensPerRequest: 150,
		Noise: 20, Groups: 4,
	}, 1)
	if *driftTrace != "" {
		var err error
		if recorded, err = trace.Open(t.Context(), *driftTrace); err != nil {
			t.Fatal(err)
		}
	}
	for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
		solution, err := solver.Solve(t.Context(), recorded, solver.Options{
			Ranks: *driftEP, Attention: attention, Algorithm: placement.Auto, Forecast: solver.Table, TrainPercent: 20, Seed: 1,
		})
		if err != nil {
			t.Fatal(err)
		}
		served, err := solver.DriftRequests(t.Context(), recorded, solution.Plan, solution.HeldOut)
		if err != nil {
			t.Fatal(err)
		}
		for _, size := range strings.Split(*driftSizes, ",") {
			n, err := strconv.Atoi(size)
			if err != nil {
				t.Fatal(err)
			}
			var tried fewRequests
			for set := range *driftResamples {
				seen, unseen := resampled(recorded, solution.HeldOut, served, n, uint64(set))
				tried.try(t, seen, unseen, uint64(set))
			}
			t.Logf("attention %s, EP %d, %d requests: %s", attention, *driftEP, n, tried.report())
			for order, alarms := range tried.alarms {
				if allowed := int(*driftAllowed * float64(tried.requests)); alarms > allowed {
					t.Errorf("attention %s, order %d, from %d requests: %d false alarms in %d requests; %d are allowed", attention, order, n, alarms, tried.requests, allowed)
				}
			}
			if median(tried.halved) >= fewLimit {
				t.Errorf("attention %s, from %d requests: that half of what is local is missing is not found within %d requests", attention, n, fewLimit)
			}
		}
	}
}

// resampled splits held-out requests by whole documents in seeded order: at least n requests, and all others.
func resampled(t *trace.Trace, heldOut []int, served []drift.Request, n int, seed uint64) (seen, unseen []drift.Request) {
	byDocument := map[int32][]drift.Request{}
	var documents []int32
	for i, r := range heldOut {
		document := t.Documents[r]
		if byDocument[document] == nil {
			documents = append(documents, document)
		}
		byDocument[document] = append(byDocument[document], served[i])
	}
	rand.New(rand.NewPCG(seed, 1)).Shuffle(len(documents), func(i, j int) { documents[i], documents[j] = documents[j], documents[i] })
	for _, document := range documents {
		if len(seen) < n {
			seen = append(seen, byDocument[document]...)
		} else {
			unseen = append(unseen, byDocument[document]...)
		}
	}
	return seen, unseen
}

// fewLimit is the number of requests within which a change must be detected.
const fewLimit = 3000

// fewRequests contains the results of tests from few requests on other requests: false alarms in random order and in
// runs of one domain, and the number of requests to detect that a tenth or half of the local activations is missing.
type fewRequests struct {
	alarms         [2]int
	requests, sets int
	// wrong counts the tests that raised any.
	wrong         [2]int
	tenth, halved []int
	reference     float64
}

func (f *fewRequests) try(t *testing.T, seen, unseen []drift.Request, seed uint64) {
	t.Helper()
	o := drift.DefaultOptions()
	o.Seed, o.Chance, o.Steps = seed, 1/float64(*driftEP), 50_000
	c, err := drift.Calibrate(t.Context(), seen, o)
	if err != nil {
		t.Fatal(err)
	}
	f.requests += *driftSteps
	f.sets++
	f.reference += c.Residual.Reference
	for i, order := range []drift.Order{{Sticky: 0, Seed: 77 + seed}, {Sticky: .9, Seed: 77 + seed}} {
		alarms, err := c.Alarms(t.Context(), unseen, order, *driftSteps)
		if err != nil {
			t.Fatal(err)
		}
		if f.alarms[i] += alarms; alarms > 0 {
			f.wrong[i]++
		}
		for drop, delays := range map[float64]*[]int{.1: &f.tenth, .5: &f.halved} {
			found, err := c.Delays(t.Context(), unseen, drift.Change{Drop: drop}, order, 5, fewLimit)
			if err != nil {
				t.Fatal(err)
			}
			*delays = append(*delays, found...)
		}
	}
}

func (f *fewRequests) report() string {
	thousands := float64(f.requests) / 1000
	return fmt.Sprintf("%.4f and %.4f false alarms in 1,000 requests (random order and runs; of %d tests %d and %d raise any), a tenth less is found after %d, half after %d; mean reference %.3f",
		float64(f.alarms[0])/thousands, float64(f.alarms[1])/thousands, f.sets, f.wrong[0], f.wrong[1], median(f.tenth), median(f.halved), f.reference/float64(f.sets))
}

func median(values []int) int { return slices.Sorted(slices.Values(values))[len(values)/2] }
