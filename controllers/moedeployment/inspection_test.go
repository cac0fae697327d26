package moedeployment

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

func job(attempt int, condition batchv1.JobConditionType) *batchv1.Job {
	j := inspectionJob(deployment(), "semmoe:1", attempt)
	j.UID = types.UID(j.Name)
	if condition != "" {
		j.Status.Conditions = []batchv1.JobCondition{{
			Type: condition, Status: corev1.ConditionTrue, Message: "because", LastTransitionTime: metav1.NewTime(start),
		}}
	}
	return j
}

func podOf(j *batchv1.Job, exitCode int32, message string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: j.Name + "-x", OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(j, batchv1.SchemeGroupVersion.WithKind("Job"))}},
		Status: corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{
			State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: exitCode, Message: message}},
		}}},
	}
}

func TestObserveInspection(t *testing.T) {
	found := report()
	text, err := json.Marshal(found)
	if err != nil {
		t.Fatal(err)
	}
	running, complete, failed1, failed2, second := job(1, ""), job(1, batchv1.JobComplete), job(1, batchv1.JobFailed), job(2, batchv1.JobFailed), job(2, "")
	recorded := job(1, batchv1.JobComplete)
	recorded.Annotations = map[string]string{semmoev1.AnnotationReport: string(text)}
	elsewhere := job(1, batchv1.JobComplete)
	elsewhere.Name, elsewhere.Labels = "m-inspect-other-1", map[string]string{semmoev1.LabelInputs: "other"}

	cases := map[string]struct {
		jobs []*batchv1.Job
		pods []*corev1.Pod
		want inspection
	}{
		"nothing yet":                      {nil, nil, inspection{NextAttempt: 1}},
		"at work":                          {[]*batchv1.Job{running}, nil, inspection{Running: running}},
		"done, not recorded":               {[]*batchv1.Job{complete}, []*corev1.Pod{podOf(complete, 0, string(text))}, inspection{Report: &found, Unrecorded: complete}},
		"recorded, pod and old Jobs gone":  {[]*batchv1.Job{recorded, elsewhere}, nil, inspection{Report: &found, Obsolete: []*batchv1.Job{elsewhere}}},
		"done, but the pod went before it": {[]*batchv1.Job{complete}, nil, inspection{NextAttempt: 2}},
		"the model is at fault": {
			[]*batchv1.Job{failed1}, []*corev1.Pod{podOf(failed1, 3, "no such directory\n")},
			inspection{Failure: "no such directory", Invalid: true, NextAttempt: 2, NextAt: start.Add(10 * time.Second)},
		},
		"something else is": {
			[]*batchv1.Job{failed2, failed1}, []*corev1.Pod{podOf(failed2, 1, "i/o error")},
			inspection{Failure: "i/o error", NextAttempt: 3, NextAt: start.Add(20 * time.Second), Obsolete: []*batchv1.Job{failed1}},
		},
		"failed, and the pod is gone": {
			[]*batchv1.Job{failed1}, nil,
			inspection{Failure: "the inspection Job failed: because", NextAttempt: 2, NextAt: start.Add(10 * time.Second)},
		},
		"tried again: the failure stays known": {
			[]*batchv1.Job{failed1, second}, []*corev1.Pod{podOf(failed1, 3, "no such directory")},
			inspection{Running: second, Failure: "no such directory", Invalid: true, Obsolete: []*batchv1.Job{}},
		},
		"a Job with other inputs says nothing": {[]*batchv1.Job{elsewhere}, nil, inspection{NextAttempt: 1}},
	}
	inputs := inspectionInputsOf(deployment()).hash()
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got := observeInspection(inputs, tc.jobs, tc.pods)
			if len(got.Obsolete) == 0 {
				got.Obsolete = tc.want.Obsolete
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("inspection (-want +got):\n%s", diff)
			}
		})
	}
}

func TestBackOff(t *testing.T) {
	for attempt, want := range map[int]time.Duration{1: 10 * time.Second, 2: 20 * time.Second, 3: 40 * time.Second, 4: time.Minute, 10: time.Minute, 11: 5 * time.Minute, 99: 5 * time.Minute} {
		if got := backOff(attempt); got != want {
			t.Errorf("after %d failures: %v, want %v", attempt, got, want)
		}
	}
}
