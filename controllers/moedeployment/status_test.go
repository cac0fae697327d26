// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/decision"
	"github.com/semmoe/operator/controllers/moedeployment/download"
	"github.com/semmoe/operator/controllers/moedeployment/front"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/jobstate"
	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/internal/kube/writes"
	"github.com/semmoe/operator/internal/model/hub/report"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/profile/inspection"
)

func TestStatus(t *testing.T) {
	found := moedtest.Report()
	inspected := inspection.State{Report: &found}
	without := moedtest.Report()
	without.TiedEmbeddings = true
	tied := inspection.State{Report: &without}
	router := &appsv1.Deployment{Status: appsv1.DeploymentStatus{AvailableReplicas: 1}}
	queued := moedtest.Pod("m-r1-1", "r1", moedtest.Unready, func(p *corev1.Pod) {
		p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "kueue.x-k8s.io/admission"}}
	})
	noNode := &podhealth.Problem{Reason: "Unschedulable", Message: "0/1 nodes are available"}
	two := []*corev1.Pod{moedtest.Pod("m-r1-0", "r1"), moedtest.Pod("m-r1-1", "r1")}

	fromHub := func(m *semmoev1.MoEDeployment) {
		m.Spec.Model.Volume = corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "models"}}
		m.Spec.Model.Source = &semmoev1.ModelSource{HuggingFace: &semmoev1.HuggingFaceSource{Repo: "org/m", Revision: "main"}}
	}
	cases := map[string]struct {
		Change  func(*semmoev1.MoEDeployment)
		o       observation
		want    map[string]string // by condition type: "status reason"
		summary string
		message string // part of Ready's message
		// unreached reports that no address exists by which clients reach the pods.
		unreached bool
	}{
		"first reconciliation": {
			o:       observation{Inspection: inspection.State{NextAttempt: 1}},
			want:    map[string]string{"Ready": "False InspectingModel", "Progressing": "True InspectingModel", "Degraded": "False AsExpected", "Stalled": "False NotStalled", "Reconciling": "True InProgress"},
			summary: "0/2",
		},
		"downloading": {
			Change:  fromHub,
			o:       observation{Download: download.State{Wanted: true, Progress: &report.Progress{Bytes: 5e9, TotalBytes: 61e9, TotalFiles: 3}}},
			want:    map[string]string{"Ready": "False Downloading", "Progressing": "True Downloading", "Degraded": "False AsExpected", "Stalled": "False NotStalled", "Reconciling": "True InProgress"},
			summary: "0/2", message: "Revision main of org/m is being downloaded to /models of claim models: 5.0 of 61.0 GB",
		},
		"the repository is gated": {
			Change:  fromHub,
			o:       observation{Download: download.State{Wanted: true, Attempts: jobstate.Attempts{Failure: "the repository is gated", Invalid: true}}},
			want:    map[string]string{"Ready": "False DownloadFailed", "Progressing": "False Stalled", "Degraded": "True DownloadFailed", "Stalled": "True DownloadFailed"},
			summary: "0/2", message: "the repository is gated",
		},
		"a download is interrupted": {
			Change:  fromHub,
			o:       observation{Download: download.State{Wanted: true, Attempts: jobstate.Attempts{Failure: "i/o error"}}},
			want:    map[string]string{"Ready": "False DownloadFailed", "Progressing": "True Downloading", "Degraded": "True DownloadFailed", "Stalled": "False NotStalled"},
			summary: "0/2", message: "resumes: i/o error",
		},
		"downloading again while replicas serve": {
			Change:  fromHub,
			o:       observation{Download: download.State{Wanted: true}, Pods: two, Router: router},
			want:    map[string]string{"Ready": "True Serving", "Progressing": "True Downloading", "Degraded": "False AsExpected"},
			summary: "2/2",
		},
		"in service": {
			o:       observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspected, Settled: true, Pods: two, Router: router},
			want:    map[string]string{"Ready": "True Serving", "Progressing": "False Complete", "Degraded": "False AsExpected", "Reconciling": "False Complete"},
			summary: "2/2", message: "2 of 2 replicas serve at http://m.ns.svc:8000",
		},
		"one of two still loads: enough": {
			o:       observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspected, Settled: true, Pods: []*corev1.Pod{two[0], moedtest.Pod("m-r1-1", "r1", moedtest.Unready)}, Router: router},
			want:    map[string]string{"Ready": "True Serving", "Progressing": "True WaitingForReplicas", "Reconciling": "True InProgress"},
			summary: "1/2",
		},
		"no router yet": {
			o:    observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspected, Settled: true, Pods: two},
			want: map[string]string{"Ready": "False RouterNotReady"}, summary: "2/2",
		},
		"ranks are ignored": {
			o: observation{Decision: decision.Decision{Revision: "r1", Reports: []lar.Report{
				{IgnoredRanks: []lar.IgnoredRank{{Revision: "r1", Route: "/generate", Pods: 1}}},
				{IgnoredRanks: []lar.IgnoredRank{{Revision: "r0", Route: "/generate", Pods: 1}, {Revision: "r1", Route: "/generate", Pods: 2}, {Revision: "r1", Route: "/v1/completions", Pods: 1}}},
			}}, Inspection: inspected, Settled: true, Pods: two, Router: router},
			want:    map[string]string{"Ready": "True Serving", "Degraded": "True RanksIgnored", "Stalled": "False NotStalled", "Reconciling": "False Complete"},
			summary: "2/2", message: "2 of 2 replicas serve",
		},
		"ranks are ignored, and another replica loads": {
			o:    observation{Decision: decision.Decision{Revision: "r1", Reports: []lar.Report{{IgnoredRanks: []lar.IgnoredRank{{Revision: "r0", Route: "/generate", Pods: 1}}}}}, Inspection: inspected, Settled: true, Pods: []*corev1.Pod{moedtest.Pod("m-r1-1", "r1", moedtest.Unready)}, Router: router},
			want: map[string]string{"Ready": "False WaitingForReplicas", "Degraded": "True RanksIgnored"}, summary: "0/2",
		},
		"tied embeddings": {
			o:    observation{Decision: decision.Decision{Revision: "r1"}, Inspection: tied, Settled: true, Pods: two, Router: router},
			want: map[string]string{"Ready": "True Serving", "Progressing": "False Complete", "Degraded": "True TiedEmbeddings", "Stalled": "False NotStalled", "Reconciling": "False Complete"}, summary: "2/2",
		},
		"tied embeddings, and nothing serves yet": {
			o:    observation{Decision: decision.Decision{Revision: "r1"}, Inspection: tied, Settled: true, Router: router},
			want: map[string]string{"Ready": "False WaitingForReplicas", "Degraded": "True TiedEmbeddings", "Stalled": "False NotStalled"}, summary: "0/2",
		},
		"tied embeddings, and another engine by its own command": {
			Change: func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Command = []string{"/semmoe-refengine"} },
			o:      observation{Decision: decision.Decision{Revision: "r1"}, Inspection: tied, Settled: true, Pods: two, Router: router},
			want:   map[string]string{"Ready": "True Serving", "Degraded": "False AsExpected"}, summary: "2/2",
		},
		"tied embeddings, and a script around the engine": {
			Change: func(m *semmoev1.MoEDeployment) {
				m.Spec.Engine.Command = []string{"sh", "-c", "exec python3 -m sglang.launch_server \"$@\""}
			},
			o:    observation{Decision: decision.Decision{Revision: "r1"}, Inspection: tied, Settled: true, Pods: two, Router: router},
			want: map[string]string{"Degraded": "True TiedEmbeddings"}, summary: "2/2",
		},
		"tied embeddings, and vLLM": {
			Change: func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Type = semmoev1.EngineVLLM },
			o:      observation{Decision: decision.Decision{Revision: "r1"}, Inspection: tied, Settled: true, Pods: two, Router: router},
			want:   map[string]string{"Ready": "True Serving", "Degraded": "False AsExpected"}, summary: "2/2",
		},
		"tied embeddings, and a pod with a problem": {
			o:    observation{Decision: decision.Decision{Revision: "r1"}, Inspection: tied, Settled: true, Pods: two, Router: router, Problem: &podhealth.Problem{Reason: "NodeLost", Message: "lost"}},
			want: map[string]string{"Degraded": "True NodeLost"}, summary: "2/2",
		},
		"one replica is queued": {
			o:    observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspected, Settled: true, Router: router, Pods: []*corev1.Pod{moedtest.Pod("m-r1-0", "r1"), queued}},
			want: map[string]string{"Ready": "True Serving", "Progressing": "True Queued", "Degraded": "False AsExpected", "Stalled": "False NotStalled"}, summary: "1/2",
		},
		"all replicas are queued": {
			o:    observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspected, Settled: true, Router: router, Pods: []*corev1.Pod{queued, queued}},
			want: map[string]string{"Ready": "False Queued", "Progressing": "True Queued", "Degraded": "False AsExpected"}, summary: "0/2",
			message: "0 of 2 replicas are ready; at least 1 must be. 2 pods wait for their scheduling gate kueue.x-k8s.io/admission",
		},
		"no router can be scheduled": {
			o:    observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspected, Settled: true, Pods: two, Router: &appsv1.Deployment{}, RouterProblem: noNode},
			want: map[string]string{"Ready": "False Unschedulable", "Degraded": "True Unschedulable", "Stalled": "False NotStalled"}, summary: "2/2",
			message: "2 of 2 replicas serve, but no request router is available: 0/1 nodes are available",
		},
		"no router can be scheduled, and an engine has another problem": {
			o:    observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspected, Settled: true, Pods: two, Router: &appsv1.Deployment{}, RouterProblem: noNode, Problem: &podhealth.Problem{Reason: "NodeLost", Message: "lost"}},
			want: map[string]string{"Ready": "False Unschedulable", "Degraded": "True NodeLost"}, summary: "2/2", message: "0/1 nodes are available",
		},
		"one of two routers cannot be scheduled": {
			o:    observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspected, Settled: true, Pods: two, Router: router, RouterProblem: noNode},
			want: map[string]string{"Ready": "True Serving", "Degraded": "True Unschedulable"}, summary: "2/2",
		},
		"neither engines nor routers can be scheduled": {
			o:    observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspected, Settled: true, Router: &appsv1.Deployment{}, RouterProblem: noNode},
			want: map[string]string{"Ready": "False Unschedulable", "Degraded": "True Unschedulable"}, summary: "0/2", message: "0/1 nodes are available",
		},
		"the store is unavailable": {
			o:    observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspected, Settled: true, Pods: two, Router: router, StoreFailure: "connection refused"},
			want: map[string]string{"Ready": "True Serving", "Degraded": "True StoreUnavailable", "Stalled": "False NotStalled"}, summary: "2/2",
		},
		"routers are deleted, none wanted": {
			Change: func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeNone },
			o:      observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspected, Settled: true, Pods: two, RouterProblem: noNode},
			want:   map[string]string{"Ready": "True Serving", "Degraded": "False AsExpected"}, summary: "2/2",
		},
		"no router wanted": {
			Change: func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeNone },
			o:      observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspected, Settled: true, Pods: two},
			want:   map[string]string{"Ready": "True Serving"}, summary: "2/2",
		},
		"no kind InferencePool: it serves all the same": {
			Change: func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeEndpointPicker },
			o:      observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspected, Settled: true, Pods: two, Router: router, Front: front.State{PoolKindMissing: true}},
			want: map[string]string{"Ready": "True Serving", "Progressing": "False Complete", "Degraded": "True InferencePoolMissing", "Stalled": "False NotStalled",
				"Reconciling": "False Complete"},
			summary: "2/2",
		},
		"its Service has another owner": {
			o:    observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspected, Settled: true, Pods: two, Router: router, Failure: "reconcile Service: taken", Front: front.State{ServiceTaken: "taken"}},
			want: map[string]string{"Ready": "False ReconcileFailed", "Degraded": "True ReconcileFailed"}, summary: "2/2", message: "2 of 2 replicas are ready, but requests to the Service m do not reach them: taken", unreached: true,
		},
		"its Service has another owner, and a pod has a problem": {
			o:    observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspected, Settled: true, Pods: two, Router: router, Front: front.State{ServiceTaken: "taken"}, Problem: &podhealth.Problem{Reason: "NodeLost", Message: "lost"}},
			want: map[string]string{"Ready": "False ReconcileFailed", "Degraded": "True NodeLost"}, summary: "2/2", message: "taken", unreached: true,
		},
		"its Service has another owner, and nothing serves": {
			Change: func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](0) },
			o:      observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspected, Settled: true, Router: router, Failure: "reconcile Service: taken", Front: front.State{ServiceTaken: "taken"}},
			want:   map[string]string{"Ready": "False ReconcileFailed"}, summary: "0/0", message: "taken", unreached: true,
		},
		"no endpoint picker yet": {
			Change: func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeEndpointPicker },
			o:      observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspected, Settled: true, Pods: two},
			want:   map[string]string{"Ready": "False RouterNotReady"}, summary: "2/2",
		},
		"rolling": {
			o:       observation{Decision: decision.Decision{Revision: "r2"}, Inspection: inspected, Pods: []*corev1.Pod{two[0], moedtest.Pod("m-r2-0", "r2", moedtest.Unready)}, Router: router},
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
			o: observation{Decision: decision.Decision{Invalid: revisions.Invalidf("InvalidExpertParallelSize", "must divide")}, Inspection: inspected, Pods: two, Router: router},
			want: map[string]string{"Ready": "True Serving", "Degraded": "True InvalidExpertParallelSize", "Stalled": "True InvalidExpertParallelSize",
				"Reconciling": "False Stalled"},
			summary: "2/2",
		},
		"inspection failed to read": {
			o:       observation{Inspection: inspection.State{Failure: "i/o error"}},
			want:    map[string]string{"Ready": "False InspectionFailed", "Degraded": "True InspectionFailed", "Stalled": "False NotStalled", "Reconciling": "True InProgress"},
			summary: "0/2",
		},
		"a pod with a problem": {
			o:    observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspected, Settled: true, Router: router, Problem: &podhealth.Problem{Reason: "ImagePullFailed", Message: "cannot be pulled"}, Pods: []*corev1.Pod{moedtest.Pod("m-r1-0", "r1", moedtest.Unready)}},
			want: map[string]string{"Ready": "False ImagePullFailed", "Degraded": "True ImagePullFailed"}, summary: "0/2", message: "cannot be pulled",
		},
		"scaled to zero": {
			Change:  func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](0) },
			o:       observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspected, Settled: true, Router: router},
			want:    map[string]string{"Ready": "True ScaledToZero", "Progressing": "False Complete", "Reconciling": "False Complete"},
			summary: "0/0",
		},
		"paused before it ever served": {
			Change:  func(m *semmoev1.MoEDeployment) { m.Spec.Reconciliation = semmoev1.ReconciliationPaused },
			o:       observation{Inspection: inspection.State{NextAttempt: 1}},
			want:    map[string]string{"Ready": "False Paused", "Progressing": "False Paused", "Reconciling": "False Paused"},
			summary: "0/2",
		},
		"rejected by the API server": {
			o:    observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspected, Router: router, Failure: "pods is forbidden: exceeded quota"},
			want: map[string]string{"Ready": "False ReconcileFailed", "Degraded": "True ReconcileFailed"}, summary: "0/2", message: "exceeded quota",
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			moed := moedtest.Deployment()
			if tc.Change != nil {
				tc.Change(moed)
			}
			status := statusOf(moed, tc.o, moedtest.Start)
			got := map[string]string{}
			for kind := range tc.want {
				c := meta.FindStatusCondition(status.Conditions, kind)
				got[kind] = string(c.Status) + " " + c.Reason
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("conditions (-want +got):\n%s", diff)
			}
			if (status.Endpoint == "") != tc.unreached {
				t.Errorf("the endpoint is %q", status.Endpoint)
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

// A Service of another owner is detected while all children are written.
func TestForeignServiceIsDetected(t *testing.T) {
	moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeNone })
	c := moedtest.Cluster(t, moed.DeepCopy(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "m"}})
	var o observation
	_, err := (&Reconciler{Client: c, Live: c}).act(t.Context(), &o, &decision.Snapshot{Snapshot: planner.Snapshot{Now: moedtest.Start, Moed: moed}}, &decision.Decision{})
	if want := "Service m exists and belongs to another owner: delete it"; err == nil || o.Front.ServiceTaken != want {
		t.Errorf("ServiceTaken is %q (%v), want %q", o.Front.ServiceTaken, err, want)
	}
}

