package moedeployment

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/checkpoint"
)

// exitInvalid is the exit code by which `semmoe inspect` says that the model itself is at fault.
const exitInvalid = 3

// inspectionInputs are what an inspection depends on: what is read, and where its pod can run.
type inspectionInputs struct {
	Path         string                        `json:"path"`
	Volume       corev1.VolumeSource           `json:"volume"`
	NodeSelector map[string]string             `json:"nodeSelector,omitempty"`
	Affinity     *corev1.Affinity              `json:"affinity,omitempty"`
	Tolerations  []corev1.Toleration           `json:"tolerations,omitempty"`
	PullSecrets  []corev1.LocalObjectReference `json:"pullSecrets,omitempty"`
}

func inspectionInputsOf(moed *semmoev1.MoEDeployment) inspectionInputs {
	inputs := inspectionInputs{Path: moed.Spec.Model.Path, Volume: moed.Spec.Model.Volume}
	if template := moed.Spec.Template; template != nil {
		inputs.NodeSelector = template.Spec.NodeSelector
		inputs.Affinity = template.Spec.Affinity
		inputs.Tolerations = template.Spec.Tolerations
		inputs.PullSecrets = template.Spec.ImagePullSecrets
	}
	return inputs
}

func (i inspectionInputs) hash() string { return shortHash(i, 8) }

// inspection is what the Jobs and pods of an inspection tell.
type inspection struct {
	// Report is the result; nil until there is one.
	Report *checkpoint.Report
	// Unrecorded is the Job whose pod holds the report, where the Job itself does not yet.
	Unrecorded *batchv1.Job
	// Running is the Job that is at work.
	Running *batchv1.Job
	// Failure is the last failure's message; Invalid tells that the model itself is at fault, so that only a change of
	// the model or the spec helps.
	Failure string
	Invalid bool
	// NextAttempt is the number of the Job to create, at NextAt; 0 where none is needed.
	NextAttempt int
	NextAt      time.Time
	// Obsolete are Jobs that nothing needs any more.
	Obsolete []*batchv1.Job
}

// observeInspection reads the state of the inspection with these inputs from its Jobs and their pods. A failed Job is
// kept, until the next attempt has ended, as the memory of how often it was tried.
func observeInspection(inputs string, jobs []*batchv1.Job, pods []*corev1.Pod) inspection {
	var ours, others []*batchv1.Job
	for _, job := range jobs {
		if job.DeletionTimestamp != nil {
			continue
		}
		if job.Labels[semmoev1.LabelInputs] == inputs {
			ours = append(ours, job)
		} else {
			others = append(others, job)
		}
	}
	slices.SortFunc(ours, func(a, b *batchv1.Job) int { return cmp.Compare(attemptOf(b), attemptOf(a)) })
	if len(ours) == 0 {
		return inspection{NextAttempt: 1}
	}
	latest := ours[0]
	state := inspection{}
	switch {
	case latest.Annotations[semmoev1.AnnotationReport] != "":
		state.Report = parseReport(latest.Annotations[semmoev1.AnnotationReport])
		state.Obsolete = append(ours[1:], others...)
	case finished(latest, batchv1.JobComplete) != nil:
		if state.Report = parseReport(terminationMessage(latest, pods)); state.Report != nil {
			state.Unrecorded = latest
			state.Obsolete = append(ours[1:], others...)
			return state
		}
	case finished(latest, batchv1.JobFailed) != nil:
		condition := finished(latest, batchv1.JobFailed)
		state.Failure = terminationMessage(latest, pods)
		if state.Failure == "" {
			state.Failure = "the inspection Job failed: " + condition.Message
		}
		state.Invalid = exitCode(latest, pods) == exitInvalid
		state.NextAttempt = attemptOf(latest) + 1
		state.NextAt = condition.LastTransitionTime.Add(backOff(attemptOf(latest)))
		state.Obsolete = ours[1:]
		return state
	default:
		state.Running = latest
		if len(ours) > 1 { // the failure that this attempt follows stays known until the attempt ends
			state.Failure = terminationMessage(ours[1], pods)
			state.Invalid = exitCode(ours[1], pods) == exitInvalid
			state.Obsolete = ours[2:]
		}
		return state
	}
	if state.Report == nil {
		// Complete, but the result went with its pod before it was recorded, or is not one: inspect again.
		state.NextAttempt = attemptOf(latest) + 1
	}
	return state
}

// backOff is how long to wait after the n-th failure: somebody who mends a volume sees it picked up within a minute, and
// an object that stays broken for hours costs a Job every five minutes.
func backOff(attempt int) time.Duration {
	if attempt > 10 {
		return 5 * time.Minute
	}
	return min(10*time.Second<<(attempt-1), time.Minute)
}

