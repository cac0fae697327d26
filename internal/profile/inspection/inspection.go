// SPDX-License-Identifier: Apache-2.0

package inspection

import (
	"encoding/json"
	"fmt"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/jobstate"
	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/internal/kube/podsecurity"
	"github.com/semmoe/operator/internal/model/checkpoint"
)

// exitInvalid is the exit code of `semmoe inspect` for an invalid model or data set.
const exitInvalid = 3

// Report is the JSON output of `semmoe inspect`: the report on the checkpoint, and on the data set if there is one.
type Report struct {
	checkpoint.Report
	Dataset *DatasetReport `json:"dataset,omitempty"`
}

// DatasetReport is the result of the inspection of a data set.
type DatasetReport struct {
	// Digest is the sha256 of the file, in hexadecimal.
	Digest string `json:"digest"`
	// Requests is the number of requests, and Bytes is the size of the file.
	Requests int   `json:"requests"`
	Bytes    int64 `json:"bytes"`
}

// Inputs are the inputs of an inspection: the files to read, and the scheduling of its pod.
type Inputs struct {
	Path         string                        `json:"path"`
	LayoutAs     string                        `json:"layoutAs,omitempty"`
	Volume       corev1.VolumeSource           `json:"volume"`
	NodeSelector map[string]string             `json:"nodeSelector,omitempty"`
	Affinity     *corev1.Affinity              `json:"affinity,omitempty"`
	Tolerations  []corev1.Toleration           `json:"tolerations,omitempty"`
	PullSecrets  []corev1.LocalObjectReference `json:"pullSecrets,omitempty"`
	// Dataset is inspected together with the model; nil without a data set.
	Dataset *semmoev1.DatasetSpec `json:"dataset,omitempty"`
}

// InputsOf returns the inputs for a model whose pods follow a template, which may be nil.
func InputsOf(model semmoev1.ModelSpec, template *corev1.PodTemplateSpec) Inputs {
	inputs := Inputs{Path: model.Path, LayoutAs: model.LayoutAs, Volume: model.ModelVolume()}
	if template != nil {
		inputs.NodeSelector = template.Spec.NodeSelector
		inputs.Affinity = template.Spec.Affinity
		inputs.Tolerations = template.Spec.Tolerations
		inputs.PullSecrets = template.Spec.ImagePullSecrets
	}
	return inputs
}

// Hash returns a short hash of the inputs.
func (i Inputs) Hash() string { return ownership.ShortHash(i, 8) }

// State is the state of an inspection, derived from its Jobs and pods.
type State struct {
	// Report is the report on the checkpoint, and Dataset is the report on the data set. Both are nil until there is a
	// result. Dataset is also nil without a data set.
	Report  *checkpoint.Report
	Dataset *DatasetReport
	// Recorded is the Job with the report in an annotation; nil until it is recorded. If the Job is deleted, the
	// inspection is repeated.
	Recorded *batchv1.Job
	// Unrecorded is the Job whose pod contains the report, while the annotation of the Job does not.
	Unrecorded *batchv1.Job
	// Running is the running Job.
	Running *batchv1.Job
	// Failure is the message of the last failure. Invalid is true if the model or the data set is invalid, so that only
	// a change of the model, the data set or the spec helps.
	Failure string
	Invalid bool
	// NextAttempt is the number of the Job to create, not before NextAt; 0 if no Job is needed.
	NextAttempt int
	NextAt      time.Time
	// Obsolete are Jobs to delete.
	Obsolete []*batchv1.Job
}

// Model returns the part of the report for a status; nil without a report.
func (s State) Model() *semmoev1.ModelStatus {
	if s.Report == nil {
		return nil
	}
	return &semmoev1.ModelStatus{
		Digest:          s.Report.ModelDigest,
		Family:          s.Report.Family,
		Layers:          int32(s.Report.Layers),
		MoELayers:       int32(len(s.Report.MoELayers)),
		Experts:         int32(s.Report.Experts),
		ExpertsPerToken: int32(s.Report.ExpertsPerToken),
		Unprofilable:    s.Report.Unprofilable,
		Unmappable:      s.Report.Unmappable,
		Unpermutable:    s.Report.Unpermutable,
	}
}

