package moedeployment

import (
	"context"
	"fmt"
	"path"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/plan"
)

// fetchContainer is the init container that brings the plan's tables to an engine which shuffles tokens by them.
const fetchContainer = "fetch-tables"

// tablesVariables tell such an engine where they are.
var tablesVariables = []string{semmoev1.TablesVariable, semmoev1.PlacementVariable, semmoev1.PlanDigestVariable}

// plannedShuffle is what plans are told of that: nothing where requests have ranks, or where tokens are shuffled, which plans take for
// granted.
func plannedShuffle(moed *semmoev1.MoEDeployment) semmoev1.TokenShuffle {
	if moed.Spec.Parallelism.Attention == semmoev1.AttentionDataParallel || desired.Shuffles(moed) {
		return ""
	}
	return semmoev1.TokenShuffleDisabled
}

// own is what our containers need in the pods of a revision that is about to be made. The artifact store is left out where there is none:
// engines serve without tables as well.
func (r *Reconciler) own(ctx context.Context, moed *semmoev1.MoEDeployment) (own, error) {
	needs := own{Image: r.Image}
	if !desired.Shuffles(moed) {
		return needs, nil
	}
	authority, err := r.front().StoreAuthority(ctx, moed)
	if err == nil && authority != "" {
		needs.Store = r.Store.Env(authority)
	}
	return needs, err
}

// addTables lets the pod fetch the whole plan before its engine starts, and tells the engine where it is. A store that is away keeps no
// pod from serving: the engine then finds no tables, and leaves tokens where they are.
func addTables(template *corev1.PodTemplateSpec, of *layout, own own) {
	volume := corev1.VolumeMount{Name: semmoev1.TablesVolume, MountPath: semmoev1.TablesMountPath}
	template.Spec.Volumes = append(template.Spec.Volumes,
		corev1.Volume{Name: semmoev1.TablesVolume, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}, access.TokenVolume())
	template.Spec.InitContainers = append(template.Spec.InitContainers, corev1.Container{
		Name:  fetchContainer,
		Image: own.Image,
		Args:  []string{"fetch", "--namespace=$(POD_NAMESPACE)", "--plan-digest=" + of.Digest, "--out=" + semmoev1.TablesPath, "--optional"},
		Env: append([]corev1.EnvVar{{Name: "POD_NAMESPACE", ValueFrom: &corev1.EnvVarSource{
			FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "metadata.namespace"},
		}}}, own.Store...),
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
		Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("50m"), corev1.ResourceMemory: resource.MustParse("128Mi")},
			Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("2Gi")},
		},
		VolumeMounts: []corev1.VolumeMount{volume, access.TokenMount()},
	})
	volume.ReadOnly = true
	served := &template.Spec.Containers[0]
	served.VolumeMounts = append(served.VolumeMounts, volume)
	served.Env = append(served.Env,
		corev1.EnvVar{Name: semmoev1.TablesVariable, Value: path.Join(semmoev1.TablesPath, plan.TablesFile)},
		corev1.EnvVar{Name: semmoev1.PlacementVariable, Value: path.Join(semmoev1.TablesPath, plan.PlacementFile)},
		corev1.EnvVar{Name: semmoev1.PlanDigestVariable, Value: of.Digest})
}

// shuffleText says, as sentences that follow another, in how many pods the engine was given the tables by which it shuffles tokens; empty
// where it shuffles none. Whether the consumer uses them is its own affair: no engine tells.
func shuffleText(moed *semmoev1.MoEDeployment, o observation) string {
	if !desired.Shuffles(moed) {
		return ""
	}
	pods, given, why := 0, 0, ""
	for _, pod := range append(append([]*corev1.Pod(nil), o.Pods...), o.Workers...) {
		if pod.Labels[semmoev1.LabelRevision] != o.Revision || pod.DeletionTimestamp != nil {
			continue
		}
		pods++
		switch missing, ended := missingTables(pod); {
		case ended && missing == "":
			given++
		case ended:
			why = fmt.Sprintf("; pod %s: %s", pod.Name, missing)
		}
	}
	return fmt.Sprintf(". The tables by which the engine shuffles tokens were given to %d of %d pods%s", given, pods, why)
}

// missingTables is why a pod's engine serves without tables, empty where it has them; ended tells that either is known.
func missingTables(pod *corev1.Pod) (why string, ended bool) {
	for _, status := range pod.Status.InitContainerStatuses {
		if end := status.State.Terminated; status.Name == fetchContainer && end != nil && end.ExitCode == 0 {
			return strings.TrimSpace(end.Message), true
		}
	}
	return "", false
}
