// SPDX-License-Identifier: Apache-2.0

// Package locality evaluates whether traffic still matches the traffic that the plan in service was made for. The
// evidence is either requests that routers sampled, or a Prometheus series.
//
// Invariants:
//   - Assess is a pure function of evidence, without memory, so that every leader reaches the same result.
//   - Missing, old or non-numeric evidence means Unknown, never drift. Unknown triggers no action.
//   - Package traffic reads the evidence: from routers, from Prometheus, and the plan's calibration from its ConfigMap.
package locality

import (
	"fmt"
	"time"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/solver/drift"
)

// Status compares the traffic to the plan in service.
type Status string

const (
	// Unknown: no conclusion is possible. No action follows.
	Unknown Status = "Unknown"
	// OnTarget: the traffic matches the plan.
	OnTarget Status = "OnTarget"
	// BelowPromise: the rate is below the plan's prediction, but no change of the traffic is detected.
	BelowPromise Status = "BelowTarget"
	// Drifted: the traffic differs from the traffic that the plan was made for.
	Drifted Status = "Drifted"
)

// Assessment is the result of the drift evaluation.
type Assessment struct {
	Status Status
	// Reason and Message explain the status. They do not change while their cause does not.
	Reason, Message string
	// Tested reports whether a test exists. Statistic is its value; a value above Threshold is an alarm.
	Tested               bool
	Statistic, Threshold float64
	// Since is the estimated start of the drift. Causes splits the lost locality by cause; nil if unknown. Both are set
	// only for Drifted.
	Since  time.Time
	Causes *drift.Causes
	// Plan is the plan in use, which is the plan of the layout or of newer tables for it; nil if unknown. Promise is
	// its forecast, or that of the layout's plan if Plan has none.
	Plan    *semmoev1.PlacementPlan
	Promise semmoev1.PlanForecast
	// Hold is why no plan may be made for the drift now; its zero value if one may.
	Hold desired.Finding
	// BatchesMoved reports that engines compute batch sizes that differ from those of the plans, independent of Status.
	// BatchHold is why no plan may be made for them now.
	BatchesMoved bool
	BatchHold    desired.Finding
}

// Replan reports whether to make a plan for the drift.
func (a Assessment) Replan() bool { return a.Status == Drifted && a.Hold.Reason == "" }

// Input is the complete evidence of an assessment.
type Input struct {
	Now  time.Time
	Spec semmoev1.DriftSpec
	// Planned reports whether a plan is in service. Plan is the plan in use, which is that plan or newer tables for its
	// layout; nil if it no longer exists. Promise is its forecast, or that of the plan in service if Plan has none (for
	// example a plan from token counts only); nil if neither has one.
	Planned bool
	Plan    *semmoev1.PlacementPlan
	Promise *semmoev1.PlanForecast
	// Engine is the type of the engine. EngineReportsRoutedExperts reports whether it can return the experts of
	// requests, Observed whether routers sample requests.
	Engine                     semmoev1.EngineType
	EngineReportsRoutedExperts bool
	Observed                   bool
	// Ranks is the expert-parallel size if attention is tensor parallel and requests have no rank, else 0. Shuffled
	// reports whether tokens are then sent to ranks by the plan's tables.
	Ranks    int32
	Shuffled bool
	// Routers is the evidence of the routers. Rate covers all requests that they sampled within the window under the
	// layout in service and the tables in use. WasBelow reports whether the rate was last reported below the target.
	Routers RouterEvidence
	// Engines is the evidence of engines that shuffle tokens. EnginesRead reports whether routers read their counters.
	Engines     EngineEvidence
	EnginesRead bool
	Rate        lar.Ratio
	WasBelow    bool
	// Prometheus is the evidence of Prometheus.
	Prometheus PrometheusEvidence
	// BatchesMoved reports that engines compute batch sizes that differ from those of the plans.
	BatchesMoved bool
	// Paused reports that the user has stopped planning, Pinned that the user has chosen the plan, RollingOut that
	// revisions are changing.
	Paused, Pinned, RollingOut bool
	// Replans are the creation times of drift plans, newest first.
	Replans []time.Time
}

// policy is one rule of an ordered list. It reports whether it is violated, and why.
type policy func(Input) (reason, message string, violated bool)

// firstViolated returns the finding of the first violated policy, or the zero value.
func firstViolated(chain []policy, in Input) desired.Finding {
	for _, link := range chain {
		if reason, message, violated := link(in); violated {
			return desired.Finding{Reason: reason, Message: message}
		}
	}
	return desired.Finding{}
}

