// SPDX-License-Identifier: Apache-2.0

package drift

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// made returns requests of as many kinds as ranks. Each kind has a preferred rank, and the forecast predicts half of
// its advantage. Without ranks there is one column.
func made(n, ranks int, seed uint64) []Request {
	random := rand.New(rand.NewPCG(seed, 7))
	requests := make([]Request, n)
	for i := range requests {
		kind := i % max(ranks, 4)
		r := Request{Kind: kind, Tokens: 200 + random.IntN(400), Known: 0.85 + 0.1*random.Float64(), Pairs: 0.3 + 0.1*random.Float64()}
		for rank := range ranks {
			local := 0.1 + 0.02*random.NormFloat64()
			if rank == kind || ranks == 1 {
				local += 0.15 + 0.03*random.NormFloat64()
			}
			r.Local = append(r.Local, local)
			r.Predicted = append(r.Predicted, float32(0.12+0.4*(local-0.12)+0.005*random.NormFloat64()))
		}
		requests[i] = r
	}
	return requests
}

func options() Options {
	o := DefaultOptions()
	o.Steps, o.Chance = 50_000, 0.125
	return o
}

func calibrated(t *testing.T, requests []Request) *Calibration {
	t.Helper()
	c, err := Calibrate(t.Context(), requests, options())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	return c
}

func drawn(t *testing.T, requests []Request, n int, seed uint64) []Sample {
	t.Helper()
	traffic, err := newSimulator(requests, Order{Sticky: 0.5, Seed: seed})
	if err != nil {
		t.Fatal(err)
	}
	samples := make([]Sample, n)
	for i := range samples {
		samples[i] = traffic.nextSample()
	}
	return samples
}

// A ConfigMap holds up to 900 KiB together with the plan's other files.
func TestCalibrationsOfManyRanksFitAConfigMap(t *testing.T) {
	o := options()
	o.Steps, o.Chance = 10_000, 1./128
	c, err := Calibrate(t.Context(), made(512, 128, 1), o)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	if len(text) > 400<<10 {
		t.Errorf("128 ranks: %d bytes", len(text))
	}
	for mean, want := range map[float64]float64{0: 0, 0.123456: 0.1235, 0.00123456: 0.001235, 0.99999: 1, 1: 1} {
		if got := rounded(mean); got != want {
			t.Errorf("%v is rounded to %v, want %v", mean, got, want)
		}
	}
}

func TestBaselineTrafficIsNoDriftAndDropsAreDetected(t *testing.T) {
	for _, ranks := range []int{1, 4} {
		requests := made(400, ranks, 1)
		c := calibrated(t, requests)
		for _, order := range c.orders() {
			// Other requests of the same kinds as the held-out requests.
			alarms, err := c.Alarms(t.Context(), made(400, ranks, 2), order, 100_000)
			if err != nil {
				t.Fatal(err)
			}
			if alarms > 0 {
				t.Errorf("%d ranks, %+v: %d false alarms", ranks, order, alarms)
			}
			last := math.MaxInt
			for _, drop := range []float64{.1, .2, .5} {
				delays, err := c.Delays(t.Context(), requests, Change{Drop: drop}, order, 40, 5000)
				if err != nil {
					t.Fatal(err)
				}
				if delays[37] > 600 || delays[20] > last {
					t.Errorf("%d ranks, %+v: a drop of %v is detected after %d requests (median), %d (95%% of runs)", ranks, order, drop, delays[20], delays[37])
				}
				last = delays[20]
			}
			other := made(100, ranks, 3)
			for i := range other {
				other[i].Known, other[i].Pairs = .5, .1
			}
			delays, err := c.Delays(t.Context(), requests, Change{To: other}, order, 40, 5000)
			if err != nil {
				t.Fatal(err)
			}
			if delays[37] > 25 {
				t.Errorf("%d ranks, %+v: new text is detected after %d requests", ranks, order, delays[37])
			}
		}
	}
}

