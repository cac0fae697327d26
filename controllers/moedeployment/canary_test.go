// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/decision"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/profile/inspection"
)

// trialCase is a deployment of two replicas, one of which is the canary of a plan.
type trialCase struct {
	moed      *semmoev1.MoEDeployment
	plan      *semmoev1.PlacementPlan
	o         observation
	workloads []*revisions.Workload
	c         client.Client
	r         *Reconciler
	events    *events.FakeRecorder
	// sampledAfter is the time from the start until requests were sampled.
	sampledAfter time.Duration
}

func newTrial(t *testing.T, change ...func(*semmoev1.MoEDeployment)) *trialCase {
	t.Helper()
	found, moed := moedtest.Report(), moedtest.Deployment(append([]func(*semmoev1.MoEDeployment){func(m *semmoev1.MoEDeployment) { m.Spec.Routing.SamplePercent = ptr.To[int32](100) }}, change...)...)
	plan := moedtest.PlanOf("new", "bb", nil)
	candidate := revisions.LayoutOf(plan, semmoev1.RealizationEngineMap)
	tc := &trialCase{moed: moed, plan: plan, events: events.NewFakeRecorder(16), sampledAfter: time.Minute}
	tc.o = observation{
		Decision:   decision.Decision{Revision: revisions.Of(moed, found, nil), CandidateRevision: revisions.Of(moed, found, candidate), Planning: planner.Planning{Plan: plan, Candidate: candidate}},
		Inspection: inspection.State{Report: &found},
	}
	for i, of := range []struct {
		revision string
		under    *revisions.Layout
		mark     string
	}{{tc.o.CandidateRevision, candidate, semmoev1.RolloutCanary}, {tc.o.Revision, nil, ""}} {
		workload, err := revisions.Render(moed, of.revision, found, of.under, revisions.Own{Image: "semmoe:1"})
		if err != nil {
			t.Fatal(err)
		}
		workload.UID, *workload.Replicas() = types.UID(of.revision), 1
		if of.mark != "" {
			metav1.SetMetaDataAnnotation(workload.ObjectMeta, semmoev1.AnnotationRollout, of.mark)
		}
		tc.workloads = append(tc.workloads, workload)
		tc.o.Pods = append(tc.o.Pods, moedtest.Pod(workload.Name+"-0", of.revision, func(p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(workload, appsv1.SchemeGroupVersion.WithKind("StatefulSet"))}
			p.Status.Conditions[0].LastTransitionTime = metav1.NewTime(moedtest.Start.Add(time.Duration(i) * time.Second))
		}))
	}
	tc.c = moedtest.Cluster(t, moed.DeepCopy(), tc.workloads[0].Object, tc.workloads[1].Object, plan)
	for _, object := range []client.Object{tc.workloads[0].Object, tc.workloads[1].Object, plan} {
		if err := tc.c.Get(context.Background(), client.ObjectKeyFromObject(object), object); err != nil {
			t.Fatal(err)
		}
	}
	tc.r = &Reconciler{Client: tc.c, Live: tc.c, Recorder: tc.events, Image: "semmoe:1"}
	return tc
}

// saw adds samples of routers: the same number for each revision, with the given number of ten activations local.
func (tc *trialCase) saw(requests int, candidate, stable int64) {
	var report lar.Report
	for range requests {
		for revision, local := range map[string]int64{tc.o.CandidateRevision: candidate, tc.o.Revision: stable} {
			report.Observations = append(report.Observations, lar.Observation{
				Time: moedtest.Start.Add(tc.sampledAfter), Revision: revision, Count: lar.Count{Activations: lar.Activations{Local: local, Total: 10}},
			})
		}
	}
	tc.o.Reports = []lar.Report{report}
}

