// SPDX-License-Identifier: Apache-2.0

// Package planner decides which profile and plan a MoEDeployment needs, and under which plan it is served.
//
// Invariants:
//   - Profiles and plans are named by the hash of their inputs, so creating one twice is a no-op.
//   - The plan in service is read only from workloads: a deleted plan, or one with a lost status, is still in
//     service.
//   - A plan is a candidate only if it may be rolled out. Its failures are recorded on the plan itself.
//   - Decide and NextReplan are pure functions of a Snapshot. They return the writes, and a question if a read depends
//     on the decision. Package plans reads snapshots and answers questions.
package planner

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/engine"
)

// Planning is the state of the profiles and plans of a MoEDeployment.
type Planning struct {
	// Profile is the profile that plans are made from; nil if it does not exist (yet).
	Profile *semmoev1.AffinityProfile
	// ProfileName is its name, known before it exists; empty if the spec requests none.
	ProfileName string
	// Hardware is the hardware profile for which plans are made.
	Hardware HardwareProfile
	// Base is the plan that the spec requests; nil if it does not exist (yet). Lineage contains the plans and profiles
	// made for drift since.
	Base    *semmoev1.PlacementPlan
	Lineage lineage
	// Plan is the plan with the wanted layout: Base, a plan made for drift, or the pinned plan; nil if it does not
	// exist (yet).
	Plan *semmoev1.PlacementPlan
	// Pin is why the pinned plan cannot be served; its zero value if it can, or if no plan is pinned.
	Pin desired.Finding
	// Tables is the plan whose tables are used with the layout in service; nil if the layout uses its own. TablesHold
	// is why newer tables are not used.
	Tables     *semmoev1.PlacementPlan
	TablesHold desired.Finding
	// TablesSince is when routers were last switched to other tables or back; zero if never.
	TablesSince time.Time
	// PinnedTables is the pinned plan if it contains new tables for an existing layout, else nil.
	PinnedTables *semmoev1.PlacementPlan
	// Named are the plans whose tables routers are configured to use. InUse are the candidates for the tables used so
	// far.
	Named []string
	InUse []*semmoev1.PlacementPlan
	// Plans are the MoEDeployment's own plans, newest first.
	Plans []*semmoev1.PlacementPlan
	// BatchSizes are the sizes that engines report, for which the next plan is made; nil if they report none, or if the
	// spec sets a size.
	BatchSizes []int32
	// Serving is the proven layout to serve under; nil for no plan.
	Serving *revisions.Layout
	// Candidate is the layout to try on a canary: that of Plan, once it may be rolled out; nil if there is none.
	Candidate *revisions.Layout
	// Promise is the plan of Serving; nil if it no longer exists, or has no forecast yet.
	Promise *semmoev1.PlacementPlan
	// Why explains why the serving plan does not reach the engine in the preferred way; empty if it does.
	Why string
	// Warnings are the features that the engine may lack under the serving plan, as sentences to append; empty if none.
	Warnings string
	// Again is the delay until the next check; zero if an event triggers it.
	Again time.Duration
	// Overlap is the decision on the overlap settings; its zero value without mode Auto.
	Overlap Overlap
	// Hold is why Plan is not rolled out although it is ready; its zero value if it is, or if there is none.
	Hold desired.Finding
}

// Profiled reports whether the profile is complete, and belongs to the served model.
func Profiled(profile *semmoev1.AffinityProfile, modelDigest string) bool {
	return profile != nil && meta.IsStatusConditionTrue(profile.Status.Conditions, semmoev1.ConditionReady) &&
		profile.Status.Result != nil && profile.Status.Model != nil && profile.Status.Model.Digest == modelDigest
}

// Published reports whether the plan can be served: it is complete, and made for the model and the ranks of the spec.
func Published(plan *semmoev1.PlacementPlan, moed *semmoev1.MoEDeployment, modelDigest string) bool {
	return plan != nil && plan.DeletionTimestamp == nil &&
		meta.IsStatusConditionTrue(plan.Status.Conditions, semmoev1.ConditionReady) && plan.Status.PlanDigest != "" &&
		plan.Status.ModelDigest == modelDigest &&
		plan.Spec.ExpertParallelSize == moed.Spec.Parallelism.ExpertParallelSize && plan.Spec.Attention == moed.Spec.Parallelism.Attention &&
		plan.Spec.Engine == moed.Spec.Engine.Type
}

// release returns the release of the engine; its zero value if unknown.
func (s *Snapshot) release() engine.Release { return revisions.Release(s.Moed, s.Workloads) }

// promiseOf returns the plan with the digest of serving, among the plans with a forecast.
func promiseOf(serving *revisions.Layout, plans ...*semmoev1.PlacementPlan) *semmoev1.PlacementPlan {
	for _, plan := range plans {
		if serving != nil && plan != nil && plan.Status.PlanDigest == serving.Digest && plan.Status.Forecast != nil {
			return plan
		}
	}
	return nil
}