// The rarest kind is kept with the requested probability, other kinds at least as often, and all requests are equally
// frequent.
func TestTraffic(t *testing.T) {
	const steps = 500_000
	for name, tc := range map[string]struct {
		sizes  []int // requests by kind, the rarest last
		sticky float64
		again  float64 // probability that a request of the rarest kind is followed by another
	}{
		"equal kinds":        {[]int{10, 10, 10, 10, 10}, .9, .9},
		"unequal kinds":      {[]int{80, 15, 5}, .9, .9},
		"random order":       {[]int{30, 10}, 0, .25},
		"below random order": {[]int{30, 10}, .2, .25},
		"one kind":           {[]int{7}, .9, 1},
	} {
		var requests []Request
		for kind, size := range tc.sizes {
			for range size {
				requests = append(requests, Request{Kind: kind, Tokens: 1, Predicted: []float32{0}, Local: []float64{0}})
			}
		}
		traffic, err := newSimulator(requests, Order{Sticky: tc.sticky, Seed: 3})
		if err != nil {
			t.Fatal(err)
		}
		again, of, last := make([]float64, len(tc.sizes)), make([]float64, len(tc.sizes)), -1
		for range steps {
			request, _ := traffic.next()
			kind := requests[request].Kind
			if of[kind]++; kind == last {
				again[kind]++
			}
			last = kind
		}
		rarest := len(tc.sizes) - 1
		if got := again[rarest] / of[rarest]; math.Abs(got-tc.again) > .01 {
			t.Errorf("%s: %v of the requests after one of the rarest kind are of it, want %v", name, got, tc.again)
		}
		for kind, n := range of {
			if kept := again[kind] / n; kept < tc.again-.01 {
				t.Errorf("%s: %v of the requests after one of kind %d are of it, want at least %v", name, kept, kind, tc.again)
			}
			if got, want := n/steps, float64(tc.sizes[kind])/float64(len(requests)); math.Abs(got-want) > .02 {
				t.Errorf("%s: %v of the requests are of kind %d, want %v", name, got, kind, want)
			}
		}
	}
}

func (c *Calibration) orders() []Order { return []Order{{Seed: 5}, {Sticky: .9, Seed: 5}} }

// The statistic depends only on the samples, and the same requests yield the same calibration.
func TestStatisticIsAFunctionOfTheSamples(t *testing.T) {
	requests := made(100, 4, 1)
	c := calibrated(t, requests)
	if diff := cmp.Diff(c, calibrated(t, requests)); diff != "" {
		t.Errorf("the same requests yield another calibration:\n%s", diff)
	}
	samples := drawn(t, requests, 500, 3)
	for i := range samples {
		samples[i].Local *= .9
	}
	var statistic Statistic
	for i, s := range samples {
		statistic = c.Next(statistic, s)
		if got := statisticOf(c, samples[:i+1]); got != statistic {
			t.Fatalf("after %d samples the statistic is %v, recomputed from all samples %v", i+1, statistic, got)
		}
	}
	if statistic == (Statistic{}) {
		t.Error("a drop did not change the statistic")
	}
}

// A lower local share never lowers the residual and level charts, and more unseen content never lowers the novelty
// chart. The expected share may fall with unseen content, as it does in baseline traffic.
func TestStatisticIsMonotone(t *testing.T) {
	requests := made(100, 4, 1)
	c := calibrated(t, requests)
	random := rand.New(rand.NewPCG(5, 5))
	for seed := range uint64(50) {
		samples := drawn(t, requests, 100, seed)
		before := statisticOf(c, samples)
		at := &samples[random.IntN(len(samples))]
		at.Local -= random.Float64()
		worse := statisticOf(c, samples)
		at.Known -= random.Float64()
		after := statisticOf(c, samples)
		if worse.Residual < before.Residual || worse.Level < before.Level || after.Novelty < before.Novelty {
			t.Fatalf("seed %d: %v became %v with a lower share, and %v with more unseen content", seed, before, worse, after)
		}
	}
}

