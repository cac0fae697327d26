// SPDX-License-Identifier: Apache-2.0

package revisions

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/kube/podhealth"
)

// The revision of a given spec must not change between releases: an upgrade would restart every serving pod.
func TestRevisionIsStable(t *testing.T) {
	const want = "383baaf1e5"
	if got := Of(moedtest.Deployment(), moedtest.Report(), nil); got != want {
		t.Errorf("revision %s, was %s: an upgrade to this version would restart every serving pod", got, want)
	}
}

func TestRevisionFollowsItsInputsAlone(t *testing.T) {
	base := Of(moedtest.Deployment(), moedtest.Report(), nil)
	cases := map[string]struct {
		Change func(*semmoev1.MoEDeployment)
		same   bool
	}{
		"replicas": {func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](9) }, true},
		"routing":  {func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Replicas = 9 }, true},
		"more samples": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Routing.Mode = "None"
			m.Spec.Routing.SamplePercent = ptr.To[int32](5)
		}, true},
		"first samples":       {func(m *semmoev1.MoEDeployment) { m.Spec.Routing.SamplePercent = ptr.To[int32](5) }, false},
		"rollout":             {func(m *semmoev1.MoEDeployment) { m.Spec.Rollout.MaxSurge = ptr.To[int32](9) }, true},
		"reconciliation":      {func(m *semmoev1.MoEDeployment) { m.Spec.Reconciliation = semmoev1.ReconciliationPaused }, true},
		"tokens not shuffled": {func(m *semmoev1.MoEDeployment) { m.Spec.Placement.TokenShuffle = semmoev1.TokenShuffleDisabled }, true},
		"micro-batches":       {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Overlap = &semmoev1.OverlapSpec{MicroBatches: 2} }, false},
		"mode Auto, no plan": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Overlap = &semmoev1.OverlapSpec{Mode: semmoev1.OverlapAuto}
		}, true},
		"labels":          {func(m *semmoev1.MoEDeployment) { m.Labels = map[string]string{"a": "b"} }, true},
		"image":           {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Image = "engine:2" }, false},
		"args":            {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = []string{"--x"} }, false},
		"model path":      {func(m *semmoev1.MoEDeployment) { m.Spec.Model.Path = "/models/x" }, false},
		"layout, no plan": {func(m *semmoev1.MoEDeployment) { m.Spec.Model.LayoutAs = "qwen3_moe" }, true},
		"EP size":         {func(m *semmoev1.MoEDeployment) { m.Spec.Parallelism.ExpertParallelSize = 8 }, false},
		"template": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{NodeSelector: map[string]string{"a": "b"}}}
		}, false},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if got := Of(moedtest.Deployment(tc.Change), moedtest.Report(), nil); (got == base) != tc.same {
				t.Errorf("revision %s, before the change %s, want equal: %v", got, base, tc.same)
			}
		})
	}
	plan := &Layout{Digest: "d", Realization: semmoev1.RealizationReshuffledWeights}
	laidOut := func(m *semmoev1.MoEDeployment) { m.Spec.Model.LayoutAs = "qwen3_moe" }
	if Of(moedtest.Deployment(laidOut), moedtest.Report(), plan) == Of(moedtest.Deployment(), moedtest.Report(), plan) {
		t.Error("another layout gives the same revision under a plan")
	}
	changed := moedtest.Report()
	changed.ModelDigest = "sha256:def"
	if Of(moedtest.Deployment(), changed, nil) == base {
		t.Error("another checkpoint gives the same revision")
	}
}