// The message contains each route once, the largest number of pods that a router reports, and what to do, for any input
// from a router.
func TestRanksFault(t *testing.T) {
	hostile := strings.Repeat("/\x1b[31m", 100)
	for name, tc := range map[string]struct {
		ignored []lar.IgnoredRank
		want    string
	}{
		"nothing": {nil, ""},
		"one pod": {[]lar.IgnoredRank{{Route: "/generate", Pods: 1}}, "1 engine pod ignores the rank of requests on /generate: these requests gain nothing from a plan"},
		"revisions": {[]lar.IgnoredRank{{Revision: "a", Route: "/generate", Pods: 1}, {Revision: "b", Route: "/generate", Pods: 2}, {Revision: "b", Route: "/a", Pods: 1}},
			"3 engine pods ignore the rank of requests on /a, /generate: "},
		"hostile": {[]lar.IgnoredRank{{Route: hostile, Pods: 1}}, "1 engine pod ignores the rank of requests on /"},
	} {
		text := ""
		if fault := ranksFault(observation{Decision: decision.Decision{Reports: []lar.Report{{IgnoredRanks: tc.ignored}, {IgnoredRanks: tc.ignored}}}}); fault != nil {
			text = fault.Message
			if fault.Stalls || !strings.Contains(text, "Use an engine release") || len(text) > 320 || strings.Contains(text, "\x1b") {
				t.Errorf("%s: %+v", name, fault)
			}
		}
		if !strings.HasPrefix(text, tc.want) || (text == "") != (tc.want == "") {
			t.Errorf("%s: %q, want %q", name, text, tc.want)
		}
	}
}

