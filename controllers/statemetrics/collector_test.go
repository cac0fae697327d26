// SPDX-License-Identifier: Apache-2.0

package statemetrics

import (
	"strings"
	"testing"

	"github.com/go-logr/logr/testr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/metricsdoc"
)

// TestCollector checks that the leader exports each condition and the replicas, and that other managers export no
// series.
func TestCollector(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := semmoev1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	at := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "team-a", Name: name} }
	moed := &semmoev1.MoEDeployment{ObjectMeta: at("m")}
	moed.Spec.Replicas = ptr.To[int32](3)
	moed.Status.Replicas, moed.Status.ReadyReplicas, moed.Status.UpdatedReplicas = 3, 2, 1
	moed.Status.Conditions = []metav1.Condition{{Type: "Ready", Status: metav1.ConditionTrue}, {Type: "LocalityOnTarget", Status: metav1.ConditionUnknown}}
	profile := &semmoev1.AffinityProfile{ObjectMeta: at("p")}
	profile.Status.Conditions = []metav1.Condition{{Type: "Ready", Status: metav1.ConditionFalse}}
	plan := &semmoev1.PlacementPlan{ObjectMeta: at("q")}
	plan.Status.Conditions = []metav1.Condition{{Type: "Degraded", Status: metav1.ConditionTrue}}

	elected := make(chan struct{})
	collector := &Collector{Reader: fake.NewClientBuilder().WithScheme(scheme).WithObjects(moed, profile, plan).Build(), Elected: elected, Log: testr.New(t)}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(collector)
	if count, err := testutil.GatherAndCount(registry); err != nil || count != 0 {
		t.Errorf("a manager that is not the leader exports %d series (error %v), want none", count, err)
	}
	close(elected)
	want := `
# HELP semmoe_condition Status of a condition: 1 for True, 0 for False, -1 for Unknown.
# TYPE semmoe_condition gauge
semmoe_condition{kind="AffinityProfile",name="p",namespace="team-a",type="Ready"} 0
semmoe_condition{kind="MoEDeployment",name="m",namespace="team-a",type="LocalityOnTarget"} -1
semmoe_condition{kind="MoEDeployment",name="m",namespace="team-a",type="Ready"} 1
semmoe_condition{kind="PlacementPlan",name="q",namespace="team-a",type="Degraded"} 1
# HELP semmoe_replicas Replicas of a MoEDeployment, by state: desired, existing, ready, or updated (ready, and of the newest revision).
# TYPE semmoe_replicas gauge
semmoe_replicas{name="m",namespace="team-a",state="desired"} 3
semmoe_replicas{name="m",namespace="team-a",state="existing"} 3
semmoe_replicas{name="m",namespace="team-a",state="ready"} 2
semmoe_replicas{name="m",namespace="team-a",state="updated"} 1
`
	if err := testutil.GatherAndCompare(registry, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
	metricsdoc.Check(t, "../../docs/metrics.md", "conditions", registry)
}
