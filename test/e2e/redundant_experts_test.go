// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/tier"
)

// TestRedundantExperts serves a plan with redundant experts on an engine that has room for them. The answers equal those
// without a plan, and the forecast is better than that of the same plan without copies.
func TestRedundantExperts(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	storedProfile(t, namespace)
	moed := storyDeployment(namespace)
	// Without an all-to-all backend, SGLang computes wrong answers with redundant experts or exits at start, so the
	// plan would be refused.
	moed.Spec.Engine.Args = append(moed.Spec.Engine.Args, "--moe-a2a-backend=deepep")
	create(t, moed)
	plain := waitPlanned(t, moed).Status
	url := serviceURL(t, moed)
	waitScored(t, url, plain.PlanDigest)
	before := greedy(t, url)

	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Placement.RedundantExperts = ptr.To(intstr.FromInt32(8)) })
	waitOtherPlan(t, moed, plain.PlanDigest, func() {})
	copies := get(t, moed).Status
	waitCondition(t, moed, semmoev1.ConditionRolledOut, metav1.ConditionTrue, "RolledOut", copies.PlanDigest)
	waitScored(t, url, copies.PlanDigest)
	sameAnswers(t, "copies", before, greedy(t, url))
	if with, without := *copies.LAR.PredictedMilli, *plain.LAR.PredictedMilli; with <= without {
		t.Errorf("forecast local activations: %d thousandths with redundant experts, %d without", with, without)
	}
	checkEngineFlags(t, moed, "--ep-num-redundant-experts 8", "--ep-dispatch-algorithm static")
}

// checkEngineFlags requires that all engines are started with the given flags.
func checkEngineFlags(t *testing.T, moed *semmoev1.MoEDeployment, flags ...string) {
	t.Helper()
	pods := listEnginePods(t, moed)
	if len(pods) == 0 {
		t.Error("no engine pods")
	}
	for _, pod := range pods {
		args := strings.Join(pod.Spec.Containers[0].Args, " ")
		for _, flag := range flags {
			if !strings.Contains(strings.ReplaceAll(args, "=", " "), flag) {
				t.Errorf("the engine of pod %s is started without %s: %s", pod.Name, flag, args)
			}
		}
	}
}

// TestRedundantExpertsFromMemory lets the operator size the redundant experts from memory. The chosen number is in the plan's
// status, engines are started with it, and answers do not change. If no expert fits in memory, the plan has no copies
// and its condition says so.
func TestRedundantExpertsFromMemory(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	storedProfile(t, namespace)
	sized := func(memory string) func(*semmoev1.MoEDeployment) {
		return func(m *semmoev1.MoEDeployment) {
			m.Spec.Placement.RedundantExperts, m.Spec.Placement.RedundantMemoryBytes = ptr.To(intstr.FromString(semmoev1.RedundantExpertsAuto)), ptr.To(resource.MustParse(memory))
		}
	}
	// The memory is less than one expert of each layer: three matrices of 128 by 64 weights of four bytes, in four
	// layers.
	moed := storyDeployment(namespace, sized("384k"))
	moed.Spec.Engine.Args = append(moed.Spec.Engine.Args, "--moe-a2a-backend=deepep")
	create(t, moed)
	plain := waitPlanned(t, moed).Status
	url := serviceURL(t, moed)
	waitScored(t, url, plain.PlanDigest)
	before := greedy(t, url)
	if plan := planOf(t, moed, plain.PlanDigest); plan.Status.RedundantExperts != 0 || !strings.Contains(message(plan), "no copies: 0.4 MiB per rank are too small for one expert") {
		t.Errorf("status without memory for any redundant expert: %+v", plan.Status)
	}

	update(t, moed, sized("1Gi"))
	waitOtherPlan(t, moed, plain.PlanDigest, func() {})
	copies := get(t, moed).Status
	waitCondition(t, moed, semmoev1.ConditionRolledOut, metav1.ConditionTrue, "RolledOut", copies.PlanDigest)
	waitScored(t, url, copies.PlanDigest)
	sameAnswers(t, "copies", before, greedy(t, url))
	plan := planOf(t, moed, copies.PlanDigest)
	ranks := moed.Spec.Parallelism.ExpertParallelSize
	if n := plan.Status.RedundantExperts; n < ranks || n%ranks != 0 || !strings.Contains(message(plan), "copies per rank and layer") {
		t.Errorf("%d redundant experts are chosen: %+v", n, plan.Status)
	}
	if with, without := *copies.LAR.PredictedMilli, *plain.LAR.PredictedMilli; with <= without {
		t.Errorf("forecast local activations: %d thousandths with redundant experts, %d without", with, without)
	}
	checkEngineFlags(t, moed, fmt.Sprintf("--ep-num-redundant-experts %d", plan.Status.RedundantExperts), "--ep-dispatch-algorithm static")
}

// planOf returns the plan of a deployment that has the given short digest.
func planOf(t *testing.T, moed *semmoev1.MoEDeployment, digest string) *semmoev1.PlacementPlan {
	t.Helper()
	var plans semmoev1.PlacementPlanList
	if err := api.List(t.Context(), &plans, client.InNamespace(moed.Namespace)); err != nil {
		t.Fatal(err)
	}
	for i := range plans.Items {
		if plans.Items[i].Status.Plan == digest {
			return &plans.Items[i]
		}
	}
	t.Fatalf("no plan has the digest %s", digest)
	return nil
}

// message returns the message of the plan's condition Ready.
func message(plan *semmoev1.PlacementPlan) string {
	if ready := meta.FindStatusCondition(plan.Status.Conditions, semmoev1.ConditionReady); ready != nil {
		return ready.Message
	}
	return ""
}