func TestNaNIsNoEvidence(t *testing.T) {
	requests := made(100, 4, 1)
	c := calibrated(t, requests)
	samples := drawn(t, requests, 50, 3)
	for i := range samples {
		samples[i].Local *= .8
		samples[i].Known *= .9
	}
	before := statisticOf(c, samples)
	s := samples[0]
	nan, inf := math.NaN(), math.Inf(1)
	for name, tc := range map[string]struct {
		sample Sample
		// novelty reports whether the share of unseen content is known.
		novelty bool
	}{
		"no local share":      {Sample{s.Best, s.Rank, s.Highest, s.Predicted, nan, nan, nan, 0}, false},
		"infinite":            {Sample{s.Best, s.Rank, s.Highest, s.Predicted, -inf, -inf, inf, 0}, false},
		"no forecast":         {Sample{s.Best, s.Rank, nan, nan, s.Local, nan, nan, 0}, false},
		"rank too high":       {Sample{s.Best, 4, s.Highest, s.Predicted, 0, nan, 1, 0}, false},
		"negative best rank":  {Sample{-1, 0, s.Highest, s.Predicted, 0, 1, nan, 0}, false},
		"new, without scores": {Sample{s.Best, s.Rank, nan, nan, nan, 0, 0, 0}, true},
	} {
		after := c.Next(before, tc.sample)
		want := before
		if tc.novelty {
			want.Novelty += 1 - c.Novelty.Reference
		}
		if diff := cmp.Diff(want, after); diff != "" {
			t.Errorf("%s: the statistic changed (-want +got):\n%s", name, diff)
		}
	}
	if got := c.Explain([]Sample{{Local: nan}}); got.Samples != 0 || got.Rest != 0 {
		t.Errorf("a NaN sample is explained by %+v", got)
	}
}

// A router with another cap loses another local share to load balancing. The loss under the calibrated cap is not an
// excess.
func TestTrafficKeepsTheCap(t *testing.T) {
	requests := made(400, 4, 1)
	last := 0.0
	for _, loadCap := range []float64{1.05, 0, 1.4} {
		o := options()
		o.Cap = loadCap
		c, err := Calibrate(t.Context(), requests, o)
		if err != nil {
			t.Fatal(err)
		}
		traffic, err := newSimulator(requests, Order{Cap: loadCap, Seed: 9})
		if err != nil {
			t.Fatal(err)
		}
		samples := make([]Sample, 2000)
		for i := range samples {
			samples[i] = traffic.nextSample()
		}
		if given := c.BalanceLoss(samples); given > 0.003 {
			t.Errorf("cap %v: a loss of %v exceeds that of baseline traffic", loadCap, given)
		}
		if c.Usual.Served < last+0.004 {
			t.Errorf("cap %v: the in-control share is %v, and %v with a smaller cap", loadCap, c.Usual.Served, last)
		}
		last = c.Usual.Served
	}
}

