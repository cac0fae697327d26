// SPDX-License-Identifier: Apache-2.0

// Package download downloads the checkpoint of a MoEDeployment to its volume by a Job, before the model is inspected.
//
// Invariants:
//   - The state is derived from the Jobs and their pods. A complete Job keeps its result in an annotation.
//   - Each MoEDeployment has its own Job. Jobs of several MoEDeployments with the same claim and path exclude each other by a
//     lock on the volume, and all except the first one find the complete download (package internal/model/hub).
//   - The access token is only in the environment of the Job, from its Secret. The operator does not read the Secret.
package download

import (
	"encoding/json"
	"fmt"
	"strings"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/kube/jobstate"
	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/internal/kube/podsecurity"
	"github.com/semmoe/operator/internal/model/hub/report"
)

const (
	// exitInvalid is the exit code of `semmoe download` for a repository or a directory that another attempt cannot use.
	exitInvalid = 3
	// seconds is the time limit of an attempt: two days. The next attempt resumes.
	seconds = 2 * 24 * 3600
	// tokenVariable is the environment variable with the access token.
	tokenVariable = "HF_TOKEN"
	// ProgressPort is the port on which the Job reports its progress.
	ProgressPort = 9090
)

// inputs are the inputs of a download, and the scheduling of its pod. Their hash names the Job.
type inputs struct {
	Source       semmoev1.HuggingFaceSource    `json:"source"`
	Claim        string                        `json:"claim"`
	Path         string                        `json:"path"`
	NodeSelector map[string]string             `json:"nodeSelector,omitempty"`
	Affinity     *corev1.Affinity              `json:"affinity,omitempty"`
	Tolerations  []corev1.Toleration           `json:"tolerations,omitempty"`
	PullSecrets  []corev1.LocalObjectReference `json:"pullSecrets,omitempty"`
	Security     *corev1.PodSecurityContext    `json:"security,omitempty"`
}

// wanted reports whether the spec requests a download.
func wanted(moed *semmoev1.MoEDeployment) bool {
	source := moed.Spec.Model.Source
	return source != nil && source.HuggingFace != nil && moed.Spec.Model.Volume.PersistentVolumeClaim != nil
}

func inputsOf(moed *semmoev1.MoEDeployment) inputs {
	i := inputs{Source: *moed.Spec.Model.Source.HuggingFace, Claim: moed.Spec.Model.Volume.PersistentVolumeClaim.ClaimName, Path: moed.Spec.Model.Path}
	if template := moed.Spec.Template; template != nil {
		i.NodeSelector, i.Affinity, i.Tolerations, i.PullSecrets = template.Spec.NodeSelector, template.Spec.Affinity, template.Spec.Tolerations, template.Spec.ImagePullSecrets
		i.Security = userOf(template.Spec.SecurityContext)
	}
	return i
}

// userOf returns the part of a security context that determines which files a pod may write; nil if it is empty. A pod
// that runs as root is not restricted, so the download of its model runs as the user of the image.
func userOf(given *corev1.PodSecurityContext) *corev1.PodSecurityContext {
	if given == nil {
		return nil
	}
	user := &corev1.PodSecurityContext{FSGroup: given.FSGroup, FSGroupChangePolicy: given.FSGroupChangePolicy, SupplementalGroups: given.SupplementalGroups, SELinuxOptions: given.SELinuxOptions}
	if ptr.Deref(given.RunAsUser, 0) != 0 {
		user.RunAsUser, user.RunAsGroup = given.RunAsUser, given.RunAsGroup
	}
	if user.FSGroup == nil && user.SupplementalGroups == nil && user.SELinuxOptions == nil && user.RunAsUser == nil {
		return nil
	}
	return user
}

// State is the state of a download.
type State struct {
	jobstate.Attempts
	// Wanted reports whether the spec requests a download.
	Wanted bool
	// Result is the result; nil until there is one.
	Result *report.Result
	// Progress is the progress of the running Job; nil if unknown.
	Progress *report.Progress
}

// Complete reports whether the checkpoint is on its volume, or nothing has to be downloaded.
func (s State) Complete() bool { return !s.Wanted || s.Result != nil }

// Observe derives the state of the download that the spec requests from the download Jobs and their pods. Jobs with other
// inputs are obsolete: they write to the same volume.
func Observe(moed *semmoev1.MoEDeployment, jobs []*batchv1.Job, pods []*corev1.Pod) State {
	if !wanted(moed) {
		return State{Attempts: jobstate.Attempts{Obsolete: jobs}}
	}
	task := jobstate.Task{Name: "download", Inputs: ownership.ShortHash(inputsOf(moed), 8), ExitInvalid: exitInvalid, Valid: func(text string) bool { return resultOf(text) != nil }}
	var ours, others []*batchv1.Job
	for _, job := range jobs {
		if job.Labels[semmoev1.LabelInputs] == task.Inputs {
			ours = append(ours, job)
		} else if job.DeletionTimestamp == nil {
			others = append(others, job)
		}
	}
	state := State{Attempts: task.Observe(ours, pods), Wanted: true}
	state.Obsolete = append(others, state.Obsolete...)
	state.Result = resultOf(state.Report)
	return state
}