// timed adds minutes of streamed requests to the samples: 1,000 per minute and revision, with tokens that take longer
// on the candidate by the share slower. The stable revision computes 3,000 tokens in the 30 ms of an output token.
func (tc *trialCase) timed(minutes int, slower float64) {
	for minute := range minutes {
		revisions := map[string]lar.Service{}
		for revision, factor := range map[string]float64{tc.o.CandidateRevision: 1 + slower, tc.o.Revision: 1} {
			served := lar.Service{Requests: 1000}
			for i := range 1000 {
				scatter := 0.9 + 0.2*float64((i*7+minute*13)%10)/9
				x := lar.Covariates{5900, 100, float64(i % 5)}
				served.FirstToken.AddWith(0.3*scatter, x)
				served.InterToken.AddWith(0.03*factor*scatter, x)
			}
			revisions[revision] = served
		}
		tc.o.Reports[0].Service = append(tc.o.Reports[0].Service, lar.ServiceBucket{Start: moedtest.Start.Add(time.Duration(minute+1) * time.Minute), Revisions: revisions})
	}
}

// rolloutOf decides on workloads from an observation.
func rolloutOf(moed *semmoev1.MoEDeployment, o observation, workloads []*revisions.Workload, now time.Time) decision.Rollout {
	return decision.DecideRollout(
		&decision.Snapshot{
			Snapshot: planner.Snapshot{Now: now, Moed: moed, Report: o.Inspection.Report, Workloads: workloads, Pods: o.Pods},
			Workers:  o.Workers, Own: revisions.Own{Image: "semmoe:1"},
		},
		&o.Decision)
}

func (tc *trialCase) reconcile(t *testing.T, now time.Time) decision.RolloutState {
	t.Helper()
	moved := rolloutOf(tc.moed, tc.o, tc.workloads, now)
	if err := errors.Join(moved.Err, tc.r.write(t.Context(), tc.moed, moved.Writes...)); err != nil {
		t.Fatal(err)
	}
	return moved.RolloutState
}

// stored returns the candidate's workload and the plan from the API server.
func (tc *trialCase) stored(t *testing.T) (*appsv1.StatefulSet, *semmoev1.PlacementPlan) {
	t.Helper()
	workload, plan := &appsv1.StatefulSet{}, &semmoev1.PlacementPlan{}
	for object, from := range map[client.Object]client.Object{workload: tc.workloads[0].Object, plan: tc.plan} {
		if err := tc.c.Get(context.Background(), client.ObjectKeyFromObject(from), object); err != nil {
			t.Fatal(err)
		}
	}
	return workload, plan
}