func TestRender(t *testing.T) {
	moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
		m.Spec.Engine.Args = []string{"--mem-fraction-static", "0.8"}
		m.Spec.Engine.Env = []corev1.EnvVar{{Name: "A", Value: "b"}}
		m.Spec.Template = &corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"team": "x"}},
			Spec: corev1.PodSpec{
				NodeSelector: map[string]string{"gpu": "h200"},
				Containers: []corev1.Container{
					{Name: "engine", Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": resource.MustParse("4")}}},
					{Name: "sidecar", Image: "sidecar:1"},
				},
			},
		}
	})
	workload, err := Render(moed, "r1", moedtest.Report(), nil, Own{Image: "semmoe:1"})
	if err != nil {
		t.Fatal(err)
	}
	template := workload.Template()
	for key, want := range map[string]string{"team": "x", semmoev1.LabelRevision: "r1", semmoev1.LabelDeployment: "m"} {
		if got := template.Labels[key]; got != want {
			t.Errorf("label %s is %q, want %q", key, got, want)
		}
	}
	if template.Annotations[semmoev1.AnnotationRanks] != "4" || template.Annotations[semmoev1.AnnotationPort] != "30000" {
		t.Errorf("annotations %v lack ranks and port", template.Annotations)
	}
	if template.Spec.NodeSelector["gpu"] != "h200" || len(template.Spec.Containers) != 2 {
		t.Fatalf("the user's template was not merged: %+v", template.Spec)
	}
	var engine corev1.Container
	for _, c := range template.Spec.Containers {
		if c.Name == "engine" {
			engine = c
		}
	}
	wantArgs := []string{
		"--model-path", "/models", "--served-model-name", "m", "--host", "$(POD_IP)", "--port", "30000", "--tp-size", "4", "--ep-size", "4",
		"--dp-size", "4", "--enable-dp-attention", "--mem-fraction-static", "0.8",
	}
	if diff := cmp.Diff(wantArgs, engine.Args); diff != "" {
		t.Errorf("args (-want +got):\n%s", diff)
	}
	if gpus := engine.Resources.Limits["nvidia.com/gpu"]; gpus.Value() != 4 {
		t.Errorf("requests %v devices, want 4", gpus.Value())
	}
	if cpu := engine.Resources.Requests["cpu"]; cpu.Value() != 4 {
		t.Errorf("the user's resources were lost: %v", engine.Resources)
	}
	if engine.Image != "engine:1" || engine.Env[0].Name != "POD_IP" || engine.Env[1].Value != "b" || engine.Lifecycle.PreStop.Sleep == nil {
		t.Errorf("the engine's container is %+v", engine)
	}
}

// A plan reaches the engine as its own expert map, which an init container verifies first. The digest in the annotation
// identifies the plan for request routers and the store.
func TestRenderWithPlan(t *testing.T) {
	plan := LayoutOf(moedtest.PlanOf("m-1", "ab", nil), semmoev1.RealizationEngineMap)
	moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
		m.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{InitContainers: []corev1.Container{{Name: "users", Image: "x"}}}}
	})
	workload, err := Render(moed, "r1", moedtest.Report(), plan, Own{Image: "semmoe:1"})
	if err != nil {
		t.Fatal(err)
	}
	template := workload.Template()
	if workload.Annotations[semmoev1.AnnotationPlanDigest] != plan.Digest || template.Annotations[semmoev1.AnnotationPlanDigest] != plan.Digest {
		t.Error("the annotation does not name the plan")
	}
	i := slices.IndexFunc(template.Spec.InitContainers, func(c corev1.Container) bool { return c.Name == "verify-plan" })
	if names := initContainers(*template); i < 0 || !slices.Equal(names, []string{"users", "verify-plan", "prove-lossless"}) {
		t.Fatalf("init containers are %v, want the user's, verify-plan and prove-lossless", names)
	}
	verify := template.Spec.InitContainers[i]
	want := []string{"verify", "--plan-dir=/etc/semmoe/plan", "--plan-digest=" + plan.Digest, "--model-path=/models", "--model-digest=sha256:abc", "--expert-parallel-size=4"}
	if diff := cmp.Diff(want, verify.Args); diff != "" || verify.Image != "semmoe:1" {
		t.Errorf("verify-plan runs %s (-want +got):\n%s", verify.Image, diff)
	}
	engine := template.Spec.Containers[0]
	if at := slices.Index(engine.Args, "--init-expert-location"); at < 0 || engine.Args[at+1] != "/etc/semmoe/plan/sglang.json" {
		t.Errorf("the engine's arguments %v do not name the map", engine.Args)
	}
	for _, mounts := range [][]corev1.VolumeMount{engine.VolumeMounts, verify.VolumeMounts} {
		if !slices.ContainsFunc(mounts, func(m corev1.VolumeMount) bool { return m.MountPath == semmoev1.PlanMountPath && m.ReadOnly }) {
			t.Errorf("the plan is not mounted: %+v", mounts)
		}
	}
	if !slices.ContainsFunc(template.Spec.Volumes, func(v corev1.Volume) bool { return v.ConfigMap != nil && v.ConfigMap.Name == "m-1-ab" }) {
		t.Errorf("no volume is the plan's ConfigMap: %+v", template.Spec.Volumes)
	}
}

func initContainers(template corev1.PodTemplateSpec) []string {
	var names []string
	for _, c := range template.Spec.InitContainers {
		names = append(names, c.Name)
	}
	return names
}

