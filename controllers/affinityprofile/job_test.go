// SPDX-License-Identifier: Apache-2.0

package affinityprofile

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	recording "github.com/semmoe/operator/internal/profile"
)

func TestRenderDedicated(t *testing.T) {
	p := newProfile(func(p *semmoev1.AffinityProfile) {
		p.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{
			RestartPolicy: corev1.RestartPolicyAlways, // a template for serving pods
			NodeSelector:  map[string]string{"gpu": "h200"},
			Containers: []corev1.Container{
				{Name: "engine", WorkingDir: "/w", StartupProbe: &corev1.Probe{FailureThreshold: 9}, LivenessProbe: &corev1.Probe{}},
				{Name: "logs", Image: "logs:1"},
				{Name: "profile", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("8Gi")}}},
			},
		}}
	})
	j := job(p, 3)
	if j.Name != "profile-"+id+"-3" || j.Labels[semmoev1.LabelComponent] != "profile" || j.Labels[semmoev1.LabelInputs] != id || j.Labels[semmoev1.LabelProfile] != "p" {
		t.Errorf("name %s, labels %v", j.Name, j.Labels)
	}
	if diff := cmp.Diff(j.Labels, j.Spec.Template.Labels); diff != "" {
		t.Errorf("pod labels differ from Job labels:\n%s", diff)
	}
	if *j.Spec.BackoffLimit != 0 || j.Spec.TTLSecondsAfterFinished != nil || j.Spec.ActiveDeadlineSeconds != nil {
		t.Errorf("spec %+v", j.Spec)
	}
	rules := j.Spec.PodFailurePolicy.Rules
	if rules[0].Action != batchv1.PodFailurePolicyActionIgnore || rules[0].OnPodConditions[0].Type != corev1.DisruptionTarget ||
		rules[1].Action != batchv1.PodFailurePolicyActionFailJob || *rules[1].OnExitCodes.ContainerName != "profile" || !slices.Equal(rules[1].OnExitCodes.Values, []int32{3, 4}) {
		t.Errorf("rules %+v", rules)
	}
	spec := j.Spec.Template.Spec
	if spec.RestartPolicy != corev1.RestartPolicyNever || *spec.ActiveDeadlineSeconds != 3600+3600+2000 || spec.NodeSelector["gpu"] != "h200" {
		t.Errorf("pod %+v", spec)
	}
	if len(spec.Containers) != 1 || len(spec.InitContainers) != 2 {
		t.Fatalf("%d containers, %d init containers", len(spec.Containers), len(spec.InitContainers))
	}
	for _, sidecar := range spec.InitContainers {
		if ptr.Deref(sidecar.RestartPolicy, "") != corev1.ContainerRestartPolicyAlways || sidecar.StartupProbe != nil || sidecar.LivenessProbe != nil {
			t.Errorf("%s is not a sidecar without probes: %+v", sidecar.Name, sidecar)
		}
	}
	at := slices.IndexFunc(spec.InitContainers, func(c corev1.Container) bool { return c.Name == "engine" })
	engine := spec.InitContainers[at]
	if engine.Image != "engine:1" || engine.WorkingDir != "/w" || !engine.Resources.Limits["nvidia.com/gpu"].Equal(resource.MustParse("4")) ||
		!slices.Contains(engine.Args, "--enable-return-routed-experts") || !slices.Contains(engine.Args, "$(POD_IP)") || !engine.VolumeMounts[0].ReadOnly {
		t.Errorf("engine %+v", engine)
	}
	recorder := spec.Containers[0]
	for _, arg := range []string{
		"--dedicated", "--endpoint=http://$(POD_IP):30000", "--progress-address=$(POD_IP):9090", "--store-scope=team/" + id, "--model-digest=model",
		"--dataset-digest=dataset", "--dataset=/dataset/d.jsonl", "--requests=2000", "--tokens=200000", "--request-tokens=512", "--wait=1h0m0s", "--timeout=2h28m20s",
	} {
		if !slices.Contains(recorder.Args, arg) {
			t.Errorf("args %v do not contain %s", recorder.Args, arg)
		}
	}
	security := recorder.SecurityContext
	if recorder.Resources.Limits.Memory().String() != "8Gi" || !*security.RunAsNonRoot || *security.AllowPrivilegeEscalation || security.SeccompProfile == nil {
		t.Errorf("recorder %+v", recorder)
	}
}

