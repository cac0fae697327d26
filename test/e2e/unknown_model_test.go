// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/tier"
)

// TestUnknownModelType serves a model of a type that the operator does not know, on an engine that knows it. The model
// answers, no profile and no plan are made, and the condition has the reason. With the layout stated, the model is
// profiled and planned.
func TestUnknownModelType(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	model := t.TempDir()
	if err := os.CopyFS(model, os.DirFS(checkpointDir())); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(model, "config.json")
	text, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config, bytes.Replace(text, []byte(`"qwen3_moe"`), []byte(`"acme_moe"`), 1), 0o644); err != nil {
		t.Fatal(err)
	}
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	create(t, dataset(t, namespace, 2))
	moed := newDeployment(namespace, "acme", func(m *semmoev1.MoEDeployment) {
		m.Spec.Model.Volume.HostPath.Path = model
		m.Spec.Engine.Args = []string{"--layout-as=qwen3_moe"}
		m.Spec.Profiling = &semmoev1.ProfilingSpec{
			Dataset:      &semmoev1.DatasetSpec{ConfigMap: &semmoev1.DatasetConfigMap{Name: "corpus"}},
			SamplingSpec: semmoev1.SamplingSpec{Requests: 100, Tokens: 10000, RequestTokens: 100},
		}
	})
	create(t, moed)
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionReady, metav1.ConditionTrue, "Serving")
	waitCondition(t, moed, semmoev1.ConditionProfiled, metav1.ConditionFalse, "ModelNotProfilable", "acme_moe", "layoutAs")
	waitCondition(t, moed, semmoev1.ConditionPlanned, metav1.ConditionFalse, "ModelNotProfilable")
	eventually(t, waitTimeout, "the model answers", func() error { return sendRequest(t.Context(), serviceURL(t, moed), "acme") })
	var profiles semmoev1.AffinityProfileList
	if err := api.List(t.Context(), &profiles, client.InNamespace(namespace)); err != nil || len(profiles.Items) != 0 {
		t.Errorf("%d profiles, error %v", len(profiles.Items), err)
	}

	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Model.LayoutAs = "qwen3_moe" })
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionProfiled, metav1.ConditionTrue, "Profiled")
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionPlanned, metav1.ConditionTrue, "Planned")
}