func resultOf(text string) *report.Result {
	var result report.Result
	if json.Unmarshal([]byte(text), &result) != nil || result.Commit == "" {
		return nil
	}
	return &result
}

// Status returns the state for a status; nil while nothing is known. previous is the last one.
func (s State) Status(previous *semmoev1.DownloadStatus) *semmoev1.DownloadStatus {
	switch p := s.Progress; {
	case !s.Wanted:
		return nil
	case s.Result != nil:
		files := int32(s.Result.Files)
		return &semmoev1.DownloadStatus{Commit: s.Result.Commit, Bytes: s.Result.Bytes, TotalBytes: s.Result.Bytes, Files: files, TotalFiles: files}
	case p != nil && p.TotalFiles > 0:
		return &semmoev1.DownloadStatus{Bytes: p.Bytes, TotalBytes: p.TotalBytes, Files: int32(p.Files), TotalFiles: int32(p.TotalFiles)}
	case previous != nil && previous.Commit == "":
		return previous
	}
	return nil
}

// Text describes an incomplete download with this status.
func (s State) Text(moed *semmoev1.MoEDeployment, status *semmoev1.DownloadStatus) string {
	source := moed.Spec.Model.Source.HuggingFace
	text := fmt.Sprintf("Revision %s of %s is being downloaded to %s of claim %s", source.Revision, source.Repo, moed.Spec.Model.Path, moed.Spec.Model.Volume.PersistentVolumeClaim.ClaimName)
	switch {
	case s.Progress != nil && s.Progress.Phase == report.Waiting:
		text += ". The Job waits for another download into the same directory"
	case status != nil:
		text += fmt.Sprintf(": %.1f of %.1f GB", gigabytes(status.Bytes), gigabytes(status.TotalBytes))
	}
	return text
}

func gigabytes(bytes int64) float64 { return float64(bytes) / 1e9 }

// Job returns the Job of an attempt. Its pod meets the restricted pod security standard.
func Job(moed *semmoev1.MoEDeployment, image string, pull corev1.PullPolicy, attempt int) *batchv1.Job {
	in := inputsOf(moed)
	hash := ownership.ShortHash(in, 8)
	labels := desired.Labels(moed, semmoev1.ComponentDownload, semmoev1.LabelInputs, hash)
	security := podsecurity.Pod()
	if in.Security != nil {
		in.Security.RunAsNonRoot, in.Security.SeccompProfile = security.RunAsNonRoot, security.SeccompProfile
		security = in.Security
	}
	env := []corev1.EnvVar{{Name: desired.PodIPVariable, ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "status.podIP"}}}}
	if token := in.Source.TokenSecretRef; token != nil {
		env = append(env, corev1.EnvVar{Name: tokenVariable, ValueFrom: &corev1.EnvVarSource{
			SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: token.Name}, Key: token.Key},
		}})
	}
	return &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: moed.Namespace, Name: fmt.Sprintf("%s-download-%s-%d", moed.Name, hash, attempt),
			Labels: labels, OwnerReferences: ownership.ControllerReference(moed, "MoEDeployment"),
		},
		Spec: batchv1.JobSpec{
			BackoffLimit:     ptr.To[int32](0),
			PodFailurePolicy: jobstate.FailurePolicy(semmoev1.ComponentDownload, exitInvalid),
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{
					RestartPolicy:                corev1.RestartPolicyNever,
					ActiveDeadlineSeconds:        ptr.To[int64](seconds),
					AutomountServiceAccountToken: ptr.To(false),
					EnableServiceLinks:           ptr.To(false),
					NodeSelector:                 in.NodeSelector,
					Affinity:                     in.Affinity,
					Tolerations:                  in.Tolerations,
					ImagePullSecrets:             in.PullSecrets,
					SecurityContext:              security,
					Containers: []corev1.Container{{
						Name:            semmoev1.ComponentDownload,
						Image:           image,
						ImagePullPolicy: pull,
						Args: []string{
							"download", "--repo=" + in.Source.Repo, "--revision=" + in.Source.Revision, "--endpoint=" + in.Source.Endpoint,
							"--out=" + strings.TrimRight(in.Path, "/"), fmt.Sprintf("--progress-address=$(%s):%d", desired.PodIPVariable, ProgressPort),
						},
						Env:                      env,
						Ports:                    []corev1.ContainerPort{{Name: "progress", ContainerPort: ProgressPort, Protocol: corev1.ProtocolTCP}},
						SecurityContext:          podsecurity.Container(),
						TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
						Resources: corev1.ResourceRequirements{
							Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("200m"), corev1.ResourceMemory: resource.MustParse("128Mi")},
							Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("512Mi")},
						},
						VolumeMounts: []corev1.VolumeMount{{Name: "model", MountPath: semmoev1.ModelMountPath}},
					}},
					Volumes: []corev1.Volume{{Name: "model", VolumeSource: corev1.VolumeSource{
						PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: in.Claim},
					}}},
				},
			},
		},
	}
}
