// SPDX-License-Identifier: Apache-2.0

package affinityprofile

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/kube/jobstate"
	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/internal/kube/podsecurity"
	"github.com/semmoe/operator/internal/kube/podtemplate"
	recording "github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/internal/profile/inspection"
)

const (
	podIPVariable   = "POD_IP"
	modelVolume     = "model"
	sharedMemory    = "shm"
	offloadVolume   = "offload"
	offloadPath     = "/offload"
	temporaryVolume = "profile-tmp" // a template for serving pods may contain a volume tmp

	// loadTime is the maximum time for an engine to load its model.
	loadTime = time.Hour
	// slowest is the rate, in tokens per second, below which a profile times out. Useful deployments are faster.
	slowest = 100
	// spareTime is the additional time limit of a profile.
	spareTime = time.Hour
	// endTime is the time between the end of the profiling container and the deadline of its pod. It allows the
	// container to report the reason.
	endTime = 5 * time.Minute
)

// progressPort returns the port on which the profiling container reports its progress. It differs from the port of the
// engine.
func progressPort(profile *semmoev1.AffinityProfile) int32 {
	if profile.Spec.Engine.Port == 9090 {
		return 9091
	}
	return 9090
}

// target contains the parameters of a profiling Job.
type target struct {
	// ID is the ID of the profile. ModelDigest and DatasetDigest are two of its inputs.
	ID, ModelDigest, DatasetDigest string
	// Image is the image of the operator.
	Image string
	// PullPolicy is the pull policy of Image. If it is empty, the API server sets the default.
	PullPolicy corev1.PullPolicy
	// Store contains the environment variables for access to the artifact store.
	Store []corev1.EnvVar
}

func samplingOf(profile *semmoev1.AffinityProfile) recording.Sampling {
	return recording.Sampling{Requests: int(profile.Spec.Requests), Tokens: int(profile.Spec.Tokens), RequestTokens: int(profile.Spec.RequestTokens)}
}

func launch(profile *semmoev1.AffinityProfile) engine.Launch {
	name := profile.Spec.Model.Name
	if name == "" {
		name = profile.Name
	}
	return engine.Launch{
		ModelPath:       profile.Spec.Model.Path,
		ServedModelName: name,
		Host:            "$(" + podIPVariable + ")",
		Port:            profile.Spec.Engine.Port,
		Ranks:           profile.Spec.Parallelism.ExpertParallelSize,
		AttentionDP:     profile.Spec.Parallelism.Attention == semmoev1.AttentionDataParallel,
		RoutedExperts:   true,
		Options:         profile.Spec.Engine.Options,
		Overlap:         profile.Spec.Engine.Overlap.Given(),
	}
}

// render returns the Job of an attempt.
func render(profile *semmoev1.AffinityProfile, to target, attempt int) (*batchv1.Job, error) {
	labels := labelsOf(profile, semmoev1.ComponentProfile, semmoev1.LabelInputs, to.ID)
	limit := loadTime + spareTime + time.Duration(profile.Spec.Tokens/slowest)*time.Second
	ours := &corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: labels, Annotations: map[string]string{
			semmoev1.AnnotationModelDigest:            to.ModelDigest,
			"kubectl.kubernetes.io/default-container": profileContainer,
		}},
		Spec: corev1.PodSpec{
			AutomountServiceAccountToken: ptr.To(false),
			EnableServiceLinks:           ptr.To(false),
			Containers:                   []corev1.Container{recorder(profile, to, limit-endTime)},
			Volumes: []corev1.Volume{
				{Name: modelVolume, VolumeSource: profile.Spec.Model.Volume},
				{Name: temporaryVolume, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
				artifact.TokenVolume(),
			},
		},
	}
	ours.Spec.Volumes = append(ours.Spec.Volumes, inspection.DatasetMount(*profile.Spec.Dataset).Volumes...)
	dedicated := profile.Spec.Target == semmoev1.ProfilingTargetDedicated
	if dedicated {
		if usesTransformers(profile) {
			ours.Spec.InitContainers = []corev1.Container{transformersSidecar(profile)}
			ours.Spec.Volumes = append(ours.Spec.Volumes, corev1.Volume{Name: offloadVolume, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}})
		} else {
			engine, err := engineSidecar(profile)
			if err != nil {
				return nil, err
			}
			ours.Spec.InitContainers = []corev1.Container{engine}
		}
		ours.Spec.Volumes = append(ours.Spec.Volumes, corev1.Volume{Name: sharedMemory, VolumeSource: corev1.VolumeSource{
			EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory},
		}})
	}
	template, err := podtemplate.Merge(ours, asSidecars(profile.Spec.Template, dedicated))
	if err != nil {
		return nil, fmt.Errorf("failed to merge spec.template: %w", err)
	}
	template.Spec.RestartPolicy = corev1.RestartPolicyNever
	template.Spec.ActiveDeadlineSeconds = ptr.To(int64(limit.Seconds()))
	return &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:       profile.Namespace,
			Name:            jobName(to.ID, attempt),
			Labels:          ownership.PassQueue(maps.Clone(labels), profile.Labels),
			OwnerReferences: ownership.ControllerReference(profile, "AffinityProfile"),
		},
		Spec: batchv1.JobSpec{
			BackoffLimit:     ptr.To[int32](0),
			PodFailurePolicy: jobstate.FailurePolicy(profileContainer, exitInputs, exitEngine),
			Template:         *template,
		},
	}, nil
}

