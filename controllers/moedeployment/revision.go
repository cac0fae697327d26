package moedeployment

import (
	"encoding/json"
	"fmt"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/checkpoint"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/router"
)

const (
	podIPVariable = "POD_IP"
	modelVolume   = "model"

	// drainSeconds is how long a pod that is being deleted goes on serving before it is told to stop, so that routers and
	// proxies have seen that it goes.
	drainSeconds = 5
	// graceSeconds bounds how long running requests may take after that.
	graceSeconds = 300
	// loadSeconds is how long an engine may take to load its model.
	loadSeconds = 3600
)

// revisionInputs are the inputs that tell revisions apart. Its JSON is hashed into the name of the workload: a field
// that is added later must be left out of the JSON at its default, else an upgrade of the operator would restart every
// serving pod.
type revisionInputs struct {
	Name          string                   `json:"name"`
	Model         semmoev1.ModelSpec       `json:"model"`
	ModelDigest   string                   `json:"modelDigest"`
	Engine        semmoev1.EngineSpec      `json:"engine"`
	Parallelism   semmoev1.ParallelismSpec `json:"parallelism"`
	Template      *corev1.PodTemplateSpec  `json:"template,omitempty"`
	RoutedExperts bool                     `json:"routedExperts,omitempty"`
}

// revisionOf is the revision that the spec asks for, given the model that was found.
func revisionOf(moed *semmoev1.MoEDeployment, report checkpoint.Report) string {
	return shortHash(revisionInputs{
		Name:        moed.Name,
		Model:       moed.Spec.Model,
		ModelDigest: report.ModelDigest,
		Engine:      moed.Spec.Engine,
		Parallelism: moed.Spec.Parallelism,
		Template:    moed.Spec.Template,

		RoutedExperts: observes(moed),
	}, 10)
}

// observes tells that routers ask the engine for routed experts.
func observes(moed *semmoev1.MoEDeployment) bool {
	return moed.Spec.Routing.Mode == semmoev1.RoutingModeRouter && moed.Spec.Routing.SamplePercent > 0 &&
		moed.Spec.Parallelism.Attention == semmoev1.AttentionDataParallel
}

func launch(moed *semmoev1.MoEDeployment) engine.Launch {
	name := moed.Spec.Model.Name
	if name == "" {
		name = moed.Name
	}
	return engine.Launch{
		ModelPath:       moed.Spec.Model.Path,
		ServedModelName: name,
		// The pod's own address, whatever its family; an engine's default is often the loopback address.
		Host:        "$(" + podIPVariable + ")",
		Port:        moed.Spec.Engine.Port,
		Ranks:       moed.Spec.Parallelism.ExpertParallelSize,
		AttentionDP: moed.Spec.Parallelism.Attention == semmoev1.AttentionDataParallel,

		RoutedExperts: observes(moed),
	}
}

// render makes the workload of a revision: our pod template with the user's merged over it.
func render(moed *semmoev1.MoEDeployment, revision string, report checkpoint.Report) (*appsv1.StatefulSet, error) {
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	if err != nil {
		return nil, err
	}
	args, err := adapter.Args(launch(moed), moed.Spec.Engine.Args)
	if err != nil {
		return nil, err
	}
	command := moed.Spec.Engine.Command
	if len(command) == 0 {
		command = adapter.Command
	}
	meta := metav1.ObjectMeta{
		Namespace:       moed.Namespace,
		Name:            moed.Name + "-" + revision,
		Labels:          labelsOf(moed, semmoev1.ComponentEngine, semmoev1.LabelRevision, revision),
		Annotations:     map[string]string{semmoev1.AnnotationModelDigest: report.ModelDigest},
		OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(moed, semmoev1.GroupVersion.WithKind("MoEDeployment"))},
	}
	ours := podTemplate(moed, meta, adapter, command, args)
	shape, err := json.Marshal(router.Shape{Layers: report.Layers, MoELayers: report.MoELayers, Experts: report.Experts, ExpertsPerToken: report.ExpertsPerToken})
	if err != nil {
		return nil, err
	}
	ours.Annotations[semmoev1.AnnotationModelShape] = string(shape)
	template, err := overlay(ours, moed.Spec.Template)
	if err != nil {
		return nil, err
	}
	podSelector := selector(moed, semmoev1.ComponentEngine)
	podSelector[semmoev1.LabelRevision] = revision
	return &appsv1.StatefulSet{
		ObjectMeta: meta,
		Spec: appsv1.StatefulSetSpec{
			Replicas:            ptr.To[int32](0),
			ServiceName:         podsServiceName(moed),
			PodManagementPolicy: appsv1.ParallelPodManagement,
			Selector:            &metav1.LabelSelector{MatchLabels: podSelector},
			Template:            *template,
			// The template is never updated; should somebody else edit it, no serving pod is restarted by that.
			UpdateStrategy:       appsv1.StatefulSetUpdateStrategy{Type: appsv1.OnDeleteStatefulSetStrategyType},
			RevisionHistoryLimit: ptr.To[int32](1),
		},
	}, nil
}

