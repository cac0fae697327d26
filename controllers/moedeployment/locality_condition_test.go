// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/decision"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/locality"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/observation/promquery"
	"github.com/semmoe/operator/internal/profile/inspection"
	"github.com/semmoe/operator/solver/drift"
	"github.com/semmoe/operator/test/metricsdoc"
)

// cluster contains ConfigMaps and Secrets, and rejects forbidden requests.
type cluster struct {
	client.Client
	configMaps map[string]map[string]string
	secrets    map[string]map[string][]byte
	forbidden  bool
}

func (c *cluster) Get(_ context.Context, key client.ObjectKey, object client.Object, _ ...client.GetOption) error {
	if c.forbidden {
		return apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, key.Name, errors.New("no"))
	}
	switch object := object.(type) {
	case *corev1.ConfigMap:
		if data, has := c.configMaps[key.Name]; has && key.Namespace == "ns" {
			object.Data = data
			return nil
		}
	case *corev1.Secret:
		if data, has := c.secrets[key.Name]; has && key.Namespace == "ns" {
			object.Data = data
			return nil
		}
	}
	return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
}

// assess evaluates the drift, and lets the reconciler read the evidence.
func assess(t *testing.T, r *Reconciler, moed *semmoev1.MoEDeployment, p planner.Planning, reports []lar.Report, workloads []*revisions.Workload, now time.Time) locality.Assessment {
	t.Helper()
	s := &decision.Snapshot{Snapshot: planner.Snapshot{Now: now, Moed: moed, Workloads: workloads}}
	a, question := decision.Assess(s, p, reports)
	if question == nil {
		return a
	}
	if err := r.answer(t.Context(), s, question); err != nil {
		t.Fatal(err)
	}
	if a, question = decision.Assess(s, p, reports); question != nil {
		t.Fatalf("another question %#v", question)
	}
	return a
}

// Drift is detected from the reports of routers and the plan's ConfigMap. The calibration of the tables in use applies,
// even if the tables belong to a newer plan than the layout.
func TestAssessFromRouters(t *testing.T) {
	data, digest := moedtest.WithCalibration(t, moedtest.Calibration())
	old := moedtest.PlanFor400()
	newer := moedtest.PlanOf("newer", "cd", func(p *semmoev1.PlacementPlan) {
		p.Status.PlanDigest, p.Status.ConfigMap = digest, "newer-cm"
		p.CreationTimestamp = metav1.NewTime(moedtest.Start.Add(-2 * time.Hour))
		p.Spec.Current = &semmoev1.CurrentPlan{PlanDigest: "ab-full"}
		p.OwnerReferences = []metav1.OwnerReference{{UID: "uid", Controller: new(true)}}
	})
	reports := []lar.Report{{}, {}}
	for i := range 200 {
		local := int64(40)
		if i < 100 {
			local = 30
		}
		reports[i%2].Observations = append([]lar.Observation{moedtest.Observed(i, digest, local)}, reports[i%2].Observations...)
	}
	r := &Reconciler{Client: &cluster{configMaps: map[string]map[string]string{"newer-cm": data}}}
	moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Routing.SamplePercent = new(int32(5)) })
	planned := planner.Planning{Serving: revisions.LayoutOf(old, semmoev1.RealizationEngineMap), Promise: old, Tables: newer, Plans: []*semmoev1.PlacementPlan{newer, old}}
	a := assess(t, r, moed, planned, reports, nil, moedtest.Start)
	if a.Status != locality.Drifted || !a.Replan() || a.Plan != newer || a.Causes == nil || a.Since.Before(moedtest.Start.Add(-101*time.Second)) || a.Statistic <= a.Threshold {
		t.Errorf("assessment %+v", a)
	}
	again := assess(t, r, moed, planned, slices.Clone(reports), nil, moedtest.Start)
	if diff := cmp.Diff(a, again); diff != "" {
		t.Errorf("the same reports give another result:\n%s", diff)
	}
	for _, jump := range []time.Duration{-6 * time.Hour, 6 * time.Hour} { // jump of the manager's clock
		if a := assess(t, r, moed, planned, reports, nil, moedtest.Start.Add(jump)); a.Status != locality.Unknown || a.Reason != "Stale" || a.Replan() {
			t.Errorf("with a clock that has jumped by %v: %+v", jump, a)
		}
	}
	newer.Status.Forecast = nil // made from token counts: the layout's plan contains the prediction
	if a := assess(t, r, moed, planned, reports, nil, moedtest.Start); a.Status != locality.Drifted || a.Plan != newer || a.Promise.LARMilli != 400 {
		t.Errorf("with tables without a forecast: %+v", a)
	}
	tried, reverted, reported := planned, planned, planned
	tried.Candidate, reverted.Tables, reported.Tables = revisions.LayoutOf(newer, semmoev1.RealizationEngineMap), nil, old
	for name, p := range map[string]planner.Planning{"a candidate exists": tried, "routers revert to the layout's tables": reverted, "routers switch to newer tables": reported} {
		if a := assess(t, r, moed, p, reports, nil, moedtest.Start); a.Status != locality.Drifted || a.Hold.Reason != "RollingOut" {
			t.Errorf("%s: %s, hold %+v", name, a.Status, a.Hold)
		}
	}
	moed.Spec.Drift.MaxReplansPerDay = new(int32(1))
	if a := assess(t, r, moed, planned, reports, nil, moedtest.Start); a.Hold.Reason != "DailyReplanLimit" {
		t.Errorf("hold %+v: the newer plan was made for drift", a.Hold)
	}
	trial := revisions.StatefulSet(&appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{semmoev1.AnnotationRollout: "canary"}}, Spec: appsv1.StatefulSetSpec{Replicas: new(int32(1))}})
	if a := assess(t, r, moed, planned, reports, []*revisions.Workload{trial}, moedtest.Start); a.Hold.Reason != "RollingOut" {
		t.Errorf("hold %+v with a revision on trial", a.Hold)
	}
	moed.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: "p"}
	if a := assess(t, r, moed, planned, reports, nil, moedtest.Start); a.Hold.Reason != "PlanPinned" {
		t.Errorf("hold %+v with a plan that is pinned", a.Hold)
	}
}

