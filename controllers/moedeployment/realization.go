package moedeployment

import (
	"encoding/json"
	"fmt"
	"math"
	"path"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/checkpoint"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/reshuffle"
)

const (
	// reshuffleContainer is the init container that makes the permuted copy of the checkpoint, holdContainer the sidecar that
	// keeps others from removing it.
	reshuffleContainer = "reshuffle-weights"
	holdContainer      = "hold-weights"

	// copyMargin is what a copy may need beyond the weights: grown headers, the tokenizer and other small files.
	copyMargin = 1 << 30
)

// layout is all that a revision needs to know of a plan.
type layout struct {
	// Digest is the plan's, ConfigMap holds its files.
	Digest, ConfigMap string
	// Realization is how it reaches the engine.
	Realization semmoev1.Realization
}

// Short is the short digest.
func (l *layout) Short() string { return l.Digest[:min(len(l.Digest), 16)] }

func (l *layout) reshuffled() bool {
	return l != nil && l.Realization == semmoev1.RealizationReshuffledWeights
}

// realizationText is how a realisation is told.
var realizationText = map[semmoev1.Realization]string{
	semmoev1.RealizationEngineMap:         "the engine's expert map",
	semmoev1.RealizationReshuffledWeights: "reshuffled weights",
}

// realizations are those that the spec allows, the preferred one first. Of an engine without an expert map nobody expects
// one.
func realizations(moed *semmoev1.MoEDeployment, adapter engine.Adapter) []semmoev1.Realization {
	switch wanted := moed.Spec.Placement.Realization; {
	case wanted == semmoev1.RealizationEngineMap || wanted == semmoev1.RealizationReshuffledWeights:
		return []semmoev1.Realization{wanted}
	case adapter.ExpertMap == nil:
		return []semmoev1.Realization{semmoev1.RealizationReshuffledWeights}
	}
	return []semmoev1.Realization{semmoev1.RealizationEngineMap, semmoev1.RealizationReshuffledWeights}
}

// planRealization is what the plan must be solved for: for a gate without groups there is no difference, and one plan serves
// both realisations.
func planRealization(possible []semmoev1.Realization, groups int) semmoev1.Realization {
	if groups > 1 && len(possible) > 0 && possible[0] == semmoev1.RealizationReshuffledWeights {
		return semmoev1.RealizationReshuffledWeights
	}
	return semmoev1.RealizationEngineMap
}

// copyPath is where the engine finds the permuted copy. Its name tells model and plan: pods of different plans share a cache.
func copyPath(report checkpoint.Report, l *layout) string {
	return path.Join(semmoev1.CacheMountPath, report.ModelDigest[:min(len(report.ModelDigest), 16)]+"-"+l.Short())
}

// addReshuffledWeights lets the pod make, or find, the permuted copy before its engine starts. In a cache that pods share a
// sidecar holds the copy for as long as the pod lives.
func addReshuffledWeights(template *corev1.PodTemplateSpec, moed *semmoev1.MoEDeployment, report checkpoint.Report, l *layout, image string) {
	args := []string{
		"reshuffle",
		"--model=" + moed.Spec.Model.Path,
		"--permutation=" + path.Join(semmoev1.PlanMountPath, plan.GatePermutationFile),
		"--out=" + copyPath(report, l),
	}
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

// reshuffleStatus sums what the copies of a revision's pods have cost; nil where none tells.
func reshuffleStatus(pods []*corev1.Pod, revision string) *semmoev1.ReshuffleStatus {
	var sum semmoev1.ReshuffleStatus
	for _, pod := range pods {
		if pod.Labels[semmoev1.LabelRevision] != revision || pod.DeletionTimestamp != nil {
			continue
		}
		told, ok := reshuffleOf(pod)
		switch {
		case !ok:
			continue
		case told.Reused:
			sum.Found++
		default:
			sum.Made++
			sum.Bytes += told.Bytes
		}
		sum.Seconds = max(sum.Seconds, int64(math.Round(told.Seconds)))
	}
	if sum.Made+sum.Found == 0 {
		return nil
	}
	return &sum
}

// reshuffleOf is what a pod's copy has cost, once it is there.
func reshuffleOf(pod *corev1.Pod) (reshuffle.Result, bool) {
	var told reshuffle.Result
	for _, status := range pod.Status.InitContainerStatuses {
		if ended := status.State.Terminated; status.Name == reshuffleContainer && ended != nil && ended.ExitCode == 0 {
			return told, json.Unmarshal([]byte(ended.Message), &told) == nil
		}
	}
	return told, false
}

// realizationOf is how the plan of a workload reaches its engine.
func realizationOf(workload *workload) semmoev1.Realization {
	if realization := workload.template().Annotations[semmoev1.AnnotationRealization]; realization != "" {
		return semmoev1.Realization(realization)
	}
	return semmoev1.RealizationEngineMap
}

// outputChangedText is why a plan is not tried again.
func outputChangedText(l *layout, told string) string {
	return fmt.Sprintf("By %s the model gives other answers under plan %s than without a plan: %s", realizationText[l.Realization], l.Short(), told)
}

// why says why a plan reaches the engine by reshuffled weights although the spec leaves the choice; empty where it need not
// be said.
func (c *choice) why(serving *layout) string {
	if !serving.reshuffled() || c.wanted == nil || c.moed.Spec.Placement.Realization == semmoev1.RealizationReshuffledWeights {
		return ""
	}
	if told := c.refusal(&layout{serving.Digest, serving.ConfigMap, semmoev1.RealizationEngineMap}); told != "" {
		return fmt.Sprintf(", since by %s answers change: %s", realizationText[semmoev1.RealizationEngineMap], told)
	}
	for _, candidate := range c.candidates() {
		if byMap := candidate.layout.Realization == semmoev1.RealizationEngineMap; byMap && len(candidate.support.Refusals) > 0 {
			return ", since " + candidate.support.Refusals[0].Message
		} else if byMap {
			return ", which was in service already"
		}
	}
	return fmt.Sprintf(", since %s takes no expert map", c.moed.Spec.Engine.Type)
}

// warnings are what the engine may lack under the serving plan, as sentences that follow another.
func (c *choice) warnings(serving *layout) string {
	text := ""
	for _, candidate := range c.candidates() {
		if serving != nil && *candidate.layout == *serving {
			for _, warning := range candidate.support.Warnings {
				text += ". " + warning.Message
			}
		}
	}
	return text
}
