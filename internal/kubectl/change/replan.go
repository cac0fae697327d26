package change

import (
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/engine/registry"
)

// InService is what serves under a MoEDeployment.
type InService struct {
	// Plan is the plan of the layout; Tables the digest of the plan whose tables are used with it, empty for its own.
	Plan   *semmoev1.PlacementPlan
	Tables string
}

// Replan is a profile of what the routers have sampled since a time, and a plan made from it to replace the one in service: the objects
// that the operator makes when it sees drift (docs/planning.md), as a person's own. Nothing is rolled out by them.
func Replan(moed *semmoev1.MoEDeployment, serving InService, since, now time.Time) (*semmoev1.AffinityProfile, *semmoev1.PlacementPlan, error) {
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	if err != nil {
		return nil, nil, err
	}
	profiling := moed.Spec.Profiling
	switch {
	case profiling == nil:
		return nil, nil, statef("MoEDeployment %s has no spec.profiling: the routers keep no samples to make a plan from", moed.Name)
	case moed.Spec.Reconciliation == semmoev1.ReconciliationPaused:
		return nil, nil, statef("MoEDeployment %s is paused: kubectl semmoe resume %s first", moed.Name, moed.Name)
	case moed.Spec.Routing.Mode == semmoev1.RoutingModeNone || ptr.Deref(moed.Spec.Routing.SamplePercent, 1) == 0:
		return nil, nil, statef("nothing is sampled: set spec.routing.samplePercent of MoEDeployment %s above 0, and spec.routing.mode to Router or EndpointPicker", moed.Name)
	case adapter.RoutedExperts.Decode == nil:
		return nil, nil, statef("engine %s does not tell the experts of requests: nothing is sampled, and a plan needs spec.profiling.profileRef", moed.Spec.Engine.Type)
	case serving.Plan == nil:
		return nil, nil, statef("no plan is in service: the first one comes from spec.profiling of MoEDeployment %s", moed.Name)
	}
	name := fmt.Sprintf("%s-replan-%s", moed.Name, now.UTC().Format("20060102-150405"))
	owned := metav1.ObjectMeta{Namespace: moed.Namespace, Name: name, OwnerReferences: []metav1.OwnerReference{{
		APIVersion: semmoev1.GroupVersion.String(), Kind: deploymentKind, Name: moed.Name, UID: moed.UID, // it goes with it
	}}}
	parallelism := moed.Spec.Parallelism
	parallelism.PodsPerReplica = nil // a profile does not depend on it
	prior := serving.Plan.Spec.ProfileRef
	profile := &semmoev1.AffinityProfile{ObjectMeta: owned, Spec: semmoev1.AffinityProfileSpec{
		Model: moed.Spec.Model, Engine: moed.Spec.Engine, Parallelism: parallelism, SamplingSpec: profiling.SamplingSpec,
		Target: semmoev1.ProfilingTargetLive, DeploymentRef: &semmoev1.DeploymentReference{Name: moed.Name},
		Live: &semmoev1.LiveSpec{Samples: profiling.LiveSamples, Since: ptr.To(metav1.NewTime(since.Truncate(time.Second))), PriorProfileRef: prior},
	}}
	promised := int32(0)
	if serving.Plan.Status.Forecast != nil {
		promised = serving.Plan.Status.Forecast.LARMilli
	}
	layout := serving.Plan.Spec.LayoutSpec
	layout.Solver = moed.Spec.Placement.Solver
	plan := &semmoev1.PlacementPlan{ObjectMeta: *owned.DeepCopy(), Spec: semmoev1.PlacementPlanSpec{
		ProfileRef: semmoev1.ProfileReference{Name: name}, PriorProfileRef: &prior,
		Attention: serving.Plan.Spec.Attention, ExpertParallelSize: serving.Plan.Spec.ExpertParallelSize, Engine: serving.Plan.Spec.Engine,
		Realization: serving.Plan.Spec.Realization, LayoutSpec: layout, RanksPerNode: serving.Plan.Spec.RanksPerNode, Hardware: moed.Spec.Placement.Hardware,
		Current: &semmoev1.CurrentPlan{
			PlanDigest: serving.Plan.Status.PlanDigest, TablesDigest: serving.Tables, TargetLARMilli: promised * (100 - moed.Spec.Drift.ThresholdPercent) / 100,
		},
		MinimumGainPercent: moed.Spec.Rollout.MinimumGainPercent, BatchTokens: moed.Spec.Rollout.BatchTokens,
	}}
	return profile, plan, nil
}