// Samples from before the window are ignored, with or without a calibration.
func TestAssessWithinTheWindow(t *testing.T) {
	plan := moedtest.PlanFor400()
	reports := []lar.Report{{}}
	for i := range 200 { // 90 minutes ago the rate was below the plan's prediction
		reports[0].Observations = append(reports[0].Observations, moedtest.Observed(5400+i, "ab-full", 30))
	}
	for i := range 40 {
		reports[0].Observations = append(reports[0].Observations, moedtest.Observed(i, "ab-full", 40))
	}
	r := &Reconciler{Client: &cluster{}}
	moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Routing.SamplePercent = new(int32(5)) })
	planned := planner.Planning{Serving: revisions.LayoutOf(plan, semmoev1.RealizationEngineMap), Promise: plan, Plans: []*semmoev1.PlacementPlan{plan}}
	if a := assess(t, r, moed, planned, reports, nil, moedtest.Start); a.Status != locality.OnTarget {
		t.Errorf("the rate matches the prediction only within the window: %+v", a)
	}
	reports[0].Observations = reports[0].Observations[:210]
	if a := assess(t, r, moed, planned, reports, nil, moedtest.Start); a.Status != locality.Unknown || a.Reason != "TooFewSamples" {
		t.Errorf("with ten requests of the window: %+v", a)
	}
}

