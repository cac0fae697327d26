// SPDX-License-Identifier: Apache-2.0

package plans

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
)

// Overlap settings are chosen by the models in the ConfigMap of the plan. In service, they are kept without it.
func TestOverlapModelIsRead(t *testing.T) {
	data, digest := moedtest.WithOverlapModel(t)
	dataset := func(m *semmoev1.MoEDeployment) {
		m.Spec.Profiling = &semmoev1.ProfilingSpec{Dataset: &semmoev1.DatasetSpec{Path: "/models/d"}, Target: semmoev1.ProfilingTargetServing, Refresh: semmoev1.RefreshLive}
	}
	s := newStory(t, moedtest.OverlapAuto(semmoev1.EngineSGLang), dataset)
	s.BatchSizes = []int32{65536, 131072}
	s.reconcile(false)
	s.profile("r0")
	s.reconcile(false)
	plan := s.solve("b0", "", semmoev1.VerdictGain)
	plan.Status.PlanDigest = digest
	s.update(plan)

	if p := s.reconcile(false); p.Serving == nil || p.Serving.Overlap != (semmoev1.OverlapSpec{}) {
		t.Fatalf("without the ConfigMap: %+v", p.Serving)
	}
	configMap := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: plan.Status.ConfigMap}, Data: data}
	if err := s.Create(t.Context(), configMap); err != nil {
		t.Fatal(err)
	}
	p := s.reconcile(false)
	if p.Serving == nil || p.Serving.Overlap.MicroBatches != 2 {
		t.Fatalf("with the ConfigMap: %+v", p.Serving)
	}
	revision := revisions.Of(s.moed, moedtest.Report(), p.Serving)
	w, err := revisions.Render(s.moed, revision, moedtest.Report(), p.Serving, revisions.Own{Image: "semmoe:1"})
	if err != nil {
		t.Fatal(err)
	}
	w.UID, *w.Replicas() = types.UID(w.Name), 2
	s.workloads = []*revisions.Workload{w}
	for name, change := range map[string]func(){
		"damaged": func() {
			configMap.Data = map[string]string{"schedule.json": "x", "hardware.json": "x", "manifest.json": "{}"}
			s.update(configMap)
		},
		"another basis": func() { delete(w.Annotations, semmoev1.AnnotationOverlapBasis) },
	} {
		change()
		if p := s.reconcile(false); p.Serving == nil || revisions.Of(s.moed, moedtest.Report(), p.Serving) != revision {
			t.Errorf("%s: %+v, %+v", name, p.Serving, p.Overlap)
		}
	}
}
