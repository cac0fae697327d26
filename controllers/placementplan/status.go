// SPDX-License-Identifier: Apache-2.0

package placementplan

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	semmoeac "github.com/semmoe/operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/kube/conditionevents"
	"github.com/semmoe/operator/internal/kube/conditions"
	"github.com/semmoe/operator/internal/kube/printable"
	"github.com/semmoe/operator/solver/placement"
)

// worthwhile is the minimum factor by which a plan must raise the local activation rate. A smaller gain is within the
// variation between samples of requests.
const worthwhile = 1.02

// faultOf returns the fault of a failed job.
func faultOf(err error) *conditions.Fault {
	var invalid *invalidError
	if errors.As(err, &invalid) {
		return &conditions.Fault{Reason: invalid.reason, Message: invalid.message, Stalls: true}
	}
	return &conditions.Fault{Reason: "SolveFailed", Message: "Solving failed and is retried: " + err.Error()}
}

// statusOf returns the status for an observation. It reads the previous status only to keep transition times, and to
// distinguish repair from the first publication.
func statusOf(plan *semmoev1.PlacementPlan, o observation, now time.Time) semmoev1.PlacementPlanStatus {
	status := semmoev1.PlacementPlanStatus{
		Conditions:         append([]metav1.Condition(nil), plan.Status.Conditions...),
		ObservedGeneration: plan.Generation,
	}
	if o.Solved != nil {
		status.Plan, status.PlanDigest, status.ModelDigest = artifact.Digest(o.Solved.PlanDigest).Short(), o.Solved.PlanDigest, o.Solved.ModelDigest
		status.Verdict, status.Forecast = o.Solved.Verdict, o.Solved.Forecast
		status.Tier, status.Comparison = o.Solved.Tier, o.Solved.Comparison
		status.RedundantExperts = plan.Spec.FixedRedundantExperts() + o.Solved.RedundantExperts
		if o.Published {
			status.ConfigMap = configMapName(plan, o.Solved.PlanDigest)
		}
		if o.Stable != nil {
			status.StableConfigMap = stableConfigMapName(plan)
		}
	}
	set := func(kind string, v conditions.Verdict) {
		conditions.Set(&status.Conditions, kind, v, plan.Generation, now)
	}
	set(semmoev1.ConditionReady, readyVerdict(plan, o, status))
	set(semmoev1.ConditionProgressing, progressingVerdict(plan, o))
	set(semmoev1.ConditionDegraded, conditions.Degraded(o.Fault))
	set(semmoev1.ConditionStalled, conditions.Stalled(o.Fault))
	set(semmoev1.ConditionReconciling, reconcilingVerdict(plan, o))
	return status
}

// verdictOf returns the verdict of a solution.
func verdictOf(s *solution) semmoev1.Verdict {
	if s.Replan != nil {
		return semmoev1.Verdict(s.Replan.Decision.Verdict)
	}
	switch {
	case s.FallBack != "":
		return semmoev1.VerdictNoGainExpected
	case s.Worth != nil && s.judgedByTime():
		return semmoev1.Verdict(s.Worth.Verdict)
	case !s.gains():
		return semmoev1.VerdictNoGainExpected
	}
	return semmoev1.VerdictGain
}

// judgedByTime reports whether the time model covers the objective of the plan. It models no exchange that sends a
// token once to each rank or node.
func (s *solution) judgedByTime() bool {
	objective := s.Inputs.objective()
	return objective == placement.Time || objective == placement.Activation
}

// gains reports whether a plan is better than the default placement.
func (s *solution) gains() bool {
	switch in := &s.Inputs; {
	case in.Unshuffled:
		return worthwhile*s.Report.RemoteRanksPerToken <= s.UnplannedRemoteRanks
	case s.LayerNanos > s.UnplannedLayerNanos:
		return false // more activations are local, but the layer waits for the busiest rank
	case !s.judgedByTime():
		return s.Report.LAR >= s.Report.BaselineLAR // the solver verified that the plan sends fewer messages
	}
	return s.Report.LAR >= worthwhile*s.Report.BaselineLAR
}

// maxHardware is the maximum length of the name of a hardware profile in a status. A file may contain a name of any
// length.
const maxHardware = 63

// maxReason is the maximum length of the reason for a verdict in a status.
const maxReason = 250