// A decision on a canary is recorded on its workload or on its plan, so that it survives a restart of the manager.
func TestCanaryIsDecided(t *testing.T) {
	soaked := moedtest.Start.Add(10 * time.Minute)
	manual := func(m *semmoev1.MoEDeployment) { m.Spec.Rollout.Rollback = semmoev1.RollbackManual }
	approve := func(m *semmoev1.MoEDeployment) {
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, semmoev1.AnnotationApprove, "bb-full")
	}
	reject := func(m *semmoev1.MoEDeployment) {
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, semmoev1.AnnotationRollBack, "bb-full")
	}
	unsampled := func(m *semmoev1.MoEDeployment) { m.Spec.Routing.SamplePercent = ptr.To[int32](0) }
	short := func(m *semmoev1.MoEDeployment) { m.Spec.Rollout.SoakSeconds = ptr.To[int32](60) }
	cases := map[string]struct {
		Change            []func(*semmoev1.MoEDeployment)
		requests          int
		candidate, stable int64
		minutes           int // minutes with timed requests
		slower            float64
		now               time.Time
		phase             semmoev1.RolloutPhase
		reason, mark      string
		says              string // part of the state's message
		failed            string // prefix of the plan's annotation
		Replicas          int32
		held              bool
	}{
		"better, but it still soaks":     {requests: 50, candidate: 8, stable: 2, minutes: 3, now: moedtest.Start.Add(4 * time.Minute), phase: semmoev1.RolloutPhaseCanary, reason: "Canary", mark: "Canary", Replicas: 1},
		"better":                         {requests: 50, candidate: 8, stable: 2, minutes: 9, now: soaked, phase: semmoev1.RolloutPhasePromoting, reason: "Promoting", mark: "Promoting", Replicas: 1},
		"better, no timed requests":      {requests: 50, candidate: 8, stable: 2, now: soaked, phase: semmoev1.RolloutPhaseCanary, reason: "Canary", mark: "Canary", Replicas: 1},
		"no timed requests for long":     {requests: 50, candidate: 8, stable: 2, now: moedtest.Start.Add(2 * time.Hour), phase: semmoev1.RolloutPhaseCanary, reason: "CanaryInconclusive", says: "0 of at least 200 requests with a time", mark: "Canary", Replicas: 1},
		"a short soak needs no times":    {Change: []func(*semmoev1.MoEDeployment){short}, requests: 50, candidate: 8, stable: 2, now: soaked, phase: semmoev1.RolloutPhasePromoting, reason: "Promoting", mark: "Promoting", Replicas: 1},
		"faster, and nothing is sampled": {Change: []func(*semmoev1.MoEDeployment){unsampled}, minutes: 9, slower: -0.1, now: soaked, phase: semmoev1.RolloutPhasePromoting, reason: "Promoting", mark: "Promoting", Replicas: 1},
		"more local, and slower":         {requests: 50, candidate: 8, stable: 2, minutes: 9, slower: 0.1, now: soaked, phase: semmoev1.RolloutPhaseRollingBack, reason: "RolledBack", mark: "Canary", failed: "InterTokenSlower: its time per output token changes by +10.0%", Replicas: 1},
		"worse, while it soaks":          {requests: 50, candidate: 2, stable: 8, now: moedtest.Start.Add(4 * time.Minute), phase: semmoev1.RolloutPhaseRollingBack, reason: "RolledBack", mark: "Canary", failed: "LocalityWorse: its local", Replicas: 1},
		"worse, held":                    {Change: []func(*semmoev1.MoEDeployment){manual}, requests: 50, candidate: 2, stable: 8, now: soaked, phase: semmoev1.RolloutPhaseCanary, reason: "RollbackPending", mark: "Canary", Replicas: 1, held: true},
		"better, and a user rejects it":  {Change: []func(*semmoev1.MoEDeployment){reject, approve}, requests: 50, candidate: 8, stable: 2, minutes: 9, now: soaked, phase: semmoev1.RolloutPhaseRollingBack, reason: "RolledBack", mark: "Canary", failed: "RollbackRequested: the annotation semmoe.io/rollback", Replicas: 1},
		"worse, held, and rejected":      {Change: []func(*semmoev1.MoEDeployment){manual, reject}, requests: 50, candidate: 2, stable: 8, now: soaked, phase: semmoev1.RolloutPhaseRollingBack, reason: "RolledBack", mark: "Canary", failed: "RollbackRequested: ", Replicas: 1},
		"few requests":                   {requests: 5, candidate: 8, stable: 2, now: soaked, phase: semmoev1.RolloutPhaseCanary, reason: "Canary", mark: "Canary", Replicas: 1},
		"few requests, approved":         {Change: []func(*semmoev1.MoEDeployment){approve}, requests: 5, candidate: 8, stable: 2, now: soaked, phase: semmoev1.RolloutPhasePromoting, reason: "Promoting", mark: "Promoting", Replicas: 1},
		"few requests for long":          {requests: 5, candidate: 8, stable: 2, now: moedtest.Start.Add(2 * time.Hour), phase: semmoev1.RolloutPhaseCanary, reason: "CanaryInconclusive", says: "5 of at least 30 sampled requests of the canary", mark: "Canary", Replicas: 1},
		"nothing is sampled":             {Change: []func(*semmoev1.MoEDeployment){unsampled}, now: soaked, phase: semmoev1.RolloutPhaseCanary, reason: "CanaryInconclusive", mark: "Canary", Replicas: 1},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			trial := newTrial(t, tc.Change...)
			trial.saw(tc.requests, tc.candidate, tc.stable)
			trial.timed(tc.minutes, tc.slower)
			state := trial.reconcile(t, tc.now)
			workload, plan := trial.stored(t)
			if state.Phase != tc.phase || !strings.Contains(state.Message, tc.says) || state.Reason != tc.reason || state.Held != tc.held || strings.Contains(state.Message, "%!") {
				t.Errorf("state is %+v", state)
			}
			if got := workload.Annotations[semmoev1.AnnotationRollout]; got != tc.mark || *workload.Spec.Replicas != tc.Replicas {
				t.Errorf("the workload is marked %q and has %d replicas, want %q and %d", got, *workload.Spec.Replicas, tc.mark, tc.Replicas)
			}
			if got := plan.Annotations[semmoev1.AnnotationFailed+trial.o.CandidateRevision]; !strings.HasPrefix(got, tc.failed) || (got == "") != (tc.failed == "") {
				t.Errorf("the plan says %q, want %q", got, tc.failed)
			}

			trial.o.Rollout = state
			status := statusOf(trial.moed, trial.o, tc.now)
			if status.Rollout == nil || status.Rollout.Phase != tc.phase || status.Rollout.StableRevision != trial.o.Revision || status.Rollout.CandidatePlan != "bb-full" {
				t.Errorf("status.rollout is %+v", status.Rollout)
			}
			for kind, want := range map[string]bool{semmoev1.ConditionStalled: tc.held, semmoev1.ConditionDegraded: false, semmoev1.ConditionReconciling: false} {
				if got := meta.IsStatusConditionTrue(status.Conditions, kind); got != want {
					t.Errorf("%s is %v, want %v", kind, got, want)
				}
			}
			trial.moed.Status = status
			if again := statusOf(trial.moed, trial.o, tc.now.Add(time.Minute)); again.Rollout.Since != status.Rollout.Since {
				t.Errorf("the phase began at %v, and a minute later at %v", status.Rollout.Since, again.Rollout.Since)
			}
		})
	}
}

