// SPDX-License-Identifier: Apache-2.0

package affinityprofile

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/internal/kube/podhealth"
	recording "github.com/semmoe/operator/internal/profile"
)

// TestAttempts checks the action and the conditions for Jobs and pods.
func TestAttempts(t *testing.T) {
	ours := newProfile()
	other := newProfile(func(p *semmoev1.AffinityProfile) { p.Name, p.UID = "other", "other-uid" })
	const policy, limit = batchv1.JobReasonPodFailurePolicy, batchv1.JobReasonBackoffLimitExceeded
	first, bad, engine, lost := job(ours, 1), job(ours, 1, failed(policy)), job(ours, 2, failed(policy)), job(ours, 1, failed(limit))
	seventh := job(ours, 7, failed(limit))
	ended := job(ours, 1, failed(batchv1.JobReasonDeadlineExceeded), func(j *batchv1.Job) {
		j.Annotations = map[string]string{annotationFailure: "the engine terminated 4 times"}
	})
	stopped := job(ours, 1, failed(batchv1.JobReasonDeadlineExceeded), func(j *batchv1.Job) {
		j.Annotations = map[string]string{annotationStopped: "it serves another model"}
	})
	queued := job(ours, 1, func(j *batchv1.Job) { j.Spec.Suspend = ptr.To(true) })
	now := start.Add(time.Second)
	cases := map[string]struct {
		jobs    []*batchv1.Job
		pods    []*corev1.Pod
		spoiled string
		unseen  bool
		want    action
		reason  string   // of Ready
		parts   []string // of the message of Ready
		stalls  bool
	}{
		"nothing yet":      {want: action{Create: 1, After: waitPeriod}, reason: "StartingJob"},
		"running":          {jobs: []*batchv1.Job{first}, want: action{After: progressPeriod}, reason: "Profiling", parts: []string{first.Name}},
		"deleted, running": {jobs: []*batchv1.Job{job(ours, 1, deleted)}, want: action{After: progressPeriod}, reason: "WaitingForJob"},
		"suspended":        {jobs: []*batchv1.Job{queued}, reason: "Queued", parts: []string{"Job " + queued.Name + " is suspended"}},
		"suspended, deployment changed": {
			jobs: []*batchv1.Job{queued}, spoiled: "it serves another model", reason: "Queued", parts: []string{queued.Name},
		},
		"a pod in a queue": {
			jobs: []*batchv1.Job{first}, pods: []*corev1.Pod{gated(first)}, want: action{After: progressPeriod},
			reason: "Queued", parts: []string{first.Name, "scheduling gate kueue.x-k8s.io/admission"},
		},
		"suspended after a failure": {
			jobs: []*batchv1.Job{lost, job(ours, 2, func(j *batchv1.Job) { j.Spec.Suspend = ptr.To(true) })},
			pods: []*corev1.Pod{podOf(lost, 1, "the artifact store is unavailable")}, reason: "ProfilingFailed", parts: []string{"Attempt 1 failed"},
		},
		"invalid inputs": {
			jobs: []*batchv1.Job{bad}, pods: []*corev1.Pod{podOf(bad, 3, "the data set has changed\n")},
			reason: "InputsInvalid", parts: []string{"the data set has changed", "delete Job " + bad.Name}, stalls: true,
		},
		"invalid engine": {
			jobs: []*batchv1.Job{bad, engine}, pods: []*corev1.Pod{podOf(bad, 3, "x"), podOf(engine, 4, "it has died")},
			reason: "EngineFailed", parts: []string{"it has died", "delete Job " + engine.Name}, stalls: true,
		},
		"final failure, pod deleted": {jobs: []*batchv1.Job{bad}, reason: "ProfilingFailed", parts: []string{"failed: because"}, stalls: true},
		"temporary failure": {
			jobs: []*batchv1.Job{lost}, pods: []*corev1.Pod{podOf(lost, 1, "the artifact store is unavailable")},
			want: action{After: 9 * time.Second}, reason: "ProfilingFailed", parts: []string{"Attempt 1 failed and is retried: the artifact store is unavailable"},
		},
		"killed": {jobs: []*batchv1.Job{lost}, pods: []*corev1.Pod{podOf(lost, 137, "")}, want: action{After: 9 * time.Second}, reason: "ProfilingFailed"},
		"seventh attempt": {
			jobs: []*batchv1.Job{seventh}, want: action{After: time.Hour - time.Second}, reason: "ProfilingFailed", parts: []string{"Attempt 7"},
		},
		"full store": {
			jobs: []*batchv1.Job{lost}, pods: []*corev1.Pod{podOf(lost, exitStoreFull, "the store is full")},
			want: action{After: time.Hour - time.Second}, reason: "ProfilingFailed", parts: []string{"the store is full"},
		},
		"retried": {
			jobs: []*batchv1.Job{lost, job(ours, 2)}, pods: []*corev1.Pod{podOf(lost, 1, "the artifact store is unavailable")},
			want: action{After: progressPeriod}, reason: "ProfilingFailed", parts: []string{"Attempt 1 failed"},
		},
		"complete, result lost":   {jobs: []*batchv1.Job{job(ours, 1, complete)}, want: action{After: 9 * time.Second}, reason: "ProfilingFailed", parts: []string{"not in the artifact store"}},
		"engine keeps crashing":   {jobs: []*batchv1.Job{first}, pods: []*corev1.Pod{crashing(first, 3)}, want: action{End: first}, reason: "EngineFailed", parts: []string{"terminated 4 times", "exit code 2: no such flag"}},
		"engine may recover":      {jobs: []*batchv1.Job{first}, pods: []*corev1.Pod{crashing(first, 2)}, want: action{After: progressPeriod}, reason: "Profiling"},
		"ended by the controller": {jobs: []*batchv1.Job{ended}, reason: "EngineFailed", parts: []string{"the engine terminated 4 times", "delete Job"}, stalls: true},
		"deployment changed": {
			jobs: []*batchv1.Job{first}, spoiled: "it serves another model", want: action{Stop: first}, reason: "WaitingForDeployment", parts: []string{first.Name, "it serves another model"},
		},
		"deployment changed, Job being deleted": {
			jobs: []*batchv1.Job{job(ours, 1, deleted)}, spoiled: "it serves another model", want: action{After: progressPeriod}, reason: "WaitingForJob",
		},
		"deployment of another profile changed": {
			jobs: []*batchv1.Job{job(other, 1)}, spoiled: "it serves another model", want: action{After: waitPeriod}, reason: "WaitingForOtherProfile",
		},
		"stopped by the controller": {
			jobs: []*batchv1.Job{stopped}, spoiled: "it serves another model", reason: "WaitingForDeployment", parts: []string{"it serves another model. Profiling waits for a change"},
		},
		"reshuffled weights, end causes no event": {
			spoiled: "its weights are reshuffled", unseen: true, want: action{After: unseenPeriod}, reason: "WaitingForDeployment", parts: []string{"its weights are reshuffled"},
		},
		"reshuffled weights after a final failure": {
			jobs: []*batchv1.Job{bad}, spoiled: "its weights are reshuffled", unseen: true, reason: "ProfilingFailed", stalls: true,
		},
		"stopped, cause resolved": {
			jobs: []*batchv1.Job{stopped}, want: action{After: 9 * time.Second}, reason: "ProfilingFailed", parts: []string{"is retried: it serves another model"},
		},
		"Job of another profile running": {jobs: []*batchv1.Job{job(other, 1)}, want: action{After: waitPeriod}, reason: "WaitingForOtherProfile", parts: []string{"AffinityProfile other"}},
		"Job of another profile being deleted": {
			jobs: []*batchv1.Job{job(other, 1, deleted)}, want: action{After: waitPeriod}, reason: "WaitingForOtherProfile",
		},
		"Job of another profile failed":         {jobs: []*batchv1.Job{job(other, 3, failed(policy))}, want: action{Create: 4, After: waitPeriod}, reason: "StartingJob"},
		"Job of another profile keeps crashing": {jobs: []*batchv1.Job{job(other, 1)}, pods: []*corev1.Pod{crashing(job(other, 1), 9)}, want: action{After: waitPeriod}, reason: "WaitingForOtherProfile"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			o := observation{Inspection: inspected(), ID: id, Attempts: attemptsOf(ours, tc.jobs, tc.pods), Deployment: tc.spoiled, Spoiled: tc.spoiled, Unseen: tc.unseen}
			if diff := cmp.Diff(tc.want, decide(o, now)); diff != "" {
				t.Errorf("action (-want +got):\n%s", diff)
			}
			conditions := conditionsOf(t, statusOf(ours, o, now))
			ready, stalled := conditions[semmoev1.ConditionReady], conditions[semmoev1.ConditionStalled]
			if ready.Status != metav1.ConditionFalse || ready.Reason != tc.reason || (stalled.Status == metav1.ConditionTrue) != tc.stalls {
				t.Errorf("Ready = %+v, Stalled = %+v", ready, stalled)
			}
			for _, part := range tc.parts {
				if !strings.Contains(ready.Message, part) {
					t.Errorf("message %q does not contain %q", ready.Message, part)
				}
			}
		})
	}
}

