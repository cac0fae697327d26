// SPDX-License-Identifier: Apache-2.0

package revisions

import (
	"encoding/json"
	"path"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/model/reshuffle"
	"github.com/semmoe/operator/internal/plan"
)

const (
	// reshuffleContainer is the init container that creates the permuted copy of the checkpoint. holdContainer is the
	// sidecar that prevents the removal of the copy.
	reshuffleContainer = "reshuffle-weights"
	holdContainer      = "hold-weights"

	// copyMargin is the space, in bytes, that a copy may need in addition to the weights: larger headers, the tokenizer
	// and other small files.
	copyMargin = 1 << 30
)

// Layout contains everything that a revision needs from a plan.
type Layout struct {
	// Digest is the plan's digest. ConfigMap is the name of the ConfigMap with its files.
	Digest, ConfigMap string
	// Realization is how the plan reaches the engine.
	Realization semmoev1.Realization
	// RedundantExperts is the number of slots per layer in addition to one per expert.
	RedundantExperts int32
	// Overlap is what the operator chose for spec.engine.overlap with mode Auto. OverlapBasis is the JSON of what it was
	// chosen from, which is not part of a revision.
	Overlap      semmoev1.OverlapSpec
	OverlapBasis string
}

// Same reports whether two layouts have the same revision in a spec.
func (l *Layout) Same(other *Layout) bool {
	a, b := *l, *other
	a.OverlapBasis, b.OverlapBasis = "", ""
	return a == b
}

// LayoutOf returns the layout of a published plan with a realization.
func LayoutOf(plan *semmoev1.PlacementPlan, realization semmoev1.Realization) *Layout {
	return &Layout{
		Digest: plan.Status.PlanDigest, ConfigMap: plan.Status.ConfigMap, Realization: realization, RedundantExperts: plan.RedundantExperts(),
	}
}

// Short returns the short digest.
func (l *Layout) Short() string { return artifact.Digest(l.Digest).Short() }

// Reshuffled reports whether the plan reaches the engine as a permuted copy of the checkpoint. It is false for nil.
func (l *Layout) Reshuffled() bool {
	return l != nil && l.Realization == semmoev1.RealizationReshuffledWeights
}

// copyPath returns the path of the permuted copy. The name contains model and plan, because pods with different plans
// share a cache.
func copyPath(report checkpoint.Report, l *Layout) string {
	return path.Join(semmoev1.CacheMountPath, artifact.Digest(report.ModelDigest).Short()+"-"+l.Short())
}

// layoutArgs returns the flag for spec.model.layoutAs; nil if it is not set.
func layoutArgs(moed *semmoev1.MoEDeployment) []string {
	if moed.Spec.Model.LayoutAs == "" {
		return nil
	}
	return []string{"--layout-as=" + moed.Spec.Model.LayoutAs}
}

// addReshuffledWeights makes the pod create or find the permuted copy before its engine starts. In a shared cache, a
// sidecar holds a lease on the copy while the pod lives.
func addReshuffledWeights(template *corev1.PodTemplateSpec, moed *semmoev1.MoEDeployment, report checkpoint.Report, l *Layout, image string) {
	args := []string{
		"reshuffle",
		"--model=" + moed.Spec.Model.Path,
		"--permutation=" + path.Join(semmoev1.PlanMountPath, plan.GatePermutationFile),
		"--out=" + copyPath(report, l),
	}
	args = append(args, layoutArgs(moed)...)
	source := corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}
	requests := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("500m"), corev1.ResourceMemory: resource.MustParse("256Mi")}
	if cache := moed.Spec.Placement.Cache; cache != nil {
		source = cache.Volume
		if cache.SizeBytes != nil {
			args = append(args, "--limit="+strconv.FormatInt(*cache.SizeBytes, 10))
		}
	} else {
		size := resource.NewQuantity(report.Bytes+copyMargin, resource.BinarySI)
		source.EmptyDir.SizeLimit = size
		requests[corev1.ResourceEphemeralStorage] = *size
	}
	template.Spec.Volumes = append(template.Spec.Volumes, corev1.Volume{Name: semmoev1.CacheVolume, VolumeSource: source})
	copier := corev1.Container{
		Name:                     reshuffleContainer,
		Image:                    image,
		Args:                     args,
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
		Resources: corev1.ResourceRequirements{
			Requests: requests,
			Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("512Mi")},
		},
		VolumeMounts: []corev1.VolumeMount{
			{Name: modelVolume, MountPath: semmoev1.ModelMountPath, ReadOnly: true},
			{Name: semmoev1.PlanVolume, MountPath: semmoev1.PlanMountPath, ReadOnly: true},
			{Name: semmoev1.CacheVolume, MountPath: semmoev1.CacheMountPath},
		},
	}
	template.Spec.InitContainers = append(template.Spec.InitContainers, copier)
	if moed.Spec.Placement.Cache != nil {
		holder := *copier.DeepCopy()
		holder.Name = holdContainer
		holder.Args = append(holder.Args, "--hold")
		holder.RestartPolicy = new(corev1.ContainerRestartPolicyAlways)
		holder.Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("10m"), corev1.ResourceMemory: resource.MustParse("64Mi")}
		template.Spec.InitContainers = append(template.Spec.InitContainers, holder)
	}
	served := &template.Spec.Containers[0]
	served.VolumeMounts = append(served.VolumeMounts, corev1.VolumeMount{Name: semmoev1.CacheVolume, MountPath: semmoev1.CacheMountPath, ReadOnly: true})
}

// ReshuffleOf returns the cost of a pod's copy, once the copy exists.
func ReshuffleOf(pod *corev1.Pod) (reshuffle.Result, bool) {
	var result reshuffle.Result
	for _, status := range pod.Status.InitContainerStatuses {
		if ended := status.State.Terminated; status.Name == reshuffleContainer && ended != nil && ended.ExitCode == 0 {
			return result, json.Unmarshal([]byte(ended.Message), &result) == nil
		}
	}
	return result, false
}
