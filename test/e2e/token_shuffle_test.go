// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/tier"
)

// TestTokenShuffle serves with attention over all ranks. An engine that shuffles tokens gets the tables of its plan, which
// the pods fetch from the store. An engine without token shuffling gets a plan with few messages, and the status does
// not claim a higher locality.
func TestTokenShuffle(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	create(t, dataset(t, namespace, 8))
	moed := profiledDeployment(namespace, func(m *semmoev1.MoEDeployment) {
		m.Spec.Parallelism.Attention = semmoev1.AttentionTensorParallel
		m.Spec.Engine.Args = append(m.Spec.Engine.Args, "--moe-a2a-backend", "deepep")
		m.Spec.Routing.SamplePercent = nil // requests have no rank
		m.Spec.Placement.TokenShuffle = semmoev1.TokenShuffleEnabled
	})
	create(t, moed)
	planned := waitPlanned(t, moed)
	waitCondition(t, moed, semmoev1.ConditionRolledOut, metav1.ConditionTrue, "RolledOut", "2 of 2 pods received the tables")
	waitCondition(t, moed, semmoev1.ConditionLocalityOnTarget, metav1.ConditionUnknown, "NotObserved", "spec.parallelism.attention is TensorParallel")
	for _, pod := range listEnginePods(t, moed) {
		engine := pod.Spec.Containers[slices.IndexFunc(pod.Spec.Containers, func(c corev1.Container) bool { return c.Name == semmoev1.EngineContainer })]
		if !slices.ContainsFunc(engine.Env, func(v corev1.EnvVar) bool {
			return v.Name == semmoev1.PlanDigestVariable && v.Value == pod.Annotations[semmoev1.AnnotationPlanDigest] && v.Value != ""
		}) {
			t.Errorf("pod %s: the engine's environment lacks the plan: %+v", pod.Name, engine.Env)
		}
	}

	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Placement.TokenShuffle = semmoev1.TokenShuffleDisabled })
	waitCondition(t, moed, semmoev1.ConditionLocalityOnTarget, metav1.ConditionUnknown, "TokenShuffleUnsupported", "one activation in 4 is local")
	eventually(t, waitTimeout, "a new plan is made", func() error {
		if plan := get(t, moed).Status.Plan; plan == planned.Status.Plan || plan == "" {
			return fmt.Errorf("the plan is %q", plan)
		}
		return nil
	})
}