// TestRenderVolumesOfServingPods checks a template for serving pods that limits the shared memory and contains a volume
// for temporary files.
func TestRenderVolumesOfServingPods(t *testing.T) {
	memory := &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory, SizeLimit: ptr.To(resource.MustParse("64Gi"))}
	local := &corev1.HostPathVolumeSource{Path: "/mnt/nvme"}
	p := newProfile(func(p *semmoev1.AffinityProfile) {
		p.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{
			Containers: []corev1.Container{{Name: "engine", VolumeMounts: []corev1.VolumeMount{{Name: "tmp", MountPath: "/tmp"}, {Name: "shm", MountPath: "/dev/shm"}}}},
			Volumes: []corev1.Volume{
				{Name: "shm", VolumeSource: corev1.VolumeSource{EmptyDir: memory}},
				{Name: "tmp", VolumeSource: corev1.VolumeSource{HostPath: local}},
			},
		}}
	})
	if err := Validate(p); err != nil {
		t.Fatal(err)
	}
	spec := job(p, 1).Spec.Template.Spec
	got := map[string]corev1.VolumeSource{}
	for _, volume := range spec.Volumes {
		got[volume.Name] = volume.VolumeSource
	}
	for name, want := range map[string]corev1.VolumeSource{
		"shm": {EmptyDir: memory}, "tmp": {HostPath: local}, temporaryVolume: {EmptyDir: &corev1.EmptyDirVolumeSource{}},
	} {
		if diff := cmp.Diff(want, got[name]); diff != "" {
			t.Errorf("volume %s (-want +got):\n%s", name, diff)
		}
	}
	for container, want := range map[*corev1.Container]map[string]string{
		&spec.InitContainers[0]: {"/models": "model", "/dev/shm": "shm", "/tmp": "tmp"},
		&spec.Containers[0]:     {"/tmp": temporaryVolume},
	} {
		mounts := map[string]string{}
		for _, mount := range container.VolumeMounts {
			mounts[mount.MountPath] = mount.Name
		}
		for path, volume := range want {
			if mounts[path] != volume {
				t.Errorf("container %s has %q at %s, want %q", container.Name, mounts[path], path, volume)
			}
		}
	}
}

func TestRenderServing(t *testing.T) {
	p := newProfile(serving, func(p *semmoev1.AffinityProfile) {
		p.Spec.Engine.Port = 9090
		p.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "engine", WorkingDir: "/w"}}}}
	})
	spec := job(p, 1).Spec.Template.Spec
	if len(spec.InitContainers) != 0 || len(spec.Containers) != 1 || slices.ContainsFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == "shm" }) {
		t.Errorf("pod %+v", spec)
	}
	args := strings.Join(spec.Containers[0].Args, " ")
	if !strings.Contains(args, "--endpoint=http://m.team.svc:8000") || strings.Contains(args, "--dedicated") || !strings.Contains(args, "--progress-address=$(POD_IP):9091") {
		t.Errorf("args %s", args)
	}
	for _, list := range []corev1.ResourceList{spec.Containers[0].Resources.Limits, spec.Containers[0].Resources.Requests} {
		if _, devices := list["nvidia.com/gpu"]; devices {
			t.Error("the pod requests devices, want none")
		}
	}
}