// A namespace that enforces the restricted pod security standard admits the pod of a compliant engine: each container
// that a plan adds sets its own security context, and the engine's is not changed.
func TestRenderedContainersAreRestricted(t *testing.T) {
	moed := moedtest.Deployment(moedtest.Shuffled, func(m *semmoev1.MoEDeployment) {
		m.Spec.Placement.Cache = &semmoev1.CacheSpec{Volume: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "c"}}}
		m.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{InitContainers: []corev1.Container{{Name: "users", Image: "x"}}}}
	})
	workload, err := Render(moed, "r1", moedtest.Report(), LayoutOf(moedtest.PlanOf("m-1", "0123456789abcdef", nil), semmoev1.RealizationReshuffledWeights), Own{Image: "semmoe:1"})
	if err != nil {
		t.Fatal(err)
	}
	spec := workload.Template().Spec
	ours := 0
	for _, c := range spec.InitContainers {
		if !slices.Contains(ourInitContainers, c.Name) {
			continue
		}
		ours++
		if s := c.SecurityContext; s == nil || !ptr.Deref(s.RunAsNonRoot, false) || s.SeccompProfile == nil || ptr.Deref(s.AllowPrivilegeEscalation, true) || !ptr.Deref(s.ReadOnlyRootFilesystem, false) ||
			s.Capabilities == nil || !slices.Contains(s.Capabilities.Drop, "ALL") {
			t.Errorf("container %s: %+v", c.Name, s)
		}
	}
	if ours != len(ourInitContainers) {
		t.Errorf("%d containers of ours, want all %d", ours, len(ourInitContainers))
	}
	if spec.SecurityContext != nil || spec.Containers[0].SecurityContext != nil {
		t.Errorf("the user's are %+v and %+v", spec.SecurityContext, spec.Containers[0].SecurityContext)
	}
}

// The pull policy applies only to the operator's containers and is not part of the revision: a change restarts no pod.
func TestPullPolicyOfOurContainers(t *testing.T) {
	moed := moedtest.Deployment(moedtest.Shuffled, func(m *semmoev1.MoEDeployment) {
		m.Spec.Placement.Cache = &semmoev1.CacheSpec{Volume: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "c"}}}
		m.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{InitContainers: []corev1.Container{{Name: "users", Image: "x"}}}}
	})
	plan := LayoutOf(moedtest.PlanOf("m-1", "0123456789abcdef", nil), semmoev1.RealizationReshuffledWeights)
	for _, policy := range []corev1.PullPolicy{"", corev1.PullIfNotPresent, corev1.PullNever} {
		workload, err := Render(moed, Of(moed, moedtest.Report(), plan), moedtest.Report(), plan, Own{Image: "semmoe:1", PullPolicy: policy})
		if err != nil {
			t.Fatal(err)
		}
		ours, spec := 0, workload.Template().Spec
		for _, c := range append(spec.InitContainers, spec.Containers...) {
			want := corev1.PullPolicy("")
			if slices.Contains(ourInitContainers, c.Name) {
				want, ours = policy, ours+1
			}
			if c.ImagePullPolicy != want {
				t.Errorf("policy %q: container %s has %q, want %q", policy, c.Name, c.ImagePullPolicy, want)
			}
		}
		if ours != len(ourInitContainers) {
			t.Errorf("%d containers of ours, want all %d", ours, len(ourInitContainers))
		}
	}
}

// The user cannot set the image of a container that the operator adds.
func TestImagesOfOurContainers(t *testing.T) {
	for _, name := range ourInitContainers {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{semmoev1.LabelComponent: semmoev1.ComponentEngine}}}
		pod.Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: name, State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImagePull"}}}}
		if problem, _ := podhealth.Find([]*corev1.Pod{pod}, nil, time.Now()); problem == nil || !strings.Contains(problem.Message, "the operator's --image") {
			t.Errorf("container %s: %+v", name, problem)
		}
	}
}

