// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"slices"
	"testing"

	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/observation/stepsizes"
	"github.com/semmoe/operator/test/tier"
)

// TestObservedBatchSizes leaves rollout.batchTokens unset. The first plan is made for the default batch sizes, and the
// status reports them. Once the engines have computed requests, the status reports the observed batch sizes. These are
// much smaller, so another plan is made for them.
func TestObservedBatchSizes(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	storedProfile(t, namespace)
	moed := storyDeployment(namespace, func(m *semmoev1.MoEDeployment) {
		m.Spec.Rollout.BatchTokens = 0
		m.Spec.Drift.CooldownSeconds, m.Spec.Drift.MaxReplansPerDay = ptr.To[int32](0), ptr.To[int32](1)
	})
	create(t, moed)
	url := waitAnswers(t, moed)
	first := waitBatches(t, moed, semmoev1.BatchTokensDefault)
	if want := []int32{4096, 16384, 65536}; !slices.Equal(first.Sizes, want) || first.Observed != nil || first.Reason == "" || first.Message == "" {
		t.Errorf("before any request: %+v, want sizes %v with a reason and a message", first, want)
	}
	stop := sendSlowly(t, url, 120)
	nudge := nudger(t, namespace)
	last := waitBatches(t, moed, semmoev1.BatchTokensObserved, nudge)
	stop()
	if len(last.Observed) != stepsizes.Parts || last.Observed[stepsizes.Parts-1] > 4096 || last.PrefillMilli == nil || *last.PrefillMilli == 0 {
		t.Errorf("after requests: %+v, want observed small batch sizes, some with prompts", last)
	}
	t.Logf("%+v", last)
}

// waitBatches waits until the newest plan is solved for batch sizes from the given source.
func waitBatches(t *testing.T, moed *semmoev1.MoEDeployment, source semmoev1.BatchTokensSource, between ...func()) *semmoev1.BatchTokensStatus {
	t.Helper()
	var found *semmoev1.BatchTokensStatus
	eventually(t, waitTimeout, "a plan for batch sizes from "+string(source), func() error {
		for _, f := range between {
			f()
		}
		var plans semmoev1.PlacementPlanList
		if err := api.List(t.Context(), &plans, client.InNamespace(moed.Namespace)); err != nil {
			return err
		}
		current := get(t, moed)
		if found = current.Status.BatchTokens; found == nil {
			return fmt.Errorf("no status.batchTokens in %+v", current.Status)
		}
		for _, plan := range plans.Items {
			if (source == semmoev1.BatchTokensObserved) == (len(plan.Spec.ObservedBatchTokens) > 0) && plan.Status.Verdict != "" {
				t.Logf("plan %s: %s %+v %+v", plan.Name, plan.Status.Verdict, plan.Status.Forecast, plan.Status.Comparison)
				return nil
			}
		}
		return fmt.Errorf("%d plans, status.batchTokens is %+v", len(plans.Items), found)
	})
	return found
}
