// SPDX-License-Identifier: Apache-2.0

package placementplan

import (
	"bytes"
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// TestLayoutSpec checks that a plan follows its layout spec, that a plan that replaces it keeps the layout spec, and
// that a spec that cannot be solved is reported and not retried.
func TestLayoutSpec(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.complete(w.newProfile("tiny"), traceFile(t))
	// One after the other: a manager solves one plan at a time, so the last one would wait for all.
	base, found := w.solved(w.newPlan("copies", "tiny", func(p *semmoev1.PlacementPlan) { p.Spec.RedundantExperts = ptr.To(intstr.FromInt32(8)) }))
	if found.Placement.SlotsPerRank != 32/4+2 || base.Status.Verdict != semmoev1.VerdictGain {
		t.Errorf("with 8 copies ranks have %d slots, verdict %s", found.Placement.SlotsPerRank, base.Status.Verdict)
	}
	plain, unlimited := w.solved(w.newPlan("free", "tiny"))
	if base.Status.Forecast.LARMilli <= plain.Status.Forecast.LARMilli {
		t.Errorf("local activation rate with copies = %d thousandths, without %d", base.Status.Forecast.LARMilli, plain.Status.Forecast.LARMilli)
	}
	nodes := w.newPlan("nodes", "tiny", func(p *semmoev1.PlacementPlan) {
		p.Spec.Objective, p.Spec.RanksPerNode = semmoev1.ObjectiveHierarchical, 2
		p.Spec.Solver.TimeBudgetSeconds = 1 // with the race detector and parallel tests the complete search takes minutes
	})
	// The verdict depends on the progress of the search.
	found = w.plan(w.wait(nodes, semmoev1.ConditionProgressing, metav1.ConditionFalse, "Complete"))
	if found.Objective != placement.Hierarchical || found.RanksPerNode != 2 {
		t.Errorf("objective %s, %d ranks per node", found.Objective, found.RanksPerNode)
	}
	_, found = w.solved(w.newPlan("limited", "tiny", func(p *semmoev1.PlacementPlan) {
		p.Spec.TokenLoadLimitPercent, p.Spec.ExpertLoadLimitPercent = ptr.To[int32](105), ptr.To[int32](110)
	}))
	if placement.Moves(unlimited.Placement, found.Placement) == 0 {
		t.Error("limits do not change the placement")
	}
	many := w.newPlan("many", "tiny", func(p *semmoev1.PlacementPlan) { p.Spec.RedundantExperts = ptr.To(intstr.FromInt32(128)) })
	w.wait(many, semmoev1.ConditionStalled, metav1.ConditionTrue, "InvalidPlacement", "spec.redundantExperts: 128 is invalid: 32 redundant slots per rank")

	other := w.newPlan("other", "tiny", func(p *semmoev1.PlacementPlan) {
		p.Spec.Current = &semmoev1.CurrentPlan{PlanDigest: base.Status.PlanDigest}
	})
	w.wait(other, semmoev1.ConditionStalled, metav1.ConditionTrue, "CurrentPlanInvalid", "spec.redundantExperts", "has 8, not 0")
	next := w.newPlan("next", "tiny", func(p *semmoev1.PlacementPlan) {
		p.Spec.RedundantExperts, p.Spec.Current = ptr.To(intstr.FromInt32(8)), &semmoev1.CurrentPlan{PlanDigest: base.Status.PlanDigest}
	})
	w.wait(next, semmoev1.ConditionProgressing, metav1.ConditionFalse, "Complete")
	foreign := w.newPlan("foreign", "tiny", func(p *semmoev1.PlacementPlan) {
		p.Spec.RedundantExperts, p.Spec.Objective, p.Spec.Current = ptr.To(intstr.FromInt32(8)), semmoev1.ObjectiveRankDedup, &semmoev1.CurrentPlan{PlanDigest: base.Status.PlanDigest}
	})
	w.wait(foreign, semmoev1.ConditionStalled, metav1.ConditionTrue, "CurrentPlanInvalid", "spec.objective")
}

// TestForecastOfThePlan checks that a plan has the forecast of its spec, that Auto reports its choice, which survives a
// loss of the status, that a plan for new traffic keeps it, and that a forecast without its input is not retried.
func TestForecastOfThePlan(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.complete(w.newProfile("tiny"), traceFile(t))
	planned := func(name string, by semmoev1.SolverForecast, current string) *semmoev1.PlacementPlan {
		return w.newPlan(name, "tiny", func(p *semmoev1.PlacementPlan) {
			p.Spec.Attention, p.Spec.Solver.Forecast = semmoev1.AttentionTensorParallel, by
			if current != "" {
				p.Spec.Current = &semmoev1.CurrentPlan{PlanDigest: current}
			}
		})
	}
	ahead := planned("ahead", semmoev1.ForecastLookAhead, "")
	w.wait(ahead, semmoev1.ConditionStalled, metav1.ConditionTrue, "ForecastUnavailable", "spec.solver.forecast: LookAhead is unavailable: the trace has no look-ahead")

	back, found := w.solved(planned("back", semmoev1.ForecastLookBack, ""))
	if found.Forecast != solver.LookBack || back.Status.Forecast.Method != semmoev1.ForecastLookBack {
		t.Errorf("forecast %s, status %+v", found.Forecast, back.Status.Forecast)
	}
	auto, found := w.solved(planned("auto", "", ""))
	if found.Forecast != solver.Table || auto.Status.Forecast.Method != semmoev1.ForecastTable {
		t.Errorf("forecast %s, status %+v", found.Forecast, auto.Status.Forecast)
	}
	says := []string{"forecast table, by modelled layer time", "lookback ", "not compared: lookahead"}
	w.wait(auto, semmoev1.ConditionReady, metav1.ConditionTrue, "Published", says...)
	w.wipe(auto)
	w.wait(auto, semmoev1.ConditionReady, metav1.ConditionTrue, "Published", says...)

	next := w.wait(planned("next", semmoev1.ForecastAuto, back.Status.PlanDigest), semmoev1.ConditionProgressing, metav1.ConditionFalse, "Complete")
	if found := w.plan(next); found.Forecast != solver.LookBack || next.Status.Forecast.Method != semmoev1.ForecastLookBack {
		t.Errorf("forecast %s after %s, status %+v", found.Forecast, semmoev1.ForecastLookBack, next.Status.Forecast)
	}
}

// TestRedundantExpertsFromMemory checks that the number of copies is chosen from the memory, is recorded in the plan and in the
// status, and is restored if the status is lost.
func TestRedundantExpertsFromMemory(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.complete(w.newProfile("tiny"), traceFile(t))
	auto := func(name, memory string) *semmoev1.PlacementPlan {
		return w.newPlan(name, "tiny", func(p *semmoev1.PlacementPlan) {
			p.Spec.RedundantExperts, p.Spec.RedundantMemoryBytes = ptr.To(intstr.FromString("Auto")), ptr.To(resource.MustParse(memory))
		})
	}
	const expertBytes, layers = 3 * 128 * 64 * 4, 2
	done, found := w.solved(auto("auto", fmt.Sprint(8*layers*expertBytes)))
	slots := found.Placement.SlotsPerRank - 32/4
	if slots < 1 || slots > 8 || done.Status.RedundantExperts != int32(4*slots) || done.Status.Verdict != semmoev1.VerdictGain {
		t.Errorf("ranks have %d copies in each layer, status %+v", slots, done.Status)
	}
	if c := found.Copies; c == nil || c.Chosen != slots || c.MaxSlots != 8 || len(c.Points) != 5 {
		t.Errorf("the plan records %+v", c)
	}
	w.wait(done, semmoev1.ConditionReady, metav1.ConditionTrue, "Published", fmt.Sprintf("; %d of at most 8 copies per rank and layer", slots))
	w.wipe(done)
	if again := w.wait(done, semmoev1.ConditionReady, metav1.ConditionTrue, "Published"); again.Status.RedundantExperts != done.Status.RedundantExperts {
		t.Errorf("restored status has %d redundant experts, want %d", again.Status.RedundantExperts, done.Status.RedundantExperts)
	}
	// The plan that replaces it keeps the number of copies.
	next := w.newPlan("next", "tiny", func(p *semmoev1.PlacementPlan) {
		p.Spec.RedundantExperts, p.Spec.Current = ptr.To(intstr.FromInt32(done.Status.RedundantExperts)), &semmoev1.CurrentPlan{PlanDigest: done.Status.PlanDigest}
	})
	if of := w.plan(w.wait(next, semmoev1.ConditionProgressing, metav1.ConditionFalse, "Complete")); of.Placement.SlotsPerRank != found.Placement.SlotsPerRank {
		t.Errorf("the new plan has %d slots per rank, want %d", of.Placement.SlotsPerRank, found.Placement.SlotsPerRank)
	}
	none, found := w.solved(auto("none", fmt.Sprint(layers*expertBytes-1)))
	if none.Status.RedundantExperts != 0 || found.Placement.Redundant() {
		t.Errorf("without memory for a copy the plan has %d copies, status %+v", found.Placement.SlotsPerRank-32/4, none.Status)
	}
	w.wait(none, semmoev1.ConditionReady, metav1.ConditionTrue, "Published", "no copies: 0.2 MiB per rank are too small for one expert in each of the 2 layers")
}

// TestDriftTestKeepsTheLoadLimit checks that the drift test is calibrated for routers with the token load limit of the
// spec.
func TestDriftTestKeepsTheLoadLimit(t *testing.T) {
	if testing.Short() {
		t.Skip("drift tests are calibrated without -short")
	}
	t.Parallel()
	w := newWorld(t)
	w.complete(w.newProfile("tiny"), traceFile(t))
	found := w.plan(w.wait(w.newPlan("limited", "tiny", func(p *semmoev1.PlacementPlan) {
		p.Spec.TokenLoadLimitPercent = ptr.To[int32](105)
		p.Spec.Solver.TrainPercent = 20 // leaves enough requests for a drift test
	}), semmoev1.ConditionProgressing, metav1.ConditionFalse, "Complete"))
	recorded, err := trace.Read(bytes.NewReader(traceFile(t)), 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	heldOut, _, err := solver.HeldOut(recorded, found, nil)
	if err != nil {
		t.Fatal(err)
	}
	want, err := solver.CalibrateDrift(t.Context(), recorded, found, heldOut, 1.05)
	if err != nil || found.Drift == nil || found.Drift.Usual != want.Usual {
		t.Errorf("error %v; drift test = %+v, want %+v", err, found.Drift, want)
	}
}

// solved waits until a plan is published, and fetches it.
func (w *world) solved(p *semmoev1.PlacementPlan) (*semmoev1.PlacementPlan, *solver.Plan) {
	w.t.Helper()
	done := w.wait(p, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	return done, w.plan(done)
}

// plan fetches a published plan.
func (w *world) plan(p *semmoev1.PlacementPlan) *solver.Plan {
	w.t.Helper()
	found, _, err := bundle.FetchPlan(w.t.Context(), w.client, w.namespace, p.Status.PlanDigest)
	if err != nil {
		w.t.Fatal(err)
	}
	return found
}
