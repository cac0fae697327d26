// SPDX-License-Identifier: Apache-2.0

package locality

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/observation/promquery"
	"github.com/semmoe/operator/solver/drift"
)

// samples returns requests one second apart, the last one now, with the given local share of their activations.
func samples(n int, local func(i int) float64) []TimedSample {
	list := make([]TimedSample, n)
	for i := range list {
		list[i] = TimedSample{moedtest.Start.Add(time.Duration(i-n+1) * time.Second), drift.Sample{Best: 1, Highest: 0.4, Predicted: 0.4, Local: local(i), Known: 1, Pairs: 1}}
	}
	return list
}

func always(share float64) func(int) float64 { return func(int) float64 { return share } }

// served returns the input of a deployment with sampling routers, with requests that match the plan's prediction.
func served(change ...func(*Input)) Input {
	plan := moedtest.PlanFor400()
	rate := lar.Ratio{}
	for range 100 {
		rate.Add(lar.Activations{Local: 40, Total: 100})
	}
	in := Input{
		Now: moedtest.Start, Spec: moedtest.Deployment().Spec.Drift, Planned: true, Plan: plan, Promise: plan.Status.Forecast,
		Engine: semmoev1.EngineSGLang, EngineReportsRoutedExperts: true, Observed: true, Rate: rate,
		Routers: RouterEvidence{Answered: 1, Newest: moedtest.Start, Tables: plan.Status.PlanDigest, Samples: samples(200, always(0.4)), Calibration: moedtest.Calibration()},
	}
	for _, c := range change {
		c(&in)
	}
	return in
}

// shifted lowers the local rate by a quarter in the last 100 seconds.
func shifted(in *Input) {
	in.Routers.Samples = samples(200, func(i int) float64 { return map[bool]float64{false: 0.4, true: 0.3}[i >= 100] })
}

// asked returns the input of a deployment with source Prometheus and values that end now.
func asked(points []lar.Point, change ...func(*Input)) Input {
	in := served(change...)
	in.Routers = RouterEvidence{}
	in.Spec.Source, in.Observed = semmoev1.DriftSourcePrometheus, false
	in.Prometheus = PrometheusEvidence{Points: points, Window: time.Hour, End: moedtest.Start}
	return in
}

// counting returns the input of a deployment whose engines shuffle tokens and count activations, until now.
func counting(values []float64, change ...func(*Input)) Input {
	in := served()
	in.Routers = RouterEvidence{Answered: 1}
	in.Ranks, in.Shuffled, in.EnginesRead, in.Observed, in.Rate = 8, true, true, false, lar.Ratio{}
	in.Engines.Window = time.Hour
	for i, value := range values {
		in.Engines.Points = append(in.Engines.Points, lar.Point{Time: moedtest.Start.Add(time.Duration(i-len(values)+1) * lar.EngineBucketTime), Value: value})
	}
	for _, c := range change {
		c(&in)
	}
	return in
}

// times repeats a value.
func times(n int, value float64) []float64 {
	list := make([]float64, n)
	for i := range list {
		list[i] = value
	}
	return list
}

