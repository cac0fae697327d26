// SPDX-License-Identifier: Apache-2.0

package jobstate

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func TestBackOff(t *testing.T) {
	for attempt, want := range map[int]time.Duration{1: 10 * time.Second, 2: 20 * time.Second, 3: 40 * time.Second, 4: time.Minute, 10: time.Minute, 11: 5 * time.Minute, 99: 5 * time.Minute} {
		if got := BackOff(attempt); got != want {
			t.Errorf("after %d failures: %v, want %v", attempt, got, want)
		}
	}
}

// A delay is bounded even if the clock is behind: it may be corrected during the delay.
func TestDelayOfTheNextAttempt(t *testing.T) {
	failed := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	attempts := Attempts{NextAttempt: 2, NextAt: failed.Add(BackOff(1))}
	for behind, want := range map[time.Duration]time.Duration{0: BackOff(1), 6 * time.Hour: maxBackOff} {
		newJob := func(int) *batchv1.Job { t.Error("a Job is created too early"); return nil }
		if ordered, again := attempts.Writes(newJob, failed.Add(-behind)); len(ordered) > 0 || again != want {
			t.Errorf("clock behind by %v: writes %v, again in %v; want none, and %v", behind, ordered, again, want)
		}
	}
}

func TestAttempt(t *testing.T) {
	for name, want := range map[string]int{"profile-0123456789abcdef-1": 1, "a-inspect-12-34": 34, "a-b": 0, "a": 0, "7": 7, "a-": 0} {
		if got := Attempt(&batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: name}}); got != want {
			t.Errorf("%s: attempt %d, want %d", name, got, want)
		}
	}
}

func TestFinished(t *testing.T) {
	job := &batchv1.Job{Status: batchv1.JobStatus{Conditions: []batchv1.JobCondition{
		{Type: batchv1.JobFailureTarget, Status: corev1.ConditionTrue},
		{Type: batchv1.JobFailed, Status: corev1.ConditionTrue, Message: "because"},
		{Type: batchv1.JobComplete, Status: corev1.ConditionFalse},
	}}}
	if c := Finished(job, batchv1.JobFailed); c == nil || c.Message != "because" {
		t.Errorf("condition %+v", c)
	}
	if c := Finished(job, batchv1.JobComplete); c != nil {
		t.Errorf("a condition that is False counts: %+v", c)
	}
}

// The newest terminated pod of the Job determines the result.
func TestTerminated(t *testing.T) {
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: "j", UID: "1"}}
	other := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: "j", UID: "2"}}
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	pod := func(owner *batchv1.Job, age time.Duration, state corev1.ContainerState) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				CreationTimestamp: metav1.NewTime(now.Add(-age)),
				OwnerReferences:   []metav1.OwnerReference{*metav1.NewControllerRef(owner, batchv1.SchemeGroupVersion.WithKind("Job"))},
			},
			Status: corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{State: state}}},
		}
	}
	ended := func(code int32, message string) corev1.ContainerState {
		return corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Message: message}}
	}
	cases := map[string]struct {
		pods    []*corev1.Pod
		code    int32
		message string
	}{
		"none":            {nil, 0, ""},
		"runs":            {[]*corev1.Pod{pod(job, 0, corev1.ContainerState{Running: &corev1.ContainerStateRunning{}})}, 0, ""},
		"not started":     {[]*corev1.Pod{{ObjectMeta: metav1.ObjectMeta{OwnerReferences: pod(job, 0, corev1.ContainerState{}).OwnerReferences}}}, 0, ""},
		"ended":           {[]*corev1.Pod{pod(job, 0, ended(3, " bad line\n"))}, 3, "bad line"},
		"of another Job":  {[]*corev1.Pod{pod(other, 0, ended(3, "bad line"))}, 0, ""},
		"evicted, and so": {[]*corev1.Pod{pod(job, 2*time.Minute, ended(143, "stopped")), pod(job, time.Minute, ended(4, "dead"))}, 4, "dead"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if code, message := ExitCode(job, tc.pods), TerminationMessage(job, tc.pods); code != tc.code || message != tc.message {
				t.Errorf("exit code %d, message %q; want %d, %q", code, message, tc.code, tc.message)
			}
		})
	}
}

func TestFailurePolicy(t *testing.T) {
	rules := FailurePolicy("work", 3, 4).Rules
	want := []batchv1.PodFailurePolicyRule{
		{Action: batchv1.PodFailurePolicyActionIgnore, OnPodConditions: []batchv1.PodFailurePolicyOnPodConditionsPattern{{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue}}},
		{Action: batchv1.PodFailurePolicyActionFailJob, OnExitCodes: &batchv1.PodFailurePolicyOnExitCodesRequirement{
			ContainerName: ptr.To("work"), Operator: batchv1.PodFailurePolicyOnExitCodesOpIn, Values: []int32{3, 4},
		}},
	}
	if diff := cmp.Diff(want, rules); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