// Observe derives the state of the inspection with these inputs from its Jobs and their pods. A failed Job is kept
// until the next attempt ends, to record the number of attempts.
func Observe(inputs string, jobs []*batchv1.Job, pods []*corev1.Pod) State {
	task := jobstate.Task{Name: "inspection", Inputs: inputs, ExitInvalid: exitInvalid, Valid: func(report string) bool {
		var state State
		state.setReport(report)
		return state.Report != nil
	}}
	found := task.Observe(jobs, pods)
	state := State{
		Recorded: found.Recorded, Unrecorded: found.Unrecorded, Running: found.Running, Failure: found.Failure, Invalid: found.Invalid,
		NextAttempt: found.NextAttempt, NextAt: found.NextAt, Obsolete: found.Obsolete,
	}
	state.setReport(found.Report)
	return state
}

// setReport sets the report from a text. It ignores an invalid text.
func (s *State) setReport(text string) {
	var report Report
	if json.Unmarshal([]byte(text), &report) == nil && report.ModelDigest != "" {
		s.Report, s.Dataset = &report.Report, report.Dataset
	}
}

// Job returns a Job that reads the headers of the checkpoint, and the data set. It needs no device, so that no device
// is used for a model that cannot be served. The name of the Job is prefix-hash-attempt. objectLabels must contain the
// hash of the inputs in LabelInputs.
func Job(namespace, prefix string, owners []metav1.OwnerReference, objectLabels map[string]string, inputs Inputs, image string, pull corev1.PullPolicy, attempt int) *batchv1.Job {
	args := []string{"inspect", "--model-path", inputs.Path}
	if inputs.LayoutAs != "" {
		args = append(args, "--layout-as", inputs.LayoutAs)
	}
	volumes := []corev1.Volume{{Name: "model", VolumeSource: inputs.Volume}}
	mounts := []corev1.VolumeMount{{Name: "model", MountPath: semmoev1.ModelMountPath, ReadOnly: true}}
	if inputs.Dataset != nil {
		dataset := DatasetMount(*inputs.Dataset)
		args = append(args, "--dataset", dataset.Path)
		volumes, mounts = append(volumes, dataset.Volumes...), append(mounts, dataset.Mounts...)
	}
	return &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:       namespace,
			Name:            fmt.Sprintf("%s-%s-%d", prefix, inputs.Hash(), attempt),
			Labels:          objectLabels,
			OwnerReferences: owners,
		},
		Spec: batchv1.JobSpec{
			BackoffLimit:     ptr.To[int32](0),
			PodFailurePolicy: jobstate.FailurePolicy("inspect", exitInvalid),
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: objectLabels},
				Spec: corev1.PodSpec{
					RestartPolicy:                corev1.RestartPolicyNever,
					AutomountServiceAccountToken: ptr.To(false),
					EnableServiceLinks:           ptr.To(false),
					NodeSelector:                 inputs.NodeSelector,
					Affinity:                     inputs.Affinity,
					Tolerations:                  inputs.Tolerations,
					ImagePullSecrets:             inputs.PullSecrets,
					SecurityContext:              podsecurity.Pod(),
					Containers: []corev1.Container{{
						Name:                     "inspect",
						Image:                    image,
						ImagePullPolicy:          pull,
						Args:                     args,
						SecurityContext:          podsecurity.Container(),
						TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
						Resources: corev1.ResourceRequirements{
							Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("50m"), corev1.ResourceMemory: resource.MustParse("64Mi")},
							Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("512Mi")},
						},
						VolumeMounts: mounts,
					}},
					Volumes: volumes,
				},
			},
		},
	}
}