// Each policy of both lists is violated individually.
func TestAssessDrift(t *testing.T) {
	remade := func(ages ...time.Duration) func(*Input) {
		return func(in *Input) {
			for _, age := range ages {
				in.Replans = append(in.Replans, moedtest.Start.Add(-age))
			}
		}
	}
	below := func(in *Input) {
		in.Rate = lar.Ratio{}
		for range 100 {
			in.Rate.Add(lar.Activations{Local: 35, Total: 100})
		}
	}
	nearBar := func(in *Input) { // 370 for a prediction of 400: above the bar of 360, below the recovery limit
		in.Rate = lar.Ratio{}
		for range 100 {
			in.Rate.Add(lar.Activations{Local: 37, Total: 100})
		}
	}
	// Requests are served off their best ranks, at the rate expected there.
	elsewhere := func(in *Input) {
		below(in)
		for i := range in.Routers.Samples {
			in.Routers.Samples[i].Predicted, in.Routers.Samples[i].Local = 0.35, 0.35
		}
	}
	scattered := func(in *Input) { // rate 340, with a standard error of 30
		in.Rate = lar.Ratio{}
		for i := range 100 {
			in.Rate.Add(lar.Activations{Local: int64(34 + 30*(2*(i%2)-1)), Total: 100})
		}
	}
	good := moedtest.Values(times(120, 0.4)...)
	for name, tc := range map[string]struct {
		in     Input
		status Status
		reason string
		hold   string // reason of the hold
		says   string
	}{
		"on target":                        {served(), OnTarget, "OnTarget", "", "matches the prediction of the plan"},
		"drifted":                          {served(shifted), Drifted, "Drifted", "", "drifted away from the plan"},
		"no plan":                          {served(func(in *Input) { in.Planned = false }), Unknown, "NoPlan", "", "Without a plan"},
		"plan deleted":                     {served(func(in *Input) { in.Plan = nil }), Unknown, "PlanNotFound", "", "no longer exists"},
		"plan of the tables deleted":       {served(func(in *Input) { in.Routers.Tables = "other" }), Unknown, "PlanNotFound", "", "no longer exists"},
		"plan without forecast":            {served(func(in *Input) { in.Promise = nil }), Unknown, "PlanNotFound", "", "has no forecast yet"},
		"an engine without routed experts": {served(shifted, func(in *Input) { in.EngineReportsRoutedExperts, in.Engine = false, semmoev1.EngineTensorRTLLM }), Unknown, "RoutedExpertsUnavailable", "", "TensorRTLLM"},
		"tokens not shuffled":              {served(shifted, func(in *Input) { in.Ranks, in.Planned = 8, false }), Unknown, "TokenShuffleUnsupported", "", "one activation in 8 is local"},
		"tokens shuffled":                  {served(shifted, func(in *Input) { in.Ranks, in.Shuffled = 8, true }), Unknown, "NotObserved", "", "spec.drift.source"},
		"nothing is sampled":               {served(shifted, func(in *Input) { in.Observed = false }), Unknown, "NotObserved", "", "samplePercent"},
		"no router answers":                {served(shifted, func(in *Input) { in.Routers.Answered = 0 }), Unknown, "RoutersUnreachable", "", "No request router"},
		"nothing in the window":            {served(func(in *Input) { in.Routers = RouterEvidence{Answered: 2} }), Unknown, "Stale", "", "last 3600 seconds"},
		"nothing scored":                   {served(func(in *Input) { in.Routers = RouterEvidence{Answered: 2, Newest: moedtest.Start} }), Unknown, "TablesNotLoaded", "", "not loaded"},
		"too few samples":                  {served(func(in *Input) { in.Routers.Samples = samples(enoughSamples-1, always(0)) }), Unknown, "TooFewSamples", "", "fewer than 30"},
		"below, not tested":                {served(below, func(in *Input) { in.Routers.Calibration = nil }), BelowPromise, "BelowTarget", "", "is not tested"},
		"on target, not tested":            {served(func(in *Input) { in.Routers.Calibration = nil }), OnTarget, "OnTarget", "", "no calibration (drift.json)"},
		"too few, not tested":              {served(func(in *Input) { in.Routers.Calibration, in.Rate.Requests = nil, 29 }), Unknown, "TooFewSamples", "", ""},
		"below, without a change":          {served(below), BelowPromise, "BelowTarget", "", "no change of the traffic is detected"},
		"below, traded for shorter waits":  {served(elsewhere), OnTarget, "OnTarget", "", "trade for shorter waits"},
		"near the bar":                     {served(nearBar), OnTarget, "OnTarget", "", ""},
		"near the bar, below before":       {served(nearBar, func(in *Input) { in.WasBelow = true }), BelowPromise, "BelowTarget", "", ""},
		"recovered":                        {served(func(in *Input) { in.WasBelow = true }), OnTarget, "OnTarget", "", ""},
		"below within chance":              {served(scattered), OnTarget, "OnTarget", "", ""},
		"a threshold above the drop":       {served(shifted, func(in *Input) { in.Spec.ThresholdPercent = 50 }), OnTarget, "OnTarget", "", ""},
		"paused":                           {served(shifted, func(in *Input) { in.Paused = true }), Drifted, "Drifted", "Paused", ""},
		"pinned":                           {served(shifted, func(in *Input) { in.Pinned = true }), Drifted, "Drifted", "PlanPinned", ""},
		"re-plans off":                     {served(shifted, func(in *Input) { in.Spec.MaxReplansPerDay = ptr.To[int32](0) }), Drifted, "Drifted", "ReplansDisabled", ""},
		"revisions change":                 {served(shifted, func(in *Input) { in.RollingOut = true }), Drifted, "Drifted", "RollingOut", ""},
		"a young plan":                     {served(shifted, func(in *Input) { in.Plan.CreationTimestamp = metav1.NewTime(moedtest.Start.Add(-59 * time.Minute)) }), Drifted, "Drifted", "PlanCooldown", ""},
		"a plan in the future":             {served(shifted, func(in *Input) { in.Plan.CreationTimestamp = metav1.NewTime(moedtest.Start.Add(time.Hour)) }), Drifted, "Drifted", "PlanCooldown", ""},
		"no cooldown, a young plan": {served(shifted, func(in *Input) {
			in.Plan.CreationTimestamp, in.Spec.CooldownSeconds = metav1.NewTime(moedtest.Start), ptr.To[int32](0)
		}), Drifted, "Drifted", "", ""},
		"cooldown":                       {served(shifted, remade(59*time.Minute, 5*time.Hour)), Drifted, "Drifted", "ReplanCooldown", ""},
		"after the cooldown":             {served(shifted, remade(60*time.Minute, 5*time.Hour)), Drifted, "Drifted", "", ""},
		"a re-plan in the future":        {served(shifted, remade(-time.Minute)), Drifted, "Drifted", "ReplanCooldown", ""},
		"daily cap":                      {served(shifted, remade(2*time.Hour, 3*time.Hour, 4*time.Hour, 23*time.Hour)), Drifted, "Drifted", "DailyReplanLimit", ""},
		"below the daily cap":            {served(shifted, remade(2*time.Hour, 3*time.Hour, 4*time.Hour, 24*time.Hour)), Drifted, "Drifted", "", ""},
		"the user's settings come first": {served(shifted, remade(0), func(in *Input) { in.Paused, in.RollingOut = true, true }), Drifted, "Drifted", "Paused", ""},

		"engines, on target":      {counting(times(240, 0.4)), OnTarget, "OnTarget", "", ""},
		"engines, drifted":        {counting(append(times(120, 0.4), times(120, 0.35)...)), Drifted, "Drifted", "", ""},
		"engines, a short drop":   {counting(append(times(180, 0.4), times(60, 0.1)...)), OnTarget, "OnTarget", "", ""},
		"engines, held":           {counting(times(240, 0.3), func(in *Input) { in.RollingOut = true }), Drifted, "Drifted", "RollingOut", ""},
		"engines, not read":       {counting(times(240, 0.3), func(in *Input) { in.EnginesRead = false }), Unknown, "NotObserved", "", "spec.routing.mode"},
		"engines, no router":      {counting(times(240, 0.3), func(in *Input) { in.Routers.Answered = 0 }), Unknown, "RoutersUnreachable", "", ""},
		"engines, nothing":        {counting(nil), Unknown, "Stale", "", ""},
		"engines, nonsense":       {counting(nil, func(in *Input) { in.Engines.Problem = desired.Finding{Reason: "CountersInvalid", Message: "pod p"} }), Unknown, "CountersInvalid", "", "pod p"},
		"engines, old":            {counting(times(240, 0.1), func(in *Input) { in.Now = in.Now.Add(3 * time.Minute) }), Unknown, "Stale", "", ""},
		"engines, too few":        {counting(times(89, 0.1)), Unknown, "TooFewValues", "", "last 3600 seconds"},
		"engines, just enough":    {counting(times(90, 0.1)), Drifted, "Drifted", "", ""},
		"Prometheus, on target":   {asked(good), OnTarget, "OnTarget", "", ""},
		"Prometheus, tokens":      {asked(good, func(in *Input) { in.Ranks, in.Shuffled = 8, true }), OnTarget, "OnTarget", "", ""},
		"Prometheus, drifted":     {asked(moedtest.Values(append(times(60, 0.4), times(60, 0.35)...)...)), Drifted, "Drifted", "", ""},
		"Prometheus, held":        {asked(moedtest.Values(times(60, 0.3)...), func(in *Input) { in.Paused = true }), Drifted, "Drifted", "Paused", ""},
		"Prometheus, no series":   {asked(good, func(*Input) {}).with(desired.Finding{Reason: promquery.NoSeries, Message: "The query yields no series"}), Unknown, "PrometheusNoSeries", "", "no series"},
		"Prometheus, nothing":     {asked(nil), Unknown, "PrometheusStale", "", ""},
		"Prometheus, ended":       {asked(moedtest.Values(times(120, 0.1)...)[:116]), Unknown, "PrometheusStale", "", ""},
		"Prometheus, percent":     {asked(moedtest.Values(times(120, 40)...)), Unknown, "PrometheusNotARate", "", "not a percentage"},
		"Prometheus, negative":    {asked(moedtest.Values(times(120, -0.1)...)), Unknown, "PrometheusNotARate", "", ""},
		"Prometheus, too few":     {asked(moedtest.Values(times(44, 0.1)...)), Unknown, "TooFewValues", "", "three quarters"},
		"Prometheus, just enough": {asked(moedtest.Values(times(45, 0.1)...)), Drifted, "Drifted", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			a := Assess(tc.in)
			if a.Status != tc.status || a.Reason != tc.reason || a.Hold.Reason != tc.hold || !strings.Contains(a.Message, tc.says) {
				t.Errorf("%s, reason %s (%s), hold %+v; want %s, reason %s with %q, hold %q", a.Status, a.Reason, a.Message, a.Hold, tc.status, tc.reason, tc.says, tc.hold)
			}
			if a.Replan() != (tc.status == Drifted && tc.hold == "") {
				t.Errorf("a plan may be made: %v", a.Replan())
			}
			if drifted := a.Status == Drifted; drifted != !a.Since.IsZero() {
				t.Errorf("%s since %v", a.Status, a.Since)
			}
			if a.Hold.Reason != "" && a.Hold.Message == "" || a.Message == "" {
				t.Error("a reason has no message")
			}
		})
	}
}