// reasonNotRealizable is the reason if no plan can reach the engine.
const reasonNotRealizable = "UnsupportedByEngine"

// reasonNoRoom is the reason if the rollout of a plan would interrupt the service.
const reasonNoRoom = "RolloutInterruptsService"

func forecastOf(plan *semmoev1.PlacementPlan) semmoev1.PlanForecast {
	if plan == nil || plan.Status.Forecast == nil {
		return semmoev1.PlanForecast{}
	}
	return *plan.Status.Forecast
}

// promiseText describes the prediction of a plan, and the value without it.
func promiseText(plan *semmoev1.PlacementPlan) string {
	f := forecastOf(plan)
	if f.LARSummary == "" {
		return "a better placement from token counts, which contain no local activation rate"
	}
	if f.BaselineRemoteRanksMilli > 0 {
		return fmt.Sprintf("the experts of a token on %.2f other ranks, versus %.2f without the plan", float64(f.RemoteRanksMilli)/1000, float64(f.BaselineRemoteRanksMilli)/1000)
	}
	text := fmt.Sprintf("%s versus %s without the plan", f.LARSummary, f.BaselineSummary)
	switch {
	case plan.Status.Verdict != semmoev1.VerdictGain && f.Reason != "":
		text += "; " + f.Reason
	case f.LayerNanos > f.BaselineLayerNanos: // the rates do not explain the verdict
		text += fmt.Sprintf("; a layer takes %.1f µs versus %.1f µs", float64(f.LayerNanos)/1000, float64(f.BaselineLayerNanos)/1000)
	}
	return text
}

// PlannedText describes the prediction of a plan that can be served.
func PlannedText(plan *semmoev1.PlacementPlan) string {
	f := forecastOf(plan)
	if f.LARSummary == "" {
		return "was solved from token counts, which contain no local activation rate"
	}
	if f.BaselineRemoteRanksMilli > 0 {
		return fmt.Sprintf("predicts %s; tokens are not shuffled, and the local activation rate is %s under any plan", promiseText(plan), f.LARSummary)
	}
	return fmt.Sprintf("predicts a local activation rate of %s, versus %s for the default placement", f.LARSummary, f.BaselineSummary)
}

// ReasonNotProfilable is the reason of Profiled for a model for which no plan can be made. It is no error: the model is
// served.
const ReasonNotProfilable = "ModelNotProfilable"

// Reasons of Profiled that are errors, not pending work.
const (
	ReasonProfileNotFound = "ProfileNotFound"
	ReasonOtherModel      = "ModelMismatch"
	ReasonOutputChanged   = "OutputChanged"
)

// ReasonRolledBack is the reason of RolledOut after a failed canary. The serving revision is not affected.
const ReasonRolledBack = "RolledBack"

// ChildVerdict returns the reason and message that an unready profile or plan reports itself.
func ChildVerdict(kind, name string, conditions []metav1.Condition, otherwise string) (reason, message string) {
	ready := meta.FindStatusCondition(conditions, semmoev1.ConditionReady)
	if ready == nil {
		return otherwise, fmt.Sprintf("%s %s has just been created", kind, name)
	}
	return ready.Reason, fmt.Sprintf("%s %s: %s", kind, name, ready.Message)
}

// TablesText names the tables used with the layout in service, and why newer ones are not used; empty if the layout
// uses its own.
func (p *Planning) TablesText() string {
	text := ""
	if p.Tables != nil {
		use := "Requests are routed"
		if p.Tables.Spec.Attention != semmoev1.AttentionDataParallel {
			use = "Tokens are shuffled"
		}
		text = fmt.Sprintf(". %s by the tables of plan %s (PlacementPlan %s)", use, p.Tables.Status.Plan, p.Tables.Name)
	}
	if p.TablesHold.Reason != "" {
		text += ". " + p.TablesHold.Reason + ": " + p.TablesHold.Message
	}
	return text
}

// NewestFirst sorts objects by age. Ties are broken by name.
func NewestFirst[T metav1.Object](objects []T) {
	slices.SortFunc(objects, func(a, b T) int {
		return cmp.Or(b.GetCreationTimestamp().Compare(a.GetCreationTimestamp().Time), cmp.Compare(a.GetName(), b.GetName()))
	})
}

// ApproveCommand returns the command that approves a plan.
func ApproveCommand(moed *semmoev1.MoEDeployment, short string) string {
	return fmt.Sprintf("kubectl annotate moed -n %s %s %s=%s --overwrite", moed.Namespace, moed.Name, semmoev1.AnnotationApprove, short)
}