// With reshuffled weights, the engine starts on the copy, without a map. Each plan has its own copy.
func TestRenderWithReshuffledWeights(t *testing.T) {
	plan := LayoutOf(moedtest.PlanOf("m-1", "0123456789abcdef", nil), semmoev1.RealizationReshuffledWeights)
	withReport := moedtest.Report()
	withReport.Bytes = 1 << 40
	emptyDir := func(template corev1.PodTemplateSpec) *corev1.Volume {
		i := slices.IndexFunc(template.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == semmoev1.CacheVolume })
		return &template.Spec.Volumes[i]
	}
	rendered := func(change ...func(*semmoev1.MoEDeployment)) corev1.PodTemplateSpec {
		workload, err := Render(moedtest.Deployment(change...), "r1", withReport, plan, Own{Image: "semmoe:1"})
		if err != nil {
			t.Fatal(err)
		}
		return *workload.Template()
	}
	const out = "/var/cache/semmoe/sha256:abc-0123456789abcdef"
	template := rendered()
	if template.Annotations[semmoev1.AnnotationRealization] != "ReshuffledWeights" {
		t.Error("the annotation for permuted expert IDs is missing")
	}
	engine := template.Spec.Containers[0]
	if at := slices.Index(engine.Args, "--model-path"); engine.Args[at+1] != out || slices.Contains(engine.Args, "--init-expert-location") {
		t.Errorf("the engine's arguments are %v", engine.Args)
	}
	if diff := cmp.Diff([]string{"verify-plan", "reshuffle-weights", "prove-lossless"}, initContainers(template)); diff != "" {
		t.Errorf("init containers (-want +got):\n%s", diff)
	}
	copier := template.Spec.InitContainers[1]
	if diff := cmp.Diff([]string{"reshuffle", "--model=/models", "--permutation=/etc/semmoe/plan/gate-permutation.json", "--out=" + out}, copier.Args); diff != "" {
		t.Errorf("arguments (-want +got):\n%s", diff)
	}
	// The scheduler must reserve the space of the copy, and the kubelet must not evict the pod for using it.
	asked, limit := copier.Resources.Requests[corev1.ResourceEphemeralStorage], emptyDir(template).EmptyDir.SizeLimit
	if asked.Value() < 1<<40 || limit.Cmp(asked) != 0 {
		t.Errorf("requests %v of storage, limit %v", asked.String(), limit)
	}

	cached := rendered(func(m *semmoev1.MoEDeployment) {
		m.Spec.Placement.Cache = &semmoev1.CacheSpec{Volume: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/c"}}, SizeBytes: ptr.To[int64](7)}
	})
	if diff := cmp.Diff([]string{"verify-plan", "reshuffle-weights", "hold-weights", "prove-lossless"}, initContainers(cached)); diff != "" {
		t.Errorf("init containers with a cache (-want +got):\n%s", diff)
	}
	holder := cached.Spec.InitContainers[2]
	if !slices.Contains(holder.Args, "--hold") || !slices.Contains(holder.Args, "--limit=7") || holder.RestartPolicy == nil || slices.Contains(cached.Spec.InitContainers[1].Args, "--hold") {
		t.Errorf("hold-weights is %+v", holder)
	}
	if storage := cached.Spec.InitContainers[1].Resources.Requests[corev1.ResourceEphemeralStorage]; !storage.IsZero() || emptyDir(cached).HostPath == nil {
		t.Errorf("with a cache, %v of ephemeral storage is requested", storage.String())
	}

	byMap := LayoutOf(moedtest.PlanOf("m-1", "0123456789abcdef", nil), semmoev1.RealizationEngineMap)
	if Of(moedtest.Deployment(), withReport, plan) == Of(moedtest.Deployment(), withReport, byMap) {
		t.Error("both realisations have the same revision")
	}
}

// TensorRT-LLM is configured by its options file for attention and expert map. The file is in the pod template, so each
// pod reads its own version.
func TestRenderWithOptionsFile(t *testing.T) {
	moed := moedtest.Deployment(moedtest.EngineOf(semmoev1.EngineTensorRTLLM))
	const options = "enable_attention_dp: true\n"
	for content, plan := range map[string]*Layout{
		options: nil,
		options + "moe_config:\n  load_balancer: /etc/semmoe/plan/trtllm.yaml\n": LayoutOf(moedtest.PlanOf("m-1", "ab", nil), semmoev1.RealizationEngineMap),
	} {
		workload, err := Render(moed, "r1", moedtest.Report(), plan, Own{Image: "semmoe:1"})
		if err != nil {
			t.Fatal(err)
		}
		template := workload.Template()
		if diff := cmp.Diff(content, template.Annotations["semmoe.io/engine-options"]); diff != "" {
			t.Errorf("options (-want +got):\n%s", diff)
		}
		engine := template.Spec.Containers[0]
		if at := slices.Index(engine.Args, "--extra_llm_api_options"); at < 0 || engine.Args[at+1] != "/etc/semmoe/engine/options.yaml" {
			t.Errorf("the engine's arguments %v do not name the file", engine.Args)
		}
		if !slices.ContainsFunc(engine.VolumeMounts, func(m corev1.VolumeMount) bool {
			return m.Name == "semmoe-engine-options" && m.MountPath == "/etc/semmoe/engine" && m.ReadOnly
		}) {
			t.Errorf("the file is not mounted: %+v", engine.VolumeMounts)
		}
		if !slices.ContainsFunc(template.Spec.Volumes, func(v corev1.Volume) bool {
			return v.Name == "semmoe-engine-options" && v.DownwardAPI != nil && v.DownwardAPI.Items[0].Path == "options.yaml" &&
				v.DownwardAPI.Items[0].FieldRef.FieldPath == "metadata.annotations['semmoe.io/engine-options']"
		}) {
			t.Errorf("no volume is the file: %+v", template.Spec.Volumes)
		}
	}
	for _, engine := range []semmoev1.EngineType{semmoev1.EngineSGLang, semmoev1.EngineVLLM, semmoev1.EngineVLLMAscend} {
		workload, err := Render(moedtest.Deployment(moedtest.EngineOf(engine)), "r1", moedtest.Report(), nil, Own{Image: "semmoe:1"})
		if err != nil {
			t.Fatal(err)
		}
		if options, has := workload.Template().Annotations[semmoev1.AnnotationEngineOptions]; has {
			t.Errorf("%s has an options file: %q", engine, options)
		}
	}
}