func inspectionName(moed *semmoev1.MoEDeployment, inputs string, attempt int) string {
	return fmt.Sprintf("%s-inspect-%s-%d", moed.Name, inputs, attempt)
}

// attemptOf is the number at the end of an inspection Job's name.
func attemptOf(job *batchv1.Job) int {
	attempt, err := strconv.Atoi(job.Name[strings.LastIndexByte(job.Name, '-')+1:])
	if err != nil {
		return 0
	}
	return attempt
}

func finished(job *batchv1.Job, kind batchv1.JobConditionType) *batchv1.JobCondition {
	for i, condition := range job.Status.Conditions {
		if condition.Type == kind && condition.Status == corev1.ConditionTrue {
			return &job.Status.Conditions[i]
		}
	}
	return nil
}

// terminated is the end of the inspection's container, in the youngest pod of the Job.
func terminated(job *batchv1.Job, pods []*corev1.Pod) *corev1.ContainerStateTerminated {
	var youngest *corev1.Pod
	for _, pod := range pods {
		if metav1.IsControlledBy(pod, job) && len(pod.Status.ContainerStatuses) > 0 && pod.Status.ContainerStatuses[0].State.Terminated != nil {
			if youngest == nil || youngest.CreationTimestamp.Before(&pod.CreationTimestamp) {
				youngest = pod
			}
		}
	}
	if youngest == nil {
		return nil
	}
	return youngest.Status.ContainerStatuses[0].State.Terminated
}

func terminationMessage(job *batchv1.Job, pods []*corev1.Pod) string {
	if state := terminated(job, pods); state != nil {
		return strings.TrimSpace(state.Message)
	}
	return ""
}

func exitCode(job *batchv1.Job, pods []*corev1.Pod) int32 {
	if state := terminated(job, pods); state != nil {
		return state.ExitCode
	}
	return 0
}

func parseReport(text string) *checkpoint.Report {
	var report checkpoint.Report
	if json.Unmarshal([]byte(text), &report) != nil || report.ModelDigest == "" {
		return nil
	}
	return &report
}

// inspectionJob reads the checkpoint's headers with a CPU and nothing else: no device is spent on a model that cannot be
// served.
func inspectionJob(moed *semmoev1.MoEDeployment, image string, attempt int) *batchv1.Job {
	inputs := inspectionInputsOf(moed)
	hash := inputs.hash()
	objectLabels := labelsOf(moed, semmoev1.ComponentInspect, semmoev1.LabelInputs, hash)
	return &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:       moed.Namespace,
			Name:            inspectionName(moed, hash, attempt),
			Labels:          objectLabels,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(moed, semmoev1.GroupVersion.WithKind("MoEDeployment"))},
		},
		Spec: batchv1.JobSpec{
			BackoffLimit: ptr.To[int32](0),
			PodFailurePolicy: &batchv1.PodFailurePolicy{Rules: []batchv1.PodFailurePolicyRule{
				// An eviction is not the model's fault: the Job controller makes another pod.
				{Action: batchv1.PodFailurePolicyActionIgnore, OnPodConditions: []batchv1.PodFailurePolicyOnPodConditionsPattern{
					{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue},
				}},
				{Action: batchv1.PodFailurePolicyActionFailJob, OnExitCodes: &batchv1.PodFailurePolicyOnExitCodesRequirement{
					ContainerName: ptr.To("inspect"), Operator: batchv1.PodFailurePolicyOnExitCodesOpIn, Values: []int32{exitInvalid},
				}},
			}},
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
					SecurityContext:              restrictedPod(),
					Containers: []corev1.Container{{
						Name:                     "inspect",
						Image:                    image,
						Args:                     []string{"inspect", "--model-path", inputs.Path},
						SecurityContext:          restrictedContainer(),
						TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
						Resources: corev1.ResourceRequirements{
							Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("50m"), corev1.ResourceMemory: resource.MustParse("64Mi")},
							Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("512Mi")},
						},
						VolumeMounts: []corev1.VolumeMount{{Name: modelVolume, MountPath: semmoev1.ModelMountPath, ReadOnly: true}},
					}},
					Volumes: []corev1.Volume{{Name: modelVolume, VolumeSource: inputs.Volume}},
				},
			},
		},
	}
}

// restrictedPod and restrictedContainer satisfy the restricted pod security standard; 65532 is the user of our image.
func restrictedPod() *corev1.PodSecurityContext {
	return &corev1.PodSecurityContext{
		RunAsNonRoot:   ptr.To(true),
		RunAsUser:      ptr.To[int64](65532),
		SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
	}
}

func restrictedContainer() *corev1.SecurityContext {
	return &corev1.SecurityContext{
		AllowPrivilegeEscalation: ptr.To(false),
		ReadOnlyRootFilesystem:   ptr.To(true),
		Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
	}
}
