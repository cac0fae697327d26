// SPDX-License-Identifier: Apache-2.0

package placementplan

import (
	"encoding/json"
	"errors"
	"math"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/calibration/machines"
	"github.com/semmoe/operator/internal/kube/conditions"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// TestInputsID checks that the ID of inputs does not change by accident. A change would solve every existing plan
// again.
func TestInputsID(t *testing.T) {
	inputs := solveInputs{
		Format: solutionFormat, Profile: artifact.Digest(modelDigest), Ranks: 4, Attention: "dp", Algorithm: "auto", Forecast: "table",
		TrainPercent: 80, Seed: 1, TimeBudgetSeconds: 300,
	}
	if got, want := inputs.ID(), "a7a1220e46649ab7"; got != want {
		text, err := json.Marshal(inputs)
		t.Errorf("ID %s, want %s: %s, %v", got, want, text, err)
	}
}

// TestForecastFor checks that plans whose tables no engine reads have forecast Table, by which their inputs keep the ID
// of earlier versions.
func TestForecastFor(t *testing.T) {
	tp, dp := semmoev1.AttentionTensorParallel, semmoev1.AttentionDataParallel
	for _, test := range []struct {
		attention semmoev1.AttentionParallelism
		shuffle   semmoev1.TokenShuffle
		by        semmoev1.SolverForecast
		want      solver.Forecast
	}{
		{dp, "", "", solver.Table}, {dp, "", semmoev1.ForecastAuto, solver.Table}, {tp, semmoev1.TokenShuffleDisabled, "", solver.Table},
		{tp, "", "", solver.AutoForecast}, {tp, semmoev1.TokenShuffleEnabled, semmoev1.ForecastAuto, solver.AutoForecast},
		{tp, "", semmoev1.ForecastTable, solver.Table}, {tp, "", semmoev1.ForecastTransition, solver.Transition},
		{tp, "", semmoev1.ForecastLookBack, solver.LookBack}, {tp, "", semmoev1.ForecastLookAhead, solver.LookAhead},
	} {
		spec := semmoev1.PlacementPlanSpec{Attention: test.attention, TokenShuffle: test.shuffle}
		if spec.Solver.Forecast = test.by; forecastFor(&spec) != test.want {
			t.Errorf("%+v: %s", test, forecastFor(&spec))
		}
	}
}

// TestForecastOfReplans checks the forecast of a plan that replaces another one.
func TestForecastOfReplans(t *testing.T) {
	recent := &trace.Trace{Model: trace.Model{Layers: []int{0}, Experts: 4, TopK: 1}} // without a look-ahead
	current := &solver.Plan{Placement: &placement.Placement{Ranks: 256}}
	for _, test := range []struct {
		set, before, want solver.Forecast
		says              string
	}{
		{solver.AutoForecast, solver.Table, solver.Table, "forecast table: as in the plan in service"},
		{solver.AutoForecast, solver.LookBack, solver.LookBack, "forecast lookback: as in the plan in service"},
		{solver.AutoForecast, solver.LookAhead, solver.Table, "forecast table: the profile lacks the input of forecast lookahead"},
		{solver.LookBack, solver.Table, solver.LookBack, ""},
		{solver.Transition, solver.Table, "", "Transition is unavailable: forecast transition supports at most 128 ranks"},
	} {
		in := solveInputs{Forecast: test.set}
		current.Forecast = test.before
		got, err := in.forecastAfter(current, recent)
		text := ""
		if err != nil {
			text = err.Error()
		} else if choice := in.forecastChoice(current, &solver.Plan{Forecast: got}); choice != nil {
			text = choice.Text()
		}
		if got != test.want || !strings.Contains(text, test.says) || (text == "") != (test.says == "") {
			t.Errorf("%+v: %s, %q", test, got, text)
		}
	}
}

// TestReshuffledWeightsKeepGroups checks that a plan for reshuffled weights keeps groups of experts, and a plan for an
// expert map does not.
func TestReshuffledWeightsKeepGroups(t *testing.T) {
	profile := &semmoev1.AffinityProfile{Status: semmoev1.AffinityProfileStatus{
		Result:     &semmoev1.ProfileResult{Digest: strings.Repeat("ab", 32)},
		Conditions: []metav1.Condition{{Type: semmoev1.ConditionReady, Status: metav1.ConditionTrue}},
	}}
	for realization, want := range map[semmoev1.Realization]bool{semmoev1.RealizationEngineMap: false, semmoev1.RealizationReshuffledWeights: true} {
		plan := &semmoev1.PlacementPlan{Spec: semmoev1.PlacementPlanSpec{ExpertParallelSize: 4, Realization: realization}}
		if inputs := inputsOf(plan, profile, nil, machines.ResolvedProfile{}); inputs == nil || inputs.options(nil).PreserveGroups != want {
			t.Errorf("%s: inputs %+v, want PreserveGroups %v", realization, inputs, want)
		}
	}
}

// TestCopiesFollowTheEngine checks that the solver gets the copy rule of the engine if the plan has copies and the rule
// is known.
func TestCopiesFollowTheEngine(t *testing.T) {
	profile := &semmoev1.AffinityProfile{Status: semmoev1.AffinityProfileStatus{
		Result:     &semmoev1.ProfileResult{Digest: strings.Repeat("ab", 32)},
		Conditions: []metav1.Condition{{Type: semmoev1.ConditionReady, Status: metav1.ConditionTrue}},
	}}
	plan := &semmoev1.PlacementPlan{Spec: semmoev1.PlacementPlanSpec{ExpertParallelSize: 4}}
	plan.Spec.RedundantMemoryBytes = ptr.To(resource.MustParse("8Gi"))
	for _, test := range []struct {
		engine    semmoev1.EngineType
		redundant string
		attention semmoev1.AttentionParallelism
		want      placement.CopyRule
	}{
		{"VLLMAscend", "8", semmoev1.AttentionDataParallel, placement.RankModuloCopy},
		{"VLLMAscend", "Auto", semmoev1.AttentionDataParallel, placement.RankModuloCopy},
		{"VLLMAscend", "0", semmoev1.AttentionDataParallel, placement.NearestCopy},
		{"VLLMAscend", "8", semmoev1.AttentionTensorParallel, placement.NearestCopy},
		{"SGLang", "8", semmoev1.AttentionDataParallel, placement.NearestCopy},
		{"", "8", semmoev1.AttentionDataParallel, placement.NearestCopy},
	} {
		plan.Spec.Engine, plan.Spec.RedundantExperts, plan.Spec.Attention = test.engine, ptr.To(intstr.Parse(test.redundant)), test.attention
		if got := inputsOf(plan, profile, nil, machines.ResolvedProfile{}).options(nil).CopyRule; got != test.want {
			t.Errorf("%+v: rule %q", test, got)
		}
	}
}

// TestUnshuffledTokens checks that a plan without token shuffle minimizes messages, and predicts a local rate of
// 1/ranks.
func TestUnshuffledTokens(t *testing.T) {
	profile := &semmoev1.AffinityProfile{Status: semmoev1.AffinityProfileStatus{
		Result:     &semmoev1.ProfileResult{Digest: strings.Repeat("ab", 32)},
		Conditions: []metav1.Condition{{Type: semmoev1.ConditionReady, Status: metav1.ConditionTrue}},
	}}
	for shuffle, want := range map[semmoev1.TokenShuffle]placement.Objective{
		"": placement.Time, semmoev1.TokenShuffleEnabled: placement.Time, semmoev1.TokenShuffleDisabled: placement.RankDedup,
	} {
		plan := &semmoev1.PlacementPlan{Spec: semmoev1.PlacementPlanSpec{ExpertParallelSize: 4, Attention: semmoev1.AttentionTensorParallel, TokenShuffle: shuffle}}
		if got := inputsOf(plan, profile, nil, machines.ResolvedProfile{}).options(nil); got.Objective != want || got.Unshuffled != (want == placement.RankDedup) {
			t.Errorf("%q is solved for %s, unshuffled %v", shuffle, got.Objective, got.Unshuffled)
		}
	}
	stay := func(remote, unplanned float64) *solution {
		s := testSolution(.3, .26)
		s.Inputs.Ranks, s.Inputs.Unshuffled = 8, true
		s.Report.RemoteRanksPerToken, s.UnplannedRemoteRanks = remote, unplanned
		return s
	}
	want := &semmoev1.PlanForecast{LARMilli: 125, BaselineMilli: 125, LARSummary: "12.5%", BaselineSummary: "12.5%", RemoteRanksMilli: 1800, BaselineRemoteRanksMilli: 2500}
	if diff := cmp.Diff(want, forecastOf(stay(1.8, 2.5))); diff != "" {
		t.Errorf("forecast (-want +got):\n%s", diff)
	}
	for remote, want := range map[float64]semmoev1.Verdict{1.8: semmoev1.VerdictGain, 2.45: semmoev1.VerdictGain, 2.46: semmoev1.VerdictNoGainExpected, 3: semmoev1.VerdictNoGainExpected} {
		if got := verdictOf(stay(remote, 2.5)); got != want {
			t.Errorf("%v remote ranks instead of 2.5: verdict %s, want %s", remote, got, want)
		}
	}
}

func testSolution(lar, baseline float64) *solution {
	return &solution{
		Format: solutionFormat, PlanDigest: strings.Repeat("0123456789abcdef", 4), ModelDigest: modelDigest, TestRequests: 10,
		Report: cost.Report{LAR: lar, BaselineLAR: baseline, UpperBound: 0.61249, WindowImbalance: ptr.To(1.1234)},
	}
}

func TestVerdict(t *testing.T) {
	fallen := testSolution(.5, .25)
	fallen.FallBack = "the default placement is better"
	timed := func(planned, unplanned int64) *solution {
		s := testSolution(.5, .25)
		s.LayerNanos, s.UnplannedLayerNanos = planned, unplanned
		return s
	}
	for name, test := range map[string]struct {
		solution *solution
		want     semmoev1.Verdict
	}{
		"gain":              {testSolution(.5, .25), semmoev1.VerdictGain},
		"just enough":       {testSolution(.256, .25), semmoev1.VerdictGain},
		"too little":        {testSolution(.254, .25), semmoev1.VerdictNoGainExpected},
		"loss":              {testSolution(.2, .25), semmoev1.VerdictNoGainExpected},
		"one rank":          {testSolution(1, 1), semmoev1.VerdictNoGainExpected},
		"default placement": {fallen, semmoev1.VerdictNoGainExpected},
		"faster":            {timed(90, 100), semmoev1.VerdictGain},
		"as slow":           {timed(100, 100), semmoev1.VerdictGain},
		"slower":            {timed(101, 100), semmoev1.VerdictNoGainExpected},
	} {
		t.Run(name, func(t *testing.T) {
			if got := verdictOf(test.solution); got != test.want {
				t.Errorf("verdict = %s, want %s", got, test.want)
			}
		})
	}
}

func TestForecast(t *testing.T) {
	want := &semmoev1.PlanForecast{
		LARMilli: 412, BaselineMilli: 250, UpperBoundMilli: 612, WindowImbalanceMilli: 1123, LARSummary: "41.2%", BaselineSummary: "25.0%",
	}
	if diff := cmp.Diff(want, forecastOf(testSolution(.41234, .25))); diff != "" {
		t.Errorf("forecast (-want +got):\n%s", diff)
	}
	timed := testSolution(.4, .25)
	timed.LayerNanos, timed.Report.Hardware = 1, strings.Repeat("é", 64)
	if got, want := forecastOf(timed).Hardware, strings.Repeat("é", 30)+"..."; got != want {
		t.Errorf("hardware %q, want %q", got, want)
	}
	tensorParallel := testSolution(.4, .25)
	tensorParallel.Report.WindowImbalance = nil
	if got := forecastOf(tensorParallel); got.WindowImbalanceMilli != 0 {
		t.Errorf("%+v", got)
	}
}

func TestConditions(t *testing.T) {
	ready := &semmoev1.AffinityProfile{}
	stalled := &semmoev1.AffinityProfile{Status: semmoev1.AffinityProfileStatus{Conditions: []metav1.Condition{
		{Type: semmoev1.ConditionStalled, Status: metav1.ConditionTrue, Message: "line 3 of the data set is not JSON"},
	}}}
	gain, noGain, truncated := testSolution(.5, .25).solved(), testSolution(.25, .25).solved(), testSolution(.5, .25).solved()
	truncated.Truncated = true
	type expected struct{ ready, progressing, degraded, stalled, reconciling string }
	for name, test := range map[string]struct {
		observation observation
		want        expected
		message     string // of Ready
	}{
		"no profile": {
			observation{Fault: &conditions.Fault{Reason: "ProfileNotFound", Message: "create it"}},
			expected{"False ProfileNotFound", "True ProfileNotFound", "True ProfileNotFound", "False NotStalled", "True InProgress"}, "create it",
		},
		"waiting": {
			observation{Profile: ready},
			expected{"False WaitingForProfile", "True WaitingForProfile", "False AsExpected", "False NotStalled", "True InProgress"}, "AffinityProfile tiny is not ready",
		},
		"profile stalled": {
			observation{Profile: stalled},
			expected{"False WaitingForProfile", "True WaitingForProfile", "False AsExpected", "False NotStalled", "True InProgress"}, "line 3 of the data set",
		},
		"queued": {
			observation{Profile: ready, Solving: &progress{}},
			expected{"False Queued", "True Queued", "False AsExpected", "False NotStalled", "True InProgress"}, "queued for solving",
		},
		"solving": {
			observation{Profile: ready, Solving: &progress{"Placement", 3, 9}},
			expected{"False Solving", "True Solving", "False AsExpected", "False NotStalled", "True InProgress"}, "Placement: 3 of 9",
		},
		"publishing": {
			observation{Profile: ready, Solved: gain},
			expected{"False Publishing", "True Publishing", "False AsExpected", "False NotStalled", "True InProgress"}, "ConfigMap",
		},
		"published": {
			observation{Profile: ready, Solved: gain, Published: true},
			expected{"True Published", "False Complete", "False AsExpected", "False NotStalled", "False Complete"}, "local activation rate on held-out requests 50.0%, default placement 25.0%",
		},
		"no gain": {
			observation{Solved: noGain, Published: true},
			expected{"True NoGainExpected", "False Complete", "False AsExpected", "False NotStalled", "False Complete"}, "not rolled out",
		},
		"time budget reached": {
			observation{Solved: truncated, Published: true},
			expected{"True Published", "False Complete", "False AsExpected", "False NotStalled", "False Complete"}, "timeBudgetSeconds",
		},
		"published, store unavailable": {
			observation{Solved: gain, Published: true, Fault: storeFault(errors.New("refused"))},
			expected{"True Published", "False Complete", "True StoreUnavailable", "False NotStalled", "False Complete"}, "50.0%",
		},
		"not published, store unavailable": {
			observation{Solved: gain, Fault: storeFault(errors.New("refused"))},
			expected{"False StoreUnavailable", "True StoreUnavailable", "True StoreUnavailable", "False NotStalled", "True InProgress"}, "is retried: refused",
		},
		"invalid": {
			observation{Fault: faultOf(invalidRanks(errors.New("EP size 5 does not divide")))},
			expected{"False InvalidExpertParallelSize", "False Stalled", "True InvalidExpertParallelSize", "True InvalidExpertParallelSize", "False Stalled"}, "spec.expertParallelSize: EP size 5",
		},
		"failed": {
			observation{Fault: faultOf(errors.New("connection refused"))},
			expected{"False SolveFailed", "True SolveFailed", "True SolveFailed", "False NotStalled", "True InProgress"}, "is retried: connection refused",
		},
	} {
		t.Run(name, func(t *testing.T) {
			plan := &semmoev1.PlacementPlan{}
			plan.Name, plan.Generation, plan.Spec.ProfileRef.Name = "plan", 1, "tiny"
			status := statusOf(plan, test.observation, time.Now())
			of := func(kind string) string {
				c := meta.FindStatusCondition(status.Conditions, kind)
				if c == nil || c.ObservedGeneration != 1 || c.Message == "" {
					t.Fatalf("condition %s: %+v", kind, c)
				}
				return string(c.Status) + " " + c.Reason
			}
			got := expected{
				of(semmoev1.ConditionReady), of(semmoev1.ConditionProgressing), of(semmoev1.ConditionDegraded), of(semmoev1.ConditionStalled), of(semmoev1.ConditionReconciling),
			}
			if got != test.want {
				t.Errorf("conditions\n%+v, want\n%+v", got, test.want)
			}
			if message := meta.FindStatusCondition(status.Conditions, semmoev1.ConditionReady).Message; !strings.Contains(message, test.message) {
				t.Errorf("message %q does not contain %q", message, test.message)
			}
			if (status.ConfigMap != "") != test.observation.Published || (status.Verdict != "") != (test.observation.Solved != nil) {
				t.Errorf("status %+v", status)
			}
			plan.Status = status
			if again := statusOf(plan, test.observation, time.Now().Add(time.Hour)); !cmp.Equal(status, again) {
				t.Errorf("the same observation gives a different status:\n%s", cmp.Diff(status, again))
			}
		})
	}
}

// TestRepairIsNotReconciling checks that restoring a lost ConfigMap of a published plan counts as repair, not as
// reconciling.
func TestRepairIsNotReconciling(t *testing.T) {
	plan := &semmoev1.PlacementPlan{}
	plan.Generation = 1
	gain := testSolution(.5, .25).solved()
	plan.Status = statusOf(plan, observation{Solved: gain, Published: true}, time.Now())
	status := statusOf(plan, observation{Solved: gain}, time.Now())
	if c := meta.FindStatusCondition(status.Conditions, semmoev1.ConditionReconciling); c.Status != metav1.ConditionFalse {
		t.Errorf("%+v", c)
	}
	if meta.IsStatusConditionTrue(status.Conditions, semmoev1.ConditionReady) {
		t.Error("ready without a ConfigMap")
	}
}

func TestTraceBound(t *testing.T) {
	for limit, want := range map[int64]int64{math.MaxInt64: maxTraceBytes, 2 << 30: 128 << 20, 1 << 40: maxTraceBytes} {
		if got := traceBound(limit); got != want {
			t.Errorf("trace bound with %d bytes of memory = %d, want %d", limit, got, want)
		}
	}
	before := debug.SetMemoryLimit(1 << 30)
	defer debug.SetMemoryLimit(before)
	for workers, want := range map[int]int64{0: 1 << 30, 1: 1 << 30, 4: 1 << 28} {
		if got := memoryShare(workers); got != want {
			t.Errorf("memory share of one of %d workers = %d bytes, want %d", workers, got, want)
		}
	}
}