// An engine that does not return routed experts is not queried for them, and not started with the option.
func TestSampling(t *testing.T) {
	for engine, want := range map[semmoev1.EngineType]int32{
		semmoev1.EngineSGLang: 5, semmoev1.EngineVLLM: 5, semmoev1.EngineVLLMAscend: 5, semmoev1.EngineTensorRTLLM: 0,
	} {
		moed := moedtest.Deployment(moedtest.EngineOf(engine))
		if got := desired.SamplePercent(moed); got != want || Launch(moed).RoutedExperts != (want > 0) {
			t.Errorf("%s: %d percent, RoutedExperts %v; want %d", engine, got, Launch(moed).RoutedExperts, want)
		}
	}
}

// tokenVolume returns a volume with a token that the artifact store accepts.
func tokenVolume() corev1.Volume {
	return corev1.Volume{Name: "own", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
		Sources: []corev1.VolumeProjection{{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Audience: artifact.Audience, Path: "t"}}},
	}}}
}

func TestValidate(t *testing.T) {
	template := func(t corev1.PodTemplateSpec) func(*semmoev1.MoEDeployment) {
		return func(m *semmoev1.MoEDeployment) { m.Spec.Template = &t }
	}
	containers := func(c ...corev1.Container) func(*semmoev1.MoEDeployment) {
		return template(corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: c}})
	}
	variable := func(name string, change ...func(*semmoev1.MoEDeployment)) func(*semmoev1.MoEDeployment) {
		return func(m *semmoev1.MoEDeployment) {
			for _, c := range change {
				c(m)
			}
			containers(corev1.Container{Name: "engine", Env: []corev1.EnvVar{{Name: "HF_TOKEN"}, {Name: name, Value: "x"}}})(m)
		}
	}
	const inTemplate = `spec.template.spec.containers: env of container "engine": `
	cases := map[string]struct {
		Change  func(*semmoev1.MoEDeployment)
		message string
	}{
		"valid":              {func(*semmoev1.MoEDeployment) {}, ""},
		"unknown engine":     {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Type = "X" }, `spec.engine.type: engine type "X" is invalid`},
		"contradicting flag": {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = []string{"--tp=2"} }, `"--tp=2" contradicts spec.parallelism.expertParallelSize`},
		"user-provided map where it is compared": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Routing.SamplePercent = ptr.To[int32](5)
			m.Spec.Engine.Args = []string{"--init-expert-location", "x.json"}
		}, `"--init-expert-location" contradicts the plan of spec.profiling`},
		"user-provided map":   {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = []string{"--init-expert-location", "x.json"} }, ""},
		"plan volume":         {template(corev1.PodTemplateSpec{Spec: corev1.PodSpec{Volumes: []corev1.Volume{{Name: "semmoe-plan"}}}}), "use another name"},
		"verifying container": {template(corev1.PodTemplateSpec{Spec: corev1.PodSpec{InitContainers: []corev1.Container{{Name: "verify-plan"}}}}), `"verify-plan" is reserved by the operator`},
		"probing container":   {template(corev1.PodTemplateSpec{Spec: corev1.PodSpec{InitContainers: []corev1.Container{{Name: "prove-lossless"}}}}), `"prove-lossless" is reserved by the operator`},
		"a cache without a use": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Placement.Realization, m.Spec.Placement.Cache = semmoev1.RealizationEngineMap, &semmoev1.CacheSpec{}
		}, "spec.placement.cache: with spec.placement.realization EngineMap"},
		"the probe's port":    {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Port = 9410 }, "spec.engine.port: 9410"},
		"operator's variable": {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Env = []corev1.EnvVar{{Name: "POD_IP"}} }, "spec.engine.env: POD_IP"},
		"two pods":            {moedtest.TwoPods, ""},
		"three pods": {func(m *semmoev1.MoEDeployment) { m.Spec.Parallelism.PodsPerReplica = ptr.To[int32](3) },
			"spec.parallelism.podsPerReplica: 3 does not divide spec.parallelism.expertParallelSize, which is 4"},
		"two pods of TensorRT-LLM": {func(m *semmoev1.MoEDeployment) { moedtest.EngineOf(semmoev1.EngineTensorRTLLM)(m); moedtest.TwoPods(m) }, "TensorRTLLM cannot be spread over pods"},
		"a group's variable": {func(m *semmoev1.MoEDeployment) {
			moedtest.TwoPods(m)
			m.Spec.Engine.Env = []corev1.EnvVar{{Name: "LWS_GROUP_SIZE", Value: "9"}}
		}, "spec.engine.env: LWS_GROUP_SIZE is set by LeaderWorkerSet"},
		"such a variable elsewhere": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Env = []corev1.EnvVar{{Name: "LWS_GROUP_SIZE", Value: "9"}}
		}, ""},
		"options volume": {template(corev1.PodTemplateSpec{Spec: corev1.PodSpec{Volumes: []corev1.Volume{{Name: "semmoe-engine-options"}}}}), "use another name"},
		"vLLM":           {moedtest.EngineOf(semmoev1.EngineVLLM), ""},
		"TensorRT-LLM":   {moedtest.EngineOf(semmoev1.EngineTensorRTLLM), ""},
		"sampling TensorRT-LLM": {func(m *semmoev1.MoEDeployment) {
			moedtest.EngineOf(semmoev1.EngineTensorRTLLM)(m)
			m.Spec.Routing.SamplePercent = ptr.To[int32](5)
		}, "spec.routing.samplePercent is 5: TensorRTLLM does not return the routed experts of requests"},
		"profiling TensorRT-LLM": {func(m *semmoev1.MoEDeployment) {
			moedtest.EngineOf(semmoev1.EngineTensorRTLLM)(m)
			m.Spec.Profiling = &semmoev1.ProfilingSpec{Dataset: &semmoev1.DatasetSpec{Path: "/models/d.jsonl"}}
		}, "reference in spec.profiling.profileRef an AffinityProfile of the same model"},
		"not sampling TensorRT-LLM": {func(m *semmoev1.MoEDeployment) {
			moedtest.EngineOf(semmoev1.EngineTensorRTLLM)(m)
			m.Spec.Routing.SamplePercent = ptr.To[int32](0)
		}, ""},
		"variable that moves experts": {func(m *semmoev1.MoEDeployment) {
			moedtest.EngineOf(semmoev1.EngineVLLMAscend)(m)
			m.Spec.Engine.Env = []corev1.EnvVar{{Name: "DYNAMIC_EPLB", Value: "true"}}
		}, "spec.engine.env: DYNAMIC_EPLB contradicts the plan"},
		"a template's variable that moves experts": {variable("DYNAMIC_EPLB", moedtest.EngineOf(semmoev1.EngineVLLMAscend)), inTemplate + "DYNAMIC_EPLB contradicts the plan"},
		"a template's variable of a group":         {variable("LWS_WORKER_INDEX", moedtest.TwoPods), inTemplate + "LWS_WORKER_INDEX is set by LeaderWorkerSet"},
		"a template's variable of tables":          {variable("SEMMOE_TABLES", moedtest.Shuffled), inTemplate + "SEMMOE_TABLES is set by the operator"},
		"a template's address":                     {variable("POD_IP"), inTemplate + "POD_IP is set by the operator"},
		"a template's address that is the pod's":   {containers(corev1.Container{Name: "engine", Env: []corev1.EnvVar{podIPEnv()}}), ""},
		"a template's variables of the user's":     {variable("LWS_WORKER_INDEX"), ""},
		"a sidecar's address":                      {containers(corev1.Container{Name: "side", Image: "x", Env: []corev1.EnvVar{{Name: "POD_IP", Value: "x"}}}), ""},
		"a template's removed backend": {variable("VLLM_ALL2ALL_BACKEND", moedtest.EngineOf(semmoev1.EngineVLLM), func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Overlap = &semmoev1.OverlapSpec{MicroBatches: 2}
		}), "set --all2all-backend in spec.engine.args"},
		"options": {func(m *semmoev1.MoEDeployment) {
			moedtest.EngineOf(semmoev1.EngineTensorRTLLM)(m)
			m.Spec.Engine.Options = "max_batch_size: 8"
		}, ""},
		"options of another engine": {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Options = "max_batch_size: 8" }, "spec.engine.options is invalid: SGLang has no options file"},
		"reserved label": {template(corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"semmoe.io/x": ""}}}),
			`spec.template.metadata.labels: "semmoe.io/x" is reserved`},
		"reserved annotation": {template(corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{"semmoe.io/x": ""}}}),
			`spec.template.metadata.annotations: "semmoe.io/x" is reserved`},
		"reserved label of routers": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Routing.Template = &semmoev1.RouterTemplate{Metadata: semmoev1.RouterTemplateMetadata{Labels: map[string]string{"semmoe.io/x": ""}}}
		}, `spec.routing.template.metadata.labels: "semmoe.io/x" is reserved`},
		"init container in place of the engine":   {template(corev1.PodTemplateSpec{Spec: corev1.PodSpec{InitContainers: []corev1.Container{{Name: "engine", Image: "evil:1"}}}}), "spec.template.spec.initContainers"},
		"token of the store in another container": {containers(corev1.Container{Name: "side", Image: "x", VolumeMounts: []corev1.VolumeMount{{Name: "semmoe-store-token", MountPath: "/t"}}}), "spec.template.spec.containers"},
		"own token for the store":                 {template(corev1.PodTemplateSpec{Spec: corev1.PodSpec{Volumes: []corev1.Volume{tokenVolume()}}}), "spec.template.spec.volumes"},
		"restart policy":                          {template(corev1.PodTemplateSpec{Spec: corev1.PodSpec{RestartPolicy: "Never"}}), "spec.template.spec.restartPolicy"},
		"model volume":                            {template(corev1.PodTemplateSpec{Spec: corev1.PodSpec{Volumes: []corev1.Volume{{Name: "model"}}}}), "use another name"},
		"engine's image":                          {containers(corev1.Container{Name: "engine", Image: "x"}), "comes from spec.engine.image"},
		"engine's command":                        {containers(corev1.Container{Name: "engine", Command: []string{"x"}}), "comes from spec.engine.command"},
		"engine's args":                           {containers(corev1.Container{Name: "engine", Args: []string{"x"}}), "come from spec.engine.args"},
		"misspelled":                              {containers(corev1.Container{Name: "engin"}), `container "engin" has no image`},
		"sidecar":                                 {containers(corev1.Container{Name: "side", Image: "x"}), ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			err := Validate(moedtest.Deployment(tc.Change))
			if tc.message == "" {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Message, tc.message) {
				t.Errorf("error %v, want one with %q", err, tc.message)
			}
		})
	}
}