// The saving of a canary is recorded on its plan with the prediction of its hardware profile, if the two are
// comparable.
func TestCanaryIsMeasured(t *testing.T) {
	forecast := func(change func(*semmoev1.PlanForecast)) func(*trialCase) {
		return func(tc *trialCase) {
			f := &semmoev1.PlanForecast{LayerNanos: 200_000, BaselineLayerNanos: 950_000, BatchTokens: []int32{3000}, Hardware: "h"}
			change(f)
			tc.plan.Status.Forecast = f
		}
	}
	const usual = `{"predictedMicros":3000,"savedMicros":3000,"savedLowMicros":3000,"savedHighMicros":3000}`
	for name, tc := range map[string]struct {
		change func(*trialCase)
		slower float64
		want   string
	}{
		"as predicted":      {forecast(func(*semmoev1.PlanForecast) {}), -0.1, usual},
		"smaller batches":   {forecast(func(f *semmoev1.PlanForecast) { f.BatchTokens = []int32{2000, 4000} }), -0.1, usual},
		"half of the batch": {forecast(func(f *semmoev1.PlanForecast) { f.BatchTokens = []int32{6000} }), -0.1, strings.Replace(usual, "3000", "1500", 1)},
		"other batches":     {forecast(func(f *semmoev1.PlanForecast) { f.BatchTokens = []int32{6100, 65536} }), -0.1, ""},
		"far smaller ones":  {forecast(func(f *semmoev1.PlanForecast) { f.BatchTokens = []int32{64, 1400} }), -0.1, ""},
		"slower":            {forecast(func(*semmoev1.PlanForecast) {}), 0.1, strings.ReplaceAll(usual, ":3000,\"savedLow", ":-3000,\"savedLow")},
		"no modelled time":  {forecast(func(f *semmoev1.PlanForecast) { f.LayerNanos, f.BaselineLayerNanos = 0, 0 }), -0.1, ""},
		"no gain predicted": {forecast(func(f *semmoev1.PlanForecast) { f.LayerNanos = 950_000 }), -0.1, ""},
		"no forecast":       {func(tc *trialCase) { tc.plan.Status.Forecast = nil }, -0.1, ""},
		"a re-plan": {func(tc *trialCase) {
			tc.plan.Spec.BatchTokens = 3000
			tc.plan.Status.Comparison = &semmoev1.PlanComparison{Requests: 9, CurrentNanos: 950_000, CandidateNanos: 200_000}
		}, -0.1, usual},
		"another plan serves": {func(tc *trialCase) {
			forecast(func(*semmoev1.PlanForecast) {})(tc)
			serving := tc.plan.DeepCopy()
			serving.Status.Forecast.LayerNanos = 575_000
			tc.o.Planning.Serving, tc.o.Planning.Promise = &revisions.Layout{}, serving
		}, -0.1, strings.Replace(usual, "3000", "1500", 1)},
		"another plan of other hardware": {func(tc *trialCase) {
			forecast(func(*semmoev1.PlanForecast) {})(tc)
			serving := tc.plan.DeepCopy()
			serving.Status.Forecast.Hardware = "g"
			tc.o.Planning.Serving, tc.o.Planning.Promise = &revisions.Layout{}, serving
		}, -0.1, ""},
	} {
		t.Run(name, func(t *testing.T) {
			trial := newTrial(t)
			trial.saw(50, 8, 2)
			trial.timed(9, tc.slower)
			tc.change(trial)
			state := trial.reconcile(t, moedtest.Start.Add(10*time.Minute))
			got := state.Measured
			if state.Phase == semmoev1.RolloutPhaseCanary {
				t.Fatalf("the times are not compared: %+v", state)
			}
			_, plan := trial.stored(t)
			text := plan.Annotations[semmoev1.AnnotationMeasured]
			if name == "slower" {
				if got == nil || got.SavedMicros > -2999 || got.SavedMicros < -3001 || text == "" {
					t.Errorf("%+v, annotation %s", got, text)
				}
				return
			}
			if text != tc.want || (got != nil) != (tc.want != "") {
				t.Errorf("%+v, annotation %s, want %s", got, text, tc.want)
			}
		})
	}
}