// A chart widened because of few requests is neither widened again nor narrowed, and the reference value of the level
// chart stays below half of the share beyond chance.
func TestCalibrationForAnotherDrop(t *testing.T) {
	chart := func(reference, threshold float64) Chart { return Chart{Reference: reference, Threshold: threshold} }
	for name, tc := range map[string]struct {
		residual, level         Chart
		drop                    float64
		wantResidual, wantLevel Chart
	}{
		"same drop":                 {chart(.06, 2), chart(.15, 4), .1, chart(.06, 2), chart(.15, 4)},
		"larger":                    {chart(.05, 2), chart(.15, 4), .2, chart(.1, 2), chart(.3, 4)},
		"larger, raised reference":  {chart(.06, 2), chart(.15, 4), .2, chart(.1, 2), chart(.3, 4)},
		"a little larger":           {chart(.06, 2), chart(.15, 4), .11, chart(.06, 2), chart(.165, 4)},
		"largest":                   {chart(.05, 2), chart(.15, 4), .5, chart(.25, 2), chart(.375, 4)},
		"widened, larger":           {chart(.3, 20), chart(.6, 40), .5, chart(.3, 20), chart(.6, 40)},
		"slightly widened, larger":  {chart(.1, 20), chart(.225, 40), .5, chart(.25, 20), chart(.375, 40)},
		"smaller":                   {chart(.06, 2), chart(.15, 4), .05, chart(.03, 4), chart(.075, 8)},
		"widened, smaller":          {chart(.3, 20), chart(.6, 40), .05, chart(.3, 20), chart(.6, 40)},
		"one widened, both smaller": {chart(.075, 20), chart(.15, 4), .05, chart(.075, 20), chart(.075, 8)},
	} {
		c := &Calibration{Chance: .125, Usual: Usual{Best: .5}, Residual: tc.residual, Level: tc.level, Novelty: chart(.4, 3)}
		got := c.ForDrop(tc.drop)
		near := cmp.Comparer(func(a, b float64) bool { return math.Abs(a-b) < 1e-9 })
		if diff := cmp.Diff([]Chart{tc.wantResidual, tc.wantLevel, c.Novelty}, []Chart{got.Residual, got.Level, got.Novelty}, near); diff != "" {
			t.Errorf("%s: charts differ (-want +got):\n%s", name, diff)
		}
	}
	c := &Calibration{Level: chart(.15, 4), Chance: .125}
	if got := c.ForDrop(.5).Level; got != c.Level {
		t.Errorf("with an in-control share of 0 the chart became %+v", got)
	}
}

func TestExplain(t *testing.T) {
	requests := made(400, 4, 1)
	c := calibrated(t, requests)
	largest := func(causes Causes) string {
		name, highest := "", 0.0
		for n, share := range map[string]float64{"new tokens": causes.NewTokens, "mix": causes.Mix, "balance": causes.Balance, "rest": causes.Rest} {
			if share > highest {
				name, highest = n, share
			}
		}
		return name
	}
	best := func(s Sample) Sample { s.Rank, s.Predicted = s.Best, s.Highest; return s }
	for name, tc := range map[string]struct {
		change func(Sample) Sample
		want   string
	}{
		"routing changed": {func(s Sample) Sample { s.Local *= .7; return s }, "rest"},
		"new tokens": {func(s Sample) Sample {
			s.Known, s.Local = .3, s.Local-.08
			s.Highest, s.Predicted = s.Highest-.04, s.Predicted-.04
			return s
		}, "new tokens"},
		// The plan correctly expects less of these requests on every rank.
		"requests that fit no rank": {func(s Sample) Sample {
			s = best(s)
			s.Highest, s.Predicted = s.Highest-.05, s.Predicted-.05
			s.Local = c.Expected(s)
			return s
		}, "mix"},
		// Load balancing by itself is not drift. Together with a drop it accounts for its part of the drop.
		"other ranks": {func(s Sample) Sample {
			s.Rank = (s.Best + 1) % 4
			s.Predicted = c.Predicted[s.Best*4+s.Rank]
			s.Local = c.Expected(s) - .03
			return s
		}, "balance"},
	} {
		samples := drawn(t, requests, 300, 9)
		for i := range samples {
			samples[i] = tc.change(samples[i])
		}
		causes := c.Explain(samples)
		if got := largest(causes); got != tc.want {
			t.Errorf("%s: the largest cause is %q, of %+v", name, got, causes)
		}
		if given := c.BalanceLoss(samples); (given > 0.03) != (name == "other ranks") {
			t.Errorf("%s: %v is lost to load balancing", name, given)
		}
		if sum := causes.NewTokens + causes.Mix + causes.Balance + causes.Rest; math.Abs(sum-1) > 1e-9 {
			t.Errorf("%s: the shares sum to %v", name, sum)
		}
	}
	// Samples before the change do not count.
	samples := drawn(t, requests, 300, 9)
	for i := range samples[200:] {
		samples[200+i].Local *= .5
	}
	if causes := c.Explain(samples); causes.Samples < 100 || causes.Samples > 140 {
		t.Errorf("%d samples are counted after a change 100 samples ago", causes.Samples)
	}
}