// The evidence comes from a real HTTP server with the Prometheus API, queried for two windows with the token of the
// Secret. Every failure of the query results in Unknown.
func TestAssessFromPrometheus(t *testing.T) {
	value, authorization, status := "0.3", "", http.StatusOK
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		authorization = request.Header.Get("Authorization")
		if err := request.ParseForm(); err != nil {
			t.Error(err)
		}
		var begin, end, step float64
		for name, into := range map[string]*float64{"start": &begin, "end": &end, "step": &step} {
			if _, err := fmt.Sscan(request.Form.Get(name), into); err != nil {
				t.Error(name, err)
			}
		}
		w.WriteHeader(status)
		var pairs []string
		for at := begin; at <= end; at += step {
			pairs = append(pairs, fmt.Sprintf(`[%v,%q]`, int64(at), value))
		}
		if len(pairs) != 2*60 {
			t.Errorf("the query requests %d values", len(pairs))
		}
		fmt.Fprintf(w, `{"status":"success","data":{"resultType":"matrix","result":[{"metric":{"job":"x"},"values":[%s]}]}}`, strings.Join(pairs, ","))
	}))
	t.Cleanup(server.Close)
	kube := &cluster{secrets: map[string]map[string][]byte{"prom": {"token": []byte("word")}, "empty": {"other": []byte("x")}}}
	moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
		m.Spec.Drift.Source = semmoev1.DriftSourcePrometheus
		m.Spec.Drift.Prometheus = &semmoev1.PrometheusSource{Address: server.URL, Query: "lar", AuthSecret: "prom"}
	})
	inUse := moedtest.PlanFor400()
	r := &Reconciler{Client: kube, Secrets: kube, Prometheus: &promquery.Client{Hosts: promquery.Hosts{"127.0.0.1"}}}
	planned := planner.Planning{Serving: revisions.LayoutOf(inUse, semmoev1.RealizationEngineMap), Promise: inUse}
	serving := revisions.StatefulSet(&appsv1.StatefulSet{Spec: appsv1.StatefulSetSpec{Replicas: new(int32(1))}})
	serving.Template().Annotations = map[string]string{semmoev1.AnnotationPlanDigest: planned.Serving.Digest}
	evaluate := func(now time.Time) locality.Assessment {
		return assess(t, r, moed, planned, nil, []*revisions.Workload{serving}, now)
	}
	if a := evaluate(moedtest.Start); a.Status != locality.Drifted || !a.Replan() || a.Causes != nil || authorization != "Bearer word" {
		t.Errorf("assessment %+v, authorization %q", a, authorization)
	}
	// Values from before the plan came into use do not count.
	const recently = 40 * time.Minute
	for what, since := range map[string]func(time.Duration){
		"the workload was not made": func(ago time.Duration) { serving.CreationTimestamp = metav1.NewTime(moedtest.Start.Add(-ago)) },
		"the workload was on trial": func(ago time.Duration) {
			serving.Annotations = map[string]string{semmoev1.AnnotationProven: moedtest.Start.Add(-ago).Format(time.RFC3339)}
		},
		"routers had other tables": func(ago time.Duration) { planned.TablesSince = moedtest.Start.Add(-ago) },
	} {
		if since(recently); evaluate(moedtest.Start).Reason != "TooFewValues" {
			t.Errorf("%s: %+v, want TooFewValues", what, evaluate(moedtest.Start))
		}
		if since(24 * time.Hour); evaluate(moedtest.Start).Reason != "Drifted" {
			t.Errorf("%s, long ago: %+v, want Drifted", what, evaluate(moedtest.Start))
		}
		serving.ObjectMeta.CreationTimestamp, serving.Annotations, planned.TablesSince = metav1.Time{}, nil, time.Time{}
	}
	for name, tc := range map[string]struct {
		value  string
		status int
		secret string
		made   time.Duration // age of the plan
		fails  bool          // the API server fails
		want   string
	}{
		"on target":           {"0.4", 200, "prom", 24 * time.Hour, false, "OnTarget"},
		"no numbers":          {"NaN", 200, "prom", 24 * time.Hour, false, "PrometheusStale"},
		"percent":             {"40", 200, "prom", 24 * time.Hour, false, "PrometheusNotARate"},
		"down":                {"0.3", 503, "", 24 * time.Hour, false, "PrometheusUnavailable"},
		"unchanged":           {"0.3", 200, "", 24 * time.Hour, false, "PrometheusUnavailable"},
		"the plan is younger": {"0.3", 200, "", 40 * time.Minute, false, "TooFewValues"},
		"no Secret":           {"0.3", 200, "gone", 24 * time.Hour, false, "SecretNotFound"},
		"no token":            {"0.3", 200, "empty", 24 * time.Hour, false, "SecretNotFound"},
		"no RBAC permission":  {"0.3", 200, "prom", 24 * time.Hour, true, "SecretForbidden"},
	} {
		t.Run(name, func(t *testing.T) {
			value, status, kube.forbidden = tc.value, tc.status, tc.fails
			moed.Spec.Drift.Prometheus.AuthSecret = tc.secret
			inUse.CreationTimestamp = metav1.NewTime(moedtest.Start.Add(-tc.made))
			if name == "unchanged" {
				status = 503
				evaluate(moedtest.Start)
				status = tc.status
			} else {
				r.Prometheus = &promquery.Client{Hosts: promquery.Hosts{"127.0.0.1"}}
			}
			if a := evaluate(moedtest.Start); a.Reason != tc.want || a.Message == "" || a.Replan() {
				t.Errorf("reason %s (%s), want %s", a.Reason, a.Message, tc.want)
			}
		})
	}
}