// Ratios are infinite if the saving may be zero, and invalid annotations are ignored.
func TestGainRatios(t *testing.T) {
	inf := math.Inf(1)
	for name, tc := range map[string]struct {
		text string
		want []float64
	}{
		"saved":                  {`{"predictedMicros":100,"savedMicros":50,"savedLowMicros":25,"savedHighMicros":100}`, []float64{2, 1, 4}},
		"interval includes zero": {`{"predictedMicros":100,"savedMicros":50,"savedLowMicros":-25,"savedHighMicros":100}`, []float64{2, 1, inf}},
		"lost":                   {`{"predictedMicros":100,"savedMicros":-50,"savedLowMicros":-75,"savedHighMicros":-25}`, []float64{inf, inf, inf}},
		"not predicted":          {`{"predictedMicros":0,"savedMicros":50}`, nil},
		"not JSON":               {`100`, nil},
		"no annotation":          {``, nil},
	} {
		plan := moedtest.PlanOf("p", "ab", func(p *semmoev1.PlacementPlan) {
			p.Annotations = map[string]string{semmoev1.AnnotationMeasured: tc.text}
		})
		f := figuresOf(observation{Decision: decision.Decision{Planning: planner.Planning{Promise: plan}}}, 0, nil, 0)
		got := []float64{f.PredictedOverMeasured, f.PredictedOverMeasuredLow, f.PredictedOverMeasuredHigh}
		if tc.want == nil && !math.IsNaN(got[0]) || tc.want != nil && !slices.Equal(got, tc.want) {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}

// A canary of the layout that pinned tables are for counts as approved, like a pinned plan.
func TestCanaryOfPinnedTables(t *testing.T) {
	for name, tc := range map[string]struct {
		tables *semmoev1.PlacementPlan
		want   semmoev1.RolloutPhase
	}{
		"another plan is pinned": {nil, semmoev1.RolloutPhaseCanary},
		"its tables are pinned":  {moedtest.PlanOf("tables", "tt", nil), semmoev1.RolloutPhasePromoting},
	} {
		trial := newTrial(t, func(m *semmoev1.MoEDeployment) { m.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: "tables"} })
		trial.o.Planning.PinnedTables = tc.tables
		trial.saw(5, 8, 2) // too few samples for a conclusion
		if state := trial.reconcile(t, moedtest.Start.Add(10*time.Minute)); state.Phase != tc.want {
			t.Errorf("%s: state is %+v, want %s", name, state, tc.want)
		}
	}
}

// A manager whose clock was set back by hours judges a canary by the time of the samples: the soak neither ends early
// nor lasts until the manager's clock has caught up.
func TestCanaryClockSetBack(t *testing.T) {
	for name, tc := range map[string]struct {
		sampled time.Duration
		phase   semmoev1.RolloutPhase
	}{
		"it soaks":      {4 * time.Minute, semmoev1.RolloutPhaseCanary},
		"it has soaked": {6 * time.Minute, semmoev1.RolloutPhasePromoting},
	} {
		t.Run(name, func(t *testing.T) {
			trial := newTrial(t)
			trial.sampledAfter = tc.sampled
			trial.saw(50, 8, 2)
			trial.timed(5, 0)
			if state := trial.reconcile(t, moedtest.Start.Add(-6*time.Hour)); state.Phase != tc.phase {
				t.Errorf("state is %+v, want phase %s", state, tc.phase)
			}
		})
	}
}

// The replica of a failed plan is removed, and the failure is recorded only on the plan.
func TestCanaryRollback(t *testing.T) {
	trial := newTrial(t)
	trial.o.Planning.Candidate, trial.o.CandidateRevision = nil, ""
	trial.o.Planning.Hold = desired.Finding{Reason: planner.ReasonRolledBack, Message: "why"}
	state := trial.reconcile(t, moedtest.Start)
	if workload, _ := trial.stored(t); *workload.Spec.Replicas != 0 || state.Phase != semmoev1.RolloutPhaseRollingBack || state.Message != "why" || state.Plan != "bb-full" {
		t.Errorf("%d replicas, state %+v", *workload.Spec.Replicas, state)
	}
	stable := trial.workloads[1]
	if _, reported := stable.Annotations[semmoev1.AnnotationProven]; reported {
		t.Error("the trial is marked as ended while the canary's pod exists")
	}
	trial.o.Pods = trial.o.Pods[1:]
	trial.reconcile(t, moedtest.Start.Add(time.Hour))
	if err := trial.c.Get(context.Background(), client.ObjectKeyFromObject(trial.workloads[0].Object), trial.workloads[0].Object); !apierrors.IsNotFound(err) {
		t.Errorf("the canary's workload: %v, want it gone", err)
	}
	if err := trial.c.Get(context.Background(), client.ObjectKeyFromObject(stable.Object), stable.Object); err != nil || !revisions.ServesSince(stable).Equal(moedtest.Start.Add(time.Hour)) {
		t.Errorf("the serving workload has annotations %v (%v), want the end of the trial", stable.Annotations, err)
	}
}

// A promoted plan is proven when it is the only one that serves. Only then the previous revision is removed.
func TestCanaryIsProven(t *testing.T) {
	trial := newTrial(t, func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](1) })
	candidate, stable := trial.workloads[0], trial.workloads[1]
	candidate.Annotations[semmoev1.AnnotationRollout] = semmoev1.RolloutPromoting
	*stable.Replicas() = 0
	for _, workload := range trial.workloads {
		if err := trial.c.Update(context.Background(), workload.Object); err != nil {
			t.Fatal(err)
		}
	}
	trial.o.Pods = trial.o.Pods[:1]
	trial.reconcile(t, moedtest.Start.Add(time.Hour))
	proven, _ := trial.stored(t)
	if workload := revisions.StatefulSet(proven); revisions.OnTrial(workload) || !revisions.ServesSince(workload).Equal(moedtest.Start.Add(time.Hour)) {
		t.Errorf("the workload has annotations %v, want that it is proven since the end of its trial", workload.Annotations)
	}
	if err := trial.c.Get(context.Background(), client.ObjectKeyFromObject(stable.Object), stable.Object); err != nil {
		t.Errorf("the workload before it: %v", err)
	}
}

