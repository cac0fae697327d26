package moedeployment

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/checkpoint"
	"github.com/semmoe/operator/internal/lossless"
	"github.com/semmoe/operator/internal/owned"
	"github.com/semmoe/operator/internal/podhealth"
)

const (
	// probeContainer is the sidecar that keeps a pod from becoming ready before it has given the answers of the model without a
	// plan; probePort is where it tells the kubelet.
	probeContainer = "prove-lossless"
	probePort      = 9410
	// answersFile holds those answers, in a ConfigMap.
	answersFile = "answers.json"
	// outputChanged is the probe's exit code for other answers.
	outputChanged = 3

	// recordTimeout bounds how long a reconciliation waits for a model's answers, recordAgain is when it asks again.
	recordTimeout = 20 * time.Second
	recordAgain   = 10 * time.Second
)

// answers tells whether it can be proven that a plan does not change what the model answers.
type answers struct {
	// Missing is why it cannot; empty where the answers without a plan are stored.
	Missing string
	// Stranded tells that pods of the present workloads wait for them, and no replica is left that could give them.
	Stranded bool
	// Again is when to ask again; zero where something else will call.
	Again time.Duration
}

// answersName is the name of the ConfigMap with a model's answers. They are the checkpoint's, not the engine's: another image
// must give the same, within the probe's tolerance.
func answersName(moed *semmoev1.MoEDeployment, modelDigest string) string {
	return moed.Name + "-answers-" + owned.ShortHash([]string{modelDigest, lossless.PromptSet}, 8)
}

// addProbe adds the sidecar that proves the pod's answers.
func addProbe(template *corev1.PodTemplateSpec, moed *semmoev1.MoEDeployment, report checkpoint.Report, image string) {
	template.Spec.Volumes = append(template.Spec.Volumes, corev1.Volume{Name: semmoev1.AnswersVolume, VolumeSource: corev1.VolumeSource{
		ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: answersName(moed, report.ModelDigest)}},
	}})
	launched, ranks := launch(moed), 1
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
			"--answers=" + semmoev1.AnswersMountPath + "/" + answersFile,
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

// reconcileAnswers makes sure that the model's answers are stored, and removes those of other checkpoints that no pod needs.
func (r *Reconciler) reconcileAnswers(ctx context.Context, moed *semmoev1.MoEDeployment, report checkpoint.Report, observed children, active bool) (answers, error) {
	name := answersName(moed, report.ModelDigest)
	var stored corev1.ConfigMapList
	if err := r.List(ctx, &stored, client.InNamespace(moed.Namespace), client.MatchingLabels(desired.Selector(moed, semmoev1.ComponentAnswers))); err != nil {
		return answers{}, fmt.Errorf("list stored answers: %w", err)
	}
	present := false
	for i := range stored.Items {
		item := &stored.Items[i]
		switch {
		case item.Name == name:
			present = item.DeletionTimestamp == nil
		case active && metav1.IsControlledBy(item, moed) && !mountsConfigMap(observed, item.Name):
			if err := deleteAll(ctx, r.Client, []*corev1.ConfigMap{item}); err != nil {
				return answers{}, err
			}
		}
	}
	if present {
		return answers{}, nil
	}
	pod := whoAnswers(observed.enginePods, report.ModelDigest)
	switch {
	case pod == nil:
		return answers{Missing: "it waits for a replica that serves without a plan", Stranded: mountsConfigMap(observed, name)}, nil
	case !active:
		return answers{Missing: "set spec.reconciliation to Active"}, nil
	}
	recorded, err := r.record(ctx, moed, pod, report.ModelDigest)
	if err != nil {
		return answers{Missing: fmt.Sprintf("pod %s does not give the answers to compare with: %v", pod.Name, err), Again: recordAgain}, nil
	}
	err = r.Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: moed.Namespace, Name: name,
			Labels:          desired.Labels(moed, semmoev1.ComponentAnswers),
			OwnerReferences: owned.ControllerReference(moed, "MoEDeployment"),
		},
		Immutable: new(true),
		Data:      map[string]string{answersFile: string(recorded)},
	}, client.FieldOwner(desired.Manager))
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return answers{}, fmt.Errorf("create ConfigMap %s: %w", name, err)
	}
	return answers{}, nil
}

