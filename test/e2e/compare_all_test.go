// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/refengine"
	"github.com/semmoe/operator/test/tier"
)

// comparing is a story: a change of the pods is promoted from its canary, a user rolls the next one back from its canary,
// and reverts it.
func comparing(t *testing.T, namespace string) {
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) {
		m.Spec.Replicas = ptr.To[int32](2)
		m.Spec.Rollout.Compare = semmoev1.CompareAll
		m.Spec.Rollout.SoakSeconds = ptr.To[int32](0) // compares nothing
	})
	create(t, moed)
	waitComplete(t, moed)
	set := func(value string, soakSeconds int32) {
		update(t, moed, func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Env, m.Spec.Rollout.SoakSeconds = []corev1.EnvVar{{Name: "CHANGED", Value: value}}, ptr.To(soakSeconds)
		})
	}
	served := func(value string) error {
		workloads := listWorkloads(t, moed)
		if len(workloads) != 1 || !slices.Contains(workloads[0].Spec.Template.Spec.Containers[0].Env, corev1.EnvVar{Name: "CHANGED", Value: value}) {
			return fmt.Errorf("%d workloads", len(workloads))
		}
		return complete(get(t, moed))
	}
	set("first", 0)
	eventually(t, waitTimeout, "the first change is promoted", func() error { return served("first") })
	set("second", 86400)
	eventually(t, waitTimeout, "the second change is on its canary", func() error {
		if current := get(t, moed); phaseOf(current) != semmoev1.RolloutPhaseCanary {
			return fmt.Errorf("conditions %+v", current.Status.Conditions)
		}
		return nil
	})
	update(t, moed, func(m *semmoev1.MoEDeployment) {
		m.Annotations = map[string]string{semmoev1.AnnotationRollBack: get(t, moed).Status.Rollout.CandidateRevision}
	})
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionStalled, metav1.ConditionTrue, "ChangeRolledBack", "RollbackRequested")
	set("first", 86400)
	eventually(t, waitTimeout, "the first change serves", func() error { return served("first") })
}

// slowBy returns the arguments of an engine whose steps are delayed.
func slowBy(delay time.Duration) []string {
	return []string{"--fault", refengine.FaultSlowSteps + delay.String()}
}

// comparedDeployment returns a deployment of two replicas that compares all changes, once it is complete. Requests are
// sent to it until stop is called.
func comparedDeployment(t *testing.T, namespace string) (moed *semmoev1.MoEDeployment, stop func()) {
	t.Helper()
	moed = newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) {
		m.Spec.Replicas = ptr.To[int32](2)
		m.Spec.Rollout.Compare = semmoev1.CompareAll
		m.Spec.Rollout.SoakSeconds = ptr.To[int32](60)
		m.Spec.Engine.Args = slowBy(60 * time.Millisecond) // most of a response's time, so that other work changes it little
	})
	create(t, moed)
	stop = sendSlowly(t, waitAnswers(t, moed), 120)
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionProgressing, metav1.ConditionFalse, "Complete")
	return moed, stop
}

// TestSlowerChangeRolledBack rolls back a change of an argument that makes the engine slower, and does not try it again.
// The reverted spec is in service without a restart.
func TestSlowerChangeRolledBack(t *testing.T) {
	tier.Nightly(t) // compares times over several minutes
	t.Parallel()
	namespace := newNamespace(t)
	stopManager := startManager(t, namespace, nil)
	moed, stop := comparedDeployment(t, namespace)
	before, pods := get(t, moed).Status.Revision, podUIDs(t, moed)

	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = slowBy(120 * time.Millisecond) })
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionRolledOut, metav1.ConditionFalse, "Canary", "1 of 2 replicas")
	onCanary := get(t, moed)
	if rollout := onCanary.Status.Rollout; rollout == nil || rollout.StableRevision != before || rollout.CandidateRevision != onCanary.Status.Revision ||
		onCanary.Status.Serving.Revision != before || !meta.IsStatusConditionTrue(onCanary.Status.Conditions, semmoev1.ConditionReconciling) {
		t.Errorf("status %+v", onCanary.Status)
	}
	waitConditionWithin(t, 20*time.Minute, moed, semmoev1.ConditionStalled, metav1.ConditionTrue, "ChangeRolledBack", "Slower", before)
	eventually(t, waitTimeout, "the change is rolled back", func() error {
		if current, workloads := get(t, moed), listWorkloads(t, moed); len(workloads) != 1 || current.Status.ReadyReplicas != 2 || phaseOf(current) != "" {
			return fmt.Errorf("%d workloads, %d ready replicas, phase %q", len(workloads), current.Status.ReadyReplicas, phaseOf(current))
		}
		return nil
	})
	stop()
	rolledBack := get(t, moed)
	if !meta.IsStatusConditionTrue(rolledBack.Status.Conditions, semmoev1.ConditionReady) || meta.IsStatusConditionTrue(rolledBack.Status.Conditions, semmoev1.ConditionDegraded) {
		t.Errorf("conditions %+v", rolledBack.Status.Conditions)
	}
	t.Logf("rolled back: %s", meta.FindStatusCondition(rolledBack.Status.Conditions, semmoev1.ConditionStalled).Message)

	// Another manager does not try the change again, even after the status is lost.
	stopManager()
	wipeStatus(t, moed)
	startManager(t, namespace, nil)
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionStalled, metav1.ConditionTrue, "ChangeRolledBack", "Slower")
	if workloads := listWorkloads(t, moed); len(workloads) != 1 {
		t.Errorf("%d workloads", len(workloads))
	}

	// The pod that the canary did not replace was not restarted.
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = slowBy(60 * time.Millisecond) })
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionProgressing, metav1.ConditionFalse, "Complete")
	kept := slices.DeleteFunc(podUIDs(t, moed), func(uid string) bool { return !slices.Contains(pods, uid) })
	if len(kept) != 1 || get(t, moed).Status.Revision != before {
		t.Errorf("%d pods remain of revision %s, want 1", len(kept), before)
	}
}

// TestEqualChangePromoted promotes a change of a variable that changes no time.
func TestEqualChangePromoted(t *testing.T) {
	tier.Nightly(t) // compares times over several minutes
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	moed, stop := comparedDeployment(t, namespace)
	before := get(t, moed).Status.Revision
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Env = []corev1.EnvVar{{Name: "UNUSED", Value: "1"}} })
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionRolledOut, metav1.ConditionFalse, "Canary", "1 of 2 replicas")
	waitConditionWithin(t, 40*time.Minute, moed, semmoev1.ConditionProgressing, metav1.ConditionFalse, "Complete")
	stop()
	if current := get(t, moed); current.Status.Revision == before || current.Status.Serving.Revision != current.Status.Revision {
		t.Errorf("status %+v", current.Status)
	}
}
