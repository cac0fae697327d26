// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/router/tlsfiles/tlstest"
	"github.com/semmoe/operator/test/tier"
)

// TestEngineReleases serves with the test double of one release of each engine, and rolls out a plan in the way that the
// operator chooses. The engine's command line, expert map or reshuffled checkpoint, health, reported release, answers
// to the lossless probe and routed experts are those of that release. The commit tier runs vLLM, with TLS.
func TestEngineReleases(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		dialect, release string
		engine           semmoev1.EngineType
		args             []string
		env              []corev1.EnvVar
		realization      string
		unpinned, tls    bool
	}{
		{dialect: "sglang", release: "0.5.12", engine: semmoev1.EngineSGLang, args: []string{"--moe-a2a-backend", "deepep"}, realization: "by the engine's expert map"},
		{dialect: "sglang", release: "0.5.23", engine: semmoev1.EngineSGLang, tls: true, args: []string{"--moe-a2a-backend", "deepep"}, realization: "by the engine's expert map"},
		{dialect: "vllm", release: "0.33.0", engine: semmoev1.EngineVLLM, tls: true, args: []string{"--all2all-backend", "deepep_low_latency"}, realization: "by reshuffled weights"},
		{dialect: "vllm-ascend", release: "0.25.1", engine: semmoev1.EngineVLLMAscend, realization: "by the engine's expert map"},
		{
			dialect: "vllm-ascend", release: "0.30.0", engine: semmoev1.EngineVLLMAscend, env: []corev1.EnvVar{{Name: "VLLM_USE_V2_MODEL_RUNNER", Value: "1"}},
			realization: "by reshuffled weights",
		},
		{dialect: "tensorrt-llm", release: "1.3.0", engine: semmoev1.EngineTensorRTLLM, realization: "by the engine's expert map", unpinned: true},
	} {
		t.Run(test.dialect+"-"+test.release, func(t *testing.T) {
			if test.engine != semmoev1.EngineVLLM {
				tier.Nightly(t)
			}
			t.Parallel()
			adapter, err := registry.For(string(test.engine))
			if err != nil {
				t.Fatal(err)
			}
			namespace := newNamespace(t)
			startManager(t, namespace, nil)
			storedProfile(t, namespace)
			moed := storyDeployment(namespace, func(m *semmoev1.MoEDeployment) {
				m.Spec.Engine = semmoev1.EngineSpec{
					Type: test.engine, Image: doubleImage, Command: slices.Concat([]string{"/engines", test.dialect + "-" + test.release}, adapter.Command), Args: test.args, Env: test.env,
				}
				if test.unpinned {
					m.Spec.Routing.SamplePercent = nil
				}
				if test.tls {
					m.Spec.Engine.TLS = &semmoev1.EngineTLS{SecretName: "engine-tls"}
				}
			})
			if test.tls {
				authority := tlstest.NewAuthority(t)
				data := certificate(t, authority, moed.Name+"-pods."+namespace+".svc")
				data[corev1.ServiceAccountRootCAKey] = readFile(t, authority.File)
				create(t, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "engine-tls"}, Data: data})
			}
			create(t, moed)
			url := waitAnswers(t, moed)
			eventually(t, waitTimeout, "status.serving contains the release of the engine", func() error {
				if serving := get(t, moed).Status.Serving; serving == nil || serving.EngineRelease != test.release {
					return fmt.Errorf("status.serving is %+v", serving)
				}
				return nil
			})
			stop := sendSlowly(t, url, 120)
			waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionRolledOut, metav1.ConditionTrue, "RolledOut", test.realization)
			for _, workload := range listWorkloads(t, moed) {
				if got := workload.Spec.Template.Annotations[semmoev1.AnnotationScheme]; (got == semmoev1.SchemeHTTPS) != test.tls {
					t.Errorf("workload %s has scheme %q", workload.Name, got)
				}
			}
			if !test.unpinned { // requests are on the ranks that the router chose, and their routed experts are decoded correctly
				waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionLocalityOnTarget, metav1.ConditionTrue, "OnTarget")
			}
			stop()
		})
	}
}
