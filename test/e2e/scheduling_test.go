// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/tier"
)

// TestUnschedulableRouter checks that request routers that fit on no node are reported within a minute, by Ready and
// Degraded with the scheduler's message. Routers do not inherit the engine's scheduling constraints. Once a node
// accepts the routers, the model is served.
func TestUnschedulableRouter(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	const engineLabel = "example.com/engine-only"
	moed := newDeployment(namespace, "m", func(m *semmoev1.MoEDeployment) {
		m.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{
			Containers: []corev1.Container{}, Tolerations: []corev1.Toleration{{Key: engineLabel, Operator: corev1.TolerationOpExists}},
		}}
		m.Spec.Routing.Template = &semmoev1.RouterTemplate{Spec: semmoev1.RouterTemplateSpec{NodeSelector: map[string]string{"example.com/pool": "none"}}}
	})
	create(t, moed)
	eventually(t, waitTimeout, "an engine is ready", func() error {
		if latest := get(t, moed); latest.Status.ReadyReplicas == 0 {
			return errors.New("no replica is ready")
		}
		return nil
	})
	waitConditionWithin(t, time.Minute, moed, semmoev1.ConditionReady, metav1.ConditionFalse, "Unschedulable", "replicas serve", "router", "didn't match", "spec.routing.template")
	waitConditionWithin(t, time.Minute, moed, semmoev1.ConditionDegraded, metav1.ConditionTrue, "Unschedulable", "router", "didn't match")

	update(t, moed, func(m *semmoev1.MoEDeployment) {
		m.Spec.Routing.Template.Spec = semmoev1.RouterTemplateSpec{Tolerations: []corev1.Toleration{{Key: "example.com/router-only", Operator: corev1.TolerationOpExists}}}
	})
	waitCondition(t, moed, semmoev1.ConditionReady, metav1.ConditionTrue, "Serving")
	waitCondition(t, moed, semmoev1.ConditionDegraded, metav1.ConditionFalse, "AsExpected")
	var routers corev1.PodList
	if err := api.List(t.Context(), &routers, client.InNamespace(namespace), client.MatchingLabels{semmoev1.LabelComponent: semmoev1.ComponentRouter}); err != nil {
		t.Fatal(err)
	}
	tolerates := func(pod corev1.Pod, key string) bool {
		for _, toleration := range pod.Spec.Tolerations {
			if toleration.Key == key {
				return true
			}
		}
		return false
	}
	for _, pod := range routers.Items {
		if pod.DeletionTimestamp == nil && (!tolerates(pod, "example.com/router-only") || tolerates(pod, engineLabel)) {
			t.Errorf("router %s has the engine's tolerations %v", pod.Name, pod.Spec.Tolerations)
		}
	}
}