// TestNoJobByTheClock checks that a clock that jumps by hours creates no Job while one is running, after a final
// failure, or directly after a failure.
func TestNoJobByTheClock(t *testing.T) {
	ours := newProfile()
	for name, tc := range map[string]struct {
		jobs  []*batchv1.Job
		jumps []time.Duration
	}{
		"running":       {[]*batchv1.Job{job(ours, 1)}, []time.Duration{-6 * time.Hour, 6 * time.Hour}},
		"final failure": {[]*batchv1.Job{job(ours, 1, failed(batchv1.JobReasonPodFailurePolicy))}, []time.Duration{-6 * time.Hour, 6 * time.Hour}},
		"failed":        {[]*batchv1.Job{job(ours, 1, failed(batchv1.JobReasonBackoffLimitExceeded))}, []time.Duration{-6 * time.Hour}},
	} {
		for _, jump := range tc.jumps {
			o := observation{Inspection: inspected(), ID: id, Attempts: attemptsOf(ours, tc.jobs, nil)}
			if got := decide(o, start.Add(jump)); got.Create != 0 || got.End != nil || got.After > slowBackOff {
				t.Errorf("%s, clock jump %v: action = %+v, want none, and the next decision within %v", name, jump, got, slowBackOff)
			}
		}
	}
}

