package moedeployment

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// The revision of a given spec must never change from release to release: an upgrade would restart every serving pod.
func TestRevisionIsStable(t *testing.T) {
	const want = "383baaf1e5"
	if got := revisionOf(deployment(), report(), nil); got != want {
		t.Errorf("revision %s, was %s: an upgrade to this version would restart every serving pod", got, want)
	}
}

func TestRevisionFollowsItsInputsAlone(t *testing.T) {
	base := revisionOf(deployment(), report(), nil)
	cases := map[string]struct {
		change func(*semmoev1.MoEDeployment)
		same   bool
	}{
		"replicas": {func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](9) }, true},
		"routing":  {func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Replicas = 9 }, true},
		"more samples": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Routing.Mode = "None"
			m.Spec.Routing.SamplePercent = ptr.To[int32](5)
		}, true},
		"first samples":  {func(m *semmoev1.MoEDeployment) { m.Spec.Routing.SamplePercent = ptr.To[int32](5) }, false},
		"rollout":        {func(m *semmoev1.MoEDeployment) { m.Spec.Rollout.MaxSurge = ptr.To[int32](9) }, true},
		"reconciliation": {func(m *semmoev1.MoEDeployment) { m.Spec.Reconciliation = semmoev1.ReconciliationPaused }, true},
		"labels":         {func(m *semmoev1.MoEDeployment) { m.Labels = map[string]string{"a": "b"} }, true},
		"image":          {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Image = "engine:2" }, false},
		"args":           {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = []string{"--x"} }, false},
		"model path":     {func(m *semmoev1.MoEDeployment) { m.Spec.Model.Path = "/models/x" }, false},
		"EP size":        {func(m *semmoev1.MoEDeployment) { m.Spec.Parallelism.ExpertParallelSize = 8 }, false},
		"template": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{NodeSelector: map[string]string{"a": "b"}}}
		}, false},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if got := revisionOf(deployment(tc.change), report(), nil); (got == base) != tc.same {
				t.Errorf("revision %s, before the change %s, want equal: %v", got, base, tc.same)
			}
		})
	}
	changed := report()
	changed.ModelDigest = "sha256:def"
	if revisionOf(deployment(), changed, nil) == base {
		t.Error("another checkpoint gives the same revision")
	}
}