// A profile of the model's own text mounts no data set, and its inspection reads none.
func TestRenderOwnText(t *testing.T) {
	p := newProfile(func(p *semmoev1.AffinityProfile) {
		p.Spec.Dataset = &semmoev1.DatasetSpec{OwnText: &semmoev1.OwnText{}}
	})
	spec := job(p, 1).Spec.Template.Spec
	args := strings.Join(spec.Containers[0].Args, " ")
	if !strings.Contains(args, "--own-text") || strings.Contains(args, "--dataset") {
		t.Errorf("args %s", args)
	}
	if slices.ContainsFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == semmoev1.DatasetVolume }) {
		t.Error("the pod has a volume for a data set")
	}
	if inputs := inputsOf(p); inputs.Dataset != nil {
		t.Errorf("the inspection has the data set %+v", inputs.Dataset)
	}
}

// The labels of Kueue are passed to the Job, whose pods have none: Kueue admits the Job.
func TestQueueOfJob(t *testing.T) {
	queue := map[string]string{semmoev1.LabelQueue: "gpus", semmoev1.LabelQueuePriority: "low"}
	for name, labels := range map[string]map[string]string{"queued": queue, "not queued": nil} {
		rendered, err := render(newProfile(func(p *semmoev1.AffinityProfile) { p.Labels = labels }), target{ID: "0123456789abcdef"}, 1)
		if err != nil {
			t.Fatal(err)
		}
		for _, label := range []string{semmoev1.LabelQueue, semmoev1.LabelQueuePriority} {
			if rendered.Labels[label] != labels[label] || rendered.Spec.Template.Labels[label] != "" {
				t.Errorf("%s: label %s is %q, and %q in the pod", name, label, rendered.Labels[label], rendered.Spec.Template.Labels[label])
			}
		}
	}
}

// TestPullPolicy checks that the pull policy is set on the operator's container only.
func TestPullPolicy(t *testing.T) {
	rendered, err := render(newProfile(), target{ID: id, ModelDigest: "model", DatasetDigest: "dataset", Image: "semmoe:1", PullPolicy: corev1.PullNever}, 1)
	if err != nil {
		t.Fatal(err)
	}
	if spec := rendered.Spec.Template.Spec; spec.Containers[0].ImagePullPolicy != corev1.PullNever || spec.InitContainers[0].ImagePullPolicy != "" {
		t.Errorf("pull policy %q, of the engine %q", spec.Containers[0].ImagePullPolicy, spec.InitContainers[0].ImagePullPolicy)
	}
}

func TestInspectPrefix(t *testing.T) {
	seen := map[string]bool{}
	for _, name := range []string{"p", strings.Repeat("a", 40), strings.Repeat("a", 41), strings.Repeat("a", 62) + "b", strings.Repeat("a", 62) + "c"} {
		prefix := inspectPrefix(newProfile(func(p *semmoev1.AffinityProfile) { p.Name = name }))
		if seen[prefix] || len(prefix)+len("-01234567-9999") > 63 {
			t.Errorf("%s: prefix %s", name, prefix)
		}
		seen[prefix] = true
	}
}