// TestNoJobWithoutTheStore checks that no Job is created while the store has the result or is unavailable, for any
// state of the Jobs.
// TestProfileWithoutEmbeddings checks that a profile without token embeddings is ready, and reports the reason.
func TestProfileWithoutEmbeddings(t *testing.T) {
	manifest := recording.Manifest{NoEmbeddings: strings.Repeat("embeddings are\nquantized ", 50), Summary: recording.Summary{Requests: 5, Tokens: 50}}
	o := observation{Inspection: inspected(), ID: id, Result: resultOf("x", manifest)}
	status := statusOf(newProfile(), o, start)
	ready := conditionsOf(t, status)[semmoev1.ConditionReady]
	if ready.Status != metav1.ConditionTrue || !strings.Contains(ready.Message, "no token embeddings (status.result.noEmbeddings)") || len(ready.Message) > 250 {
		t.Errorf("condition %+v", ready)
	}
	if reason := status.Result.NoEmbeddings; len(reason) > recording.MaxNoEmbeddings || !strings.HasPrefix(reason, "embeddings are") || strings.Contains(reason, "\n") {
		t.Errorf("reason %q", reason)
	}
	o.Result = resultOf("x", recording.Manifest{})
	if ready := conditionsOf(t, statusOf(newProfile(), o, start))[semmoev1.ConditionReady]; strings.Contains(ready.Message, "embeddings") {
		t.Errorf("with embeddings, or recorded by an earlier version: %+v", ready)
	}
}