// The reported statistic changes by steps of a quarter of its threshold or of itself, at most once a minute. An alarm
// is reported immediately, and keeps its start time.
func TestDriftStatus(t *testing.T) {
	is := func(statistic float64, change ...func(*locality.Assessment)) locality.Assessment {
		a := locality.Assessment{Status: locality.OnTarget, Tested: true, Statistic: statistic, Threshold: 1}
		for _, c := range change {
			c(&a)
		}
		return a
	}
	alarm := func(since time.Duration, newTokens float64) func(*locality.Assessment) {
		return func(a *locality.Assessment) {
			a.Status, a.Since, a.Causes = locality.Drifted, moedtest.Start.Add(since), &drift.Causes{NewTokens: newTokens, Mix: 0.2}
		}
	}
	at := func(statistic int32, after time.Duration) *semmoev1.DriftStatus {
		return &semmoev1.DriftStatus{StatisticMilli: statistic, ThresholdMilli: 1000, ObservedTime: &metav1.Time{Time: moedtest.Start.Add(after)}}
	}
	drifted := func(statistic int32, after time.Duration, newTokens int32) *semmoev1.DriftStatus {
		status := at(statistic, after)
		status.Since, status.Causes = &metav1.Time{Time: moedtest.Start}, &semmoev1.DriftCauses{NewTokensMilli: newTokens, ChangedMixMilli: 200}
		return status
	}
	for name, tc := range map[string]struct {
		previous *semmoev1.DriftStatus
		a        locality.Assessment
		after    time.Duration
		want     *semmoev1.DriftStatus
	}{
		"first":                      {nil, is(0.1), 0, at(100, 0)},
		"not tested":                 {at(100, 0), locality.Assessment{Status: locality.OnTarget}, time.Hour, nil},
		"not known":                  {at(100, 0), locality.Assessment{Status: locality.Unknown}, time.Hour, nil},
		"not assessed":               {at(100, 0), locality.Assessment{}, time.Hour, at(100, 0)},
		"a small change":             {at(100, 0), is(0.349), time.Hour, at(100, 0)},
		"a step":                     {at(100, 0), is(0.35), time.Hour, at(350, time.Hour)},
		"a step within the minute":   {at(100, 0), is(0.9), 59 * time.Second, at(100, 0)},
		"clock set back":             {at(100, 0), is(0.9), -6 * time.Hour, at(900, -6*time.Hour)},
		"an alarm":                   {at(900, 0), is(1.01, alarm(0, 0.5)), time.Second, drifted(1010, time.Second, 500)},
		"the end of one":             {drifted(1010, 0, 500), is(0.49), time.Second, at(490, time.Second)},
		"onset forgotten":            {drifted(4000, 0, 500), is(4.9, alarm(time.Hour, 0.55)), 2 * time.Hour, drifted(4000, 0, 500)},
		"a step of itself":           {drifted(4000, 0, 500), is(5, alarm(time.Hour, 0.5)), 2 * time.Hour, drifted(5000, 2*time.Hour, 500)},
		"other causes":               {drifted(4000, 0, 500), is(4, alarm(time.Hour, 0.6)), 2 * time.Hour, drifted(4000, 2*time.Hour, 600)},
		"from Prometheus":            {at(100, 0), locality.Assessment{Status: locality.OnTarget, Tested: true, Statistic: 0.1, Threshold: 0.9}, 0, &semmoev1.DriftStatus{StatisticMilli: 100, ThresholdMilli: 900, ObservedTime: &metav1.Time{Time: moedtest.Start}}},
		"not a number, and infinite": {nil, is(math.Inf(1)), 0, at(1e9, 0)},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, driftStatus(tc.previous, tc.a, moedtest.Start.Add(tc.after))); diff != "" {
				t.Errorf("drift (-want +got):\n%s", diff)
			}
		})
	}
}

