// SPDX-License-Identifier: Apache-2.0

package affinityprofile

import (
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/profile/inspection"
)

const id = "0123456789abcdef"

// start is the start time of these tests.
var start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func newProfile(change ...func(*semmoev1.AffinityProfile)) *semmoev1.AffinityProfile {
	p := &semmoev1.AffinityProfile{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "p", UID: "p-uid", Generation: 1},
		Spec: semmoev1.AffinityProfileSpec{
			Model:  semmoev1.ModelSpec{Path: "/models/m", Volume: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/srv/models"}}},
			Engine: semmoev1.EngineSpec{Type: semmoev1.EngineSGLang, Image: "engine:1", Port: 30000},
			Parallelism: semmoev1.ParallelismSpec{
				Attention: semmoev1.AttentionDataParallel, ExpertParallelSize: 4, ResourceName: "nvidia.com/gpu",
			},
			Dataset:      &semmoev1.DatasetSpec{ConfigMap: &semmoev1.DatasetConfigMap{Name: "d", Key: "d.jsonl"}},
			SamplingSpec: semmoev1.SamplingSpec{Requests: 2000, Tokens: 200000, RequestTokens: 512},
			Target:       semmoev1.ProfilingTargetDedicated,
		},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func serving(p *semmoev1.AffinityProfile) {
	p.Spec.Target, p.Spec.DeploymentRef = semmoev1.ProfilingTargetServing, &semmoev1.DeploymentReference{Name: "m"}
}

// job returns the Job of an attempt of a profile. It is running unless changed.
func job(owner *semmoev1.AffinityProfile, attempt int, change ...func(*batchv1.Job)) *batchv1.Job {
	j, err := render(owner, target{ID: id, ModelDigest: "model", DatasetDigest: "dataset", Image: "semmoe:1"}, attempt)
	if err != nil {
		panic(err) // the fixtures are valid
	}
	j.UID = types.UID(owner.Name + j.Name)
	for _, c := range change {
		c(j)
	}
	return j
}

func failed(reason string) func(*batchv1.Job) {
	return func(j *batchv1.Job) {
		j.Status.Conditions = []batchv1.JobCondition{{
			Type: batchv1.JobFailed, Status: corev1.ConditionTrue, Reason: reason, Message: "because", LastTransitionTime: metav1.NewTime(start),
		}}
	}
}

func complete(j *batchv1.Job) {
	failed("")(j)
	j.Status.Conditions[0].Type = batchv1.JobComplete
}

func deleted(j *batchv1.Job) { j.DeletionTimestamp = &metav1.Time{Time: start} }

// podOf returns a pod of a Job whose profiling container terminated.
func podOf(j *batchv1.Job, exitCode int32, message string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: j.Name + "-x", OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(j, batchv1.SchemeGroupVersion.WithKind("Job"))}},
		Status: corev1.PodStatus{Phase: corev1.PodFailed, ContainerStatuses: []corev1.ContainerStatus{{
			Name: profileContainer, State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: exitCode, Message: message}},
		}}},
	}
}

// crashing returns a pod of a Job whose engine was restarted.
func crashing(j *batchv1.Job, restarts int32) *corev1.Pod {
	p := podOf(j, 0, "")
	p.Status.Phase = corev1.PodRunning
	p.Status.ContainerStatuses[0].State = corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	p.Status.InitContainerStatuses = []corev1.ContainerStatus{{
		Name: semmoev1.EngineContainer, RestartCount: restarts,
		State:                corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}},
		LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 2, Message: "trace\nno such flag\n"}},
	}}
	return p
}

// gated returns a pod of a Job that a queue has not admitted.
func gated(j *batchv1.Job) *corev1.Pod {
	p := podOf(j, 0, "")
	p.Status = corev1.PodStatus{Phase: corev1.PodPending}
	p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "kueue.x-k8s.io/admission"}}
	return p
}

// inspected returns the state of a completed inspection.
func inspected() inspection.State {
	return inspection.State{
		Report:  &checkpoint.Report{Family: "qwen3_moe", Layers: 4, MoELayers: []int{1, 2, 3}, Experts: 32, ExpertsPerToken: 4, ModelDigest: "model"},
		Dataset: &inspection.DatasetReport{Digest: "dataset", Requests: 10},
	}
}