// The status accepts names of 63 characters, and the spec accepts longer ones: the status is written without them.
func TestStatusOmitsLongNames(t *testing.T) {
	for length, reported := range map[int]bool{63: true, 64: false, 253: false} {
		name := strings.Repeat("p", length)
		plan := &semmoev1.PlacementPlan{ObjectMeta: metav1.ObjectMeta{Name: name}}
		status := statusOf(moedtest.Deployment(), observation{Decision: decision.Decision{Planning: planner.Planning{ProfileName: name, Plan: plan}}}, moedtest.Start)
		want := ""
		if reported {
			want = name
		}
		if status.Profile != want || status.Plan != want {
			t.Errorf("%d characters: profile %q and plan %q, want %q", length, status.Profile, status.Plan, want)
		}
	}
}

// A completed generation stays complete when a pod is lost: this is repair, not work of a new generation. An unchanged
// status is not written, so transition times stay.
func TestStatusRemembersTransitions(t *testing.T) {
	found := moedtest.Report()
	o := observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspection.State{Report: &found}, Settled: true, Pods: []*corev1.Pod{moedtest.Pod("m-r1-0", "r1"), moedtest.Pod("m-r1-1", "r1")}}
	moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeNone })
	moed.Status = statusOf(moed, o, moedtest.Start)
	if again := statusOf(moed, o, moedtest.Start.Add(time.Hour)); !cmp.Equal(moed.Status, again) {
		t.Errorf("the same observation gives another status: %s", cmp.Diff(moed.Status, again))
	}
	moedtest.Unready(o.Pods[1])
	status := statusOf(moed, o, moedtest.Start.Add(time.Hour))
	if !meta.IsStatusConditionFalse(status.Conditions, semmoev1.ConditionReconciling) {
		t.Error("a lost pod counts as a new generation's work")
	}
	moed.Generation = 2
	if status = statusOf(moed, o, moedtest.Start.Add(time.Hour)); !meta.IsStatusConditionTrue(status.Conditions, semmoev1.ConditionReconciling) {
		t.Error("a new generation is not reconciling")
	}
}