// If the forecast is less reliable for requests with fewer known tokens, the shares of known tokens reduce the
// detection delay.
func TestKnownSharesExplainResiduals(t *testing.T) {
	varied := made(400, 1, 1)
	for i := range varied {
		varied[i].Local[0] += 0.6*(varied[i].Known-0.9) - 0.5*(varied[i].Pairs-0.35)
	}
	constant := slices.Clone(varied)
	for i := range constant {
		constant[i].Known, constant[i].Pairs = 0.9, 0.35
	}
	c := calibrated(t, varied)
	if math.Abs(c.Slopes.Known-0.6) > 0.15 || math.Abs(c.Slopes.Pairs+0.5) > 0.15 {
		t.Errorf("slopes %+v; want 0.6 by known tokens and -0.5 by known pairs", c.Slopes)
	}
	if with, without := medianDelay(t, c, varied), medianDelay(t, calibrated(t, constant), constant); with >= without {
		t.Errorf("a drop of 10%% is detected after %d requests, and after %d with forecasts only", with, without)
	}
}

// medianDelay returns the median detection delay of a drop of 10%.
func medianDelay(t *testing.T, c *Calibration, requests []Request) int {
	t.Helper()
	delays, err := c.Delays(t.Context(), requests, Change{Drop: .1}, Order{Sticky: .9, Seed: 5}, 41, 5000)
	if err != nil {
		t.Fatal(err)
	}
	return delays[20]
}

// A calibration of an earlier version has no slopes for known shares and no text model.
func TestEarlierCalibration(t *testing.T) {
	c := *calibrated(t, made(100, 1, 1))
	c.Known, c.Slopes.Known, c.Slopes.Pairs = nil, 0, 0
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
	s := Sample{Predicted: .2, Highest: .2, Known: .1, Pairs: .1}
	expected := c.Expected(s)
	if s.Known, s.Pairs, s.Text = 1, 1, 1; expected != c.Expected(s) {
		t.Errorf("the expectation is %v with new tokens and %v with known tokens and a text term", expected, c.Expected(s))
	}
}

// Exponential tails of peaks are extrapolated correctly, also if few peaks form the tail: extrapolation from the many
// others would yield a third of the height.
func TestTailOfPeaks(t *testing.T) {
	const n, exceeding = 100_000, 0.1
	for name, tc := range map[string]struct {
		// One of every `of` peaks is `times` as high.
		of, times int
		want      float64
	}{
		"one distribution": {1, 1, math.Log(n / exceeding)},
		"few high peaks":   {1000, 8, 8 * math.Log(n/1000/exceeding)},
	} {
		for seed := range uint64(10) {
			random := rand.New(rand.NewPCG(seed, 3))
			peaks := make([]float64, n)
			for i := range peaks {
				if peaks[i] = random.ExpFloat64(); i%tc.of == 0 {
					peaks[i] *= float64(tc.times)
				}
			}
			if got := exceededBy(peaks, exceeding); got < 0.5*tc.want || got > 1.5*tc.want {
				t.Errorf("%s, seed %d: the tail is %.1f; want about %.1f", name, seed, got, tc.want)
			}
		}
	}
	if got := exceededBy([]float64{1, 3}, exceeding); got != 6 {
		t.Errorf("the tail of two peaks is %v; want twice the highest", got)
	}
}

func TestCalibrateRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		requests []Request
		change   func(*Options)
		want     string
	}{
		"few requests":  {made(MinRequests-1, 4, 1), func(*Options) {}, "49 held-out requests"},
		"rate of zero":  {made(100, 4, 1), func(o *Options) { o.FalseAlarms = 0 }, "false alarms is 0"},
		"few steps":     {made(100, 4, 1), func(o *Options) { o.Steps = 1 }, "steps is 1"},
		"always sticky": {made(100, 4, 1), func(o *Options) { o.Sticky = 1 }, "sticky is 1"},
	} {
		o := options()
		tc.change(&o)
		if _, err := Calibrate(t.Context(), tc.requests, o); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v; want %q", name, err, tc.want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Calibrate(ctx, made(100, 4, 1), options()); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: error %v", err)
	}
}

// Identical requests yield charts that never move. The first different request is not yet an alarm.
func TestIdenticalRequests(t *testing.T) {
	requests := make([]Request, 60)
	for i := range requests {
		requests[i] = Request{Tokens: 100, Known: 1, Pairs: 1, Predicted: []float32{.25, .25}, Local: []float64{.25, .25}}
	}
	c := calibrated(t, requests)
	statistic := c.Next(Statistic{}, Sample{Predicted: .25, Highest: .25, Local: .2, Known: .95, Pairs: .9})
	if c.Drifted(statistic) {
		t.Errorf("one request is an alarm: %v against %+v", statistic, c)
	}
}

// With only local and known tokens, rounding pushes the means of many simulated requests above 1.
func TestSharesAreAtMostOne(t *testing.T) {
	requests := make([]Request, 60)
	for i := range requests {
		requests[i] = Request{Tokens: 100, Known: 1, Pairs: 1, Predicted: []float32{1}, Local: []float64{1}}
	}
	c, err := Calibrate(t.Context(), requests, DefaultOptions())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Validate(); err != nil || c.Usual != (Usual{1, 1, 1}) {
		t.Errorf("usual is %v, %v", c.Usual, err)
	}
}

func TestCalibrationRoundTrip(t *testing.T) {
	c := calibrated(t, made(100, 4, 1))
	text, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	var read Calibration
	if err := json.Unmarshal(text, &read); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(c, &read); diff != "" {
		t.Errorf("the decoded calibration differs:\n%s", diff)
	}
	for name, tc := range map[string]struct {
		change func(*Calibration)
		want   string
	}{
		"ranks":       {func(c *Calibration) { c.Ranks = 0 }, "ranks is 0"},
		"many ranks":  {func(c *Calibration) { c.Ranks = 1 << 20 }, "ranks is 1048576"},
		"entries":     {func(c *Calibration) { c.Local = c.Local[1:] }, "local has 15 entries"},
		"requests":    {func(c *Calibration) { c.Requests = 3 }, "requests is 3"},
		"rate":        {func(c *Calibration) { c.FalseAlarms = 1 }, "false_alarms is 1"},
		"known":       {func(c *Calibration) { c.Known = &Known{2, 1} }, "known is {2 1}"},
		"slope":       {func(c *Calibration) { c.Slopes.Highest = math.NaN() }, "one is NaN"},
		"reference":   {func(c *Calibration) { c.Level.Reference = 2 }, "level.reference is 2"},
		"threshold":   {func(c *Calibration) { c.Novelty.Threshold = 0 }, "novelty.threshold is 0"},
		"usual share": {func(c *Calibration) { c.Usual.Known = -1 }, "usual is"},
		"chance":      {func(c *Calibration) { c.Chance = math.Inf(1) }, "chance is +Inf"},
	} {
		wrong := read
		tc.change(&wrong)
		if err := wrong.Validate(); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v; want %q", name, err, tc.want)
		}
	}
}

// statisticOf returns the statistic after the samples.
func statisticOf(c *Calibration, samples []Sample) Statistic {
	var statistic Statistic
	for _, s := range samples {
		statistic = c.Next(statistic, s)
	}
	return statistic
}
