// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"fmt"
	"time"

	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/engine/registry"
)

// RouterMetricsPort is the port of a request router for probes and metrics.
const RouterMetricsPort = 9090

// PodsPerReplica returns the number of pods of one replica.
func PodsPerReplica(moed *semmoev1.MoEDeployment) int32 {
	return ptr.Deref(moed.Spec.Parallelism.PodsPerReplica, 1)
}

// Paused reports whether no profile, plan or rollout may be started.
func Paused(moed *semmoev1.MoEDeployment) bool {
	return moed.Spec.Reconciliation == semmoev1.ReconciliationPaused
}

// UsesPlans reports whether the spec requests or pins a plan.
func UsesPlans(moed *semmoev1.MoEDeployment) bool {
	return moed.Spec.Profiling != nil || moed.Spec.Placement.PlanRef != nil
}

// PodIPVariable is the environment variable with the address of the container's pod.
const PodIPVariable = "POD_IP"

// DrainSeconds is how long a terminating pod continues to serve before it is stopped, so that routers and proxies
// notice the termination.
const DrainSeconds = 5

// GraceSeconds is the maximum time for running requests after the drain.
const GraceSeconds = 300

// defaultSamplePercent is the share of sampled requests if the spec requests a profile. Without samples, the prediction
// of a plan cannot be checked.
const defaultSamplePercent = 5

// SamplePercent returns the percentage of requests for which routers request the routed experts.
func SamplePercent(moed *semmoev1.MoEDeployment) int32 {
	switch {
	case moed.Spec.Routing.Mode == semmoev1.RoutingModeNone || moed.Spec.Parallelism.Attention != semmoev1.AttentionDataParallel:
		return 0 // no router samples, or requests have no rank
	case !EngineReportsRoutedExperts(moed):
		return 0
	case moed.Spec.Routing.SamplePercent != nil:
		return *moed.Spec.Routing.SamplePercent
	case UsesPlans(moed):
		return defaultSamplePercent
	}
	return 0
}

// Observes reports whether routers request routed experts from the engine.
func Observes(moed *semmoev1.MoEDeployment) bool { return SamplePercent(moed) > 0 }

// ObservesTokens reports whether routers read the local activation rate of shuffled tokens from the counters of engines.
func ObservesTokens(moed *semmoev1.MoEDeployment) bool {
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	return err == nil && adapter.CountsActivations && Shuffles(moed) && moed.Spec.Routing.Mode != semmoev1.RoutingModeNone
}

// NeedsRoutedExperts reports whether the engine must return the experts of a request: because routers sample them, or
// because the model is profiled while it serves.
func NeedsRoutedExperts(moed *semmoev1.MoEDeployment) bool {
	profiling := moed.Spec.Profiling
	return Observes(moed) || EngineReportsRoutedExperts(moed) && profiling != nil && profiling.Dataset != nil && profiling.Target == semmoev1.ProfilingTargetServing
}

// Soak returns how long a canary must serve.
func Soak(moed *semmoev1.MoEDeployment) time.Duration {
	return time.Duration(*moed.Spec.Rollout.SoakSeconds) * time.Second
}

// Shuffles reports whether the engine sends tokens to ranks by the tables of a plan.
func Shuffles(moed *semmoev1.MoEDeployment) bool {
	return moed.Spec.Placement.TokenShuffle == semmoev1.TokenShuffleEnabled
}

// ObservesSteps reports whether routers read the batch sizes of engines: because plans are made for them, or because the
// local activation rate of shuffled tokens depends on them.
func ObservesSteps(moed *semmoev1.MoEDeployment) bool {
	read := UsesPlans(moed) && moed.Spec.Routing.Mode != semmoev1.RoutingModeNone && EngineCountsSteps(moed)
	return read && (moed.Spec.Rollout.BatchTokens == 0 || ObservesTokens(moed))
}

// EngineCountsSteps reports whether the engine exports a metric of its steps that routers read.
func EngineCountsSteps(moed *semmoev1.MoEDeployment) bool {
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	return err == nil && adapter.CountsSteps()
}

// ReasonRoutedExpertsUnavailable is the reason of a spec or condition that needs the routed experts of requests from an
// engine that cannot return them.
const ReasonRoutedExpertsUnavailable = "RoutedExpertsUnavailable"

// EngineReportsRoutedExperts reports whether the engine can return the experts of a request. It is false for an unknown
// engine, which revisions.Validate rejects.
func EngineReportsRoutedExperts(moed *semmoev1.MoEDeployment) bool {
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	return err == nil && adapter.ReportsRoutedExperts()
}

// Finding is the reason and message of a condition. The zero value means no finding.
type Finding struct {
	Reason, Message string
	// Pending is the short digest of the plan that waits for approval, if the finding is that it does.
	Pending string
}

// Percent formats thousandths as a percentage.
func Percent(milli int32) string { return fmt.Sprintf("%.1f%%", float64(milli)/10) }