// with sets a problem of Prometheus.
func (in Input) with(problem desired.Finding) Input {
	in.Prometheus.Problem = problem
	return in
}

// Missing, old, out-of-range or non-numeric evidence never results in drift. The valid samples in this test match the
// plan.
func TestNoisyEvidenceIsNeverDrift(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 7))
	odd := []float64{math.NaN(), math.Inf(1), math.Inf(-1)}
	for range 3000 {
		in := served()
		n := random.IntN(300)
		in.Routers.Samples = samples(n, func(int) float64 { return 0.36 + 0.08*random.Float64() })
		for i := range in.Routers.Samples {
			s := &in.Routers.Samples[i]
			switch random.IntN(8) {
			case 0:
				s.Local = odd[random.IntN(3)]
			case 1:
				s.Predicted = odd[random.IntN(3)]
			case 2:
				s.Known = odd[random.IntN(3)]
			case 5:
				s.Pairs = odd[random.IntN(3)]
			case 3:
				s.Highest = odd[random.IntN(3)]
			case 4:
				s.Rank = random.IntN(2000) - 1000
			}
			// An invalid rank, for example of another shape, has no expectation.
			if s.Rank < 0 || s.Rank > 1 {
				s.Local, s.Best = random.Float64(), s.Rank
			}
		}
		if random.IntN(3) == 0 {
			in.Routers = RouterEvidence{Answered: random.IntN(2), Tables: in.Routers.Tables, Samples: in.Routers.Samples}
		}
		if a := Assess(in); a.Status == Drifted {
			t.Fatalf("routers: %d samples are drift: %+v", n, a)
		}
		points := moedtest.Values(times(120, 0.4)...)
		for i := range points {
			if random.IntN(2) == 0 {
				points[i].Value = odd[random.IntN(3)]
			}
		}
		points = points[:random.IntN(len(points)+1)]
		if a := Assess(asked(Numbers(points, moedtest.Start.Add(-time.Duration(random.IntN(200))*time.Minute)))); a.Status == Drifted {
			t.Fatalf("Prometheus: %v are drift: %+v", points, a)
		}
	}
}

