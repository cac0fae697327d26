// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/locality"
	"github.com/semmoe/operator/test/corpus"
	"github.com/semmoe/operator/test/tier"
)

// halvesOf returns requests of some kinds of text from two disjoint halves of the documents.
func halvesOf(kinds ...string) (profiled, served []corpus.Request) {
	documents := slices.DeleteFunc(corpus.Written(), func(d corpus.Document) bool { return !slices.Contains(kinds, d.Kind) })
	rest, heldOut := corpus.Split(documents, 50, 1)
	return corpus.Requests(rest, 300), corpus.Requests(heldOut, 300)
}

// asDataset returns the ConfigMap of the data set with these requests.
func asDataset(t *testing.T, namespace string, requests []corpus.Request) *corev1.ConfigMap {
	t.Helper()
	lines, err := corpus.JSONL(requests)
	if err != nil {
		t.Fatal(err)
	}
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "corpus"}, Data: map[string]string{"dataset.jsonl": string(lines)}}
}

// containerStarts returns the UIDs of the engine pods, with the number of restarts of each container.
func containerStarts(t *testing.T, moed *semmoev1.MoEDeployment) map[string]int32 {
	t.Helper()
	starts := map[string]int32{}
	for _, pod := range listEnginePods(t, moed) {
		for _, status := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
			starts[string(pod.UID)+" "+status.Name] = status.RestartCount
		}
	}
	return starts
}

