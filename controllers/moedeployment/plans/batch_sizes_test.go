// SPDX-License-Identifier: Apache-2.0

package plans

import (
	"context"
	"slices"
	"testing"
	"time"

	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
)

var (
	decoding = []int32{48, 48, 64, 64, 64, 64, 96, 1024}
	prompts  = []int32{64, 64, 64, 64, 2048, 4096, 8192, 8192}
)

// reconcileBatches runs the planner once, with no policy that holds a plan.
func (s *story) reconcileBatches() planner.Planning {
	s.t.Helper()
	p, err := s.Plan(context.Background(), s.moed, moedtest.Report(), s.workloads, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	if err := s.Replan(context.Background(), p, planner.DriftSignal{BatchesMoved: p.BatchesMoved(), Now: s.now}); err != nil {
		s.t.Fatal(err)
	}
	return p
}

// A plan keeps the batch sizes that engines reported when it was created. A change of only the sizes causes no other plan, and a
// size in the spec takes precedence.
func TestPlanKeepsItsBatchSizes(t *testing.T) {
	for name, tc := range map[string]struct {
		before, after, want []int32
	}{
		"reported":     {decoding, prompts, decoding},
		"not reported": {nil, prompts, nil},
		"gone":         {decoding, nil, decoding},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStory(t)
			s.BatchSizes = tc.before
			s.inService()
			writes := s.writes
			s.BatchSizes = tc.after
			s.reconcile(false)
			plans := s.plans()
			if len(plans) != 1 || s.writes != writes || !slices.Equal(plans[0].Spec.ObservedBatchTokens, tc.want) {
				t.Errorf("%d plans after %d writes, of sizes %v; want one of %v", len(plans), s.writes-writes, plans[0].Spec.ObservedBatchTokens, tc.want)
			}
		})
	}
}

// Batch sizes that differ much from those of the newest plan cause one plan from the same profile. A plan without gain
// causes no further plan.
func TestReplanForBatches(t *testing.T) {
	s := newStory(t)
	s.BatchSizes = decoding
	base := s.inService()
	if p := s.reconcileBatches(); p.BatchesMoved() || len(s.plans()) != 1 {
		t.Fatalf("%d plans for the same sizes", len(s.plans()))
	}
	s.BatchSizes = prompts
	for range 2 { // the second run sees the plan of the first one
		s.reconcileBatches()
	}
	made := slices.DeleteFunc(s.plans(), func(p semmoev1.PlacementPlan) bool { return p.Name == base.Name })
	if len(made) != 1 || len(s.profiles()) != 1 {
		t.Fatalf("%d more plans and %d profiles, want one of each", len(made), len(s.profiles()))
	}
	spec := made[0].Spec
	if spec.Current == nil || spec.Current.PlanDigest != base.Status.PlanDigest || spec.ProfileRef != base.Spec.ProfileRef || spec.PriorProfileRef != nil || !slices.Equal(spec.ObservedBatchTokens, prompts) {
		t.Errorf("the plan is made as %+v", spec)
	}
	s.solve("b1", "", semmoev1.VerdictNoGainExpected)
	writes := s.writes
	if p := s.reconcileBatches(); p.BatchesMoved() || s.writes != writes {
		t.Error("sizes at which nothing is gained lead to another plan")
	}
	s.BatchSizes = decoding
	if s.reconcileBatches(); len(s.plans()) != 3 {
		t.Errorf("%d plans once the sizes are those of before, want another one", len(s.plans()))
	}
}

// A plan without gain at its batch sizes is recreated for other sizes if no workload serves under a plan.
func TestOutgrownPlanIsRecreated(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*story)
		want   []int32
	}{
		"moved":     {func(*story) {}, prompts},
		"alike":     {func(s *story) { s.BatchSizes = []int32{48, 48, 64, 64, 64, 64, 96, 1536} }, decoding},
		"unknown":   {func(s *story) { s.BatchSizes = nil }, decoding},
		"too young": {func(s *story) { s.now = moedtest.Start.Add(time.Minute) }, decoding},
		"off":       {func(s *story) { s.moed.Spec.Drift.MaxReplansPerDay = ptr.To[int32](0) }, decoding},
		"serving": {func(s *story) {
			s.workloads = []*revisions.Workload{workloadUnder(s.t, moedtest.PlanOf("x", "x", nil), 2)}
		}, decoding},
		"changing": {func(s *story) { s.moed.Generation = 0 }, decoding},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStory(t)
			s.BatchSizes = decoding
			s.reconcile(false)
			s.profile("r0")
			s.reconcile(false)
			plan := s.solve("b0", "", semmoev1.VerdictNoGainExpected)
			s.BatchSizes, s.now = prompts, s.now.Add(2*time.Hour)
			tc.change(s)
			for range 3 {
				s.reconcile(false)
			}
			plans := s.plans()
			if len(plans) != 1 || plans[0].Name != plan.Name || !slices.Equal(plans[0].Spec.ObservedBatchTokens, tc.want) {
				t.Errorf("%d plans; the first is %s for %v, want %s for %v", len(plans), plans[0].Name, plans[0].Spec.ObservedBatchTokens, plan.Name, tc.want)
			}
		})
	}
}
