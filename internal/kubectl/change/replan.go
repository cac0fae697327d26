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

// InService is what serves under a MoEDeployment.
type InService struct {
	// Plan is the plan of the layout; nil where none is in service.
	Plan *semmoev1.PlacementPlan
	// TablesDigest is that of the plan whose tables are used with it, empty for its own; Tables is that plan, nil where it is gone.
	TablesDigest string
	Tables       *semmoev1.PlacementPlan
	// Reported is the plan that the MoEDeployment's status names; nil where there is none.
	Reported *semmoev1.PlacementPlan
	// Profiles are those that these plans were made from, by name, as far as they exist.
	Profiles map[string]*semmoev1.AffinityProfile
}

// Plans are those that tell what was requested before, the one that knows most first.
func (s InService) Plans() []*semmoev1.PlacementPlan {
	return slices.DeleteFunc([]*semmoev1.PlacementPlan{s.Tables, s.Plan, s.Reported}, func(plan *semmoev1.PlacementPlan) bool { return plan == nil })
}

// prior is the profile that the plan in service was made from; one without a routing trace says less of tokens that are rare now than the
// one before it. It is empty where there is none with a result.
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

// promised is the local activation rate, in thousandths, that the plan in service promises with the tables that are used.
func (s InService) promised() int32 {
	for _, plan := range []*semmoev1.PlacementPlan{s.Tables, s.Plan} {
		if plan != nil && plan.Status.Forecast != nil { // of counts alone there is none
			return plan.Status.Forecast.LARMilli
		}
	}
	return 0
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
	case leavesTokens(moed):
		return nil, nil, statef("the engine of MoEDeployment %s does not shuffle tokens (attention TensorParallel, spec.placement.tokenShuffle Disabled): the same share of activations is local under every plan, and a plan of other requests gains nothing", moed.Name)
	case moed.Spec.Parallelism.Attention != semmoev1.AttentionDataParallel:
		return nil, nil, statef("nothing is sampled: with attention TensorParallel routers do not see the ranks of tokens. For a plan of other requests name another data set or profile in spec.profiling of MoEDeployment %s", moed.Name)
	case moed.Spec.Routing.Mode == semmoev1.RoutingModeNone || ptr.Deref(moed.Spec.Routing.SamplePercent, 1) == 0:
		return nil, nil, statef("nothing is sampled: set spec.routing.samplePercent of MoEDeployment %s above 0, and spec.routing.mode to Router or EndpointPicker", moed.Name)
	case adapter.RoutedExperts.Decode == nil:
		return nil, nil, statef("engine %s does not tell the experts of requests: nothing is sampled, and a plan needs spec.profiling.profileRef", moed.Spec.Engine.Type)
	case serving.Plan == nil:
		return nil, nil, statef("no plan is in service: the first one comes from spec.profiling of MoEDeployment %s", moed.Name)
	}
	prior := serving.prior()
	if prior.Name == "" {
		return nil, nil, statef("no AffinityProfile with a result is left of those that the plans of MoEDeployment %s were made from: name another data set or profile in spec.profiling, from which another plan is made", moed.Name)
	}
	name := fmt.Sprintf("%s-replan-%s", moed.Name, now.UTC().Format("20060102-150405"))
	owned := metav1.ObjectMeta{Namespace: moed.Namespace, Name: name, OwnerReferences: []metav1.OwnerReference{{
		APIVersion: semmoev1.GroupVersion.String(), Kind: deploymentKind, Name: moed.Name, UID: moed.UID, // it goes with it
	}}}
	parallelism := moed.Spec.Parallelism
	parallelism.PodsPerReplica = nil // a profile does not depend on it
	profile := &semmoev1.AffinityProfile{ObjectMeta: owned, Spec: semmoev1.AffinityProfileSpec{
		Model: moed.Spec.Model, Engine: moed.Spec.Engine, Parallelism: parallelism, SamplingSpec: profiling.SamplingSpec,
		Target: semmoev1.ProfilingTargetLive, DeploymentRef: &semmoev1.DeploymentReference{Name: moed.Name},
		Live: &semmoev1.LiveSpec{Samples: profiling.LiveSamples, Since: ptr.To(metav1.NewTime(since.Truncate(time.Second))), PriorProfileRef: prior},
	}}
	layout := serving.Plan.Spec.LayoutSpec
	layout.Solver = moed.Spec.Placement.Solver
	layout.Solver.Algorithm = "" // it is always auto here, and another one may not go with the objective and limits of the plan in service
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
