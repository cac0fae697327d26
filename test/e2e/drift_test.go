package e2e

import (
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
)

// prometheusOf answers range queries with a value at every step, or with a status that is an error.
func prometheusOf(t *testing.T, value *atomic.Value, status *atomic.Int32) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		var start, end, step float64
		for name, into := range map[string]*float64{"start": &start, "end": &end, "step": &step} {
			if _, err := fmt.Sscan(request.FormValue(name), into); err != nil {
				t.Errorf("%s of the query: %v", name, err)
			}
		}
		var pairs []string
		for at := start; at <= end; at += step {
			pairs = append(pairs, fmt.Sprintf(`[%.3f,%q]`, at, value.Load()))
		}
		w.WriteHeader(int(status.Load()))
		fmt.Fprintf(w, `{"status":"success","data":{"resultType":"matrix","result":[{"metric":{},"values":[%s]}]}}`, strings.Join(pairs, ","))
	}))
	t.Cleanup(server.Close)
	return server.URL
}

// How what is served stands to its plan is told by the routers' sample, and by a Prometheus server: what falls below the promise is
// drift, and a server that fails is not. No plan is made while the one in service is young.
func TestDriftIsTold(t *testing.T) {
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	storedProfile(t, namespace)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) {
		m.Spec.Replicas = ptr.To[int32](2)
		m.Spec.Routing.SamplePercent = ptr.To[int32](100)
		m.Spec.Profiling = &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "tiny"}}
		m.Spec.Drift.WindowSeconds = 60
	})
	create(t, moed)
	waitPlanned(t, moed)
	url := reach(t, moed)

	looks := 0
	// look waits for a status and a reason; where they are empty, for any but Unknown.
	look := func(status metav1.ConditionStatus, reason string) *semmoev1.MoEDeployment {
		t.Helper()
		var current *semmoev1.MoEDeployment
		var last time.Time
		eventually(t, patience, "LocalityOnTarget is "+string(status)+" "+reason, func() error {
			if time.Since(last) > time.Second { // it looks once a minute by itself
				looks, last = looks+1, time.Now()
				update(t, moed, func(m *semmoev1.MoEDeployment) {
					metav1.SetMetaDataAnnotation(&m.ObjectMeta, "look", fmt.Sprint(looks))
				})
			}
			current = get(t, moed)
			c := meta.FindStatusCondition(current.Status.Conditions, semmoev1.ConditionLocalityOnTarget)
			if known := status == "" && c.Status != metav1.ConditionUnknown; !known && (c.Status != status || c.Reason != reason) {
				return fmt.Errorf("it is %s %s (%s)", c.Status, c.Reason, c.Message)
			}
			return nil
		})
		return current
	}
	look(metav1.ConditionUnknown, "Stale")
	for range 40 {
		if err := ask(t.Context(), url, "tiny"); err != nil {
			t.Fatal(err)
		}
	}
	look("", "")

	var value atomic.Value
	var status atomic.Int32
	value.Store("0.99")
	status.Store(http.StatusOK)
	address := prometheusOf(t, &value, &status)
	update(t, moed, func(m *semmoev1.MoEDeployment) {
		m.Spec.Drift.Source = semmoev1.DriftSourcePrometheus
		m.Spec.Drift.Prometheus = &semmoev1.PrometheusSource{Address: address, Query: "lar"}
	})
	look(metav1.ConditionTrue, "OnTarget")
	value.Store("0.01")
	told := look(metav1.ConditionFalse, "Drifted")
	if c := meta.FindStatusCondition(told.Status.Conditions, semmoev1.ConditionLocalityOnTarget); !strings.Contains(c.Message, "PlanTooYoung") {
		t.Errorf("the condition does not tell why nothing is planned: %s", c.Message)
	}
	if told.Status.Drift == nil || told.Status.Drift.ThresholdMilli != 900 || told.Status.Drift.StatisticMilli != 1000 || told.Status.Drift.Since == nil {
		t.Errorf("status.drift is %+v", told.Status.Drift)
	}
	status.Store(http.StatusBadGateway)
	if after := look(metav1.ConditionUnknown, "PrometheusUnavailable"); after.Status.Drift != nil || !meta.IsStatusConditionTrue(after.Status.Conditions, semmoev1.ConditionReady) {
		t.Errorf("after Prometheus has failed: drift %+v, conditions %+v", after.Status.Drift, after.Status.Conditions)
	}
	var plans semmoev1.PlacementPlanList
	if err := api.List(t.Context(), &plans, client.InNamespace(namespace)); err != nil {
		t.Fatal(err)
	}
	if len(plans.Items) != 1 {
		t.Errorf("%d plans, want the one in service", len(plans.Items))
	}
}
