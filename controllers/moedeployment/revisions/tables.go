// SPDX-License-Identifier: Apache-2.0

package revisions

import (
	"path"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/plan"
)

const (
	// fetchContainer is the init container that fetches the plan's tables for an engine that shuffles tokens.
	// followContainer is the sidecar that replaces them by newer tables for the same placement.
	fetchContainer  = "fetch-tables"
	followContainer = "follow-tables"
)

// tablesVariables are the environment variables that point this engine to the tables.
var tablesVariables = []string{semmoev1.TablesVariable, semmoev1.PlacementVariable, semmoev1.PlanDigestVariable}

// addTables makes the pod fetch the whole plan before its engine starts, and follow the tables in use afterwards, and
// passes the path to the engine. An unavailable store does not prevent the pod from serving: without tables, the engine
// does not shuffle tokens.
func addTables(template *corev1.PodTemplateSpec, moed *semmoev1.MoEDeployment, of *Layout, own Own) {
	template.Annotations[semmoev1.AnnotationFollowTables] = "true"
	volume := corev1.VolumeMount{Name: semmoev1.TablesVolume, MountPath: semmoev1.TablesMountPath}
	template.Spec.Volumes = append(template.Spec.Volumes,
		corev1.Volume{Name: semmoev1.TablesVolume, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		// The ConfigMap is optional: it does not exist before tables are swapped for the first time.
		corev1.Volume{Name: semmoev1.TablesInUseVolume, VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
			LocalObjectReference: corev1.LocalObjectReference{Name: desired.TablesName(moed)}, Optional: new(true),
		}}},
		artifact.TokenVolume())
	fetcher := corev1.Container{
		Name:  fetchContainer,
		Image: own.Image,
		Args: []string{
			"fetch", "--namespace=$(POD_NAMESPACE)", "--plan-digest=" + of.Digest, "--out=" + semmoev1.TablesPath,
			"--tables=" + path.Join(semmoev1.TablesInUseMountPath, semmoev1.TablesKey),
		},
		Env: append([]corev1.EnvVar{{Name: "POD_NAMESPACE", ValueFrom: &corev1.EnvVarSource{
			FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "metadata.namespace"},
		}}}, own.Store...),
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
		Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("50m"), corev1.ResourceMemory: resource.MustParse("128Mi")},
			Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("2Gi")},
		},
		VolumeMounts: []corev1.VolumeMount{volume, {Name: semmoev1.TablesInUseVolume, MountPath: semmoev1.TablesInUseMountPath, ReadOnly: true}, artifact.TokenMount()},
	}
	follower := *fetcher.DeepCopy()
	fetcher.Args = append(fetcher.Args, "--optional")
	follower.Name, follower.Args = followContainer, append(follower.Args, "--follow")
	follower.RestartPolicy = new(corev1.ContainerRestartPolicyAlways)
	follower.Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("10m"), corev1.ResourceMemory: resource.MustParse("64Mi")}
	template.Spec.InitContainers = append(template.Spec.InitContainers, fetcher, follower)
	volume.ReadOnly = true
	served := &template.Spec.Containers[0]
	served.VolumeMounts = append(served.VolumeMounts, volume)
	served.Env = append(served.Env,
		corev1.EnvVar{Name: semmoev1.TablesVariable, Value: path.Join(semmoev1.TablesPath, plan.TablesFile)},
		corev1.EnvVar{Name: semmoev1.PlacementVariable, Value: path.Join(semmoev1.TablesPath, plan.PlacementFile)},
		corev1.EnvVar{Name: semmoev1.PlanDigestVariable, Value: of.Digest})
}

// FollowsTables reports whether the pods of a workload receive new tables while they serve.
func FollowsTables(w *Workload) bool {
	return w.Template().Annotations[semmoev1.AnnotationFollowTables] != ""
}

// MissingTables returns why a pod's engine serves without tables, or "" if it has them. ended reports whether this is
// known yet.
func MissingTables(pod *corev1.Pod) (why string, ended bool) {
	for _, status := range pod.Status.InitContainerStatuses {
		if end := status.State.Terminated; status.Name == fetchContainer && end != nil && end.ExitCode == 0 {
			return strings.TrimSpace(end.Message), true
		}
	}
	return "", false
}
