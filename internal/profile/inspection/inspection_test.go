// SPDX-License-Identifier: Apache-2.0

package inspection

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
	"github.com/semmoe/operator/internal/model/checkpoint"
)

var (
	start  = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	inputs = Inputs{
		Path:    "/models/m",
		Volume:  corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/srv/models"}},
		Dataset: &semmoev1.DatasetSpec{ConfigMap: &semmoev1.DatasetConfigMap{Name: "requests", Key: "d.jsonl"}},
	}
)

func job(attempt int, condition batchv1.JobConditionType) *batchv1.Job {
	j := Job("team", "m-inspect", nil, map[string]string{semmoev1.LabelInputs: inputs.Hash()}, inputs, "semmoe:1", "", attempt)
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
	found := checkpoint.Report{Family: "qwen3_moe", Layers: 4, MoELayers: []int{1, 2, 3}, ModelDigest: "abc"}
	dataset := DatasetReport{Digest: "def", Requests: 7, Bytes: 700}
	text, err := json.Marshal(Report{found, &dataset})
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
		want State
	}{
		"nothing yet":            {nil, nil, State{NextAttempt: 1}},
		"running":                {[]*batchv1.Job{running}, nil, State{Running: running}},
		"complete, not recorded": {[]*batchv1.Job{complete}, []*corev1.Pod{podOf(complete, 0, string(text))}, State{Report: &found, Dataset: &dataset, Unrecorded: complete}},
		"recorded, pod deleted":  {[]*batchv1.Job{recorded, elsewhere}, nil, State{Report: &found, Dataset: &dataset, Recorded: recorded, Obsolete: []*batchv1.Job{elsewhere}}},
		"complete, pod deleted":  {[]*batchv1.Job{complete}, nil, State{NextAttempt: 2, NextAt: start.Add(10 * time.Second)}},
		"invalid model": {
			[]*batchv1.Job{failed1}, []*corev1.Pod{podOf(failed1, 3, "no such directory\n")},
			State{Failure: "no such directory", Invalid: true, NextAttempt: 2, NextAt: start.Add(10 * time.Second)},
		},
		"temporary failure": {
			[]*batchv1.Job{failed2, failed1}, []*corev1.Pod{podOf(failed2, 1, "i/o error")},
			State{Failure: "i/o error", NextAttempt: 3, NextAt: start.Add(20 * time.Second), Obsolete: []*batchv1.Job{failed1}},
		},
		"failed, pod deleted": {
			[]*batchv1.Job{failed1}, nil,
			State{Failure: "the inspection Job failed: because", NextAttempt: 2, NextAt: start.Add(10 * time.Second)},
		},
		"retried, failure kept": {
			[]*batchv1.Job{failed1, second}, []*corev1.Pod{podOf(failed1, 3, "no such directory")},
			State{Running: second, Failure: "no such directory", Invalid: true, Obsolete: []*batchv1.Job{}},
		},
		"Job with other inputs": {[]*batchv1.Job{elsewhere}, nil, State{NextAttempt: 1}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got := Observe(inputs.Hash(), tc.jobs, tc.pods)
			if len(got.Obsolete) == 0 {
				got.Obsolete = tc.want.Obsolete
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("inspection (-want +got):\n%s", diff)
			}
		})
	}
}

// TestJobMountsDataset checks that the container mounts only the volume of the data set.
func TestJobMountsDataset(t *testing.T) {
	mount := func(name, path string) corev1.VolumeMount {
		return corev1.VolumeMount{Name: name, MountPath: path, ReadOnly: true}
	}
	cases := map[string]struct {
		dataset *semmoev1.DatasetSpec
		args    []string
		mounts  []corev1.VolumeMount
		source  *corev1.VolumeSource
	}{
		"none": {nil, []string{"inspect", "--model-path", "/models/m"}, []corev1.VolumeMount{mount("model", "/models")}, nil},
		"path": {
			&semmoev1.DatasetSpec{Path: "/models/d.jsonl"},
			[]string{"inspect", "--model-path", "/models/m", "--dataset", "/models/d.jsonl"}, []corev1.VolumeMount{mount("model", "/models")}, nil,
		},
		"ConfigMap": {
			inputs.Dataset,
			[]string{"inspect", "--model-path", "/models/m", "--dataset", "/dataset/d.jsonl"},
			[]corev1.VolumeMount{mount("model", "/models"), mount("dataset", "/dataset")},
			&corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
				LocalObjectReference: corev1.LocalObjectReference{Name: "requests"}, Items: []corev1.KeyToPath{{Key: "d.jsonl", Path: "d.jsonl"}},
			}},
		},
		"claim": {
			&semmoev1.DatasetSpec{PersistentVolumeClaim: &semmoev1.DatasetClaim{ClaimName: "c", Path: "a/d.jsonl"}},
			[]string{"inspect", "--model-path", "/models/m", "--dataset", "/dataset/a/d.jsonl"},
			[]corev1.VolumeMount{mount("model", "/models"), mount("dataset", "/dataset")},
			&corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "c", ReadOnly: true}},
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			i := inputs
			i.Dataset = tc.dataset
			spec := Job("team", "m-inspect", nil, nil, i, "semmoe:1", corev1.PullNever, 1).Spec.Template.Spec
			if diff := cmp.Diff(tc.args, spec.Containers[0].Args); diff != "" {
				t.Errorf("args (-want +got):\n%s", diff)
			}
			if c := spec.Containers[0]; c.Image != "semmoe:1" || c.ImagePullPolicy != corev1.PullNever {
				t.Errorf("image %s, pull policy %s", c.Image, c.ImagePullPolicy)
			}
			if diff := cmp.Diff(tc.mounts, spec.Containers[0].VolumeMounts); diff != "" {
				t.Errorf("mounts (-want +got):\n%s", diff)
			}
			var source *corev1.VolumeSource
			if len(spec.Volumes) > 1 {
				source = &spec.Volumes[1].VolumeSource
			}
			if diff := cmp.Diff(tc.source, source); diff != "" {
				t.Errorf("volume (-want +got):\n%s", diff)
			}
		})
	}
}

// TestHashWithoutDataset checks that inputs without a data set keep the JSON of versions without data sets, so that an
// upgrade repeats no inspection.
func TestHashWithoutDataset(t *testing.T) {
	i := Inputs{Path: "/models", Volume: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/srv"}}}
	text, err := json.Marshal(i)
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"path":"/models","volume":{"hostPath":{"path":"/srv"}}}`; string(text) != want {
		t.Errorf("inputs %s, want %s", text, want)
	}
	if with := inputs.Hash(); with == i.Hash() {
		t.Error("the hash does not depend on the data set")
	}
}

func TestModel(t *testing.T) {
	if got := (State{}).Model(); got != nil {
		t.Errorf("Model without a report = %+v, want nil", got)
	}
	found := checkpoint.Report{Family: "qwen3_moe", Layers: 4, MoELayers: []int{1, 2, 3}, Experts: 32, ExpertsPerToken: 4, ModelDigest: "abc"}
	want := &semmoev1.ModelStatus{Digest: "abc", Family: "qwen3_moe", Layers: 4, MoELayers: 3, Experts: 32, ExpertsPerToken: 4}
	if diff := cmp.Diff(want, State{Report: &found}.Model()); diff != "" {
		t.Error(diff)
	}
}