// TestImageVolume checks that source.oci is an image volume, that it is the same revision as the same volume by hand, and
// that the source of a claim is no part of the revision.
func TestImageVolume(t *testing.T) {
	byHand, bySource := moedtest.Deployment(), moedtest.Deployment()
	byHand.Spec.Model.Volume = corev1.VolumeSource{Image: &corev1.ImageVolumeSource{Reference: "m:1", PullPolicy: corev1.PullAlways}}
	bySource.Spec.Model.Volume = corev1.VolumeSource{}
	bySource.Spec.Model.Source = &semmoev1.ModelSource{OCI: &semmoev1.OCISource{Image: "m:1", PullPolicy: corev1.PullAlways}}
	workload, err := Render(bySource, "r1", moedtest.Report(), nil, Own{Image: "semmoe:1"})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(byHand.Spec.Model.Volume, workload.Template().Spec.Volumes[0].VolumeSource); diff != "" {
		t.Errorf("volume (-want +got):\n%s", diff)
	}
	if Of(byHand, moedtest.Report(), nil) != Of(bySource, moedtest.Report(), nil) {
		t.Error("source.oci and the same volume.image are different revisions")
	}
	claim := moedtest.Deployment()
	claim.Spec.Model.Volume = corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "models"}}
	before := Of(claim, moedtest.Report(), nil)
	claim.Spec.Model.Source = &semmoev1.ModelSource{HuggingFace: &semmoev1.HuggingFaceSource{Repo: "org/m"}}
	if Of(claim, moedtest.Report(), nil) != before {
		t.Error("a source on the same claim changes the revision: it would restart every serving pod")
	}
}

