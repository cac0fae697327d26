package revisions

import (
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/intstr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/checkpoint"
	"github.com/semmoe/operator/internal/lossless"
	"github.com/semmoe/operator/internal/owned"
	"github.com/semmoe/operator/internal/podhealth"
	"github.com/semmoe/operator/internal/printable"
)

// AnswersFile holds the answers of a model without a plan, in a ConfigMap.
const AnswersFile = "answers.json"

const (
	// probeContainer is the sidecar that keeps a pod from becoming ready before it has given the answers of the model without a
	// plan; probePort is where it tells the kubelet.
	probeContainer = "prove-lossless"
	probePort      = 9410
	// outputChanged is the probe's exit code for other answers.
	outputChanged = 3
)

// AnswersName is the name of the ConfigMap with a model's answers. They are the checkpoint's, not the engine's: another image
// must give the same, within the probe's tolerance.
func AnswersName(moed *semmoev1.MoEDeployment, modelDigest string) string {
	return moed.Name + "-answers-" + owned.ShortHash([]string{modelDigest, lossless.PromptSet}, 8)
}

// addProbe adds the sidecar that proves the pod's answers.
func addProbe(template *corev1.PodTemplateSpec, moed *semmoev1.MoEDeployment, report checkpoint.Report, image string) {
	template.Spec.Volumes = append(template.Spec.Volumes, corev1.Volume{Name: semmoev1.AnswersVolume, VolumeSource: corev1.VolumeSource{
		ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: AnswersName(moed, report.ModelDigest)}},
	}})
	launched, ranks := Launch(moed), 1
	if launched.AttentionDP { // else requests have none
		ranks = int(launched.Ranks)
	}
	template.Spec.InitContainers = append(template.Spec.InitContainers, corev1.Container{
		Name:  probeContainer,
		Image: image,
		Args: []string{
			"probe",
			"--engine=" + string(moed.Spec.Engine.Type),
			"--address=http://$(" + desired.PodIPVariable + "):" + strconv.Itoa(int(launched.Port)),
			"--listen=$(" + desired.PodIPVariable + "):" + strconv.Itoa(probePort),
			"--model-name=" + launched.ServedModelName,
			"--ranks=" + strconv.Itoa(ranks),
			"--answers=" + semmoev1.AnswersMountPath + "/" + AnswersFile,
		},
		Env:                      []corev1.EnvVar{podIPEnv()},
		RestartPolicy:            new(corev1.ContainerRestartPolicyAlways),
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
		ReadinessProbe: &corev1.Probe{
			ProbeHandler:  corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/readyz", Port: intstr.FromInt32(probePort)}},
			PeriodSeconds: 2, TimeoutSeconds: 2, FailureThreshold: 1,
		},
		Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("10m"), corev1.ResourceMemory: resource.MustParse("32Mi")},
			Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("128Mi")},
		},
		VolumeMounts: []corev1.VolumeMount{{Name: semmoev1.AnswersVolume, MountPath: semmoev1.AnswersMountPath, ReadOnly: true}},
	})
}

// WhoAnswers is a pod that gives the answers of the model without a plan: one that has none, or else one that was ready only
// after it had given the same.
func WhoAnswers(pods []*corev1.Pod, modelDigest string) *corev1.Pod {
	var proven *corev1.Pod
	for _, pod := range pods {
		if pod.DeletionTimestamp != nil || !podhealth.Ready(pod) || pod.Status.PodIP == "" || pod.Annotations[semmoev1.AnnotationModelDigest] != modelDigest {
			continue
		}
		if pod.Annotations[semmoev1.AnnotationPlanDigest] == "" {
			return pod
		}
		if slices.ContainsFunc(pod.Spec.InitContainers, func(c corev1.Container) bool { return c.Name == probeContainer }) {
			proven = pod
		}
	}
	return proven
}

// ChangedOutputs are the revisions of which a pod's probe has found other answers than those without a plan, and what it
// found. A pod that has become ready since has passed.
func ChangedOutputs(pods []*corev1.Pod) map[string]string {
	changed := map[string]string{}
	for _, pod := range pods {
		if told, found := ChangedOutput(pod); found {
			changed[pod.Labels[semmoev1.LabelRevision]] = told
		}
	}
	return changed
}

// ChangedOutput is what the probe of a pod that is not ready has found to be other than without a plan, if it has.
func ChangedOutput(pod *corev1.Pod) (told string, found bool) {
	if podhealth.Ready(pod) {
		return "", false
	}
	for _, status := range pod.Status.InitContainerStatuses {
		for _, ended := range []*corev1.ContainerStateTerminated{status.LastTerminationState.Terminated, status.State.Terminated} {
			if status.Name == probeContainer && ended != nil && ended.ExitCode == outputChanged {
				told, found = printable.Line(strings.TrimSpace(ended.Message), 512), true
			}
		}
	}
	return told, found
}