// A generation that has not started is not reported as in service when a canary next to the previous generation is
// rolled back.
func TestGenerationDuringTrial(t *testing.T) {
	found := moedtest.Report()
	one := func(revision string) *corev1.Pod { return moedtest.Pod("m-"+revision+"-0", revision) }
	finished := func(m *semmoev1.MoEDeployment) {
		m.Status.Conditions = []metav1.Condition{{Type: semmoev1.ConditionReconciling, Status: metav1.ConditionFalse, Reason: "Complete", ObservedGeneration: m.Generation}}
	}
	for name, tc := range map[string]struct {
		phase   semmoev1.RolloutPhase
		pods    []*corev1.Pod
		change  func(*semmoev1.MoEDeployment)
		settled bool
		want    string
	}{
		"a canary":                            {phase: semmoev1.RolloutPhaseCanary, pods: []*corev1.Pod{one("r1"), one("c1")}, want: "False Complete"},
		"promoted":                            {phase: semmoev1.RolloutPhasePromoting, pods: []*corev1.Pod{one("r1"), one("c1")}, want: "False Complete"},
		"rolled back":                         {phase: semmoev1.RolloutPhaseRollingBack, pods: []*corev1.Pod{one("r1"), one("c1")}, want: "False Complete"},
		"rolled back, of an older generation": {phase: semmoev1.RolloutPhaseRollingBack, pods: []*corev1.Pod{one("r0"), one("c1")}, want: "True InProgress"},
		"rolled back, of an older generation, new one starts": {phase: semmoev1.RolloutPhaseRollingBack, pods: []*corev1.Pod{one("r0"), one("r1"), one("c1")}, want: "True InProgress"},
		"rolled back, only the canary is left":                {phase: semmoev1.RolloutPhaseRollingBack, pods: []*corev1.Pod{one("c1")}, want: "True InProgress"},
		"rolled back, generation was complete":                {phase: semmoev1.RolloutPhaseRollingBack, pods: []*corev1.Pod{one("c1")}, change: finished, want: "False Complete"},
		"no trial, another revision is wanted":                {pods: []*corev1.Pod{one("r0")}, want: "True InProgress"},
		"no trial, finished, and a replica is lost":           {pods: []*corev1.Pod{one("r1")}, change: finished, settled: true, want: "False Complete"},
	} {
		moed := moedtest.Deployment()
		if tc.change != nil {
			tc.change(moed)
		}
		o := observation{Decision: decision.Decision{Revision: "r1"}, Inspection: inspection.State{Report: &found}, Settled: tc.settled, Pods: tc.pods, Rollout: decision.RolloutState{Phase: tc.phase, Reason: "R", Message: "m", Candidate: "c1"}}
		c := meta.FindStatusCondition(statusOf(moed, o, moedtest.Start).Conditions, semmoev1.ConditionReconciling)
		if got := string(c.Status) + " " + c.Reason; got != tc.want {
			t.Errorf("%s: Reconciling is %s, want %s", name, got, tc.want)
		}
	}
}