// TestRenderTLS checks the flags, the volume, the scheme of probes, and the annotation of engines with TLS. Workers serve
// no requests and stay without TLS. The output probe verifies the certificate.
func TestRenderTLS(t *testing.T) {
	secured := func(m *semmoev1.MoEDeployment) { m.Spec.Engine.TLS = &semmoev1.EngineTLS{SecretName: "certificate"} }
	for _, engineType := range []semmoev1.EngineType{semmoev1.EngineSGLang, semmoev1.EngineVLLM, semmoev1.EngineVLLMAscend} {
		for _, pods := range []int32{1, 2} {
			moed := moedtest.Deployment(moedtest.EngineOf(engineType), secured, func(m *semmoev1.MoEDeployment) { m.Spec.Parallelism.PodsPerReplica = &pods })
			plan := &Layout{Digest: "d", Realization: semmoev1.RealizationReshuffledWeights, ConfigMap: "c"}
			workload, err := Render(moed, "r1", moedtest.Report(), plan, Own{Image: "semmoe:1"})
			if err != nil {
				t.Fatal(err)
			}
			checkTLS(t, workload.Template(), true)
			if groups, ok := workload.Object.(*leaderworkersetv1.LeaderWorkerSet); ok == (pods == 1) {
				t.Errorf("%s, %d pods: the workload is a %T", engineType, pods, workload.Object)
			} else if ok {
				checkTLS(t, &groups.Spec.LeaderWorkerTemplate.WorkerTemplate, false)
			}
		}
	}
	plain, err := Render(moedtest.Deployment(), "r1", moedtest.Report(), nil, Own{Image: "semmoe:1"})
	if err != nil {
		t.Fatal(err)
	}
	checkTLS(t, plain.Template(), false)
	if Of(moedtest.Deployment(secured), moedtest.Report(), nil) == Of(moedtest.Deployment(), moedtest.Report(), nil) {
		t.Error("TLS gives the same revision")
	}
	contradiction := moedtest.Deployment(secured, func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = []string{"--ssl-certfile=/own"} })
	if fault := Validate(contradiction); fault == nil || fault.Reason != "ContradictingFlags" || !strings.Contains(fault.Message, "spec.engine.tls") {
		t.Errorf("a certificate in spec.engine.args: %v", fault)
	}
	exposed := moedtest.Deployment(secured, func(m *semmoev1.MoEDeployment) {
		m.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "sidecar", Image: "i", VolumeMounts: []corev1.VolumeMount{{Name: "semmoe-engine-tls", MountPath: "/key"}},
		}}}}
	})
	if fault := Validate(exposed); fault == nil || fault.Reason != "InvalidTemplate" {
		t.Errorf("a user's container mounts the key: %v", fault)
	}
}