// forecastOf returns the predicted score of a plan; nil if the profile contains only counts of tokens.
func forecastOf(s *solution) *semmoev1.PlanForecast {
	if s.TestRequests == 0 {
		return nil
	}
	if s.Inputs.Unshuffled {
		return unshuffledForecast(s)
	}
	forecast := &semmoev1.PlanForecast{
		LARMilli: rate(s.Report.LAR), BaselineMilli: rate(s.Report.BaselineLAR), UpperBoundMilli: rate(s.Report.UpperBound),
		LARSummary: percent(s.Report.LAR), BaselineSummary: percent(s.Report.BaselineLAR),
	}
	if s.Inputs.Attention == placement.TensorParallel {
		forecast.Method = methodOf(s.Forecast)
	}
	for _, r := range s.BatchRates {
		forecast.LARByBatch = append(forecast.LARByBatch, semmoev1.BatchLAR{BatchTokens: int32(r.BatchTokens), LARMilli: rate(r.LAR)})
	}
	if s.LayerNanos > 0 {
		forecast.LayerNanos, forecast.BaselineLayerNanos = s.LayerNanos, s.UnplannedLayerNanos
		forecast.Hardware = printable.Line(s.Report.Hardware, maxHardware)
	}
	if w := s.Worth; w != nil {
		for _, tokens := range w.BatchTokens {
			forecast.BatchTokens = append(forecast.BatchTokens, int32(tokens))
		}
		milli := func(percent float64) int32 { return int32(math.Round(10 * min(max(percent, -1e5), 1e5))) }
		forecast.SavedMilli, forecast.SavedLowMilli, forecast.SavedHighMilli = milli(w.SavedPercent), milli(w.Low), milli(w.High)
		forecast.Reason, forecast.Chosen = printable.Line(w.Reason, maxReason), printable.Line(s.Chosen, maxHardware)
	}
	if imbalance := s.Report.WindowImbalance; imbalance != nil {
		forecast.WindowImbalanceMilli = int32(math.Round(1000 * *imbalance))
	}
	return forecast
}

// unshuffledForecast returns the forecast of a plan without token shuffle. Tokens are distributed round-robin over the
// ranks, so the local activation rate is 1/ranks under any placement.
func unshuffledForecast(s *solution) *semmoev1.PlanForecast {
	local := 1 / float64(s.Inputs.Ranks)
	milli := func(ranks float64) int32 { return int32(math.Round(1000 * ranks)) }
	return &semmoev1.PlanForecast{
		LARMilli: rate(local), BaselineMilli: rate(local), LARSummary: percent(local), BaselineSummary: percent(local),
		RemoteRanksMilli: milli(s.Report.RemoteRanksPerToken), BaselineRemoteRanksMilli: milli(s.UnplannedRemoteRanks),
	}
}

// rate converts a share to thousandths.
func rate(share float64) int32 { return int32(math.Round(1000 * min(max(share, 0), 1))) }

func percent(share float64) string { return fmt.Sprintf("%.1f%%", 100*share) }

func readyVerdict(plan *semmoev1.PlacementPlan, o observation, status semmoev1.PlacementPlanStatus) conditions.Verdict {
	switch {
	case o.Published:
		return publishedVerdict(plan, o, status)
	case o.Fault != nil:
		return conditions.False(o.Fault.Reason, o.Fault.Message)
	}
	reason, message := stage(plan, o)
	return conditions.False(reason, message)
}

func publishedVerdict(plan *semmoev1.PlacementPlan, o observation, status semmoev1.PlacementPlanStatus) conditions.Verdict {
	reason, message := "Published", fmt.Sprintf("Plan %s is in ConfigMap %s", status.Plan, status.ConfigMap)
	switch f := status.Forecast; {
	case f == nil:
	case f.BaselineRemoteRanksMilli > 0:
		message += fmt.Sprintf("; on held-out requests the experts of a token are on %.2f remote ranks, in the default placement on %.2f; without token shuffle the local activation rate is %s under any plan",
			float64(f.RemoteRanksMilli)/1000, float64(f.BaselineRemoteRanksMilli)/1000, f.LARSummary)
	default:
		message += fmt.Sprintf("; local activation rate on held-out requests %s, default placement %s", f.LARSummary, f.BaselineSummary)
	}
	if f := status.Forecast; f != nil && f.LayerNanos > 0 {
		message += fmt.Sprintf("; modelled layer time %.1f µs, without a plan %.1f µs (hardware profile %s)", float64(f.LayerNanos)/1000, float64(f.BaselineLayerNanos)/1000, f.Hardware)
		if len(f.BatchTokens) > 0 {
			message += fmt.Sprintf(", reduction %.1f%% (95%% interval %.1f%% to %.1f%%; batches of %s tokens%s)",
				float64(f.SavedMilli)/10, float64(f.SavedLowMilli)/10, float64(f.SavedHighMilli)/10, sizesText(f.BatchTokens), sizesSource(&plan.Spec))
		}
	}
	if o.Solved.Copies != "" {
		message += "; " + o.Solved.Copies
	}
	if o.Solved.Neighbours != "" {
		message += "; " + o.Solved.Neighbours
	}
	if o.Solved.Forecasts != "" {
		message += "; " + o.Solved.Forecasts
	}
	if c := status.Comparison; c != nil {
		message += "; comparison with the plan in service: " + c.Reason
	}
	switch status.Verdict {
	case semmoev1.VerdictNoGainExpected:
		reason = string(status.Verdict)
		message += "; the plan is not rolled out, because no gain is expected"
		if f := status.Forecast; f != nil && f.Reason != "" && status.Comparison == nil {
			message += ": " + f.Reason
		}
	case semmoev1.VerdictLocalityDoesNotPay:
		reason = string(status.Verdict)
		message += "; the plan is not rolled out, because locality does not pay"
	}
	if o.Solved.Truncated {
		message += "; the search reached its time budget (spec.solver.timeBudgetSeconds)"
	}
	return conditions.True(reason, message)
}