// A canary starts when the serving revision is complete, and is created with its annotation.
func TestCanaryBegins(t *testing.T) {
	trial := newTrial(t)
	stable := trial.workloads[1]
	trial.workloads, trial.o.Pods = trial.workloads[1:], trial.o.Pods[1:]
	if err := trial.c.DeleteAllOf(context.Background(), &appsv1.StatefulSet{}, client.InNamespace("ns"), client.MatchingLabels{semmoev1.LabelRevision: trial.o.CandidateRevision}); err != nil {
		t.Fatal(err)
	}
	if state := trial.reconcile(t, moedtest.Start); state.Phase != "" || state.Reason != "WaitingForReplicas" {
		t.Errorf("with one of two replicas: %+v", state)
	}
	second := *trial.o.Pods[0].DeepCopy()
	second.Name = stable.Name + "-1"
	trial.o.Pods = append(trial.o.Pods, &second)
	if state := trial.reconcile(t, moedtest.Start); state.Phase != semmoev1.RolloutPhaseCanary || state.Reason != "CanaryStarting" {
		t.Errorf("with both replicas: %+v", state)
	}
	begun := &appsv1.StatefulSet{}
	if err := trial.c.Get(context.Background(), client.ObjectKey{Namespace: "ns", Name: "m-" + trial.o.CandidateRevision}, begun); err != nil {
		t.Fatal(err)
	}
	if begun.Annotations[semmoev1.AnnotationRollout] != semmoev1.RolloutCanary || begun.Spec.Template.Annotations[semmoev1.AnnotationRollout] != "" {
		t.Errorf("the annotations are %v", begun.Annotations)
	}
}

