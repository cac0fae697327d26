// SPDX-License-Identifier: Apache-2.0

package revisions

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
)

// TestRelease reads the release from a workload with the same engine and image, or else from the image's tag.
func TestRelease(t *testing.T) {
	stock := func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Image = "lmsysorg/sglang:v0.5.12" }
	reported := func(change ...func(*semmoev1.MoEDeployment)) *Workload {
		workload, err := Render(moedtest.Deployment(change...), "r1", moedtest.Report(), nil, Own{Image: "semmoe:1"})
		if err != nil {
			t.Fatal(err)
		}
		workload.Annotations[semmoev1.AnnotationEngineRelease] = "0.5.17"
		return workload
	}
	replaced := func(m *semmoev1.MoEDeployment) {
		m.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "engine", Image: "lmsysorg/sglang:v0.5.14"}}}}
	}
	for name, test := range map[string]struct {
		moed      *semmoev1.MoEDeployment
		workloads []*Workload
		want      string
	}{
		"tag":                       {moedtest.Deployment(stock), nil, "0.5.12"},
		"image of a template":       {moedtest.Deployment(stock, replaced), nil, "0.5.14"},
		"unknown":                   {moedtest.Deployment(), nil, ""},
		"reported":                  {moedtest.Deployment(stock), []*Workload{reported(stock)}, "0.5.17"},
		"reported by another image": {moedtest.Deployment(stock), []*Workload{reported()}, "0.5.12"},
		"another engine":            {moedtest.Deployment(moedtest.EngineOf(semmoev1.EngineVLLM)), []*Workload{reported()}, ""},
	} {
		if got := Release(test.moed, test.workloads).String(); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

// TestValidateRelease rejects settings that a release does not support, and accepts all settings for an unknown
// release.
func TestValidateRelease(t *testing.T) {
	vllm := func(image string, change ...func(*semmoev1.MoEDeployment)) *semmoev1.MoEDeployment {
		moed := moedtest.Deployment(moedtest.EngineOf(semmoev1.EngineVLLM), func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Image, m.Spec.Profiling = image, &semmoev1.ProfilingSpec{Dataset: &semmoev1.DatasetSpec{Path: "/models/d"}}
		})
		for _, c := range change {
			c(moed)
		}
		return moed
	}
	connector := func(m *semmoev1.MoEDeployment) {
		m.Spec.Engine.Args = []string{"--kv-transfer-config", `{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}`}
	}
	for name, test := range map[string]struct {
		moed         *semmoev1.MoEDeployment
		reason, want string
	}{
		"old":       {vllm("vllm/vllm-openai:v0.17.0"), "EngineReleaseTooOld", "VLLM 0.17.0 is invalid"},
		"new":       {vllm("vllm/vllm-openai:v0.22.0"), "", ""},
		"latest":    {vllm("vllm/vllm-openai:latest"), "", ""},
		"connector": {vllm("vllm/vllm-openai:v0.22.0", connector), "CaptureUnsupported", "set spec.routing.samplePercent to 0 and give spec.profiling.profileRef"},
		"connector, nothing sampled": {vllm("vllm/vllm-openai:v0.22.0", connector, func(m *semmoev1.MoEDeployment) {
			m.Spec.Routing.SamplePercent, m.Spec.Profiling = ptr.To[int32](0), &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "p"}}
		}), "", ""},
	} {
		err := ValidateRelease(test.moed, Release(test.moed, nil))
		if (err == nil) != (test.reason == "") || err != nil && (err.Reason != test.reason || !strings.Contains(err.Message, test.want)) {
			t.Errorf("%s: %+v, want %s %q", name, err, test.reason, test.want)
		}
	}
}