// A temporary error keeps the last decided conditions, except that a new generation is not reported as in service.
func TestStatusSurvivesErrors(t *testing.T) {
	moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
		m.Spec.Profiling = &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "q"}}
	})
	found := moedtest.Report()
	job := inspectionJob(moed, "semmoe:1", "", 1)
	text, err := json.Marshal(inspection.Report{Report: found})
	if err != nil {
		t.Fatal(err)
	}
	job.Annotations = map[string]string{semmoev1.AnnotationReport: string(text)}
	observed := &decision.Snapshot{
		Snapshot:   planner.Snapshot{Now: moedtest.Start, Moed: moed, Report: &found, Pods: []*corev1.Pod{moedtest.Pod("m-r1-0", "r1"), moedtest.Pod("m-c1-0", "c1")}},
		Inspection: inspection.Observe(inspectionInputs(moed).Hash(), []*batchv1.Job{job}, nil),
	}
	decided := observation{
		Decision:   decision.Decision{Revision: "r1", Planning: planner.Planning{Profile: moedtest.ProfiledBy("q", "r", moedtest.Start), ProfileName: "q", Plan: moedtest.PlanFor400(), Promise: moedtest.PlanFor400(), Candidate: &revisions.Layout{Digest: "ab"}}},
		Inspection: inspection.State{Report: &found},
		Pods:       observed.Pods,
		Rollout:    decision.RolloutState{Phase: semmoev1.RolloutPhaseCanary, Reason: "Canary", Message: "m", Candidate: "c1", Plan: "ab"},
	}
	moed.Status = statusOf(moed, decided, moedtest.Start)

	c := interceptor.NewClient(moedtest.Cluster(t), interceptor.Funcs{List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
		return errors.New("connection refused")
	}})
	r := &Reconciler{Client: c, Live: c, Now: func() time.Time { return moedtest.Start }}
	observed.Unread = r.plans().Observe(t.Context(), &observed.Snapshot)
	d := r.decide(t.Context(), observed)
	o, err := observationOf(observed, d), d.Err
	if err == nil || !o.Undecided || o.Revision != "" || o.Inspection.Report == nil {
		t.Fatalf("error %v, observation %+v", err, o)
	}
	if diff := cmp.Diff(moed.Status, statusOf(moed, o, moedtest.Start.Add(time.Hour))); diff != "" {
		t.Errorf("after an error (-before +after):\n%s", diff)
	}
	moed.Generation++
	status := statusOf(moed, o, moedtest.Start.Add(time.Hour))
	if !meta.IsStatusConditionTrue(status.Conditions, semmoev1.ConditionReconciling) || status.Revision != "r1" || status.UpdatedReplicas != 1 {
		t.Errorf("of a new generation: %+v", status)
	}
}