func TestNoJobWithoutTheStore(t *testing.T) {
	ours := newProfile()
	result := &semmoev1.ProfileResult{Digest: "x", Requests: 5, Tokens: 50, TracedTokens: 40}
	now := start.Add(time.Hour)
	for name, jobs := range map[string][]*batchv1.Job{
		"none": nil, "failed": {job(ours, 1, failed(""))}, "complete": {job(ours, 1, complete)}, "running": {job(ours, 1)},
	} {
		o := observation{Inspection: inspected(), ID: id, Attempts: attemptsOf(ours, jobs, nil), Result: result}
		if got := decide(o, now); got != (action{}) {
			t.Errorf("%s, with a result: unexpected %+v", name, got)
		}
		status := statusOf(ours, o, now)
		conditions := conditionsOf(t, status)
		if conditions[semmoev1.ConditionReady].Status != metav1.ConditionTrue || conditions[semmoev1.ConditionDegraded].Status != metav1.ConditionFalse ||
			conditions[semmoev1.ConditionProgressing].Reason != "Complete" || conditions[semmoev1.ConditionReconciling].Status != metav1.ConditionFalse {
			t.Errorf("%s, with a result: unexpected %+v", name, conditions)
		}
		// The store becomes unavailable: the known result is still reported.
		o.StoreFailure = "The artifact store is unavailable"
		if got := decide(o, now); got != (action{After: storePeriod}) {
			t.Errorf("%s, store unavailable: unexpected %+v", name, got)
		}
		conditions = conditionsOf(t, statusOf(ours, o, now))
		if conditions[semmoev1.ConditionReady].Status != metav1.ConditionTrue || conditions[semmoev1.ConditionDegraded].Reason != "StoreUnavailable" {
			t.Errorf("%s, store unavailable: unexpected %+v", name, conditions)
		}
		o.Result = nil
		if got := decide(o, now); got != (action{After: storePeriod}) {
			t.Errorf("%s, store never available: unexpected %+v", name, got)
		}
		if o.Spoiled = "it serves another model"; o.Attempts.Running != decide(o, now).Stop {
			t.Errorf("%s, store never available, other model: unexpected %+v", name, decide(o, now))
		}
		o.Spoiled = ""
		if ready := conditionsOf(t, statusOf(ours, o, now))[semmoev1.ConditionReady]; ready.Reason != "StoreUnavailable" {
			t.Errorf("%s, store never available: unexpected %+v", name, ready)
		}
	}
}

func TestFaultsOutsideJobs(t *testing.T) {
	failedInspection := inspected()
	failedInspection.Report, failedInspection.Dataset = nil, nil
	invalid := func(message string) observation {
		o := observation{Inspection: failedInspection}
		o.Inspection.Failure, o.Inspection.Invalid = message, true
		return o
	}
	temporary := invalid("i/o error")
	temporary.Inspection.Invalid = false
	cases := map[string]struct {
		o      observation
		reason string
		stalls bool
	}{
		"spec":          {observation{Invalid: invalidf("InvalidTemplate", "x")}, "InvalidTemplate", true},
		"model":         {invalid("model path /models/m does not exist"), "ModelInvalid", true},
		"data set":      {invalid("data set /dataset/d.jsonl: line 2 ..."), "DatasetInvalid", true},
		"volume":        {temporary, "InspectionFailed", false},
		"inspecting":    {observation{Inspection: failedInspection}, "Inspecting", false},
		"pod":           {observation{Inspection: failedInspection, Problem: &podhealth.Problem{Reason: "ImagePullFailed", Message: "x"}}, "ImagePullFailed", false},
		"quota":         {observation{Inspection: inspected(), ID: id, Failure: "exceeded quota", Attempts: attempts{Next: 1}}, "ReconcileFailed", false},
		"no deployment": {observation{Inspection: inspected(), ID: id, Deployment: "MoEDeployment m is not ready", Attempts: attempts{Next: 1}}, "WaitingForDeployment", false},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if got := decide(tc.o, start); got.Create != 0 && name != "quota" {
				t.Errorf("decide starts attempt %d, want none", got.Create)
			}
			conditions := conditionsOf(t, statusOf(newProfile(), tc.o, start))
			if got := conditions[semmoev1.ConditionReady]; got.Status != metav1.ConditionFalse || got.Reason != tc.reason {
				t.Errorf("Ready = %+v", got)
			}
			if got := conditions[semmoev1.ConditionStalled]; (got.Status == metav1.ConditionTrue) != tc.stalls {
				t.Errorf("Stalled = %+v", got)
			}
		})
	}
}