// TestTokenTablesFollowTheTraffic serves prose with attention over all ranks. When the traffic changes to program code,
// the engines' counters show the drift, and new tables for the same placement reach the engines. No container is
// restarted, no output changes, and the local activation rate is as the new tables promise. A pin reverts to the
// earlier tables in the same way.
func TestTokenTablesFollowTheTraffic(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	proseProfiled, prose := halvesOf("english", "french", "german", "spanish")
	codeProfiled, code := halvesOf("c", "javascript", "json", "python", "rust", "sql", "yaml")
	create(t, asDataset(t, namespace, proseProfiled))
	moed := profiledDeployment(namespace, func(m *semmoev1.MoEDeployment) {
		shufflesTokens(m, 200)
		m.Spec.Profiling.Refresh = semmoev1.RefreshJob
		// The rate falls by a quarter, and new tables recover all of it: both are far from the threshold.
		m.Spec.Drift = semmoev1.DriftSpec{ThresholdPercent: 15, WindowSeconds: 60, CooldownSeconds: ptr.To[int32](0), MaxReplansPerDay: ptr.To[int32](1)}
	})
	create(t, moed)
	url := serviceURL(t, moed)
	used := func(plan string) error {
		for _, text := range metricsOf(t, namespace, client.MatchingLabels{semmoev1.LabelComponent: semmoev1.ComponentEngine}, 30000) {
			if !strings.Contains(text, fmt.Sprintf("semmoe_engine_tables_info{plan_digest=%q} 1", plan)) {
				return fmt.Errorf("an engine does not use the tables of plan %s", plan)
			}
		}
		return nil
	}
	base := &semmoev1.PlacementPlan{}
	if err := api.Get(t.Context(), types.NamespacedName{Namespace: namespace, Name: waitPlanned(t, moed).Status.Plan}, base); err != nil {
		t.Fatal(err)
	}
	eventually(t, waitTimeout, "the engines use the plan's tables", func() error { return used(base.Status.PlanDigest) })
	golden := append(slices.Clone(prose[:4]), code[:4]...)
	before := continuations(t, url, golden)
	eventually(t, 6*time.Minute, "prose is served as promised", func() error {
		sendRequests(t, url, prose)
		current := get(t, moed)
		return conditionIs(current.Status.Conditions, current.Generation, semmoev1.ConditionLocalityOnTarget, metav1.ConditionTrue, "OnTarget")
	})
	starts := containerStarts(t, moed)

	changed := &corev1.ConfigMap{}
	if err := api.Get(t.Context(), types.NamespacedName{Namespace: namespace, Name: "corpus"}, changed); err != nil {
		t.Fatal(err)
	}
	changed.Data = asDataset(t, namespace, codeProfiled).Data
	if err := api.Update(t.Context(), changed); err != nil {
		t.Fatal(err)
	}
	replan := &semmoev1.PlacementPlan{}
	eventually(t, 8*time.Minute, "a plan is made for the drift", func() error {
		sendRequests(t, url, code)
		var plans semmoev1.PlacementPlanList
		if err := api.List(t.Context(), &plans, client.InNamespace(namespace)); err != nil {
			return err
		}
		for i := range plans.Items {
			if p := &plans.Items[i]; p.Spec.Current != nil && p.Status.Verdict != "" {
				replan = p
				return nil
			}
		}
		return errors.New("no plan for the drift yet")
	})
	if replan.Status.Tier != semmoev1.TierTables || replan.Spec.Current.PlanDigest != base.Status.PlanDigest {
		t.Fatalf("unexpected plan %+v with tier %q and comparison %+v", replan.Spec, replan.Status.Tier, replan.Status.Comparison)
	}
	eventually(t, waitTimeout, "the engines use the new tables", func() error { return used(replan.Status.PlanDigest) })
	engines := client.MatchingLabels{semmoev1.LabelComponent: semmoev1.ComponentEngine}
	localBefore, totalBefore := countedActivations(t, namespace, engines)
	if after := continuations(t, url, golden); !slices.Equal(before, after) {
		t.Errorf("answers by the new tables differ: %q, before %q", after, before)
	}
	var lar *semmoev1.LARStatus
	eventually(t, 6*time.Minute, "code is served as promised", func() error {
		sendRequests(t, url, code)
		current := get(t, moed)
		if lar = current.Status.LAR; lar == nil || lar.ObservedMilli == nil || lar.PredictedMilli == nil || *lar.PredictedMilli != locality.PromiseAt(replan.Status.Forecast, current.Status.BatchTokens).LARMilli {
			return fmt.Errorf("the status is %+v", lar)
		}
		return errors.Join(
			conditionIs(current.Status.Conditions, current.Generation, semmoev1.ConditionLocalityOnTarget, metav1.ConditionTrue, "OnTarget"),
			conditionIs(current.Status.Conditions, current.Generation, semmoev1.ConditionRolledOut, metav1.ConditionTrue, "RolledOut", "2 use the tables of plan "+replan.Status.Plan))
	})
	localAfter, totalAfter := countedActivations(t, namespace, engines)
	observed, promised, counted := float64(*lar.ObservedMilli), float64(*lar.PredictedMilli), 1000*(localAfter-localBefore)/(totalAfter-totalBefore)
	t.Logf("thousandths: promised %v for prose, %v for code by the new tables; observed %v, counted by the engines since the swap %.0f (%+v)",
		base.Status.Forecast.LARMilli, promised, observed, counted, replan.Status.Comparison)
	if math.Abs(observed/promised-1) > 0.1 || math.Abs(observed/counted-1) > 0.1 {
		t.Errorf("observed %+v; promised %v, the engines count %.0f", lar, promised, counted)
	}
	if got := containerStarts(t, moed); !maps.Equal(got, starts) {
		t.Errorf("the containers of the engine pods changed to %v from %v", got, starts)
	}

	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: base.Name} })
	eventually(t, waitTimeout, "the engines use the tables of the layout's plan again", func() error { return used(base.Status.PlanDigest) })
	if after := continuations(t, url, golden); !slices.Equal(before, after) {
		t.Errorf("answers by the earlier tables differ: %q, before %q", after, before)
	}
	if got := containerStarts(t, moed); !maps.Equal(got, starts) {
		t.Errorf("the containers of the engine pods changed to %v from %v", got, starts)
	}
}
