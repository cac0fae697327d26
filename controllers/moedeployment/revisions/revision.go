// SPDX-License-Identifier: Apache-2.0

// Package revisions renders the workloads of a MoEDeployment's revisions, and reports the state of their replicas.
//
// Invariants:
//   - A revision is named by the hash of its inputs (Of); Render is a pure function of spec, model and plan.
//   - The template of an existing workload is never changed: Workload changes only replicas and annotations.
//   - Validate rejects a spec for which no workload can be rendered, and names the field.
package revisions

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net"
	"path"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/internal/kube/podsecurity"
	"github.com/semmoe/operator/internal/kube/podtemplate"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/observation/lar"
)

const (
	modelVolume = "model"
	// verifyContainer is the init container that verifies the plan.
	verifyContainer = "verify-plan"

	// loadSeconds is the maximum time for an engine to load its model.
	loadSeconds = 3600
)

// revisionInputs are the inputs that distinguish revisions. Their JSON is hashed into the name of the workload. A field
// that is added later must be omitted from the JSON at its default; otherwise an upgrade of the operator would restart
// every serving pod.
type revisionInputs struct {
	Name          string                   `json:"name"`
	Model         semmoev1.ModelSpec       `json:"model"`
	ModelDigest   string                   `json:"modelDigest"`
	Engine        semmoev1.EngineSpec      `json:"engine"`
	Parallelism   semmoev1.ParallelismSpec `json:"parallelism"`
	Template      *corev1.PodTemplateSpec  `json:"template,omitempty"`
	RoutedExperts bool                     `json:"routedExperts,omitempty"`
	Plan          string                   `json:"plan,omitempty"`
	// Realization and Cache are omitted if the plan reaches the engine as its own map.
	Realization semmoev1.Realization `json:"realization,omitempty"`
	Cache       *semmoev1.CacheSpec  `json:"cache,omitempty"`
	// TokenShuffle is omitted if the engine does not shuffle tokens by a plan.
	TokenShuffle semmoev1.TokenShuffle `json:"tokenShuffle,omitempty"`
}

// Of returns the revision of the spec for the inspected model and the plan to serve under, which may be nil.
func Of(moed *semmoev1.MoEDeployment, report checkpoint.Report, plan *Layout) string {
	inputs := revisionInputs{
		Name:        moed.Name,
		Model:       moed.Spec.Model.Mounted(),
		ModelDigest: report.ModelDigest,
		Engine:      moed.Spec.Engine,
		Parallelism: moed.Spec.Parallelism,
		Template:    moed.Spec.Template,

		RoutedExperts: desired.NeedsRoutedExperts(moed),
		Plan:          digestOf(plan),
	}
	if desired.PodsPerReplica(moed) == 1 {
		inputs.Parallelism.PodsPerReplica = nil // an explicit default is no change
	}
	if plan == nil {
		inputs.Model.LayoutAs = "" // pods use it only with a plan
	}
	if plan.Reshuffled() {
		inputs.Realization, inputs.Cache = plan.Realization, moed.Spec.Placement.Cache
	}
	if plan != nil && desired.Shuffles(moed) {
		inputs.TokenShuffle = moed.Spec.Placement.TokenShuffle
	}
	// The settings count, not who chose them.
	if overlap := overlapOf(moed, plan); overlap != (semmoev1.OverlapSpec{}) {
		inputs.Engine.Overlap = &overlap
	} else {
		inputs.Engine.Overlap = nil
	}
	return ownership.ShortHash(inputs, 10)
}

// overlapOf returns the overlap settings of the spec, or with mode Auto those that were chosen for a layout.
func overlapOf(moed *semmoev1.MoEDeployment, plan *Layout) semmoev1.OverlapSpec {
	if moed.Spec.Engine.Overlap.Chosen() && plan != nil {
		return plan.Overlap
	}
	return moed.Spec.Engine.Overlap.Given()
}

func digestOf(plan *Layout) string {
	if plan == nil {
		return ""
	}
	return plan.Digest
}