func checkTLS(t *testing.T, template *corev1.PodTemplateSpec, secured bool) {
	t.Helper()
	container := template.Spec.Containers[0]
	if got := strings.Contains(strings.Join(container.Args, " "), "--ssl-certfile /etc/semmoe/engine-tls/tls.crt --ssl-keyfile /etc/semmoe/engine-tls/tls.key"); got != secured {
		t.Errorf("arguments %v, want TLS %t", container.Args, secured)
	}
	if got := template.Annotations["semmoe.io/scheme"]; (got == "https") != secured || !secured && got != "" {
		t.Errorf("scheme %q, want TLS %t", got, secured)
	}
	for _, probe := range []*corev1.Probe{container.StartupProbe, container.ReadinessProbe} {
		if probe != nil && (probe.HTTPGet.Scheme == corev1.URISchemeHTTPS) != secured {
			t.Errorf("probe %+v, want TLS %t", probe.HTTPGet, secured)
		}
	}
	at := slices.IndexFunc(template.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == "semmoe-engine-tls" })
	if (at >= 0) != secured {
		t.Errorf("volumes %+v, want TLS %t", template.Spec.Volumes, secured)
	}
	if at >= 0 {
		var keys []string
		for _, item := range template.Spec.Volumes[at].Secret.Items {
			keys = append(keys, item.Key)
		}
		if !slices.Equal(keys, []string{"tls.crt", "tls.key", "ca.crt"}) { // a Secret without one of them starts no pod
			t.Errorf("the pod requires the keys %v", keys)
		}
	}
	mounts := func(c corev1.Container) bool {
		return slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool {
			return m.Name == "semmoe-engine-tls" && m.MountPath == "/etc/semmoe/engine-tls" && m.ReadOnly
		})
	}
	if mounts(container) != secured {
		t.Errorf("mounts %+v, want TLS %t", container.VolumeMounts, secured)
	}
	for _, c := range template.Spec.InitContainers {
		probes := c.Name == "prove-lossless"
		if mounts(c) != (secured && probes) {
			t.Errorf("%s mounts %+v, want TLS %t", c.Name, c.VolumeMounts, secured)
		}
		text := strings.Join(c.Args, " ")
		if probes && secured && (!strings.Contains(text, "--address=https://") || !strings.Contains(text, "--tls-ca-file=/etc/semmoe/engine-tls/ca.crt --tls-server-name=m-pods.ns.svc")) {
			t.Errorf("the output probe has arguments %s", text)
		}
	}
}
