// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"encoding/json"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
)

// Every pod of a MoEDeployment uses the template's pull secrets. A token that the template gives to the engine reaches
// only pods with an engine.
func TestPullSecretsAndTokens(t *testing.T) {
	target := func(target semmoev1.ProfilingTarget) *semmoev1.MoEDeployment {
		return moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
			m.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{
				ImagePullSecrets: []corev1.LocalObjectReference{{Name: "registry"}},
				Containers: []corev1.Container{{Name: semmoev1.EngineContainer, Env: []corev1.EnvVar{{
					Name: "HF_TOKEN", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "hub"}, Key: "token"}},
				}}}},
			}}
			m.Spec.Profiling = &semmoev1.ProfilingSpec{Dataset: &semmoev1.DatasetSpec{Path: "/models/data.jsonl"}, Target: target}
		})
	}
	serving := target(semmoev1.ProfilingTargetServing)
	workload, err := revisions.Render(serving, "r1", moedtest.Report(), nil, revisions.Own{Image: "semmoe:1"})
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		pod   any
		token bool
	}{
		"engine":     {workload.Template(), true},
		"inspection": {inspectionInputs(serving), false},
	} {
		text, err := json.Marshal(tc.pod)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), `"registry"`) {
			t.Errorf("%s is not pulled with the secret: %s", name, text)
		}
		if got := strings.Contains(string(text), "HF_TOKEN"); got != tc.token {
			t.Errorf("%s has the token: %v, want %v: %s", name, got, tc.token, text)
		}
	}
}