// Launch returns how the spec launches an engine, without the additions of a plan.
func Launch(moed *semmoev1.MoEDeployment) engine.Launch {
	name := moed.Spec.Model.Name
	if name == "" {
		name = moed.Name
	}
	l := engine.Launch{
		ModelPath:       moed.Spec.Model.Path,
		ServedModelName: name,
		// Bind the pod's own address, of either IP family; the default of an engine is often the loopback address.
		Host:        "$(" + desired.PodIPVariable + ")",
		Port:        moed.Spec.Engine.Port,
		Ranks:       moed.Spec.Parallelism.ExpertParallelSize,
		AttentionDP: moed.Spec.Parallelism.Attention == semmoev1.AttentionDataParallel,

		RoutedExperts: desired.NeedsRoutedExperts(moed),
		OptionsFile:   semmoev1.EngineOptionsPath,
		Options:       moed.Spec.Engine.Options,
		Overlap:       moed.Spec.Engine.Overlap.Given(),
	}
	if moed.Spec.Engine.TLS != nil {
		l.CertFile, l.KeyFile = path.Join(semmoev1.EngineTLSMountPath, corev1.TLSCertKey), path.Join(semmoev1.EngineTLSMountPath, corev1.TLSPrivateKeyKey)
	}
	if events := moed.Spec.Routing.KVEvents; events != nil {
		l.KVEventsPort = events.Port
	}
	if nodes := desired.PodsPerReplica(moed); nodes > 1 {
		l.Nodes, l.NodeRank, l.LeaderAddress = nodes, nodeRank, leaderAddress
	}
	return l
}

// WorkloadName returns the name of the workload of a revision.
func WorkloadName(moed *semmoev1.MoEDeployment, revision string) string {
	return moed.Name + "-" + revision
}

// Own contains the settings of the operator's own containers in a pod.
type Own struct {
	// Image is the image of these containers.
	Image string
	// PullPolicy is the image pull policy. If empty, the API server sets its default.
	PullPolicy corev1.PullPolicy
	// Store contains the variables for access to the artifact store; empty if there is none.
	Store []corev1.EnvVar
}

// Render returns the workload of a revision. plan may be nil.
func Render(moed *semmoev1.MoEDeployment, revision string, report checkpoint.Report, plan *Layout, own Own) (*Workload, error) {
	launched := Launch(moed)
	launched.Overlap = overlapOf(moed, plan)
	template, err := renderTemplate(moed, revision, report, plan, own, launched)
	if err != nil {
		return nil, err
	}
	meta := metav1.ObjectMeta{
		Namespace:       moed.Namespace,
		Name:            WorkloadName(moed, revision),
		Labels:          desired.Labels(moed, semmoev1.ComponentEngine, semmoev1.LabelRevision, revision),
		Annotations:     map[string]string{semmoev1.AnnotationModelDigest: report.ModelDigest},
		OwnerReferences: ownership.ControllerReference(moed, "MoEDeployment"),
	}
	if plan != nil {
		meta.Annotations[semmoev1.AnnotationPlanDigest] = plan.Digest
		if plan.OverlapBasis != "" {
			meta.Annotations[semmoev1.AnnotationOverlapBasis] = plan.OverlapBasis
		}
	}
	if desired.PodsPerReplica(moed) > 1 {
		// Workers receive no requests: SGLang's serve only /health, in plain text also with the flags for TLS
		// (launch_dummy_health_check_server in srt/utils/common.py of 0.5.12 and 0.5.23), vLLM's serve nothing.
		launched.Worker, launched.CertFile, launched.KeyFile = true, "", ""
		worker, err := renderTemplate(moed, revision, report, plan, own, launched)
		if err != nil {
			return nil, err
		}
		return groupsOf(moed, meta, template, worker), nil
	}
	podSelector := desired.Selector(moed, semmoev1.ComponentEngine)
	podSelector[semmoev1.LabelRevision] = revision
	return StatefulSet(&appsv1.StatefulSet{
		ObjectMeta: meta,
		Spec: appsv1.StatefulSetSpec{
			Replicas:            ptr.To[int32](0),
			ServiceName:         desired.PodsServiceName(moed),
			PodManagementPolicy: appsv1.ParallelPodManagement,
			Selector:            &metav1.LabelSelector{MatchLabels: podSelector},
			Template:            *template,
			// The template is never updated. With OnDelete, an edit by another client restarts no serving pod.
			UpdateStrategy:       appsv1.StatefulSetUpdateStrategy{Type: appsv1.OnDeleteStatefulSetStrategyType},
			RevisionHistoryLimit: ptr.To[int32](1),
		},
	}), nil
}