// recorder returns the container that sends the requests and stores the recorded profile.
func recorder(profile *semmoev1.AffinityProfile, to target, timeout time.Duration) corev1.Container {
	dataset := inspection.DatasetMount(*profile.Spec.Dataset)
	sampling := samplingOf(profile)
	args := []string{
		"profile",
		"--model-path=" + profile.Spec.Model.Path,
		"--model-digest=" + to.ModelDigest,
		"--requests=" + strconv.Itoa(sampling.Requests),
		"--tokens=" + strconv.Itoa(sampling.Tokens),
		"--request-tokens=" + strconv.Itoa(sampling.RequestTokens),
		"--store-scope=" + profile.Namespace + "/" + to.ID,
		fmt.Sprintf("--progress-address=$(%s):%d", podIPVariable, progressPort(profile)),
		"--timeout=" + timeout.String(),
	}
	if ownText(profile) {
		args = append(args, "--own-text")
	} else {
		args = append(args, "--dataset="+dataset.Path, "--dataset-digest="+to.DatasetDigest)
	}
	if layout := profile.Spec.Model.LayoutAs; layout != "" {
		args = append(args, "--layout-as="+layout)
	}
	switch own := fmt.Sprintf("--endpoint=http://$(%s):%d", podIPVariable, profile.Spec.Engine.Port); {
	case usesTransformers(profile):
		args = append(args, "--backend=Transformers", "--wait="+loadTime.String(), own)
	case profile.Spec.Target == semmoev1.ProfilingTargetDedicated:
		args = append(args, "--engine="+string(profile.Spec.Engine.Type), "--dedicated", "--wait="+loadTime.String(), own)
	default:
		args = append(args, "--engine="+string(profile.Spec.Engine.Type), fmt.Sprintf("--endpoint=http://%s.%s.svc:%d", profile.Spec.DeploymentRef.Name, profile.Namespace, semmoev1.ServicePort))
	}
	var users *corev1.PodSecurityContext // the engine in the same pod may be unrestricted
	if profile.Spec.Template != nil {
		users = profile.Spec.Template.Spec.SecurityContext
	}
	return corev1.Container{
		Name:                     profileContainer,
		Image:                    to.Image,
		ImagePullPolicy:          to.PullPolicy,
		Args:                     args,
		Env:                      append([]corev1.EnvVar{podIPEnv()}, to.Store...),
		Ports:                    []corev1.ContainerPort{{Name: "progress", ContainerPort: progressPort(profile), Protocol: corev1.ProtocolTCP}},
		SecurityContext:          podsecurity.Isolated(users),
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
		Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("200m"), corev1.ResourceMemory: resource.MustParse("256Mi")},
		},
		VolumeMounts: slices.Concat([]corev1.VolumeMount{
			{Name: modelVolume, MountPath: semmoev1.ModelMountPath, ReadOnly: true},
			{Name: temporaryVolume, MountPath: "/tmp"},
			artifact.TokenMount(),
		}, dataset.Mounts),
	}
}