// Workloads keep the ConfigMap of their plan regardless of the decision. A new workload keeps it before the replaced
// workload is deleted.
func TestPlansAreKept(t *testing.T) {
	trial := newTrial(t, func(m *semmoev1.MoEDeployment) {
		m.Spec.Routing.Mode, m.Spec.Replicas = semmoev1.RoutingModeNone, ptr.To[int32](1)
	})
	served := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: trial.plan.Status.ConfigMap, OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "m-before", UID: "before"}}}}
	c := interceptor.NewClient(moedtest.Cluster(t, trial.moed.DeepCopy(), served), interceptor.Funcs{
		// The fake client sets no UID.
		Create: func(ctx context.Context, c client.WithWatch, object client.Object, options ...client.CreateOption) error {
			object.SetUID("made")
			return c.Create(ctx, object, options...)
		},
	})
	r := &Reconciler{Client: c, Live: c, Recorder: trial.events, Image: "semmoe:1"}
	ownedBy := func(when string, want ...types.UID) {
		t.Helper()
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(served), served); err != nil {
			t.Fatal(err)
		}
		has := func(uid types.UID) bool {
			return slices.ContainsFunc(served.OwnerReferences, func(owner metav1.OwnerReference) bool { return owner.UID == uid })
		}
		if missing := slices.DeleteFunc(want, has); len(missing) > 0 {
			t.Errorf("%s the owners lack %v: %+v", when, missing, served.OwnerReferences)
		}
	}
	candidate := trial.workloads[0]
	if _, err := r.act(t.Context(), &observation{}, &decision.Snapshot{Snapshot: planner.Snapshot{Now: moedtest.Start, Moed: trial.moed, Workloads: []*revisions.Workload{candidate}}}, &decision.Decision{}); err != nil {
		t.Fatal(err)
	}
	ownedBy("while nothing is known", "before", candidate.UID)
	made, err := revisions.Render(trial.moed, "new", moedtest.Report(), trial.o.Planning.Candidate, revisions.Own{Image: "semmoe:1"})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.write(t.Context(), trial.moed, revisions.CreateWorkload{Workload: made}, revisions.KeepPlan{Workload: made}); err != nil {
		t.Fatal(err)
	}
	ownedBy("once another is made", "before", candidate.UID, "made")
}