func podTemplate(moed *semmoev1.MoEDeployment, meta metav1.ObjectMeta, adapter engine.Adapter, command, args []string) *corev1.PodTemplateSpec {
	port := moed.Spec.Engine.Port
	annotations := map[string]string{
		semmoev1.AnnotationPort:                   strconv.Itoa(int(port)),
		semmoev1.AnnotationModelDigest:            meta.Annotations[semmoev1.AnnotationModelDigest],
		"kubectl.kubernetes.io/default-container": semmoev1.EngineContainer,
	}
	if moed.Spec.Parallelism.Attention == semmoev1.AttentionDataParallel {
		annotations[semmoev1.AnnotationRanks] = strconv.Itoa(int(moed.Spec.Parallelism.ExpertParallelSize))
	}
	devices := corev1.ResourceList{
		corev1.ResourceName(moed.Spec.Parallelism.ResourceName): *resource.NewQuantity(int64(moed.Spec.Parallelism.ExpertParallelSize), resource.DecimalSI),
	}
	health := corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: adapter.HealthPath, Port: intstr.FromString("http")}}
	return &corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: meta.Labels, Annotations: annotations},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: ptr.To[int64](drainSeconds + graceSeconds),
			AutomountServiceAccountToken:  ptr.To(false),
			EnableServiceLinks:            ptr.To(false),
			Containers: []corev1.Container{{
				Name:                     semmoev1.EngineContainer,
				Image:                    moed.Spec.Engine.Image,
				Command:                  command,
				Args:                     args,
				Env:                      append([]corev1.EnvVar{podIPEnv()}, moed.Spec.Engine.Env...),
				Ports:                    []corev1.ContainerPort{{Name: "http", ContainerPort: port, Protocol: corev1.ProtocolTCP}},
				Resources:                corev1.ResourceRequirements{Requests: devices, Limits: devices},
				StartupProbe:             &corev1.Probe{ProbeHandler: health, PeriodSeconds: 2, TimeoutSeconds: 5, FailureThreshold: loadSeconds / 2},
				ReadinessProbe:           &corev1.Probe{ProbeHandler: health, PeriodSeconds: 5, TimeoutSeconds: 5, FailureThreshold: 3},
				Lifecycle:                &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: drainSeconds}}},
				TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
				VolumeMounts: []corev1.VolumeMount{
					{Name: modelVolume, MountPath: semmoev1.ModelMountPath, ReadOnly: true},
					// Collective libraries exchange data between the processes of a replica through shared memory.
					{Name: "shm", MountPath: "/dev/shm"},
				},
			}},
			Volumes: []corev1.Volume{
				{Name: modelVolume, VolumeSource: moed.Spec.Model.Volume},
				{Name: "shm", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory}}},
			},
		},
	}
}

func podIPEnv() corev1.EnvVar {
	return corev1.EnvVar{Name: podIPVariable, ValueFrom: &corev1.EnvVarSource{
		FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "status.podIP"},
	}}
}

// overlay merges the user's pod template over ours, as kubectl patch would.
func overlay(ours, users *corev1.PodTemplateSpec) (*corev1.PodTemplateSpec, error) {
	if users == nil {
		return ours, nil
	}
	original, err := json.Marshal(ours)
	if err != nil {
		return nil, err
	}
	patch, err := withoutNulls(users)
	if err != nil {
		return nil, err
	}
	merged, err := strategicpatch.StrategicMergePatch(original, patch, corev1.PodTemplateSpec{})
	if err != nil {
		return nil, fmt.Errorf("merge spec.template: %w", err)
	}
	template := &corev1.PodTemplateSpec{}
	if err := json.Unmarshal(merged, template); err != nil {
		return nil, fmt.Errorf("merge spec.template: %w", err)
	}
	return template, nil
}

// withoutNulls is the JSON of a pod template without its nulls: an absent list of containers marshals as null, which
// would delete ours.
func withoutNulls(template *corev1.PodTemplateSpec) ([]byte, error) {
	data, err := json.Marshal(template)
	if err != nil {
		return nil, err
	}
	var tree map[string]any
	if err := json.Unmarshal(data, &tree); err != nil {
		return nil, err
	}
	dropNulls(tree)
	return json.Marshal(tree)
}

func dropNulls(value any) {
	switch value := value.(type) {
	case map[string]any:
		for key, child := range value {
			if child == nil {
				delete(value, key)
				continue
			}
			dropNulls(child)
		}
	case []any:
		for _, child := range value {
			dropNulls(child)
		}
	}
}