func TestValidate(t *testing.T) {
	template := func(spec corev1.PodSpec) func(*semmoev1.AffinityProfile) {
		return func(p *semmoev1.AffinityProfile) { p.Spec.Template = &corev1.PodTemplateSpec{Spec: spec} }
	}
	for name, tc := range map[string]struct {
		change func(*semmoev1.AffinityProfile)
		want   []string // reason, then parts of the message; none: valid
	}{
		"valid":                         {func(*semmoev1.AffinityProfile) {}, nil},
		"serving":                       {serving, nil},
		"unknown engine":                {func(p *semmoev1.AffinityProfile) { p.Spec.Engine.Type = "Other" }, []string{"UnknownEngine", "spec.engine.type", `"Other"`}},
		"engine without routed experts": {func(p *semmoev1.AffinityProfile) { p.Spec.Engine.Type = semmoev1.EngineTensorRTLLM }, []string{"RoutedExpertsUnavailable", "TensorRTLLM does not return the experts"}},
		"reserved flag":                 {func(p *semmoev1.AffinityProfile) { p.Spec.Engine.Args = []string{"--port=1"} }, []string{"ContradictingFlags", "--port=1"}},
		"reserved flag, complete profile": {func(p *semmoev1.AffinityProfile) {
			p.Spec.Engine.Args, p.Status.Result = []string{"--config=/flags.yaml"}, &semmoev1.ProfileResult{}
		}, nil},
		"flags of the engine of the deployment": {func(p *semmoev1.AffinityProfile) {
			serving(p)
			p.Spec.Engine.Args = []string{"--port=1"}
		}, nil},
		"reserved variable":                     {func(p *semmoev1.AffinityProfile) { p.Spec.Engine.Env = []corev1.EnvVar{{Name: "POD_IP"}} }, []string{"InvalidSpec", "spec.engine.env", "POD_IP"}},
		"reserved volume":                       {template(corev1.PodSpec{Volumes: []corev1.Volume{{Name: "dataset"}}}), []string{"InvalidTemplate", "spec.template.spec.volumes", `"dataset"`}},
		"image":                                 {template(corev1.PodSpec{Containers: []corev1.Container{{Name: "engine", Image: "x"}}}), []string{"InvalidTemplate", "spec.engine"}},
		"container without image":               {template(corev1.PodSpec{Containers: []corev1.Container{{Name: "logs"}}}), []string{"InvalidTemplate", `container "logs" has no image`}},
		"init container in place of the engine": {template(corev1.PodSpec{InitContainers: []corev1.Container{{Name: "engine", Image: "evil:1"}}}), []string{"InvalidTemplate", "spec.template.spec.initContainers"}},
		"privileged recorder": {template(corev1.PodSpec{Containers: []corev1.Container{{Name: "profile", SecurityContext: &corev1.SecurityContext{Privileged: ptr.To(true)}}}}),
			[]string{"InvalidTemplate", "securityContext"}},
		"another store": {template(corev1.PodSpec{Containers: []corev1.Container{{Name: "profile", Env: []corev1.EnvVar{{Name: "SEMMOE_STORE_URL", Value: "https://evil"}}}}}),
			[]string{"InvalidTemplate", "SEMMOE_STORE_URL"}},
		"token of the store in another container": {template(corev1.PodSpec{Containers: []corev1.Container{{Name: "side", Image: "x", VolumeMounts: []corev1.VolumeMount{{Name: "semmoe-store-token", MountPath: "/t"}}}}}),
			[]string{"InvalidTemplate", "spec.template.spec.containers"}},
		"own token for the store": {template(corev1.PodSpec{Volumes: []corev1.Volume{{Name: "own", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
			Sources: []corev1.VolumeProjection{{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Audience: artifact.Audience, Path: "t"}}},
		}}}}}), []string{"InvalidTemplate", "spec.template.spec.volumes"}},
		"processes of other containers": {template(corev1.PodSpec{ShareProcessNamespace: ptr.To(true)}), []string{"InvalidTemplate", "spec.template.spec.shareProcessNamespace"}},
		"reserved label": {func(p *semmoev1.AffinityProfile) {
			p.Spec.Template = &corev1.PodTemplateSpec{}
			p.Spec.Template.Labels = map[string]string{"semmoe.io/inputs": "x"}
		}, []string{"InvalidTemplate", "semmoe.io/inputs", "reserved"}},
		"unsupported micro-batches": {func(p *semmoev1.AffinityProfile) {
			p.Spec.Engine.Overlap = &semmoev1.OverlapSpec{MicroBatches: 3}
		}, []string{"OverlapUnsupported", "spec.engine.overlap.microBatches: 3"}},
		"a release without routed experts": {func(p *semmoev1.AffinityProfile) {
			p.Spec.Engine.Type, p.Spec.Engine.Image = semmoev1.EngineVLLM, "vllm/vllm-openai:v0.17.0"
		}, []string{"EngineReleaseTooOld", "spec.engine.image: VLLM 0.17.0 is invalid"}},
		"a connector": {func(p *semmoev1.AffinityProfile) {
			p.Spec.Engine.Type, p.Spec.Engine.Args = semmoev1.EngineVLLM, []string{"--kv-transfer-config", `{"kv_connector":"NixlConnector"}`}
		}, []string{"CaptureUnsupported", "the KV connector NixlConnector"}},
		"options": {func(p *semmoev1.AffinityProfile) { p.Spec.Engine.Options = "a: 1" }, []string{"ContradictingFlags", "spec.engine.options is invalid"}},
	} {
		got := validate(newProfile(tc.change))
		if tc.want == nil {
			if got != nil {
				t.Errorf("%s: %v", name, got)
			}
			continue
		}
		if got == nil || got.reason != tc.want[0] {
			t.Errorf("%s: %+v, want %s", name, got, tc.want[0])
			continue
		}
		for _, part := range tc.want[1:] {
			if !strings.Contains(got.message, part) {
				t.Errorf("%s: message %q does not contain %q", name, got.message, part)
			}
		}
	}
}