// renderTemplate returns the pod template of a revision with this launch: the operator's template with the user's
// merged over it.
func renderTemplate(moed *semmoev1.MoEDeployment, revision string, report checkpoint.Report, plan *Layout, own Own, launched engine.Launch) (*corev1.PodTemplateSpec, error) {
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	if err != nil {
		return nil, err
	}
	switch {
	case plan.Reshuffled():
		launched.ModelPath, launched.Reshuffled = copyPath(report, plan), true
	case plan != nil && adapter.ExpertMap == nil:
		return nil, fmt.Errorf("engine %s reads no expert map", adapter.Type)
	case plan != nil:
		launched.ExpertMap, launched.RedundantExperts = path.Join(semmoev1.PlanMountPath, adapter.ExpertMap.File), plan.RedundantExperts
	}
	args, err := adapter.Args(launched, moed.Spec.Engine.Args)
	if err != nil {
		return nil, err
	}
	if err := checkEnv(moed, adapter, launched); err != nil {
		return nil, err
	}
	command := moed.Spec.Engine.Command
	if len(command) == 0 {
		command = adapter.Command
	}
	ours := podTemplate(moed, desired.Labels(moed, component(launched), semmoev1.LabelRevision, revision), report, adapter, launched, command, args)
	if adapter.Options != nil {
		options, err := adapter.Options(launched)
		if err != nil {
			return nil, err
		}
		addOptions(ours, options)
	}
	if launched.CertFile != "" {
		addTLS(ours, moed.Spec.Engine.TLS.SecretName)
	}
	shape, err := json.Marshal(lar.Shape{
		Layers: report.Layers, MoELayers: report.MoELayers, Experts: report.Experts, ExpertsPerToken: report.ExpertsPerToken,
		Hidden: report.Hidden, Vocabulary: report.Vocab,
	})
	if err != nil {
		return nil, err
	}
	ours.Annotations[semmoev1.AnnotationModelShape] = string(shape)
	if launched.Overlap != (semmoev1.OverlapSpec{}) {
		settings, err := json.Marshal(launched.Overlap)
		if err != nil {
			return nil, err
		}
		ours.Annotations[semmoev1.AnnotationOverlap] = string(settings)
	}
	if plan != nil {
		addPlan(ours, moed, report, plan, own.Image)
		if plan.Reshuffled() {
			addReshuffledWeights(ours, moed, report, plan, own.Image)
		}
		if desired.Shuffles(moed) {
			addTables(ours, moed, plan, own)
		}
		if !launched.Worker {
			addProbe(ours, moed, report, own.Image)
		}
		restrict(ours.Spec.InitContainers, moed.Spec.Template)
		for i := range ours.Spec.InitContainers {
			ours.Spec.InitContainers[i].ImagePullPolicy = own.PullPolicy
		}
	}
	template, err := podtemplate.Merge(ours, moed.Spec.Template)
	if err != nil {
		return nil, fmt.Errorf("failed to merge spec.template: %w", err)
	}
	return template, nil
}