// An alarm ends only well below the threshold. Both are functions of the samples only.
func TestAlarmHasHysteresis(t *testing.T) {
	c := moedtest.Calibration()
	drop := samples(300, func(i int) float64 {
		switch {
		case i < 50:
			return 0.4
		case i < 90:
			return 0.3 // adds 0.08 each beyond the reference value 0.02: above 2 after 26
		}
		return 0.4 // subtracts 0.02 each
	})
	changes, alarm, since := []int{}, false, time.Time{}
	for i := range drop {
		result := testSamples(c, drop[:i+1])
		if result.Alarm != alarm {
			changes, alarm = append(changes, i), result.Alarm
			if alarm {
				since = result.Since
			}
		}
		if result.Alarm && (result.Causes == nil || result.Since.After(drop[50].Time)) {
			t.Fatalf("sample %d: since %v, causes %v", i, result.Since, result.Causes)
		}
	}
	// The statistic reaches 40 x 0.08 = 3.2, and falls to 1 after 110 samples.
	if len(changes) != 2 || changes[0] < 74 || changes[0] > 75 || changes[1] < 195 || changes[1] > 205 {
		t.Errorf("the alarm changes at samples %v, want about 75 and about 200", changes)
	}
	if !since.Equal(drop[50].Time) {
		t.Errorf("the drift began at %v, want the first sample that lacks something, %v", since, drop[50].Time)
	}
}