func TestRender(t *testing.T) {
	moed := deployment(func(m *semmoev1.MoEDeployment) {
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
	workload, err := render(moed, "r1", report(), nil, "semmoe:1")
	if err != nil {
		t.Fatal(err)
	}
	template := workload.Spec.Template
	for key, want := range map[string]string{"team": "x", semmoev1.LabelRevision: "r1", semmoev1.LabelDeployment: "m"} {
		if got := template.Labels[key]; got != want {
			t.Errorf("label %s is %q, want %q", key, got, want)
		}
	}
	if template.Annotations[semmoev1.AnnotationRanks] != "4" || template.Annotations[semmoev1.AnnotationPort] != "30000" {
		t.Errorf("annotations %v do not tell ranks and port", template.Annotations)
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
		t.Errorf("asks for %v devices, want 4", gpus.Value())
	}
	if cpu := engine.Resources.Requests["cpu"]; cpu.Value() != 4 {
		t.Errorf("the user's resources were lost: %v", engine.Resources)
	}
	if engine.Image != "engine:1" || engine.Env[0].Name != "POD_IP" || engine.Env[1].Value != "b" || engine.Lifecycle.PreStop.Sleep == nil {
		t.Errorf("the engine's container is %+v", engine)
	}
}

// A plan reaches the engine as its own expert map, which an init container has verified before; the digest in the
// annotation tells request routers and the store which plan it is.
func TestRenderWithPlan(t *testing.T) {
	plan := layoutOf(planOf("m-1", "ab", nil))
	moed := deployment(func(m *semmoev1.MoEDeployment) {
		m.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{InitContainers: []corev1.Container{{Name: "users", Image: "x"}}}}
	})
	workload, err := render(moed, "r1", report(), plan, "semmoe:1")
	if err != nil {
		t.Fatal(err)
	}
	template := workload.Spec.Template
	if workload.Annotations[semmoev1.AnnotationPlanDigest] != plan.Digest || template.Annotations[semmoev1.AnnotationPlanDigest] != plan.Digest {
		t.Error("the annotation does not name the plan")
	}
	i := slices.IndexFunc(template.Spec.InitContainers, func(c corev1.Container) bool { return c.Name == "verify-plan" })
	if i < 0 || len(template.Spec.InitContainers) != 2 {
		t.Fatalf("init containers are %+v, want the user's and verify-plan", template.Spec.InitContainers)
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

func TestValidate(t *testing.T) {
	template := func(t corev1.PodTemplateSpec) func(*semmoev1.MoEDeployment) {
		return func(m *semmoev1.MoEDeployment) { m.Spec.Template = &t }
	}
	containers := func(c ...corev1.Container) func(*semmoev1.MoEDeployment) {
		return template(corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: c}})
	}
	cases := map[string]struct {
		change  func(*semmoev1.MoEDeployment)
		message string
	}{
		"valid":              {func(*semmoev1.MoEDeployment) {}, ""},
		"unknown engine":     {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Type = "X" }, `spec.engine.type: engine type "X" is not known`},
		"contradicting flag": {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = []string{"--tp=2"} }, `"--tp=2" contradicts spec.parallelism.expertParallelSize`},
		"a map of the user's where it is compared": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Routing.SamplePercent = ptr.To[int32](5)
			m.Spec.Engine.Args = []string{"--init-expert-location", "x.json"}
		}, `"--init-expert-location" contradicts the plan of spec.profiling`},
		"a map of the user's": {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = []string{"--init-expert-location", "x.json"} }, ""},
		"plan volume":         {template(corev1.PodTemplateSpec{Spec: corev1.PodSpec{Volumes: []corev1.Volume{{Name: "semmoe-plan"}}}}), "use another name"},
		"verifying container": {template(corev1.PodTemplateSpec{Spec: corev1.PodSpec{InitContainers: []corev1.Container{{Name: "verify-plan"}}}}), `"verify-plan" is the operator's`},
		"our variable":        {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Env = []corev1.EnvVar{{Name: "POD_IP"}} }, "spec.engine.env: POD_IP"},
		"reserved label": {template(corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"semmoe.io/x": ""}}}),
			`spec.template.metadata.labels: "semmoe.io/x" is reserved`},
		"reserved annotation": {template(corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{"semmoe.io/x": ""}}}),
			`spec.template.metadata.annotations: "semmoe.io/x" is reserved`},
		"restart policy":   {template(corev1.PodTemplateSpec{Spec: corev1.PodSpec{RestartPolicy: "Never"}}), "spec.template.spec.restartPolicy"},
		"model volume":     {template(corev1.PodTemplateSpec{Spec: corev1.PodSpec{Volumes: []corev1.Volume{{Name: "model"}}}}), "use another name"},
		"engine's image":   {containers(corev1.Container{Name: "engine", Image: "x"}), "comes from spec.engine.image"},
		"engine's command": {containers(corev1.Container{Name: "engine", Command: []string{"x"}}), "comes from spec.engine.command"},
		"engine's args":    {containers(corev1.Container{Name: "engine", Args: []string{"x"}}), "come from spec.engine.args"},
		"misspelled":       {containers(corev1.Container{Name: "engin"}), `container "engin" has no image`},
		"sidecar":          {containers(corev1.Container{Name: "side", Image: "x"}), ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			err := validate(deployment(tc.change))
			if tc.message == "" {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			if err == nil || !strings.Contains(err.message, tc.message) {
				t.Errorf("error %v, want one with %q", err, tc.message)
			}
		})
	}
}
