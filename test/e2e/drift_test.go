// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/tier"
)

// prometheusStub is a Prometheus server that answers range queries with one value at every step, or with a fixed
// response body.
type prometheusStub struct {
	value, instead atomic.Pointer[string]
	status         atomic.Int32
}

// setAnswer sets the answer to later queries.
func (p *prometheusStub) setAnswer(status int, value, instead string) {
	p.status.Store(int32(status))
	p.value.Store(&value)
	p.instead.Store(&instead)
}

// start serves until the test ends, and returns the address.
func (p *prometheusStub) start(t *testing.T) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		var start, end, step float64
		for name, into := range map[string]*float64{"start": &start, "end": &end, "step": &step} {
			if _, err := fmt.Sscan(request.FormValue(name), into); err != nil {
				t.Errorf("query parameter %s: %v", name, err)
			}
		}
		var pairs []string
		for at := start; at <= end; at += step {
			pairs = append(pairs, fmt.Sprintf(`[%.3f,%q]`, at, *p.value.Load()))
		}
		series := fmt.Sprintf(`{"metric":{},"values":[%s]}`, strings.Join(pairs, ","))
		answer := fmt.Sprintf(`{"status":"success","data":{"resultType":"matrix","result":[%s]}}`, series)
		w.WriteHeader(int(p.status.Load()))
		fmt.Fprint(w, cmp.Or(*p.instead.Load(), answer))
	}))
	t.Cleanup(server.Close)
	return server.URL
}

// TestDriftDetection measures the locality of the serving plan with the routers' samples and with a Prometheus server. A
// rate below the forecast is drift, and a failing server is not. No plan is made while the serving plan is newer than
// the minimum age.
func TestDriftDetection(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	granted := grantRights(t, namespace)
	startManagerAs(t, granted.config(), image, namespace, nil)
	storedProfile(t, namespace)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) {
		m.Spec.Replicas = ptr.To[int32](2)
		m.Spec.Routing.SamplePercent = ptr.To[int32](100)
		m.Spec.Profiling = &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "tiny"}}
		m.Spec.Drift.WindowSeconds = 60
	})
	create(t, moed)
	waitPlanned(t, moed)
	url := serviceURL(t, moed)

	wait := func(status metav1.ConditionStatus, reason string) *semmoev1.MoEDeployment {
		return waitLocality(t, moed, status, reason)
	}
	wait(metav1.ConditionUnknown, "Stale")
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Routing.SamplePercent = ptr.To[int32](0) })
	wait(metav1.ConditionUnknown, "NotObserved")
	createLiveProfiles(t, moed)
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Routing.SamplePercent = ptr.To[int32](100) })
	waitComplete(t, moed)
	for range 40 {
		if err := sendRequest(t.Context(), url, "tiny"); err != nil {
			t.Fatal(err)
		}
	}
	wait("", "")

	prometheus := &prometheusStub{}
	prometheus.setAnswer(http.StatusOK, "0.99", "")
	address := prometheus.start(t)
	update(t, moed, func(m *semmoev1.MoEDeployment) {
		m.Spec.Drift.Source = semmoev1.DriftSourcePrometheus
		m.Spec.Drift.Prometheus = &semmoev1.PrometheusSource{Address: address, Query: "lar"}
	})
	wait(metav1.ConditionTrue, "OnTarget")
	prometheus.setAnswer(http.StatusOK, "0.01", "")
	drifted := wait(metav1.ConditionFalse, "Drifted")
	if c := meta.FindStatusCondition(drifted.Status.Conditions, semmoev1.ConditionLocalityOnTarget); !strings.Contains(c.Message, "PlanCooldown") {
		t.Errorf("the condition message lacks the reason for not planning: %s", c.Message)
	}
	if drifted.Status.Drift == nil || drifted.Status.Drift.ThresholdMilli != 900 || drifted.Status.Drift.StatisticMilli != 1000 || drifted.Status.Drift.Since == nil {
		t.Errorf("status.drift is %+v", drifted.Status.Drift)
	}
	blockReplans(t, moed)
	for _, wrong := range []struct {
		reason string
		status int
		value  string
		answer string
	}{
		{"PrometheusNotARate", http.StatusOK, "50", ""},
		{"PrometheusStale", http.StatusOK, "NaN", ""},
		{"PrometheusRefused", http.StatusBadRequest, "", `{"status":"error","errorType":"bad_data","error":"unexpected character"}`},
		{"PrometheusWarned", http.StatusOK, "", `{"status":"success","data":{"resultType":"matrix","result":[]},"warnings":["a remote server is away"]}`},
		{"PrometheusNoSeries", http.StatusOK, "", `{"status":"success","data":{"resultType":"matrix","result":[]}}`},
		{"PrometheusSeveralSeries", http.StatusOK, "", `{"status":"success","data":{"resultType":"matrix","result":[{"metric":{"a":"1"},"values":[]},{"metric":{"a":"2"},"values":[]}]}}`},
	} {
		prometheus.setAnswer(wrong.status, wrong.value, wrong.answer)
		wait(metav1.ConditionUnknown, wrong.reason)
	}
	name := func(address string) {
		update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Drift.Prometheus.Address = address })
	}
	name("http://prometheus.monitoring.svc:9090")
	wait(metav1.ConditionUnknown, "PrometheusNotAllowed")
	name(address)
	secret := func(name string) {
		update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Drift.Prometheus.AuthSecret = name })
	}
	secret("token")
	wait(metav1.ConditionUnknown, "SecretForbidden")
	granted.mayRead(t, namespace, "token")
	wait(metav1.ConditionUnknown, "SecretNotFound")
	secret("")
	prometheus.setAnswer(http.StatusOK, "0.99", "")
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Drift.WindowSeconds = 3600 })
	wait(metav1.ConditionUnknown, "TooFewValues")
	prometheus.setAnswer(http.StatusBadGateway, "", "")
	if after := wait(metav1.ConditionUnknown, "PrometheusUnavailable"); after.Status.Drift != nil || !meta.IsStatusConditionTrue(after.Status.Conditions, semmoev1.ConditionReady) {
		t.Errorf("after failures of Prometheus: drift %+v, conditions %+v", after.Status.Drift, after.Status.Conditions)
	}
	var plans semmoev1.PlacementPlanList
	if err := api.List(t.Context(), &plans, client.InNamespace(namespace)); err != nil {
		t.Fatal(err)
	}
	if len(plans.Items) != 1 {
		t.Errorf("%d plans, want only the serving plan", len(plans.Items))
	}
}

