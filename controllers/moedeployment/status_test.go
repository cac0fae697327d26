package moedeployment

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/inspection"
	"github.com/semmoe/operator/internal/podhealth"
)

func TestStatus(t *testing.T) {
	found := report()
	inspected := inspection.State{Report: &found}
	router := &appsv1.Deployment{Status: appsv1.DeploymentStatus{AvailableReplicas: 1}}
	two := []*corev1.Pod{pod("m-r1-0", "r1"), pod("m-r1-1", "r1")}

	cases := map[string]struct {
		change  func(*semmoev1.MoEDeployment)
		o       observation
		want    map[string]string // condition -> "status reason"
		summary string
		message string // in Ready's message
	}{
		"first visit": {
			o:       observation{Inspection: inspection.State{NextAttempt: 1}},
			want:    map[string]string{"Ready": "False InspectingModel", "Progressing": "True InspectingModel", "Degraded": "False AsExpected", "Stalled": "False NotStalled", "Reconciling": "True InProgress"},
			summary: "0/2",
		},
		"in service": {
			o:       observation{Inspection: inspected, Revision: "r1", Settled: true, Pods: two, Router: router},
			want:    map[string]string{"Ready": "True Serving", "Progressing": "False Complete", "Degraded": "False AsExpected", "Reconciling": "False Complete"},
			summary: "2/2", message: "2 of 2 replicas serve at http://m.ns.svc:8000",
		},
		"one of two still loads: enough": {
			o:       observation{Inspection: inspected, Revision: "r1", Settled: true, Pods: []*corev1.Pod{two[0], pod("m-r1-1", "r1", unready)}, Router: router},
			want:    map[string]string{"Ready": "True Serving", "Progressing": "True WaitingForReplicas", "Reconciling": "True InProgress"},
			summary: "1/2",
		},
		"no router yet": {
			o:    observation{Inspection: inspected, Revision: "r1", Settled: true, Pods: two},
			want: map[string]string{"Ready": "False RouterNotReady"}, summary: "2/2",
		},
		"no router wanted": {
			change: func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeNone },
			o:      observation{Inspection: inspected, Revision: "r1", Settled: true, Pods: two},
			want:   map[string]string{"Ready": "True Serving"}, summary: "2/2",
		},
		"no kind InferencePool: it serves all the same": {
			change: func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeEndpointPicker },
			o:      observation{Inspection: inspected, Revision: "r1", Settled: true, Pods: two, Router: router, PoolKindMissing: true},
			want: map[string]string{"Ready": "True Serving", "Progressing": "False Complete", "Degraded": "True InferencePoolMissing", "Stalled": "False NotStalled",
				"Reconciling": "False Complete"},
			summary: "2/2",
		},
		"no endpoint picker yet": {
			change: func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeEndpointPicker },
			o:      observation{Inspection: inspected, Revision: "r1", Settled: true, Pods: two},
			want:   map[string]string{"Ready": "False RouterNotReady"}, summary: "2/2",
		},
		"rolling": {
			o:       observation{Inspection: inspected, Revision: "r2", Pods: []*corev1.Pod{two[0], pod("m-r2-0", "r2", unready)}, Router: router},
			want:    map[string]string{"Ready": "True Serving", "Progressing": "True RollingOut", "Reconciling": "True InProgress"},
			summary: "1/2",
		},
		"the model is broken, nothing serves": {
			o: observation{Inspection: inspection.State{Failure: "shard x is cut off", Invalid: true}, Router: router},
			want: map[string]string{"Ready": "False ModelInvalid", "Progressing": "False Stalled", "Degraded": "True ModelInvalid", "Stalled": "True ModelInvalid",
				"Reconciling": "False Stalled"},
			summary: "0/2", message: "shard x is cut off",
		},
		"a broken change while the old one serves": {
			o: observation{Invalid: invalidf("InvalidExpertParallelSize", "must divide"), Inspection: inspected, Pods: two, Router: router},
			want: map[string]string{"Ready": "True Serving", "Degraded": "True InvalidExpertParallelSize", "Stalled": "True InvalidExpertParallelSize",
				"Reconciling": "False Stalled"},
			summary: "2/2",
		},
		"an inspection that could not read": {
			o:       observation{Inspection: inspection.State{Failure: "i/o error"}},
			want:    map[string]string{"Ready": "False InspectionFailed", "Degraded": "True InspectionFailed", "Stalled": "False NotStalled", "Reconciling": "True InProgress"},
			summary: "0/2",
		},
		"a pod with a problem": {
			o: observation{Inspection: inspected, Revision: "r1", Settled: true, Router: router, Problem: &podhealth.Problem{Reason: "ImagePullFailed", Message: "cannot be pulled"},
				Pods: []*corev1.Pod{pod("m-r1-0", "r1", unready)}},
			want: map[string]string{"Ready": "False ImagePullFailed", "Degraded": "True ImagePullFailed"}, summary: "0/2", message: "cannot be pulled",
		},
		"scaled to zero": {
			change:  func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](0) },
			o:       observation{Inspection: inspected, Revision: "r1", Settled: true, Router: router},
			want:    map[string]string{"Ready": "True ScaledToZero", "Progressing": "False Complete", "Reconciling": "False Complete"},
			summary: "0/0",
		},
		"paused before it ever served": {
			change:  func(m *semmoev1.MoEDeployment) { m.Spec.Reconciliation = semmoev1.ReconciliationPaused },
			o:       observation{Inspection: inspection.State{NextAttempt: 1}},
			want:    map[string]string{"Ready": "False Paused", "Progressing": "False Paused", "Reconciling": "False Paused"},
			summary: "0/2",
		},
		"refused by the API server": {
			o:    observation{Inspection: inspected, Revision: "r1", Router: router, Failure: "pods is forbidden: exceeded quota"},
			want: map[string]string{"Ready": "False ReconcileFailed", "Degraded": "True ReconcileFailed"}, summary: "0/2", message: "exceeded quota",
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			moed := deployment()
			if tc.change != nil {
				tc.change(moed)
			}
			status := statusOf(moed, tc.o, start)
			got := map[string]string{}
			for kind := range tc.want {
				c := meta.FindStatusCondition(status.Conditions, kind)
				got[kind] = string(c.Status) + " " + c.Reason
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("conditions (-want +got):\n%s", diff)
			}
			if status.Summary != tc.summary {
				t.Errorf("summary %s, want %s", status.Summary, tc.summary)
			}
			if message := meta.FindStatusCondition(status.Conditions, "Ready").Message; !strings.Contains(message, tc.message) {
				t.Errorf("Ready says %q, want it to contain %q", message, tc.message)
			}
			if len(status.Conditions) != 9 {
				t.Errorf("%d conditions, want all nine", len(status.Conditions))
			}
			for _, c := range status.Conditions {
				if c.ObservedGeneration != moed.Generation || c.Reason == "" || c.Message == "" {
					t.Errorf("condition %s lacks something: %+v", c.Type, c)
				}
			}
		})
	}
}

// What was finished stays finished when a pod is lost: that is repair, not a new generation's work. And a status that has
// not changed is not written: times of transitions stay.
func TestStatusRemembersTransitions(t *testing.T) {
	found := report()
	o := observation{Inspection: inspection.State{Report: &found}, Revision: "r1", Settled: true, Pods: []*corev1.Pod{pod("m-r1-0", "r1"), pod("m-r1-1", "r1")}}
	moed := deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeNone })
	moed.Status = statusOf(moed, o, start)
	if again := statusOf(moed, o, start.Add(time.Hour)); !cmp.Equal(moed.Status, again) {
		t.Errorf("the same observation gives another status: %s", cmp.Diff(moed.Status, again))
	}
	unready(o.Pods[1])
	status := statusOf(moed, o, start.Add(time.Hour))
	if !meta.IsStatusConditionFalse(status.Conditions, semmoev1.ConditionReconciling) {
		t.Error("a lost pod counts as a new generation's work")
	}
	moed.Generation = 2
	if status = statusOf(moed, o, start.Add(time.Hour)); !meta.IsStatusConditionTrue(status.Conditions, semmoev1.ConditionReconciling) {
		t.Error("a new generation is not reconciling")
	}
}