// TestRenderTransformers checks that the recorder takes the place of the engine, with one device, and that nothing of
// the engine remains.
func TestRenderTransformers(t *testing.T) {
	p := newProfile(func(p *semmoev1.AffinityProfile) {
		p.Spec.Backend = semmoev1.ProfilingBackendTransformers
		p.Spec.Engine.Type = semmoev1.EngineTensorRTLLM // returns no experts
		p.Spec.Engine.Args = []string{"--no-such-flag"}
		p.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "engine", Resources: corev1.ResourceRequirements{
				Requests: corev1.ResourceList{"example.com/gpu": resource.MustParse("1")}, Limits: corev1.ResourceList{"example.com/gpu": resource.MustParse("1")},
			},
		}}}}
	})
	if err := Validate(p); err != nil {
		t.Fatal(err)
	}
	for image, want := range map[string]string{"": "engine:1", "torch:2": "torch:2"} {
		p.Spec.BackendImage = image
		spec := job(p, 1).Spec.Template.Spec
		engine, recorder := spec.InitContainers[0], spec.Containers[0]
		if engine.Name != "engine" || engine.Image != want || !slices.Equal(engine.Command, []string{"python3", "-c", recording.TransformersRecorder}) ||
			!slices.Equal(engine.Args, []string{"--model-path=/models/m", "--host=$(POD_IP)", "--port=30000", "--offload-dir=/offload"}) {
			t.Errorf("engine %s, image %s, args %v", engine.Name, engine.Image, engine.Args)
		}
		if one := resource.MustParse("1"); !engine.Resources.Limits["nvidia.com/gpu"].Equal(one) || !engine.Resources.Requests["nvidia.com/gpu"].Equal(one) || len(engine.Resources.Limits) != 2 {
			t.Errorf("devices %v", engine.Resources)
		}
		if !slices.ContainsFunc(engine.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == "/offload" && !m.ReadOnly }) ||
			!slices.ContainsFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == "offload" && v.EmptyDir != nil }) {
			t.Errorf("no volume for weights: %v, %v", engine.VolumeMounts, spec.Volumes)
		}
		if !slices.Contains(recorder.Args, "--backend=Transformers") || !slices.Contains(recorder.Args, "--endpoint=http://$(POD_IP):30000") ||
			slices.ContainsFunc(recorder.Args, func(arg string) bool { return strings.HasPrefix(arg, "--engine") || arg == "--dedicated" }) {
			t.Errorf("args %v", recorder.Args)
		}
	}
	if strings.Contains(recording.TransformersRecorder, "$(") || len(recording.TransformersRecorder) > 100<<10 {
		t.Error("the program contains $(, which Kubernetes expands, or is too long for an argument")
	}
	p.Spec.Backend = semmoev1.ProfilingBackendEngine
	if err := Validate(p); err == nil || !strings.Contains(err.Error(), "backend Transformers") {
		t.Errorf("an engine that returns no experts: %v", err)
	}
}
