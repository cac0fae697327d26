// SPDX-License-Identifier: Apache-2.0

package podtemplate

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// reserved contains the reserved names of these tests.
var reserved = Reserved{
	Engine: "engine", Managed: []string{"profile"}, Containers: []string{"verify"},
	Volumes: map[string]string{"token": "a token", "plan": "the plan", "model": "the model"}, Shared: []string{"model"},
	Secret: "token", Audience: "store.example.com", Exposed: true, Mounts: []string{"/etc/semmoe/plan"}, Variables: []string{"POD_IP"},
}

// Every template that takes over an operator-managed container or its data is rejected with the name of the field.
// User-provided objects are accepted.
func TestCheck(t *testing.T) {
	named := func(name string, change func(*corev1.Container)) []corev1.Container {
		c := corev1.Container{Name: name}
		if name != "engine" && name != "profile" {
			c.Image = "user:1"
		}
		change(&c)
		return []corev1.Container{c}
	}
	nothing := func(*corev1.Container) {}
	mounts := func(volume, at string, readOnly bool) func(*corev1.Container) {
		return func(c *corev1.Container) {
			c.VolumeMounts = []corev1.VolumeMount{{Name: volume, MountPath: at, ReadOnly: readOnly}}
		}
	}
	projected := func(audience string) []corev1.Volume {
		return []corev1.Volume{{Name: "own", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
			Sources: []corev1.VolumeProjection{{}, {ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Audience: audience}}},
		}}}}
	}
	keys := func(key string) map[string]string { return map[string]string{"a": "b", key: "c"} }
	for name, tc := range map[string]struct {
		metadata metav1.ObjectMeta
		spec     corev1.PodSpec
		want     string // empty if valid
	}{
		"nothing": {},
		"label":   {metadata: metav1.ObjectMeta{Labels: keys("semmoe.io/revision")}, want: `f.metadata.labels: "semmoe.io/revision" is reserved`},
		"annotation of a subdomain": {
			metadata: metav1.ObjectMeta{Annotations: keys("failed.semmoe.io/r1")}, want: `f.metadata.annotations: "failed.semmoe.io/r1" is reserved`,
		},
		"label of a similar domain": {metadata: metav1.ObjectMeta{Labels: keys("notsemmoe.io/x")}},
		"directive in labels":       {metadata: metav1.ObjectMeta{Labels: keys("$patch")}, want: `f.metadata.labels: "$patch" is invalid`},
		"directive in annotations":  {metadata: metav1.ObjectMeta{Annotations: keys("$retainKeys")}, want: "f.metadata.annotations"},
		"directive in nodeSelector": {spec: corev1.PodSpec{NodeSelector: keys("$patch")}, want: "f.spec.nodeSelector"},

		"init container named like the engine":    {spec: corev1.PodSpec{InitContainers: named("engine", func(c *corev1.Container) { c.Image, c.Command = "evil:1", []string{"/evil"} })}, want: `f.spec.initContainers: "engine" is reserved by the operator`},
		"init container named like the recorder":  {spec: corev1.PodSpec{InitContainers: named("profile", nothing)}, want: `f.spec.initContainers: "profile" is reserved by the operator`},
		"init container named like an operator's": {spec: corev1.PodSpec{InitContainers: named("verify", nothing)}, want: `f.spec.initContainers: "verify" is reserved by the operator`},
		"container named like an operator's":      {spec: corev1.PodSpec{Containers: named("verify", nothing)}, want: `f.spec.containers: "verify" is reserved by the operator`},
		"ephemeral container":                     {spec: corev1.PodSpec{EphemeralContainers: []corev1.EphemeralContainer{{}}}, want: "f.spec.ephemeralContainers"},
		"two containers of one name":              {spec: corev1.PodSpec{InitContainers: named("a", nothing), Containers: named("a", nothing)}, want: `f.spec.containers: "a" is invalid`},
		"image of the engine":                     {spec: corev1.PodSpec{Containers: named("engine", func(c *corev1.Container) { c.Image = "x" })}, want: "spec.engine.image"},
		"command of the engine":                   {spec: corev1.PodSpec{Containers: named("engine", func(c *corev1.Container) { c.Command = []string{"x"} })}, want: "spec.engine.command"},
		"args of the engine":                      {spec: corev1.PodSpec{Containers: named("engine", func(c *corev1.Container) { c.Args = []string{"x"} })}, want: "spec.engine.args"},
		"security context of the engine":          {spec: corev1.PodSpec{Containers: named("engine", func(c *corev1.Container) { c.SecurityContext = &corev1.SecurityContext{Privileged: ptr.To(true)} })}},
		"container without an image":              {spec: corev1.PodSpec{Containers: named("a", func(c *corev1.Container) { c.Image = "" })}, want: `container "a" has no image`},
		"privileged container of the user's":      {spec: corev1.PodSpec{HostNetwork: true, Containers: named("a", func(c *corev1.Container) { c.SecurityContext = &corev1.SecurityContext{Privileged: ptr.To(true)} })}},
		"image of the recorder":                   {spec: corev1.PodSpec{Containers: named("profile", func(c *corev1.Container) { c.Image = "x" })}, want: `image of container "profile" is set by the operator`},
		"privileged recorder":                     {spec: corev1.PodSpec{Containers: named("profile", func(c *corev1.Container) { c.SecurityContext = &corev1.SecurityContext{Privileged: ptr.To(true)} })}, want: `securityContext of container "profile"`},
		"variables of the recorder from a Secret": {spec: corev1.PodSpec{Containers: named("profile", func(c *corev1.Container) { c.EnvFrom = []corev1.EnvFromSource{{}} })}, want: `envFrom of container "profile"`},
		"volumes of the recorder":                 {spec: corev1.PodSpec{Containers: named("profile", mounts("own", "/models", true))}, want: `volumeMounts of container "profile"`},
		"hook in the recorder":                    {spec: corev1.PodSpec{Containers: named("profile", func(c *corev1.Container) { c.Lifecycle = &corev1.Lifecycle{PostStart: &corev1.LifecycleHandler{}} })}, want: `lifecycle of container "profile"`},
		"another store":                           {spec: corev1.PodSpec{Containers: named("profile", func(c *corev1.Container) { c.Env = []corev1.EnvVar{{Name: "SEMMOE_STORE_URL"}} })}, want: `SEMMOE_STORE_URL of container "profile" is set by the operator`},
		"another address":                         {spec: corev1.PodSpec{Containers: named("profile", func(c *corev1.Container) { c.Env = []corev1.EnvVar{{Name: "POD_IP"}} })}, want: `POD_IP of container "profile" is set by the operator`},
		"resources and variables of the recorder": {spec: corev1.PodSpec{Containers: named("profile", func(c *corev1.Container) {
			c.Env = []corev1.EnvVar{{Name: "HTTPS_PROXY"}}
			c.Resources.Requests = corev1.ResourceList{"cpu": resource.MustParse("1")}
		})}},
		"volume of the operator's":                     {spec: corev1.PodSpec{Volumes: []corev1.Volume{{Name: "plan"}}}, want: `f.spec.volumes: "plan" is reserved by the operator (the plan)`},
		"two volumes of one name":                      {spec: corev1.PodSpec{Volumes: []corev1.Volume{{Name: "a"}, {Name: "a"}}}, want: `f.spec.volumes: "a" is invalid`},
		"a token for the store":                        {spec: corev1.PodSpec{Volumes: projected("store.example.com")}, want: `f.spec.volumes: the audience "store.example.com" of volume "own" is reserved`},
		"a token for something else":                   {spec: corev1.PodSpec{Volumes: projected("vault")}},
		"the operator's token in a container":          {spec: corev1.PodSpec{Containers: named("a", mounts("token", "/t", true))}, want: `container "a" must not mount volume "token" (a token)`},
		"the operator's token in an init container":    {spec: corev1.PodSpec{InitContainers: named("a", mounts("token", "/t", true))}, want: `f.spec.initContainers: container "a" must not mount volume "token"`},
		"the operator's token in the engine":           {spec: corev1.PodSpec{Containers: named("engine", mounts("token", "/t", true))}, want: `container "engine" must not mount volume "token"`},
		"plan volume, writable":                        {spec: corev1.PodSpec{Containers: named("a", mounts("plan", "/p", false))}, want: `must mount volume "plan" (the plan) with readOnly: true`},
		"plan volume, read-only":                       {spec: corev1.PodSpec{Containers: named("a", mounts("plan", "/p", true))}},
		"the model":                                    {spec: corev1.PodSpec{Containers: named("a", mounts("model", "/m", false))}},
		"the plan as a device":                         {spec: corev1.PodSpec{Containers: named("a", func(c *corev1.Container) { c.VolumeDevices = []corev1.VolumeDevice{{Name: "plan"}} })}, want: `must not use volume "plan" as a device`},
		"another plan in the engine":                   {spec: corev1.PodSpec{Containers: named("engine", mounts("own", "/etc/semmoe/plan/", true))}, want: "at /etc/semmoe/plan/: the operator mounts its own volumes there"},
		"a file of another plan in the engine":         {spec: corev1.PodSpec{Containers: named("engine", mounts("own", "/etc/semmoe/plan/sglang.json", true))}, want: "the operator mounts its own volumes there"},
		"a parent directory of the plan in the engine": {spec: corev1.PodSpec{Containers: named("engine", mounts("own", "/etc/x/../semmoe", true))}, want: "the operator mounts its own volumes there"},
		"a volume of the user's in the engine":         {spec: corev1.PodSpec{Containers: named("engine", mounts("own", "/etc/semmoe-own", false))}},
		"processes of all containers":                  {spec: corev1.PodSpec{ShareProcessNamespace: ptr.To(true)}, want: "f.spec.shareProcessNamespace"},
		"processes of the node":                        {spec: corev1.PodSpec{HostPID: true}, want: "f.spec.hostPID"},
	} {
		err := Check("f", &corev1.PodTemplateSpec{ObjectMeta: tc.metadata, Spec: tc.spec}, reserved)
		switch {
		case tc.want == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n")):
			t.Errorf("%s: %v, want one line with %q", name, err, tc.want)
		}
	}
	if err := Check("f", nil, reserved); err != nil {
		t.Errorf("no template: %v", err)
	}
	open := reserved
	open.Exposed = false
	if err := Check("f", &corev1.PodTemplateSpec{Spec: corev1.PodSpec{ShareProcessNamespace: ptr.To(true), HostPID: true}}, open); err != nil {
		t.Errorf("a pod without a token: %v", err)
	}
}

// Of several errors, the same one is reported each time: an update with an error that exists in the stored object is
// detected by its text.
func TestCheckIsDeterministic(t *testing.T) {
	labels := map[string]string{"semmoe.io/a": "", "semmoe.io/b": "", "semmoe.io/c": "", "semmoe.io/d": ""}
	for range 50 {
		if err := CheckMetadata("f", labels, nil); err == nil || !strings.Contains(err.Error(), `"semmoe.io/a"`) {
			t.Fatalf("%v, want the first key", err)
		}
	}
}
