package desired

import (
	"fmt"

	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/engine/registry"
)

// RouterMetricsPort is the port of a request router for probes and metrics.
const RouterMetricsPort = 9090

// PodsPerReplica is the number of pods of one replica.
func PodsPerReplica(moed *semmoev1.MoEDeployment) int32 {
	return ptr.Deref(moed.Spec.Parallelism.PodsPerReplica, 1)
}

// Paused tells that no profile, plan or roll-out is to be begun.
func Paused(moed *semmoev1.MoEDeployment) bool {
	return moed.Spec.Reconciliation == semmoev1.ReconciliationPaused
}

// UsesPlans tells that the spec asks for a plan, or names one.
func UsesPlans(moed *semmoev1.MoEDeployment) bool {
	return moed.Spec.Profiling != nil || moed.Spec.Placement.PlanRef != nil
}

// PodIPVariable is the variable of a container that has the address of its pod.
const PodIPVariable = "POD_IP"

// DrainSeconds is how long a pod that is being deleted goes on serving before it is told to stop, so that routers and
// proxies have seen that it goes.
const DrainSeconds = 5

// GraceSeconds bounds how long running requests may take after that.
const GraceSeconds = 300

// defaultSamplePercent is how many requests are sampled where a profile is asked for: what a plan promises is worth
// little if nobody looks whether it holds.
const defaultSamplePercent = 5

// SamplePercent is the share of requests whose experts the routers ask for.
func SamplePercent(moed *semmoev1.MoEDeployment) int32 {
	switch {
	case moed.Spec.Routing.Mode == semmoev1.RoutingModeNone || moed.Spec.Parallelism.Attention != semmoev1.AttentionDataParallel:
		return 0 // nobody samples, or requests have no rank
	case !EngineTells(moed):
		return 0
	case moed.Spec.Routing.SamplePercent != nil:
		return *moed.Spec.Routing.SamplePercent
	case UsesPlans(moed):
		return defaultSamplePercent
	}
	return 0
}

// Observes tells that routers ask the engine for routed experts.
func Observes(moed *semmoev1.MoEDeployment) bool { return SamplePercent(moed) > 0 }

// TellsExperts tells that the engine must be able to tell which experts a request activated: the routers sample it, or
// it is profiled while it serves.
func TellsExperts(moed *semmoev1.MoEDeployment) bool {
	profiling := moed.Spec.Profiling
	return Observes(moed) || EngineTells(moed) && profiling != nil && profiling.Dataset != nil && profiling.Target == semmoev1.ProfilingTargetServing
}

// Shuffles tells that the engine sends tokens to the ranks of a plan's tables.
func Shuffles(moed *semmoev1.MoEDeployment) bool {
	return moed.Spec.Placement.TokenShuffle == semmoev1.TokenShuffleEnabled
}

// ObservesSteps reports whether plans are made for the batch sizes that engines count.
func ObservesSteps(moed *semmoev1.MoEDeployment) bool {
	return UsesPlans(moed) && moed.Spec.Rollout.BatchTokens == 0 && moed.Spec.Routing.Mode != semmoev1.RoutingModeNone && EngineCountsSteps(moed)
}

// EngineCountsSteps reports whether the engine counts its steps by a metric that routers read.
func EngineCountsSteps(moed *semmoev1.MoEDeployment) bool {
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	return err == nil && adapter.CountsSteps()
}

// ReasonEngineCannotTell is that of a spec, or a condition, which needs the experts of requests of an engine that does not
// tell them.
const ReasonEngineCannotTell = "RoutedExpertsUnavailable"

// EngineTells tells that the engine can be asked for the experts of a request. It is false of an engine that is not known,
// which revisions.Validate refuses.
func EngineTells(moed *semmoev1.MoEDeployment) bool {
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	return err == nil && adapter.TellsExperts()
}

// Finding is a reason and a message, as a condition gives them; its zero value is that there is nothing to say.
type Finding struct{ Reason, Message string }

// Percent writes thousandths as percent.
func Percent(milli int32) string { return fmt.Sprintf("%.1f%%", float64(milli)/10) }