// A change on trial is work for the generation, next to a revision that serves. A change that was rolled back stalls the
// generation, and the service stays ready.
func TestChangeIsReported(t *testing.T) {
	const candidate, plan = "c0ffee", "bb-full"
	for name, tc := range map[string]struct {
		state                  decision.RolloutState
		paused                 bool
		rolledOut, progressing string
		reconciling, stalled   bool
		pending                string
	}{
		"canary": {
			state:     decision.RolloutState{Phase: semmoev1.RolloutPhaseCanary, Reason: "Canary", Message: "m", Candidate: candidate, Plan: plan},
			rolledOut: "Canary", progressing: "Canary", reconciling: true,
		},
		"inconclusive": {
			state:     decision.RolloutState{Phase: semmoev1.RolloutPhaseCanary, Reason: "CanaryInconclusive", Message: "m", Candidate: candidate, Plan: plan},
			rolledOut: "CanaryInconclusive", progressing: "CanaryInconclusive", reconciling: true, pending: candidate,
		},
		"waiting": {
			state:     decision.RolloutState{Reason: "WaitingForReplicas", Message: "m"},
			rolledOut: "WaitingForReplicas", progressing: "RollingOut", reconciling: true,
		},
		"rolled back": {
			state:     decision.RolloutState{Held: true, Reason: decision.ReasonChangeRolledBack, Message: "m"},
			rolledOut: "ChangeRolledBack", progressing: "Stalled", stalled: true,
		},
		"paused": {paused: true, rolledOut: "Paused", progressing: "Paused"},
	} {
		t.Run(name, func(t *testing.T) {
			trial := newTrial(t)
			stable := trial.workloads[1]
			if tc.paused {
				trial.moed.Spec.Reconciliation = semmoev1.ReconciliationPaused
			}
			trial.o.Serving, trial.o.Change = stable, &decision.Change{Stable: stable}
			trial.o.Planning, trial.o.Revision, trial.o.Rollout = planner.Planning{}, candidate, tc.state
			status := statusOf(trial.moed, trial.o, moedtest.Start)
			reason := func(kind string) string { return meta.FindStatusCondition(status.Conditions, kind).Reason }
			if reason(semmoev1.ConditionRolledOut) != tc.rolledOut || reason(semmoev1.ConditionProgressing) != tc.progressing {
				t.Errorf("RolledOut %s, Progressing %s; want %s, %s", reason(semmoev1.ConditionRolledOut), reason(semmoev1.ConditionProgressing), tc.rolledOut, tc.progressing)
			}
			for kind, want := range map[string]bool{semmoev1.ConditionStalled: tc.stalled, semmoev1.ConditionDegraded: false, semmoev1.ConditionReconciling: tc.reconciling} {
				if got := meta.IsStatusConditionTrue(status.Conditions, kind); got != want {
					t.Errorf("%s is %v, want %v", kind, got, want)
				}
			}
			serving := stable.Labels[semmoev1.LabelRevision]
			if status.Revision != candidate || status.Serving == nil || status.Serving.Revision != serving || status.PendingPlan != tc.pending {
				t.Errorf("revision %s, serving %+v, pending %q", status.Revision, status.Serving, status.PendingPlan)
			}
			if rollout := status.Rollout; (rollout != nil) != (tc.state.Phase != "") || rollout != nil && (rollout.StableRevision != serving || rollout.CandidateRevision != candidate) {
				t.Errorf("status.rollout is %+v", rollout)
			}
		})
	}
}
