// SPDX-License-Identifier: Apache-2.0

package change

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/engine/registry"
)

// InService holds the plans that a MoEDeployment serves with.
type InService struct {
	// Plan is the plan of the layout. It is nil if no plan is in service.
	Plan *semmoev1.PlacementPlan
	// TablesDigest is the digest of the plan that provides the tables for Plan. It is empty if Plan uses its own
	// tables. Tables is that plan, or nil if it was deleted.
	TablesDigest string
	Tables       *semmoev1.PlacementPlan
	// Reported is the plan in the status of the MoEDeployment, or nil.
	Reported *semmoev1.PlacementPlan
	// Profiles are the existing profiles of these plans, by name.
	Profiles map[string]*semmoev1.AffinityProfile
}

// Plans returns the plans with profiles of earlier requests, most recent first.
func (s InService) Plans() []*semmoev1.PlacementPlan {
	return slices.DeleteFunc([]*semmoev1.PlacementPlan{s.Tables, s.Plan, s.Reported}, func(plan *semmoev1.PlacementPlan) bool { return plan == nil })
}

// prior returns the profile that the plan in service was made from. It prefers the first profile with a routing trace,
// because a profile without a trace has less information on rare tokens. It is empty if no profile has a result.
func (s InService) prior() semmoev1.ProfileReference {
	var first semmoev1.ProfileReference
	for _, plan := range s.Plans() {
		profile := s.Profiles[plan.Spec.ProfileRef.Name]
		switch {
		case profile == nil || profile.Status.Result == nil:
		case profile.Status.Result.TracedTokens > 0:
			return plan.Spec.ProfileRef
		default:
			first = cmp.Or(first, plan.Spec.ProfileRef)
		}
	}
	return first
}

// promised returns the local activation rate, in thousandths, that the plan in service promises with the tables in use.
// It is 0 if unknown.
func (s InService) promised() int32 {
	for _, plan := range []*semmoev1.PlacementPlan{s.Tables, s.Plan} {
		if plan != nil && plan.Status.Forecast != nil { // a plan that was made only from counts has no forecast
			return plan.Status.Forecast.LARMilli
		}
	}
	return 0
}

// Replan returns an AffinityProfile of the requests that the routers sampled since a time, and a PlacementPlan made
// from it to replace the plan in service. The operator creates the same objects when it detects drift
// (docs/planning.md). These objects belong to the user, and creating them rolls out nothing.
func Replan(moed *semmoev1.MoEDeployment, serving InService, since, now time.Time) (*semmoev1.AffinityProfile, *semmoev1.PlacementPlan, error) {
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	if err != nil {
		return nil, nil, err
	}
	profiling := moed.Spec.Profiling
	switch {
	case profiling == nil:
		return nil, nil, statef("MoEDeployment %s has no spec.profiling, so the routers keep no samples to make a plan from", moed.Name)
	case moed.Spec.Reconciliation == semmoev1.ReconciliationPaused:
		return nil, nil, statef("MoEDeployment %s is paused: run kubectl semmoe resume %s first", moed.Name, moed.Name)
	case leavesTokens(moed):
		return nil, nil, statef("the engine of MoEDeployment %s does not shuffle tokens (attention TensorParallel, spec.placement.tokenShuffle Disabled): the local activation rate is the same with every plan, so a new plan gains nothing", moed.Name)
	case moed.Spec.Parallelism.Attention != semmoev1.AttentionDataParallel:
		return nil, nil, statef("no requests are sampled: with attention TensorParallel routers do not know the ranks of tokens. To plan for other requests, set another data set or profile in spec.profiling of MoEDeployment %s", moed.Name)
	case moed.Spec.Routing.Mode == semmoev1.RoutingModeNone || ptr.Deref(moed.Spec.Routing.SamplePercent, 1) == 0:
		return nil, nil, statef("no requests are sampled: set spec.routing.samplePercent of MoEDeployment %s above 0, and spec.routing.mode to Router or EndpointPicker", moed.Name)
	case adapter.RoutedExperts.Decode == nil:
		return nil, nil, statef("engine %s does not report routed experts, so no requests are sampled: a plan needs spec.profiling.profileRef", moed.Spec.Engine.Type)
	case serving.Plan == nil:
		return nil, nil, statef("no plan is in service: the operator makes the first plan from spec.profiling of MoEDeployment %s", moed.Name)
	}
	prior := serving.prior()
	if prior.Name == "" {
		return nil, nil, statef("the AffinityProfiles of the plans of MoEDeployment %s were deleted or have no result: to make another plan, set another data set or profile in spec.profiling", moed.Name)
	}
	name := fmt.Sprintf("%s-replan-%s", moed.Name, now.UTC().Format("20060102-150405"))
	owned := metav1.ObjectMeta{Namespace: moed.Namespace, Name: name, OwnerReferences: []metav1.OwnerReference{{
		APIVersion: semmoev1.GroupVersion.String(), Kind: deploymentKind, Name: moed.Name, UID: moed.UID, // deleted with the MoEDeployment
	}}}
	parallelism := moed.Spec.Parallelism
	parallelism.PodsPerReplica = nil // a profile does not depend on the number of pods
	profile := &semmoev1.AffinityProfile{ObjectMeta: owned, Spec: semmoev1.AffinityProfileSpec{
		Model: moed.Spec.Model.Mounted(), Engine: moed.Spec.Engine.ForProfile(), Parallelism: parallelism, SamplingSpec: profiling.SamplingSpec,
		Target: semmoev1.ProfilingTargetLive, DeploymentRef: &semmoev1.DeploymentReference{Name: moed.Name},
		Live: &semmoev1.LiveSpec{Samples: profiling.LiveSamples, Since: ptr.To(metav1.NewTime(since.Truncate(time.Second))), PriorProfileRef: prior},
	}}
	layout := serving.Plan.Spec.LayoutSpec
	layout.Solver = moed.Spec.Placement.Solver
	layout.Solver.Algorithm = "" // auto: another algorithm may not support the objective and limits of the plan in service
	plan := &semmoev1.PlacementPlan{ObjectMeta: *owned.DeepCopy(), Spec: semmoev1.PlacementPlanSpec{
		ProfileRef: semmoev1.ProfileReference{Name: name}, PriorProfileRef: &prior,
		Attention: serving.Plan.Spec.Attention, ExpertParallelSize: serving.Plan.Spec.ExpertParallelSize, Engine: serving.Plan.Spec.Engine,
		Realization: serving.Plan.Spec.Realization, LayoutSpec: layout, RanksPerNode: serving.Plan.Spec.RanksPerNode, Hardware: moed.Spec.Placement.Hardware,
		Current: &semmoev1.CurrentPlan{
			PlanDigest: serving.Plan.Status.PlanDigest, TablesDigest: serving.TablesDigest, TargetLARMilli: serving.promised() * (100 - moed.Spec.Drift.ThresholdPercent) / 100,
		},
		MinimumGainPercent: moed.Spec.Rollout.MinimumGainPercent, BatchTokens: moed.Spec.Rollout.BatchTokens,
	}}
	if observed := moed.Status.BatchTokens; observed != nil && plan.Spec.BatchTokens == 0 {
		plan.Spec.ObservedBatchTokens = observed.Observed
	}
	return profile, plan, nil
}
