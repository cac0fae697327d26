// SPDX-License-Identifier: Apache-2.0

package revisions

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
)

// Tables reach only the engine's container, as files and variables. The token for the store reaches only the container
// that fetches.
func TestRenderWithTables(t *testing.T) {
	plan := LayoutOf(moedtest.PlanOf("m-1", "0123456789abcdef", nil), semmoev1.RealizationEngineMap)
	store := []corev1.EnvVar{{Name: "SEMMOE_STORE_URL", Value: "https://store"}, {Name: "SEMMOE_STORE_CA", Value: "ca"}}
	rendered := func(plan *Layout, change func(*semmoev1.MoEDeployment)) corev1.PodSpec {
		workload, err := Render(moedtest.Deployment(change), "r1", moedtest.Report(), plan, Own{Image: "semmoe:1", Store: store})
		if err != nil {
			t.Fatal(err)
		}
		return workload.Template().Spec
	}
	variables := func(c corev1.Container) map[string]string {
		values := map[string]string{}
		for _, v := range c.Env {
			if strings.HasPrefix(v.Name, "SEMMOE_") {
				values[v.Name] = v.Value
			}
		}
		return values
	}
	spec := rendered(plan, moedtest.Shuffled)
	if diff := cmp.Diff([]string{"verify-plan", "fetch-tables", "follow-tables", "prove-lossless"}, initContainers(corev1.PodTemplateSpec{Spec: spec})); diff != "" {
		t.Fatalf("init containers (-want +got):\n%s", diff)
	}
	fetch, follow, engine := spec.InitContainers[1], spec.InitContainers[2], spec.Containers[0]
	want := []string{"fetch", "--namespace=$(POD_NAMESPACE)", "--plan-digest=" + plan.Digest, "--out=/var/lib/semmoe/plan", "--tables=/etc/semmoe/tables/tables.json"}
	if diff := cmp.Diff(append(slices.Clone(want), "--optional"), fetch.Args); diff != "" || variables(fetch)["SEMMOE_STORE_URL"] != "https://store" {
		t.Errorf("it knows %v, and runs (-want +got):\n%s", variables(fetch), diff)
	}
	if diff := cmp.Diff(append(want, "--follow"), follow.Args); diff != "" || variables(follow)["SEMMOE_STORE_URL"] != "https://store" {
		t.Errorf("the follower knows %v, and runs (-want +got):\n%s", variables(follow), diff)
	}
	// The sidecar never affects whether the pod is ready.
	if *follow.RestartPolicy != corev1.ContainerRestartPolicyAlways || fetch.RestartPolicy != nil || follow.ReadinessProbe != nil || follow.StartupProbe != nil || follow.LivenessProbe != nil {
		t.Errorf("the follower is %+v", follow)
	}
	if at := slices.IndexFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == "semmoe-tables-in-use" }); at < 0 || spec.Volumes[at].ConfigMap.Name != "m-tables" || !*spec.Volumes[at].ConfigMap.Optional {
		t.Errorf("volumes %+v", spec.Volumes)
	}
	if diff := cmp.Diff(map[string]string{
		"SEMMOE_TABLES": "/var/lib/semmoe/plan/tables.safetensors", "SEMMOE_PLACEMENT": "/var/lib/semmoe/plan/placement.json", "SEMMOE_PLAN_DIGEST": plan.Digest,
	}, variables(engine)); diff != "" {
		t.Errorf("the engine's variables (-want +got):\n%s", diff)
	}
	mounted := func(c corev1.Container, name string) *corev1.VolumeMount {
		i := slices.IndexFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == name })
		if i < 0 {
			return nil
		}
		return &c.VolumeMounts[i]
	}
	if m := mounted(engine, "semmoe-tables"); m == nil || m.MountPath != "/var/lib/semmoe" || !m.ReadOnly || mounted(engine, "semmoe-store-token") != nil {
		t.Errorf("the engine mounts %+v", engine.VolumeMounts)
	}
	for _, c := range []corev1.Container{fetch, follow} {
		if m := mounted(c, "semmoe-tables"); m == nil || m.ReadOnly || mounted(c, "semmoe-store-token") == nil || mounted(c, "semmoe-tables-in-use") == nil {
			t.Errorf("%s mounts %+v", c.Name, c.VolumeMounts)
		}
	}
	if at := slices.Index(spec.InitContainers[3].Args, "--ranks=1"); at < 0 {
		t.Errorf("requests without ranks are pinned: %v", spec.InitContainers[2].Args)
	}
	for name, spec := range map[string]corev1.PodSpec{"tokens that stay": rendered(plan, moedtest.Tokens), "no plan": rendered(nil, moedtest.Shuffled)} {
		if names := initContainers(corev1.PodTemplateSpec{Spec: spec}); slices.Contains(names, "fetch-tables") || len(variables(spec.Containers[0])) > 0 {
			t.Errorf("%s: init containers %v, variables %v", name, names, variables(spec.Containers[0]))
		}
	}
}