// A smaller threshold detects a smaller drop, and a larger one detects less. None causes more false alarms than the
// calibrated threshold.
func TestThresholdPercent(t *testing.T) {
	found := func(percent int32, drop float64) int {
		for i, c, list := 1, moedtest.Calibration().ForDrop(float64(percent)/100), samples(1000, always(0.4*(1-drop))); i <= len(list); i++ {
			if testSamples(c, list[:i]).Alarm {
				return i
			}
		}
		return 0
	}
	if found(10, 0.04) != 0 || found(5, 0.04) == 0 {
		t.Error("a drop of 4% is found at 10, or not at 5")
	}
	if found(10, 0.12) == 0 || found(30, 0.12) != 0 || found(30, 0.3) == 0 {
		t.Error("a drop of 12% is not found at 10, or is at 30, or one of 30% is not at 30")
	}
	random := rand.New(rand.NewPCG(3, 3))
	for range 20 {
		list := samples(2000, func(int) float64 { return 0.4 + 0.2*random.NormFloat64() })
		// The false alarm rate falls with the margin by which a peak exceeds its threshold, so the test compares the
		// peaks.
		peak := func(percent int32) float64 {
			c, highest := moedtest.Calibration().ForDrop(float64(percent)/100), 0.0
			var statistic drift.Statistic
			for _, s := range list {
				statistic = c.Next(statistic, s.Sample)
				highest = max(highest, c.Ratio(statistic))
			}
			return highest
		}
		if peak(20) > peak(10) || peak(50) > peak(20) {
			t.Fatalf("a larger drop to look for makes chance count more: %v %v %v", peak(10), peak(20), peak(50))
		}
	}
}