func podTemplate(moed *semmoev1.MoEDeployment, labels map[string]string, report checkpoint.Report, adapter engine.Adapter, launched engine.Launch, command, args []string) *corev1.PodTemplateSpec {
	port := moed.Spec.Engine.Port
	annotations := map[string]string{
		semmoev1.AnnotationModelDigest:            report.ModelDigest,
		semmoev1.AnnotationEngine:                 adapter.Type,
		"kubectl.kubernetes.io/default-container": semmoev1.EngineContainer,
	}
	if !launched.Worker {
		annotateForRouters(annotations, launched)
	}
	devices := corev1.ResourceList{
		corev1.ResourceName(moed.Spec.Parallelism.ResourceName): *resource.NewQuantity(int64(launched.Ranks/max(1, launched.Nodes)), resource.DecimalSI),
	}
	var startup, readiness *corev1.Probe
	if !launched.Worker || adapter.Nodes.WorkersServeHealth {
		health := corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: adapter.HealthPath, Port: intstr.FromString("http")}}
		startup = &corev1.Probe{ProbeHandler: health, PeriodSeconds: 2, TimeoutSeconds: 5, FailureThreshold: loadSeconds / 2}
		readiness = &corev1.Probe{ProbeHandler: health, PeriodSeconds: 5, TimeoutSeconds: 5, FailureThreshold: 3}
	}
	return &corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: labels, Annotations: annotations},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: ptr.To[int64](desired.DrainSeconds + desired.GraceSeconds),
			AutomountServiceAccountToken:  ptr.To(false),
			EnableServiceLinks:            ptr.To(false),
			Containers: []corev1.Container{{
				Name:                     semmoev1.EngineContainer,
				Image:                    moed.Spec.Engine.Image,
				Command:                  command,
				Args:                     args,
				Env:                      append([]corev1.EnvVar{podIPEnv()}, moed.Spec.Engine.Env...),
				Ports:                    enginePorts(port, launched),
				Resources:                corev1.ResourceRequirements{Requests: devices, Limits: devices},
				StartupProbe:             startup,
				ReadinessProbe:           readiness,
				Lifecycle:                &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: desired.DrainSeconds}}},
				TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
				VolumeMounts: []corev1.VolumeMount{
					{Name: modelVolume, MountPath: semmoev1.ModelMountPath, ReadOnly: true},
					// Collective libraries exchange data between the processes of a replica through shared memory.
					{Name: "shm", MountPath: "/dev/shm"},
				},
			}},
			Volumes: []corev1.Volume{
				{Name: modelVolume, VolumeSource: moed.Spec.Model.ModelVolume()},
				{Name: "shm", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory}}},
			},
		},
	}
}

// annotateForRouters annotates a serving pod with the settings that request routers need.
func annotateForRouters(annotations map[string]string, launched engine.Launch) {
	annotations[semmoev1.AnnotationPort] = strconv.Itoa(int(launched.Port))
	if launched.AttentionDP {
		annotations[semmoev1.AnnotationRanks] = strconv.Itoa(int(launched.Ranks))
	}
	if launched.Nodes > 1 {
		annotations[semmoev1.AnnotationPodsPerReplica] = strconv.Itoa(int(launched.Nodes))
	}
}

// addOptions adds the engine's options file. Its content is stored in the pod template, so it belongs to the revision
// and cannot change under a running pod.
func addOptions(template *corev1.PodTemplateSpec, content []byte) {
	template.Annotations[semmoev1.AnnotationEngineOptions] = string(content)
	template.Spec.Containers[0].VolumeMounts = append(template.Spec.Containers[0].VolumeMounts,
		corev1.VolumeMount{Name: semmoev1.EngineOptionsVolume, MountPath: path.Dir(semmoev1.EngineOptionsPath), ReadOnly: true})
	template.Spec.Volumes = append(template.Spec.Volumes, corev1.Volume{Name: semmoev1.EngineOptionsVolume, VolumeSource: corev1.VolumeSource{
		DownwardAPI: &corev1.DownwardAPIVolumeSource{Items: []corev1.DownwardAPIVolumeFile{{
			Path:     path.Base(semmoev1.EngineOptionsPath),
			FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "metadata.annotations['" + semmoev1.AnnotationEngineOptions + "']"},
		}}},
	}})
}

// secretMode makes the files of a Secret readable for engines and the output probe, whose user IDs depend on image and
// cluster. Only the containers of the pod can reach the volume.
const secretMode = 0o444

// addTLS adds the certificate of the engine, and the scheme to the probes and to the annotations for request routers. The
// engine does not need the authorities of the certificate. As an item they are required: without them, request routers
// cannot verify the pod, and it must not replace a pod that serves.
func addTLS(template *corev1.PodTemplateSpec, secret string) {
	template.Annotations[semmoev1.AnnotationScheme] = semmoev1.SchemeHTTPS
	engine := &template.Spec.Containers[0]
	for _, probe := range []*corev1.Probe{engine.StartupProbe, engine.ReadinessProbe} {
		probe.HTTPGet.Scheme = corev1.URISchemeHTTPS // the kubelet verifies no certificate
	}
	engine.VolumeMounts = append(engine.VolumeMounts, tlsMount())
	var items []corev1.KeyToPath
	for _, key := range []string{corev1.TLSCertKey, corev1.TLSPrivateKeyKey, corev1.ServiceAccountRootCAKey} {
		items = append(items, corev1.KeyToPath{Key: key, Path: key})
	}
	template.Spec.Volumes = append(template.Spec.Volumes, corev1.Volume{Name: semmoev1.EngineTLSVolume, VolumeSource: corev1.VolumeSource{
		Secret: &corev1.SecretVolumeSource{SecretName: secret, Items: items, DefaultMode: ptr.To[int32](secretMode)},
	}})
}

