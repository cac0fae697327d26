// SPDX-License-Identifier: Apache-2.0

package revisions

import (
	"path"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/intstr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/internal/kube/printable"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/probe/prompts"
)

// AnswersFile is the key of the baseline outputs (the model's outputs without a plan) in a ConfigMap.
const AnswersFile = "answers.json"

const (
	// probeContainer is the sidecar that keeps a pod unready until its outputs equal the baseline outputs. probePort is
	// the port of its readiness probe.
	probeContainer = "prove-lossless"
	probePort      = 9410
	// outputChanged is the exit code of the probe for different outputs.
	outputChanged = 3
)

// AnswersName returns the name of the ConfigMap with a model's baseline outputs. They belong to the checkpoint, not to
// the engine: another image must produce the same outputs, within the probe's tolerance.
func AnswersName(moed *semmoev1.MoEDeployment, modelDigest string) string {
	return moed.Name + "-answers-" + ownership.ShortHash([]string{modelDigest, prompts.Set}, 8)
}

// addProbe adds the sidecar that verifies the pod's outputs.
func addProbe(template *corev1.PodTemplateSpec, moed *semmoev1.MoEDeployment, report checkpoint.Report, image string) {
	template.Spec.Volumes = append(template.Spec.Volumes, corev1.Volume{Name: semmoev1.BaselineOutputsVolume, VolumeSource: corev1.VolumeSource{
		ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: AnswersName(moed, report.ModelDigest)}},
	}})
	launched, ranks := Launch(moed), 1
	if launched.AttentionDP { // without attention DP requests have no rank
		ranks = int(launched.Ranks)
	}
	scheme, tlsArgs := "http", []string(nil)
	mounts := []corev1.VolumeMount{{Name: semmoev1.BaselineOutputsVolume, MountPath: semmoev1.BaselineOutputsMountPath, ReadOnly: true}}
	if moed.Spec.Engine.TLS != nil {
		scheme, mounts = semmoev1.SchemeHTTPS, append(mounts, tlsMount())
		tlsArgs = []string{"--tls-ca-file=" + path.Join(semmoev1.EngineTLSMountPath, corev1.ServiceAccountRootCAKey), "--tls-server-name=" + desired.EngineServerName(moed)}
	}
	template.Spec.InitContainers = append(template.Spec.InitContainers, corev1.Container{
		Name:  probeContainer,
		Image: image,
		Args: append([]string{
			"probe",
			"--engine=" + string(moed.Spec.Engine.Type),
			"--address=" + scheme + "://$(" + desired.PodIPVariable + "):" + strconv.Itoa(int(launched.Port)),
			"--listen=$(" + desired.PodIPVariable + "):" + strconv.Itoa(probePort),
			"--model-name=" + launched.ServedModelName,
			"--ranks=" + strconv.Itoa(ranks),
			"--answers=" + semmoev1.BaselineOutputsMountPath + "/" + AnswersFile,
		}, tlsArgs...),
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
		VolumeMounts: mounts,
	})
}

// BaselinePod returns a pod that produces the baseline outputs: a pod without a plan, or else a pod that became ready
// only after its outputs were verified.
func BaselinePod(pods []*corev1.Pod, modelDigest string) *corev1.Pod {
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

// ChangedOutputs returns, by revision, the difference that a pod's probe found to the baseline outputs. A pod that has
// become ready since has passed.
func ChangedOutputs(pods []*corev1.Pod) map[string]string {
	changed := map[string]string{}
	for _, pod := range pods {
		if difference, found := ChangedOutput(pod); found {
			changed[pod.Labels[semmoev1.LabelRevision]] = difference
		}
	}
	return changed
}

// ChangedOutput returns the difference to the baseline outputs that the probe of an unready pod found, if any.
func ChangedOutput(pod *corev1.Pod) (difference string, found bool) {
	if podhealth.Ready(pod) {
		return "", false
	}
	for _, status := range pod.Status.InitContainerStatuses {
		for _, ended := range []*corev1.ContainerStateTerminated{status.LastTerminationState.Terminated, status.State.Terminated} {
			if status.Name == probeContainer && ended != nil && ended.ExitCode == outputChanged {
				difference, found = printable.Line(strings.TrimSpace(ended.Message), 512), true
			}
		}
	}
	return difference, found
}