// The condition contains the causes of the drop and why no plan is made, with the figures of the status.
func TestLocalityVerdict(t *testing.T) {
	a := locality.Assessment{
		Status: locality.Drifted, Reason: "Drifted", Message: "The traffic has drifted away from the plan",
		Promise: semmoev1.PlanForecast{LARSummary: "40.0%"}, Hold: desired.Finding{Reason: "Paused", Message: "spec.reconciliation is Paused"},
	}
	got := localityVerdict(a, &semmoev1.LARStatus{ObservedMilli: new(int32(312))}, &semmoev1.DriftStatus{Causes: &semmoev1.DriftCauses{NewTokensMilli: 500, LoadBalancingMilli: 100}})
	if got.Status != metav1.ConditionFalse || got.Reason != "Drifted" {
		t.Errorf("%s %s", got.Status, got.Reason)
	}
	for _, part := range []string{"31.2%", "predicts 40.0%", "new tokens 50.0%", "load balancing 10.0%", "changed expert activations 40.0%", "(Paused): spec.reconciliation is Paused."} {
		if !strings.Contains(got.Message, part) {
			t.Errorf("the message lacks %q: %s", part, got.Message)
		}
	}
}

// Events report LocalityOnTarget when it becomes False (a warning) and when it was False, but not when samples come and
// go.
func TestLocalityEvents(t *testing.T) {
	condition := func(status metav1.ConditionStatus, reason string) []metav1.Condition {
		if status == "" {
			return nil
		}
		list := []metav1.Condition{{Type: semmoev1.ConditionLocalityOnTarget, Status: status, Reason: reason, Message: "m"}}
		for _, kind := range eventConditions {
			if kind != semmoev1.ConditionLocalityOnTarget {
				list = append(list, metav1.Condition{Type: kind, Status: metav1.ConditionFalse, Reason: "Same"})
			}
		}
		return list
	}
	for name, tc := range map[string]struct {
		before, after             metav1.ConditionStatus
		beforeReason, afterReason string
		event                     string // prefix of the event
	}{
		"drift":           {metav1.ConditionTrue, metav1.ConditionFalse, "OnTarget", "Drifted", "Warning Drifted LocalityOnTarget is False"},
		"drift, at once":  {metav1.ConditionUnknown, metav1.ConditionFalse, "TooFewSamples", "Drifted", "Warning Drifted"},
		"mended":          {metav1.ConditionFalse, metav1.ConditionTrue, "Drifted", "OnTarget", "Normal OnTarget"},
		"not known now":   {metav1.ConditionFalse, metav1.ConditionUnknown, "Drifted", "Stale", "Normal Stale"},
		"the same":        {metav1.ConditionFalse, metav1.ConditionFalse, "Drifted", "Drifted", ""},
		"quiet":           {metav1.ConditionTrue, metav1.ConditionUnknown, "OnTarget", "Stale", ""},
		"drift again":     {metav1.ConditionUnknown, metav1.ConditionTrue, "Stale", "OnTarget", ""},
		"another unknown": {metav1.ConditionUnknown, metav1.ConditionUnknown, "Stale", "RoutersUnreachable", ""},
	} {
		t.Run(name, func(t *testing.T) {
			recorder := events.NewFakeRecorder(8)
			moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Status.Conditions = condition(tc.before, tc.beforeReason) })
			(&Reconciler{Recorder: recorder}).recordTransitions(moed, semmoev1.MoEDeploymentStatus{Conditions: condition(tc.after, tc.afterReason)})
			select {
			case got := <-recorder.Events:
				if tc.event == "" || !strings.HasPrefix(got, tc.event) {
					t.Errorf("event %q, want %q", got, tc.event)
				}
			default:
				if tc.event != "" {
					t.Error("no event")
				}
			}
		})
	}
}