// engineSidecar returns the engine container of target Dedicated. It has no startup probe: the profiling container
// waits for the engine with its own time limit, and ends the pod if the engine is dead.
func engineSidecar(profile *semmoev1.AffinityProfile) (corev1.Container, error) {
	adapter, err := registry.For(string(profile.Spec.Engine.Type))
	if err != nil {
		return corev1.Container{}, err
	}
	args, err := adapter.Args(launch(profile), profile.Spec.Engine.Args)
	if err != nil {
		return corev1.Container{}, err
	}
	command := profile.Spec.Engine.Command
	if len(command) == 0 {
		command = adapter.Command
	}
	return sidecar(profile, profile.Spec.Engine.Image, command, args, profile.Spec.Parallelism.ExpertParallelSize), nil
}

// transformersSidecar returns the engine container of backend Transformers. It runs the recorder on one device.
func transformersSidecar(profile *semmoev1.AffinityProfile) corev1.Container {
	container := sidecar(profile, cmp.Or(profile.Spec.BackendImage, profile.Spec.Engine.Image), []string{"python3", "-c", recording.TransformersRecorder}, []string{
		"--model-path=" + profile.Spec.Model.Path, "--host=$(" + podIPVariable + ")", fmt.Sprintf("--port=%d", profile.Spec.Engine.Port), "--offload-dir=" + offloadPath,
	}, 1)
	container.VolumeMounts = append(container.VolumeMounts, corev1.VolumeMount{Name: offloadVolume, MountPath: offloadPath})
	return container
}

// sidecar returns the container that computes the requests.
func sidecar(profile *semmoev1.AffinityProfile, image string, command, args []string, devices int32) corev1.Container {
	resources := corev1.ResourceList{corev1.ResourceName(profile.Spec.Parallelism.ResourceName): *resource.NewQuantity(int64(devices), resource.DecimalSI)}
	return corev1.Container{
		Name:                     semmoev1.EngineContainer,
		RestartPolicy:            ptr.To(corev1.ContainerRestartPolicyAlways),
		Image:                    image,
		Command:                  command,
		Args:                     args,
		Env:                      append([]corev1.EnvVar{podIPEnv()}, profile.Spec.Engine.Env...),
		Ports:                    []corev1.ContainerPort{{Name: "http", ContainerPort: profile.Spec.Engine.Port, Protocol: corev1.ProtocolTCP}},
		Resources:                corev1.ResourceRequirements{Requests: resources, Limits: resources},
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
		VolumeMounts: []corev1.VolumeMount{
			{Name: modelVolume, MountPath: semmoev1.ModelMountPath, ReadOnly: true},
			// Collective libraries exchange data between the processes of an engine through shared memory.
			{Name: sharedMemory, MountPath: "/dev/shm"},
		},
	}
}

// asSidecars converts a template, which may be written for serving pods, to a template for a pod that terminates. All
// containers except the profiling container become sidecars, because other containers would keep the pod running.
// Without a dedicated engine, the engine container is removed.
func asSidecars(template *corev1.PodTemplateSpec, dedicated bool) *corev1.PodTemplateSpec {
	if template == nil {
		return nil
	}
	template = template.DeepCopy()
	containers := template.Spec.Containers
	template.Spec.Containers = nil
	for _, container := range containers {
		switch {
		case container.Name == profileContainer:
			template.Spec.Containers = append(template.Spec.Containers, container)
			continue
		case container.Name == semmoev1.EngineContainer && !dedicated:
			continue
		}
		// The profiling container waits for the engine, so probes are not needed.
		container.StartupProbe, container.ReadinessProbe, container.LivenessProbe, container.Lifecycle = nil, nil, nil, nil
		container.RestartPolicy = ptr.To(corev1.ContainerRestartPolicyAlways)
		template.Spec.InitContainers = append(template.Spec.InitContainers, container)
	}
	return template
}

func podIPEnv() corev1.EnvVar {
	return corev1.EnvVar{Name: podIPVariable, ValueFrom: &corev1.EnvVarSource{
		FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "status.podIP"},
	}}
}