// conditionsOf checks that each condition is present, and returns the conditions by type.
func conditionsOf(t *testing.T, status semmoev1.AffinityProfileStatus) map[string]metav1.Condition {
	t.Helper()
	all := map[string]metav1.Condition{}
	for _, c := range status.Conditions {
		if c.ObservedGeneration != 1 || c.Reason == "" || c.Message == "" {
			t.Errorf("condition %+v", c)
		}
		all[c.Type] = c
	}
	if len(all) != 5 {
		t.Errorf("%d conditions, want 5", len(all))
	}
	return all
}

func TestObsoleteAttempts(t *testing.T) {
	ours := newProfile()
	jobs := []*batchv1.Job{job(ours, 2, failed("")), job(ours, 10, failed("")), job(ours, 9, failed("")), job(ours, 1, failed(""))}
	a := attemptsOf(ours, jobs, nil)
	var names []string
	for _, j := range a.Obsolete {
		names = append(names, j.Name)
	}
	if diff := cmp.Diff([]string{jobName(id, 2), jobName(id, 1)}, names); diff != "" || a.Next != 11 {
		t.Errorf("next attempt %d, obsolete (-want +got):\n%s", a.Next, diff)
	}
}

func TestWaitsFor(t *testing.T) {
	ready := func() *semmoev1.MoEDeployment {
		return &semmoev1.MoEDeployment{
			ObjectMeta: metav1.ObjectMeta{Generation: 2},
			Spec:       semmoev1.MoEDeploymentSpec{Replicas: ptr.To[int32](2)},
			Status: semmoev1.MoEDeploymentStatus{
				ObservedGeneration: 2, Replicas: 2, ReadyReplicas: 2, UpdatedReplicas: 2, Model: &semmoev1.ModelStatus{Digest: "model"},
				Conditions: []metav1.Condition{{Type: semmoev1.ConditionReady, Status: metav1.ConditionTrue}},
			},
		}
	}
	for name, tc := range map[string]struct {
		change func(*semmoev1.MoEDeployment)
		want   string
	}{
		"ready":          {func(*semmoev1.MoEDeployment) {}, ""},
		"not ready":      {func(m *semmoev1.MoEDeployment) { m.Status.Conditions[0].Status = metav1.ConditionFalse }, "is not ready"},
		"just changed":   {func(m *semmoev1.MoEDeployment) { m.Generation = 3 }, "is not ready"},
		"scaled to zero": {func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](0) }, "no replicas"},
		"another model":  {func(m *semmoev1.MoEDeployment) { m.Status.Model.Digest = "other" }, "does not serve the model"},
		"paused":         {func(m *semmoev1.MoEDeployment) { m.Spec.Reconciliation = semmoev1.ReconciliationPaused }, "is paused"},
		"one not ready":  {func(m *semmoev1.MoEDeployment) { m.Status.ReadyReplicas, m.Status.UpdatedReplicas = 1, 1 }, ""},
		"one refused": {func(m *semmoev1.MoEDeployment) {
			m.Status.Replicas, m.Status.ReadyReplicas, m.Status.UpdatedReplicas = 1, 1, 1
		}, ""},
		"rolling out": {func(m *semmoev1.MoEDeployment) { m.Status.UpdatedReplicas = 1 }, "rolling out"},
		"surging": {func(m *semmoev1.MoEDeployment) {
			m.Status.Replicas, m.Status.ReadyReplicas, m.Status.UpdatedReplicas = 3, 3, 3
		}, "rolling out"},
	} {
		m := ready()
		tc.change(m)
		if got := waitsFor(semmoev1.ProfilingTargetServing, "m", m, "model"); tc.want == "" && got != "" || !strings.Contains(got, tc.want) {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
	unready := ready()
	unready.Status.Conditions[0].Status = metav1.ConditionFalse
	if got := waitsFor(semmoev1.ProfilingTargetDedicated, "m", unready, "model"); got != "" {
		t.Errorf("a dedicated engine waits: %q, want no reason", got)
	}
	unready.Spec.Reconciliation = semmoev1.ReconciliationPaused
	if got := waitsFor(semmoev1.ProfilingTargetDedicated, "m", unready, "model"); !strings.Contains(got, "is paused") {
		t.Errorf("a dedicated engine of a paused deployment waits: %q, want a pause", got)
	}
	if got := waitsFor(semmoev1.ProfilingTargetServing, "m", nil, "model"); !strings.Contains(got, `MoEDeployment "m" does not exist`) {
		t.Errorf("missing deployment: %q", got)
	}
}

// TestSpoiled checks the states of a deployment in which a running Job is stopped: it serves another model, another
// owner controls the Service, or the Service selects engines with permuted expert IDs.
func TestSpoiled(t *testing.T) {
	const model = "model"
	engine := func(deployment string, realization semmoev1.Realization) client.Object {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: "team", Name: deployment + "-" + strings.ToLower(string(realization)),
			Labels:      map[string]string{semmoev1.LabelDeployment: deployment, semmoev1.LabelComponent: semmoev1.ComponentEngine},
			Annotations: map[string]string{semmoev1.AnnotationRealization: string(realization)},
		}}
	}
	service := func(component string) client.Object {
		return &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "m", OwnerReferences: ownership.ControllerReference(&metav1.ObjectMeta{Name: "m", UID: "uid"}, "MoEDeployment")},
			Spec:       corev1.ServiceSpec{Selector: map[string]string{semmoev1.LabelComponent: component}},
		}
	}
	permuted, mapped := engine("m", semmoev1.RealizationReshuffledWeights), engine("m", semmoev1.RealizationEngineMap)
	other := engine("other", semmoev1.RealizationReshuffledWeights)
	toRouter, toEngines := service(semmoev1.ComponentRouter), service(semmoev1.ComponentEngine)
	foreign, another := service(semmoev1.ComponentRouter), service(semmoev1.ComponentRouter)
	foreign.SetOwnerReferences(nil)
	another.SetOwnerReferences(ownership.ControllerReference(&metav1.ObjectMeta{Name: "another", UID: "other"}, "MoEDeployment"))
	for name, tc := range map[string]struct {
		mode    semmoev1.RoutingMode
		model   string
		objects []client.Object
		want    string
	}{
		"router in front":               {semmoev1.RoutingModeRouter, model, []client.Object{toRouter, permuted}, ""},
		"router not ready yet":          {semmoev1.RoutingModeRouter, model, []client.Object{toEngines, permuted}, "reshuffled weights"},
		"no Service yet":                {semmoev1.RoutingModeRouter, model, []client.Object{mapped}, "does not control a Service m"},
		"Service of another owner":      {semmoev1.RoutingModeRouter, model, []client.Object{foreign, mapped}, "does not control a Service m"},
		"Service of another deployment": {semmoev1.RoutingModeNone, model, []client.Object{another, mapped}, "does not control a Service m"},
		"router to be removed":          {semmoev1.RoutingModeNone, model, []client.Object{toRouter, permuted}, "spec.routing.mode to Router"},
		"Gateway without translation":   {semmoev1.RoutingModeEndpointPicker, model, []client.Object{toEngines, permuted, mapped}, "target Dedicated"},
		"engines with an expert map":    {semmoev1.RoutingModeNone, model, []client.Object{toEngines, mapped, other}, ""},
		"another model":                 {semmoev1.RoutingModeRouter, "another", []client.Object{toRouter, mapped}, "does not serve the model"},
		"unknown model":                 {semmoev1.RoutingModeRouter, "", []client.Object{toRouter, mapped}, ""},
	} {
		moed := &semmoev1.MoEDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "m", UID: "uid"}}
		moed.Spec.Routing.Mode = tc.mode
		if tc.model != "" {
			moed.Status.Model = &semmoev1.ModelStatus{Digest: tc.model}
		}
		r := &Reconciler{Client: fake.NewClientBuilder().WithObjects(tc.objects...).Build()}
		got, unseen, err := r.spoiled(t.Context(), moed, model)
		if err != nil || (got == "") != (tc.want == "") || !strings.Contains(got, tc.want) {
			t.Errorf("%s: %q, %v, want %q", name, got, err, tc.want)
		}
		if want := tc.want != "" && tc.model == model; unseen != want { // the status of the deployment reports a new model
			t.Errorf("%s: unseen = %v, want %v", name, unseen, want)
		}
	}
}