func tlsMount() corev1.VolumeMount {
	return corev1.VolumeMount{Name: semmoev1.EngineTLSVolume, MountPath: semmoev1.EngineTLSMountPath, ReadOnly: true}
}

// EngineURL returns the base URL of the engine of a pod.
func EngineURL(pod *corev1.Pod) string {
	scheme := cmp.Or(pod.Annotations[semmoev1.AnnotationScheme], "http")
	return scheme + "://" + net.JoinHostPort(pod.Status.PodIP, pod.Annotations[semmoev1.AnnotationPort])
}

// restrict sets the restricted pod security standard on the operator's containers: a namespace that enforces it would
// reject a pod whose engine sets it only for its own container.
func restrict(containers []corev1.Container, users *corev1.PodTemplateSpec) {
	var pod *corev1.PodSecurityContext
	if users != nil {
		pod = users.Spec.SecurityContext
	}
	for i := range containers {
		containers[i].SecurityContext = podsecurity.Sidecar(pod)
	}
}

// addPlan mounts the plan, and prevents the engine from starting if the plan is not the one that the revision names, or
// was not made for the current checkpoint.
func addPlan(template *corev1.PodTemplateSpec, moed *semmoev1.MoEDeployment, report checkpoint.Report, plan *Layout, image string) {
	template.Annotations[semmoev1.AnnotationPlanDigest] = plan.Digest
	if plan.Reshuffled() {
		template.Annotations[semmoev1.AnnotationRealization] = string(plan.Realization)
	}
	if plan.RedundantExperts > 0 {
		template.Annotations[semmoev1.AnnotationRedundantExperts] = strconv.Itoa(int(plan.RedundantExperts))
	}
	if moed.Spec.Parallelism.Attention != semmoev1.AttentionDataParallel {
		template.Annotations[semmoev1.AnnotationExpertParallelSize] = strconv.Itoa(int(moed.Spec.Parallelism.ExpertParallelSize))
	}
	mount := corev1.VolumeMount{Name: semmoev1.PlanVolume, MountPath: semmoev1.PlanMountPath, ReadOnly: true}
	template.Spec.Containers[0].VolumeMounts = append(template.Spec.Containers[0].VolumeMounts, mount)
	template.Spec.Volumes = append(template.Spec.Volumes, corev1.Volume{Name: semmoev1.PlanVolume, VolumeSource: corev1.VolumeSource{
		ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: plan.ConfigMap}},
	}})
	template.Spec.InitContainers = append(template.Spec.InitContainers, corev1.Container{
		Name:  verifyContainer,
		Image: image,
		Args: append([]string{
			"verify",
			"--plan-dir=" + semmoev1.PlanMountPath,
			"--plan-digest=" + plan.Digest,
			"--model-path=" + moed.Spec.Model.Path,
			"--model-digest=" + report.ModelDigest,
			"--expert-parallel-size=" + strconv.Itoa(int(moed.Spec.Parallelism.ExpertParallelSize)),
		}, layoutArgs(moed)...),
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
		Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("50m"), corev1.ResourceMemory: resource.MustParse("64Mi")},
			Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("512Mi")},
		},
		VolumeMounts: []corev1.VolumeMount{{Name: modelVolume, MountPath: semmoev1.ModelMountPath, ReadOnly: true}, mount},
	})
}

func podIPEnv() corev1.EnvVar {
	return corev1.EnvVar{Name: desired.PodIPVariable, ValueFrom: &corev1.EnvVarSource{
		FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "status.podIP"},
	}}
}

// enginePorts returns the ports of the engine's container: for requests, and the first one for KV events.
func enginePorts(port int32, launched engine.Launch) []corev1.ContainerPort {
	ports := []corev1.ContainerPort{{Name: "http", ContainerPort: port, Protocol: corev1.ProtocolTCP}}
	if first, _ := launched.KVEventPorts(); first > 0 {
		ports = append(ports, corev1.ContainerPort{Name: "kv-events", ContainerPort: first, Protocol: corev1.ProtocolTCP})
	}
	return ports
}