// sizesText lists batch sizes. A size that occurs n times in a row is written as "n × size".
func sizesText(sizes []int32) string {
	var words []string
	for i := 0; i < len(sizes); {
		same := 1
		for i+same < len(sizes) && sizes[i+same] == sizes[i] {
			same++
		}
		word := strconv.Itoa(int(sizes[i]))
		if same > 1 {
			word = fmt.Sprintf("%d × %d", same, sizes[i])
		}
		words = append(words, word)
		i += same
	}
	return strings.Join(words, ", ")
}

// sizesSource returns the source of batch sizes that the spec does not set.
func sizesSource(s *semmoev1.PlacementPlanSpec) string {
	switch {
	case s.BatchTokens > 0:
		return ""
	case len(s.ObservedBatchTokens) > 0:
		return ", as observed"
	}
	return ", the default"
}

// stage returns the current step of a plan that is not published.
func stage(plan *semmoev1.PlacementPlan, o observation) (reason, message string) {
	switch {
	case o.Solved != nil:
		return "Publishing", "The ConfigMap of the plan is being created"
	case o.Solving != nil && o.Solving.Step == "":
		return "Queued", "The plan is queued for solving"
	case o.Solving != nil:
		return "Solving", fmt.Sprintf("%s: %d of %d", o.Solving.Step, o.Solving.Done, o.Solving.Total)
	}
	name, waited := plan.Spec.ProfileRef.Name, o.Profile
	if plan.Spec.PriorProfileRef != nil && resultOf(o.Profile) != "" {
		name, waited = plan.Spec.PriorProfileRef.Name, o.Prior
	}
	message = fmt.Sprintf("AffinityProfile %s is not ready", name)
	if waited != nil {
		if stalled := meta.FindStatusCondition(waited.Status.Conditions, semmoev1.ConditionStalled); stalled != nil && stalled.Status == metav1.ConditionTrue {
			message += ": " + stalled.Message
		}
	}
	return "WaitingForProfile", message
}

func progressingVerdict(plan *semmoev1.PlacementPlan, o observation) conditions.Verdict {
	switch {
	case o.Published:
		return conditions.False("Complete", "The plan is published")
	case o.Fault != nil && o.Fault.Stalls:
		return conditions.False("Stalled", "No progress is possible until the cause in condition Stalled is fixed")
	case o.Fault != nil:
		return conditions.True(o.Fault.Reason, o.Fault.Message)
	}
	reason, message := stage(plan, o)
	return conditions.True(reason, message)
}

// reconcilingVerdict is True only until the plan is published for the first time. Restoring a lost ConfigMap is repair.
func reconcilingVerdict(plan *semmoev1.PlacementPlan, o observation) conditions.Verdict {
	switch {
	case o.Fault != nil && o.Fault.Stalls:
		return conditions.False("Stalled", "Condition Stalled names the cause to fix")
	case o.Published, conditions.Finished(plan.Status.Conditions, plan.Generation):
		return conditions.False("Complete", "The plan is published")
	}
	return conditions.True("InProgress", "The plan is not published yet")
}

// applyStatus writes the status if it differs from the recorded one, and records condition transitions as events.
func (r *Reconciler) applyStatus(ctx context.Context, plan *semmoev1.PlacementPlan, status semmoev1.PlacementPlanStatus) error {
	wrote, err := r.statuses.Write(plan, plan.Status, status, func(data []byte) (string, error) {
		intent := semmoeac.PlacementPlan(plan.Name, plan.Namespace).WithStatus(&semmoeac.PlacementPlanStatusApplyConfiguration{})
		if err := json.Unmarshal(data, intent.Status); err != nil {
			return "", err
		}
		err := r.Status().Apply(ctx, intent, client.FieldOwner(manager), client.ForceOwnership)
		return ptr.Deref(intent.ResourceVersion, ""), err
	})
	if wrote {
		conditionevents.NewEventRecorder(r.Recorder, plan, nil).RecordSteps(plan.Status.Conditions, status.Conditions)
	}
	return err
}