// TestInspectionOutdated checks that inputs that changed since the inspection are inspected again, once.
func TestInspectionOutdated(t *testing.T) {
	p := newProfile()
	at := func(j *batchv1.Job, after time.Duration) *batchv1.Job {
		j.CreationTimestamp = metav1.NewTime(start.Add(after))
		return j
	}
	attempt := job(p, 1, failed("")) // created at start
	before, after := at(&batchv1.Job{}, -time.Minute), at(&batchv1.Job{}, 0)
	changed := attemptsOf(p, []*batchv1.Job{attempt}, []*corev1.Pod{podOf(attempt, exitInputs, "the data set has changed")})
	crashed := attemptsOf(p, []*batchv1.Job{attempt}, []*corev1.Pod{podOf(attempt, exitEngine, "the engine died")})
	cases := map[string]struct {
		inspected *batchv1.Job
		a         attempts
		want      bool
	}{
		"inspected before": {before, changed, true},
		"inspected since":  {after, changed, false},
		"not inspected":    {nil, changed, false},
		"another failure":  {before, crashed, false},
		"no attempt yet":   {before, attempts{Next: 1}, false},
	}
	for name, tc := range cases {
		if got := inspectionOutdated(tc.inspected, tc.a); got != tc.want {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}

// TestObserveProgressIsSlow checks that the progress is updated at most every ten seconds after the last write.
func TestObserveProgressIsSlow(t *testing.T) {
	known := &semmoev1.ProfileProgress{RequestsDone: 3, RequestsTotal: 10}
	p := newProfile(func(p *semmoev1.AffinityProfile) {
		p.Status.Progress = known
		p.ManagedFields = []metav1.ManagedFieldsEntry{
			{Manager: "other", Subresource: "status", Time: &metav1.Time{Time: start.Add(time.Hour)}},
			{Manager: manager, Subresource: "status", Time: &metav1.Time{Time: start}},
		}
	})
	r := &Reconciler{} // no HTTP client: a request would panic
	if got := r.observeProgress(t.Context(), p, []*corev1.Pod{{Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "192.0.2.1"}}}, start.Add(progressPeriod-time.Second)); got != known {
		t.Errorf("progress %+v", got)
	}
	if got := r.observeProgress(t.Context(), p, nil, start.Add(progressPeriod)); got != nil {
		t.Errorf("progress without a pod = %+v, want nil", got)
	}
}