// recorder stores the related objects of events, by reason.
type recorder struct {
	events.EventRecorder
	related map[string][]runtime.Object
}

func (r *recorder) Eventf(_, related runtime.Object, _, reason, _, _ string, _ ...any) {
	r.related[reason] = append(r.related[reason], related)
}

// The rollout events of two revisions relate to different objects. With the same object, a recorder would count the second event as
// a repetition.
func TestEventsRelateToRevisions(t *testing.T) {
	rollingOut := func(revision string) semmoev1.MoEDeploymentStatus {
		status := semmoev1.MoEDeploymentStatus{Revision: revision}
		for _, kind := range eventConditions {
			status.Conditions = append(status.Conditions, metav1.Condition{Type: kind, Status: metav1.ConditionFalse, Reason: kind})
		}
		meta.SetStatusCondition(&status.Conditions, metav1.Condition{Type: semmoev1.ConditionProgressing, Status: metav1.ConditionTrue, Reason: "RollingOut"})
		return status
	}
	reported := &recorder{related: map[string][]runtime.Object{}}
	r := &Reconciler{Recorder: reported}
	moed := moedtest.Deployment()
	for _, revision := range []string{"", "r1", "r2"} {
		r.recordTransitions(moed, rollingOut(revision))
	}
	moed.Spec.Parallelism.PodsPerReplica = ptr.To[int32](2)
	r.recordTransitions(moed, rollingOut("r3"))
	want := []runtime.Object{
		nil,
		&corev1.ObjectReference{APIVersion: "apps/v1", Kind: "StatefulSet", Namespace: moed.Namespace, Name: moed.Name + "-r1"},
		&corev1.ObjectReference{APIVersion: "apps/v1", Kind: "StatefulSet", Namespace: moed.Namespace, Name: moed.Name + "-r2"},
		&corev1.ObjectReference{APIVersion: "leaderworkerset.x-k8s.io/v1", Kind: "LeaderWorkerSet", Namespace: moed.Namespace, Name: moed.Name + "-r3"},
	}
	if diff := cmp.Diff(want, reported.related["RollingOut"]); diff != "" {
		t.Errorf("related (-want +got):\n%s", diff)
	}
}