// unknowns are the policies for which no conclusion is possible, in order: each makes the following ones meaningless.
// Missing, old or non-numeric evidence ends here, never in drift.
var unknowns = []policy{
	tokenShuffleUnsupported,
	noPlan,
	routedExpertsUnavailable,
	tokensNotObserved,
	notObserved,
	noPromise,
	routersUnreachable,
	nothingObserved,
	notScored,
	tooFewSamples,
	enginesSilent,
	enginesStale,
	tooFewEngineValues,
	prometheusSilent,
	prometheusStale,
	notARate,
	tooFewValues,
}

// holds are the policies for which no plan is made for a detected drift, in order: first the user's settings, then
// temporary causes.
var holds = []policy{
	holdPaused,
	holdPinned,
	holdOff,
	holdRollOut,
	holdYoungPlan,
	holdCooldown,
	holdDailyCap,
}

// Assess evaluates the evidence.
func Assess(in Input) Assessment {
	a := Assessment{Status: Unknown, Plan: in.Plan}
	if in.BatchesMoved && in.Plan != nil {
		a.BatchesMoved, a.BatchHold = true, firstViolated(holds, in)
	}
	if in.Promise != nil { // known even if the status is Unknown
		a.Promise = *in.Promise
	}
	if unknown := firstViolated(unknowns, in); unknown.Reason != "" {
		a.Reason, a.Message = unknown.Reason, unknown.Message
		return a
	}
	result := in.test()
	a.Tested, a.Statistic, a.Threshold = result.Tested, result.Statistic, result.Threshold
	switch {
	case result.Alarm:
		a.Status, a.Since, a.Causes = Drifted, result.Since, result.Causes
		a.Message = "The traffic has drifted away from the plan"
		a.Hold = firstViolated(holds, in)
	case in.below():
		a.Status = BelowPromise
		a.Message = "Locality is below the prediction of the plan, but no change of the traffic is detected. Profile requests that are more similar to the traffic"
	case in.fromSamples() && in.Rate.Value() < in.bar() && in.given() > 0:
		a.Status = OnTarget
		a.Message = "Locality matches the prediction of the plan, except for the share that routers trade for shorter waits"
	default:
		a.Status = OnTarget
		a.Message = "Locality matches the prediction of the plan"
	}
	if !a.Tested {
		a.Message += ". Drift is not tested, because the ConfigMap of the plan has no calibration (drift.json)"
	}
	a.Reason = string(a.Status)
	return a
}

// testResult is the result of the drift test.
type testResult struct {
	// Tested is false if the plan has no calibration.
	Tested               bool
	Statistic, Threshold float64
	Alarm                bool
	Since                time.Time
	Causes               *drift.Causes
}

// test runs the test of the configured source.
func (in Input) test() testResult {
	switch {
	case in.fromPrometheus():
		return testValues(in.Prometheus.Points, in.Prometheus.Window, in.bar(), minValues)
	case in.fromEngines():
		return testValues(in.Engines.Points, in.Engines.Window, in.bar(), in.Engines.minValues())
	}
	if in.Routers.Calibration == nil {
		return testResult{}
	}
	return testSamples(in.Routers.Calibration.ForDrop(float64(in.Spec.ThresholdPercent)/100), in.Routers.Samples)
}

// promised returns the local activation rate that the plan in use predicts.
func (in Input) promised() float64 { return float64(in.Promise.LARMilli) / 1000 }

// bar returns the predicted rate minus the threshold.
func (in Input) bar() float64 {
	return in.promised() * (1 - float64(in.Spec.ThresholdPercent)/100)
}

// belowErrors is the distance below the bar, in standard errors, from which a rate is reported as below: few samples
// vary widely.
const belowErrors = 2

// given returns the local activation rate that routers traded for shorter waits, as far as the plan's calibration
// covers it.
func (in Input) given() float64 {
	if in.Routers.Calibration == nil {
		return 0
	}
	return in.Routers.Calibration.BalanceLoss(plain(in.Routers.Samples))
}

// below reports whether the sampled rate is below the prediction by more than the threshold. Once below, it stays below
// until half of the threshold is recovered, as hysteresis. The rate that routers trade to avoid a slow rank does not
// count as missing: the prediction is for requests that arrive one at a time.
func (in Input) below() bool {
	if !in.fromSamples() || in.Rate.Requests < enoughSamples {
		return false
	}
	rate := in.Rate.Value() + in.given()
	if in.WasBelow {
		return rate < (in.bar()+in.promised())/2
	}
	return rate+belowErrors*in.Rate.StandardError() < in.bar()
}

// tokenShuffleUnsupported: the local share does not depend on the plan or the traffic.
func tokenShuffleUnsupported(in Input) (reason, message string, violated bool) {
	return reasonTokenShuffleUnsupported, fmt.Sprintf("With attention TensorParallel and tokenShuffle not Enabled, tokens are not moved, and one activation in %d is local under any plan. Enable spec.placement.tokenShuffle if the engine image reads the plan's tables, or use DataParallel", in.Ranks),
		in.Ranks > 0 && !in.Shuffled
}