// record asks a pod for the model's answers.
func (r *Reconciler) record(ctx context.Context, moed *semmoev1.MoEDeployment, pod *corev1.Pod, modelDigest string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	engine := &lossless.Client{
		Address: "http://" + net.JoinHostPort(pod.Status.PodIP, pod.Annotations[semmoev1.AnnotationPort]),
		Model:   launch(moed).ServedModelName, HTTP: r.HTTP,
	}
	recorded, err := lossless.Record(ctx, engine, modelDigest)
	if err != nil {
		return nil, err
	}
	return recorded.Encode()
}

// whoAnswers is a pod that gives the answers of the model without a plan: one that has none, or else one that was ready only
// after it had given the same.
func whoAnswers(pods []*corev1.Pod, modelDigest string) *corev1.Pod {
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

// mountsConfigMap tells that a workload's pods mount a ConfigMap.
func mountsConfigMap(observed children, name string) bool {
	for _, workload := range observed.revisions {
		if slices.ContainsFunc(workload.template().Spec.Volumes, func(v corev1.Volume) bool { return v.ConfigMap != nil && v.ConfigMap.Name == name }) {
			return true
		}
	}
	return false
}

// changedOutputs are the revisions of which a pod's probe has found other answers than those without a plan, and what it
// found. A pod that has become ready since has passed.
func changedOutputs(pods []*corev1.Pod) map[string]string {
	changed := map[string]string{}
	for _, pod := range pods {
		if told, found := changedOutput(pod); found {
			changed[pod.Labels[semmoev1.LabelRevision]] = told
		}
	}
	return changed
}

// changedOutput is what the probe of a pod that is not ready has found to be other than without a plan, if it has.
func changedOutput(pod *corev1.Pod) (told string, found bool) {
	if podhealth.Ready(pod) {
		return "", false
	}
	for _, status := range pod.Status.InitContainerStatuses {
		for _, ended := range []*corev1.ContainerStateTerminated{status.LastTerminationState.Terminated, status.State.Terminated} {
			if status.Name == probeContainer && ended != nil && ended.ExitCode == outputChanged {
				told, found = podhealth.Truncate(strings.TrimSpace(ended.Message), 512), true
			}
		}
	}
	return told, found
}

// recordChangedOutputs keeps what probes have found on the plans, where it outlives the pods, and returns all that is known, by
// revision.
func (r *Reconciler) recordChangedOutputs(ctx context.Context, observed children, plans []*semmoev1.PlacementPlan) (map[string]string, error) {
	changed := changedOutputs(observed.enginePods)
	for _, plan := range plans {
		base := plan.DeepCopy()
		for _, workload := range observed.revisions {
			revision := workload.Labels[semmoev1.LabelRevision]
			if told := changed[revision]; told != "" && mounts(workload, plan) && plan.Annotations[semmoev1.AnnotationOutputChanged+revision] == "" {
				metav1.SetMetaDataAnnotation(&plan.ObjectMeta, semmoev1.AnnotationOutputChanged+revision, told)
			}
		}
		if len(plan.Annotations) != len(base.Annotations) {
			if err := r.Patch(ctx, plan, client.MergeFrom(base), client.FieldOwner(desired.Manager)); err != nil {
				return nil, fmt.Errorf("annotate PlacementPlan %s: %w", plan.Name, err)
			}
		}
		for key, told := range plan.Annotations {
			if revision, ok := strings.CutPrefix(key, semmoev1.AnnotationOutputChanged); ok {
				changed[revision] = told
			}
		}
	}
	return changed, nil
}