// waitLocality waits until LocalityOnTarget has a status and a reason. If both are empty, it accepts any status except
// Unknown.
func waitLocality(t *testing.T, moed *semmoev1.MoEDeployment, status metav1.ConditionStatus, reason string) *semmoev1.MoEDeployment {
	t.Helper()
	var current *semmoev1.MoEDeployment
	var last time.Time
	eventually(t, waitTimeout, "LocalityOnTarget is "+string(status)+" "+reason, func() error {
		if time.Since(last) > time.Second { // by itself the manager polls once a minute
			last = time.Now()
			update(t, moed, func(m *semmoev1.MoEDeployment) {
				metav1.SetMetaDataAnnotation(&m.ObjectMeta, "look", last.Format(time.RFC3339Nano))
			})
		}
		current = get(t, moed)
		c := meta.FindStatusCondition(current.Status.Conditions, semmoev1.ConditionLocalityOnTarget)
		if known := status == "" && c.Status != metav1.ConditionUnknown; !known && (c.Status != status || c.Reason != reason) {
			return fmt.Errorf("LocalityOnTarget is %s %s (%s)", c.Status, c.Reason, c.Message)
		}
		return nil
	})
	return current
}

// createLiveProfiles requests live profiles from a deployment that samples counts and currently has no samples.
func createLiveProfiles(t *testing.T, moed *semmoev1.MoEDeployment) {
	t.Helper()
	for samples, reason := range map[semmoev1.LiveSamples]string{semmoev1.LiveSamplesCounts: "WaitingForSamples", semmoev1.LiveSamplesSequences: "NoLiveSamples"} {
		p := newProfile(moed.Namespace, strings.ToLower(string(samples)), func(p *semmoev1.AffinityProfile) {
			p.Spec.Dataset, p.Spec.Target, p.Spec.DeploymentRef = nil, semmoev1.ProfilingTargetLive, &semmoev1.DeploymentReference{Name: moed.Name}
			p.Spec.Live = &semmoev1.LiveSpec{Samples: samples, PriorProfileRef: semmoev1.ProfileReference{Name: moed.Spec.Profiling.ProfileRef.Name}}
		})
		create(t, p)
		waitProfile(t, waitTimeout, p, semmoev1.ConditionReady, metav1.ConditionFalse, reason)
		deleteAndWait(t, p)
	}
}

// blockReplans prevents re-planning after drift in each way that a user can, and reverts the change. The condition
// reports each reason.
func blockReplans(t *testing.T, moed *semmoev1.MoEDeployment) {
	t.Helper()
	spec := get(t, moed).Spec
	blocked := func(reason string, change func(*semmoev1.MoEDeployment)) {
		t.Helper()
		update(t, moed, change)
		waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionLocalityOnTarget, metav1.ConditionFalse, "Drifted", "("+reason+"): ")
		update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec = *spec.DeepCopy() })
	}
	blocked("Paused", func(m *semmoev1.MoEDeployment) { m.Spec.Reconciliation = semmoev1.ReconciliationPaused })
	blocked("ReplansDisabled", func(m *semmoev1.MoEDeployment) { m.Spec.Drift.MaxReplansPerDay = ptr.To[int32](0) })
	blocked("PlanPinned", func(m *semmoev1.MoEDeployment) {
		m.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: get(t, moed).Status.Plan}
	})
}