// tokensNotObserved: requests have no rank to compare their experts with, and nothing reads the counters of engines.
func tokensNotObserved(in Input) (reason, message string, violated bool) {
	return "NotObserved", "spec.parallelism.attention is TensorParallel, and no request router reads the counters of the engines. Set spec.routing.mode to Router, or, if the engine exports the rate to Prometheus, spec.drift.source to Prometheus",
		in.fromEngines() && !in.EnginesRead
}

// noPlan: the engine's own placement makes no prediction.
func noPlan(in Input) (reason, message string, violated bool) {
	return "NoPlan", "Without a plan there is no predicted local activation rate to compare with", !in.Planned
}

// routedExpertsUnavailable: samples are impossible.
func routedExpertsUnavailable(in Input) (reason, message string, violated bool) {
	return desired.ReasonRoutedExpertsUnavailable, fmt.Sprintf("%s does not return the routed experts of requests: the local activation rate cannot be measured, and the plan stays until its inputs change", in.Engine),
		in.fromSamples() && !in.EngineReportsRoutedExperts
}

// notObserved: sampling is disabled.
func notObserved(in Input) (reason, message string, violated bool) {
	return "NotObserved", "No requests are sampled. Set spec.routing.samplePercent above 0", in.fromSamples() && !in.Observed
}

// noPromise: pods continue to serve, and routers continue to use tables, after the plan is deleted, but the prediction
// is deleted with the plan.
func noPromise(in Input) (reason, message string, violated bool) {
	return "PlanNotFound", "The PlacementPlan in service no longer exists, or has no forecast yet, so no comparison is possible",
		in.Plan == nil || in.Promise == nil || in.Routers.Tables != "" && in.Routers.Tables != in.Plan.Status.PlanDigest
}

// routersUnreachable: samples may exist, but cannot be read.
func routersUnreachable(in Input) (reason, message string, violated bool) {
	return "RoutersUnreachable", "No request router returns its observations: none is ready, or the operator cannot reach port 9091 of their pods", in.fromRouters() && in.Routers.Answered == 0
}

// nothingObserved: all samples are old, for example without traffic, after a clock change, or while routers do not
// sample.
func nothingObserved(in Input) (reason, message string, violated bool) {
	return "Stale", fmt.Sprintf("The routers have sampled no request under this plan in the last %d seconds (spec.drift.windowSeconds)", in.Spec.WindowSeconds),
		in.fromSamples() && in.Routers.Newest.IsZero()
}

// notScored: without the tables, the expected locality of a request is unknown.
func notScored(in Input) (reason, message string, violated bool) {
	return "TablesNotLoaded", "The routers have not loaded the tables of the plan, so samples cannot be compared with the plan", in.fromSamples() && in.Routers.Tables == ""
}

// tooFewSamples: the rate is not statistically significant.
func tooFewSamples(in Input) (reason, message string, violated bool) {
	samples := int64(len(in.Routers.Samples))
	if in.Routers.Calibration == nil {
		samples = in.Rate.Requests
	}
	return "TooFewSamples", fmt.Sprintf("The routers have sampled fewer than %d requests under this plan that its tables scored", enoughSamples), in.fromSamples() && samples < enoughSamples
}

// enginesSilent: no pod shuffles tokens by the tables in use and counts in a way that can be true.
func enginesSilent(in Input) (reason, message string, violated bool) {
	return in.Engines.Problem.Reason, in.Engines.Problem.Message, in.fromEngines() && in.Engines.Problem.Reason != ""
}

// enginesStale: the last values do not describe the present, for example without traffic.
func enginesStale(in Input) (reason, message string, violated bool) {
	points := in.Engines.Points
	return "Stale", "The engines have counted too few activations under this plan in the last minutes",
		in.fromEngines() && (len(points) == 0 || in.Now.Sub(points[len(points)-1].Time) > staleEngines)
}

// tooFewEngineValues: the window is not complete, or has gaps.
func tooFewEngineValues(in Input) (reason, message string, violated bool) {
	return "TooFewValues", fmt.Sprintf("The engines have counted activations under this plan for less than three quarters of the last %.0f seconds (spec.drift.windowSeconds, 3600 at most)", in.Engines.Window.Seconds()),
		in.fromEngines() && !in.Engines.covered()
}

// prometheusSilent: there is no series.
func prometheusSilent(in Input) (reason, message string, violated bool) {
	return in.Prometheus.Problem.Reason, in.Prometheus.Problem.Message, in.fromPrometheus() && in.Prometheus.Problem.Reason != ""
}