// A status that returns to the state in a stale cache is written. If it were not, the intermediate status would stay. The
// same holds if the last write failed.
func TestStatusGoesBack(t *testing.T) {
	moed := moedtest.Deployment()
	var refuse error
	c := fake.NewClientBuilder().WithScheme(moedtest.GroupScheme(t)).WithObjects(moed.DeepCopy()).WithStatusSubresource(moed).WithInterceptorFuncs(interceptor.Funcs{
		SubResourceApply: func(ctx context.Context, c client.Client, subResource string, intent runtime.ApplyConfiguration, options ...client.SubResourceApplyOption) error {
			if refuse != nil {
				return refuse
			}
			return c.SubResource(subResource).Apply(ctx, intent, options...)
		},
	}).Build()
	r := &Reconciler{Client: c, Recorder: events.NewFakeRecorder(64)}
	reported := func(reason string) semmoev1.MoEDeploymentStatus {
		status := semmoev1.MoEDeploymentStatus{}
		for _, kind := range eventConditions {
			status.Conditions = append(status.Conditions, metav1.Condition{Type: kind, Status: metav1.ConditionFalse, Reason: reason, LastTransitionTime: metav1.NewTime(moedtest.Start)})
		}
		return status
	}
	read := func() *semmoev1.MoEDeployment {
		stored := &semmoev1.MoEDeployment{}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(moed), stored); err != nil {
			t.Fatal(err)
		}
		return stored
	}
	cache := read()
	for _, step := range []struct {
		decided       string
		refused, seen bool // rejected by the API server; in the cache afterwards
		want          string
	}{
		{decided: "Complete", seen: true, want: "Complete"},
		{decided: "RollingOut", want: "RollingOut"},
		{decided: "Complete", refused: true, want: "RollingOut"},
		{decided: "Complete", want: "Complete"},
		{decided: "RollingOut", want: "RollingOut"},
		{decided: "Complete", seen: true, want: "Complete"},
	} {
		cached := cache.DeepCopy()
		cached.Status = r.statuses.Latest(cached, cached.Status)
		if refuse = nil; step.refused {
			refuse = errors.New("conflict")
		}
		if err := r.applyStatus(t.Context(), cached, reported(step.decided)); (err != nil) != step.refused {
			t.Fatal(err)
		}
		if got := read().Status.Conditions[0].Reason; got != step.want {
			t.Errorf("%+v: %s is written", step, got)
		}
		if step.seen {
			cache = read()
		}
	}
}

// TestExplainImageVolumes checks the message for an API server that drops the image of a volume.
func TestExplainImageVolumes(t *testing.T) {
	dropped := apierrors.NewInvalid(schema.GroupKind{Group: "batch", Kind: "Job"}, "m-inspect", field.ErrorList{field.Required(field.NewPath("spec.template.spec.volumes[0]"), "must specify a volume type")})
	image := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
		m.Spec.Model.Volume, m.Spec.Model.Source = corev1.VolumeSource{}, &semmoev1.ModelSource{OCI: &semmoev1.OCISource{Image: "m:1"}}
	})
	if err := explainImageVolumes(image, writes.Refusable(dropped)); !writes.IsRefused(err) || !strings.Contains(err.Error(), "the cluster has no image volumes, which the model needs: use Kubernetes 1.35") {
		t.Errorf("error %v", err)
	}
	other := errors.New("connection refused")
	if err := explainImageVolumes(image, other); err != other {
		t.Errorf("another error becomes %v", err)
	}
	if err := explainImageVolumes(moedtest.Deployment(), dropped); err != error(dropped) {
		t.Errorf("a model on a volume reports %v", err)
	}
}