// Metrics follow the naming conventions of Prometheus, are documented, contain the known values, and are removed with
// their object.
func TestMetrics(t *testing.T) {
	m := NewMetrics(func() time.Time { return moedtest.Start })
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(m)
	inUse := moedtest.PlanFor400()
	m.Set(types.NamespacedName{Namespace: "ns", Name: "a"}, figuresOf(observation{
		Decision: decision.Decision{Observed: sampledOf(300), Planning: planner.Planning{Serving: revisions.LayoutOf(inUse, semmoev1.RealizationEngineMap), Promise: inUse}, Drift: locality.Assessment{Tested: true, Statistic: 1.5, Threshold: 1, Plan: inUse, Promise: *inUse.Status.Forecast}},
		Enough:   true,
		Rollout:  decision.RolloutState{Measured: &decision.MeasuredGain{PredictedMicros: 300, SavedMicros: 200, SavedLowMicros: 100, SavedHighMicros: 300}},
	}, 2, &semmoev1.RolloutStatus{Phase: semmoev1.RolloutPhaseCanary, Since: metav1.NewTime(moedtest.Start)}, 5*time.Minute))
	m.Set(types.NamespacedName{Namespace: "ns", Name: "b"}, figuresOf(observation{}, 0, nil, 5*time.Minute))
	metricsdoc.Check(t, "../../docs/metrics.md", "MoEDeployments", registry)
	want := map[string]float64{"semmoe_drift_statistic": 1.5, "semmoe_drift_threshold": 1, "semmoe_lar_observed_ratio": 0.3, "semmoe_lar_promised_ratio": 0.4, "semmoe_lar_baseline_ratio": 0.25, "semmoe_plan_age_seconds": 86400, "semmoe_replans_last_day": 2,
		"semmoe_plan_predicted_over_measured": 1.5, "semmoe_plan_predicted_over_measured_low": 1, "semmoe_plan_predicted_over_measured_high": 3,
		"semmoe_rollout_phase Canary": 1, "semmoe_rollout_phase None": 0, "semmoe_rollout_phase Promoting": 0, "semmoe_rollout_phase RollingBack": 0,
		"semmoe_rollout_phase_start_time_seconds": float64(moedtest.Start.Unix()), "semmoe_rollout_soak_seconds": 300}
	gather := func(object string) map[string]float64 {
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]float64{}
		for _, family := range families {
			for _, metric := range family.Metric {
				if metric.Label[0].GetValue() != object {
					continue
				}
				name := family.GetName()
				if len(metric.Label) > 2 {
					name += " " + metric.Label[2].GetValue()
				}
				got[name] = metric.Gauge.GetValue()
			}
		}
		return got
	}
	if diff := cmp.Diff(want, gather("a")); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]float64{"semmoe_replans_last_day": 0,
		"semmoe_rollout_phase Canary": 0, "semmoe_rollout_phase None": 1, "semmoe_rollout_phase Promoting": 0, "semmoe_rollout_phase RollingBack": 0}, gather("b")); diff != "" {
		t.Errorf("metrics of an object without a plan (-want +got):\n%s", diff)
	}
	m.forget(types.NamespacedName{Namespace: "ns", Name: "a"})
	if got := gather("a"); len(got) > 0 {
		t.Errorf("a deleted object still has %v", got)
	}
}

// An error that prevents the drift evaluation keeps the last report. Without this, the report would disappear with every
// conflict.
func TestLocalitySurvivesErrors(t *testing.T) {
	found := moedtest.Report()
	o := observation{Decision: decision.Decision{Revision: "r1", Drift: locality.Assessment{Status: locality.Drifted, Reason: "Drifted", Tested: true, Statistic: 2, Threshold: 1, Since: moedtest.Start}}, Inspection: inspection.State{Report: &found}}
	moed := moedtest.Deployment()
	moed.Status = statusOf(moed, o, moedtest.Start)
	o.Drift = locality.Assessment{}
	again := statusOf(moed, o, moedtest.Start.Add(time.Hour))
	condition := meta.FindStatusCondition(again.Conditions, semmoev1.ConditionLocalityOnTarget)
	if condition.Reason != "Drifted" || again.Drift == nil || again.Drift.Since == nil {
		t.Errorf("after an error: %+v, drift %+v", condition, again.Drift)
	}
}