// prometheusStale: the series has ended, for example because scraping stopped. Its last values do not describe the
// present.
func prometheusStale(in Input) (reason, message string, violated bool) {
	points := in.Prometheus.Points
	return "PrometheusStale", "The query returned no numeric value for the last minutes",
		in.fromPrometheus() && (len(points) == 0 || in.Now.Sub(points[len(points)-1].Time) > staleSteps*in.Prometheus.Step())
}

// notARate: the query returns something else. Evaluating it would report drift always or never.
func notARate(in Input) (reason, message string, violated bool) {
	outside := false
	for _, point := range in.Prometheus.Points {
		outside = outside || point.Value < 0 || point.Value > 1
	}
	return "PrometheusNotARate", "The query has values below 0 or above 1: it must return a local activation rate as a share from 0 to 1, not a percentage", in.fromPrometheus() && outside
}

// tooFewValues: the window is not complete, or has gaps.
func tooFewValues(in Input) (reason, message string, violated bool) {
	return "TooFewValues", fmt.Sprintf("The query has had values for less than three quarters of the last %d seconds (spec.drift.windowSeconds) under this plan", in.Spec.WindowSeconds),
		in.fromPrometheus() && !in.Prometheus.covered()
}

func (in Input) fromRouters() bool { return in.Spec.Source == semmoev1.DriftSourceRouter }

// fromSamples reports whether the evidence is requests that routers sample, fromEngines whether it is the counters of
// engines that shuffle tokens.
func (in Input) fromSamples() bool { return in.fromRouters() && in.Ranks == 0 }

func (in Input) fromEngines() bool { return in.fromRouters() && in.Ranks > 0 }

func (in Input) fromPrometheus() bool { return in.Spec.Source == semmoev1.DriftSourcePrometheus }

// holdPaused: no new work is started.
func holdPaused(in Input) (reason, message string, violated bool) {
	return "Paused", "spec.reconciliation is Paused", in.Paused
}

// holdPinned: only the user replaces a pinned plan.
func holdPinned(in Input) (reason, message string, violated bool) {
	return "PlanPinned", "spec.placement.planRef pins the plan", in.Pinned
}

// holdOff: drift is reported, and triggers no action.
func holdOff(in Input) (reason, message string, violated bool) {
	return "ReplansDisabled", "spec.drift.maxReplansPerDay is 0", *in.Spec.MaxReplansPerDay == 0
}

// holdRollOut: samples cover two revisions, one of which may be the plan for this drift.
func holdRollOut(in Input) (reason, message string, violated bool) {
	return "RollingOut", "Revisions, or the tables that routers use, are being changed", in.RollingOut
}

// holdYoungPlan: a plan that came into use recently has seen few requests. A negative age, for example after a clock
// change, counts as young.
func holdYoungPlan(in Input) (reason, message string, violated bool) {
	until := in.Plan.CreationTimestamp.Add(in.cooldown())
	return "PlanCooldown", "The plan in use is younger than spec.drift.cooldownSeconds, until " + stamp(until), in.Now.Before(until)
}

// holdCooldown: the last plan for drift was no gain, or failed. Another plan immediately after it would have the same
// result.
func holdCooldown(in Input) (reason, message string, violated bool) {
	if len(in.Replans) == 0 {
		return "", "", false
	}
	until := in.Replans[0].Add(in.cooldown())
	return "ReplanCooldown", "The last plan for drift was made less than spec.drift.cooldownSeconds ago, until " + stamp(until), in.Now.Before(until)
}

// holdDailyCap: permanently changing traffic, or a faulty test, must not cause unbounded cost.
func holdDailyCap(in Input) (reason, message string, violated bool) {
	made := ReplansLastDay(in.Replans, in.Now)
	return "DailyReplanLimit", fmt.Sprintf("%d plans were made for drift within 24 hours; spec.drift.maxReplansPerDay is %d", made, *in.Spec.MaxReplansPerDay),
		made >= int(*in.Spec.MaxReplansPerDay)
}

// ReplansLastDay counts the plans created within the last 24 hours, including those with creation times in the future
// (after a clock change).
func ReplansLastDay(replans []time.Time, now time.Time) int {
	count := 0
	for _, made := range replans {
		if now.Sub(made) < 24*time.Hour {
			count++
		}
	}
	return count
}

func (in Input) cooldown() time.Duration {
	return time.Duration(*in.Spec.CooldownSeconds) * time.Second
}

// stamp formats a time for conditions.
func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// reasonTokenShuffleUnsupported is the reason of a condition that requires tokens to be sent to the ranks of their
// experts.
const reasonTokenShuffleUnsupported = "TokenShuffleUnsupported"