// The window moves along the values: an alarm starts when nine tenths of it are below the bar, and ends when half of it
// is above.
func TestValuesOfPrometheus(t *testing.T) {
	for name, tc := range map[string]struct {
		points    []lar.Point
		alarm     bool
		statistic float64
		since     int // index of the value at which the drift starts
	}{
		"on target":               {moedtest.Values(times(120, 0.4)...), false, 0, 0},
		"on the bar":              {moedtest.Values(times(120, 0.36)...), false, 0, 0},
		"below":                   {moedtest.Values(times(120, 0.35)...), true, 1, 0},
		"a short drop":            {moedtest.Values(append(times(70, 0.4), times(50, 0.1)...)...), false, 50. / 60, 0},
		"nine tenths":             {moedtest.Values(append(times(66, 0.4), times(54, 0.1)...)...), true, 0.9, 66},
		"half is above":           {moedtest.Values(append(times(90, 0.1), times(30, 0.4)...)...), true, 0.5, 0},
		"more than half is above": {moedtest.Values(append(times(89, 0.1), times(31, 0.4)...)...), false, 29. / 60, 0},
		"one bad value":           {moedtest.Values(append(times(119, 0.4), 0)...), false, 1. / 60, 0},
		"just below nine tenths":  {moedtest.Values(times(44, 0.1)...), false, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			got := testValues(tc.points, time.Hour, 0.36, minValues)
			if got.Alarm != tc.alarm || math.Abs(got.Statistic-tc.statistic) > 1e-9 || !got.Tested || got.Threshold != 0.9 {
				t.Errorf("alarm %v with %v of %v, want %v with %v", got.Alarm, got.Statistic, got.Threshold, tc.alarm, tc.statistic)
			}
			if tc.alarm && !got.Since.Equal(tc.points[tc.since].Time) {
				t.Errorf("since %v, want %v", got.Since, tc.points[tc.since].Time)
			}
		})
	}
}

// The prediction of newer tables is compared only with requests that were routed by them.
func TestRateUnder(t *testing.T) {
	observed := func(plan, tables string, local int64) lar.Observation {
		o := lar.Observation{Time: moedtest.Start, Plan: plan, Count: lar.Count{Activations: lar.Activations{Local: local, Total: 10}}}
		if tables != "" {
			o.Forecast = &lar.Forecast{Tables: tables}
		}
		return o
	}
	old := observed("p", "t", 0)
	old.Time = moedtest.Start.Add(-time.Hour - time.Second)
	reports := []lar.Report{
		{Observations: []lar.Observation{observed("p", "p", 2), observed("p", "t", 6), observed("q", "t", 9)}},
		{Observations: []lar.Observation{observed("p", "", 1), observed("p", "t", 8), old}},
	}
	for tables, want := range map[string]float64{"": 0.425, "p": 0.2, "t": 0.7} {
		if got := RateUnder(reports, "p", tables, moedtest.Start, time.Hour).Value(); math.Abs(got-want) > 1e-9 {
			t.Errorf("tables %q: rate %v, want %v", tables, got, want)
		}
	}
}

// The prediction is known even if the status is Unknown: metrics and alerts use it.
func TestPredictionWithoutSamples(t *testing.T) {
	for name, change := range map[string]func(*Input){
		"tokens stay where they are": func(in *Input) { in.Ranks = 8 },
		"no router answers":          func(in *Input) { in.Routers = RouterEvidence{} },
	} {
		if a := Assess(served(change)); a.Status != Unknown || a.Promise.LARMilli != 400 {
			t.Errorf("%s: %s, promise %d, want Unknown and 400", name, a.Status, a.Promise.LARMilli)
		}
	}
	if a := Assess(served(func(in *Input) { in.Promise = nil })); a.Promise.LARMilli != 0 {
		t.Errorf("without a prediction, the rate is %d", a.Promise.LARMilli)
	}
}
