// Package locality judges whether what is served still is what the plan in service was made for: by what request routers sampled, or by
// a series of Prometheus.
//
// Invariants:
//   - The judgement is a pure function of evidence (Assess): no memory, so that whoever leads comes to the same.
//   - What is missing, old or no number is Unknown, never drift; nothing is done for it.
//   - Around it are thin shells that read evidence: from routers, from Prometheus, and a plan's calibration from its ConfigMap.
package locality

import (
	"fmt"
	"time"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/lar"
	"github.com/semmoe/operator/solver/drift"
)

// Status is how what is served stands to what the plan in service was made for.
type Status string

const (
	// Unknown: it cannot be told. Nothing is ever done for it.
	Unknown Status = "Unknown"
	// OnTarget: requests are as they were.
	OnTarget Status = "OnTarget"
	// BelowPromise: requests do not get what the plan promises, but have not been seen to be others than before.
	BelowPromise Status = "BelowTarget"
	// Drifted: requests are others than those that the plan was made for.
	Drifted Status = "Drifted"
)

// Assessment is what is known of drift.
type Assessment struct {
	Status Status
	// Reason and Message say why, in words that stay the same while that does.
	Reason, Message string
	// Tested tells that there is a test; Statistic is then its value, above Threshold an alarm.
	Tested               bool
	Statistic, Threshold float64
	// Since is when the drift began, as far as samples tell; Causes where the drop comes from, nil where that is not known. Both are
	// for Drifted alone.
	Since  time.Time
	Causes *drift.Causes
	// Plan is the plan in use: that of the layout, or of newer tables for it; nil where it is not known. Promise is what it promises, or
	// the layout's plan where it does not tell.
	Plan    *semmoev1.PlacementPlan
	Promise semmoev1.PlanForecast
	// Hold is why no plan is made for the drift now; its zero value where one may be.
	Hold desired.Finding
	// BatchesMoved reports that engines compute other batch sizes than plans were made for, whatever the status; BatchHold is why no plan is made
	// for them now.
	BatchesMoved bool
	BatchHold    desired.Finding
}

// Replan reports whether a plan is to be made for drift.
func (a Assessment) Replan() bool { return a.Status == Drifted && a.Hold.Reason == "" }

// Input is all that an assessment is made from.
type Input struct {
	Now  time.Time
	Spec semmoev1.DriftSpec
	// Planned tells that a plan is in service. Plan is the plan in use: that one, or of newer tables for its layout; nil where it does not
	// exist any more. Promise is what it promises, or the plan in service where it does not tell, as one that was made from counts alone;
	// nil where neither does.
	Planned bool
	Plan    *semmoev1.PlacementPlan
	Promise *semmoev1.PlanForecast
	// Engine is the type of the engine, EngineTells that it tells the experts of requests, Observed that routers sample some.
	Engine      semmoev1.EngineType
	EngineTells bool
	Observed    bool
	// Ranks is the expert-parallel size where attention is tensor parallel, and requests have no rank; else 0. Shuffled tells that tokens
	// are then sent to the ranks of the plan's tables.
	Ranks    int32
	Shuffled bool
	// Routers is what routers tell; Rate is the rate over all that they sampled of what is in service within the window, by the tables in
	// use, WasBelow that it was reported to be below the promise.
	Routers  RouterEvidence
	Rate     lar.Ratio
	WasBelow bool
	// Prometheus is what Prometheus tells.
	Prometheus PrometheusEvidence
	// BatchesMoved reports that engines compute other batch sizes than plans were made for.
	BatchesMoved bool
	// Paused, Pinned and RollingOut tell that the user has stopped planning, that he has chosen the plan, and that revisions change.
	Paused, Pinned, RollingOut bool
	// Replans are the times at which plans were made for drift, the newest first.
	Replans []time.Time
}

// policy is one link of a chain: it is violated for a reason, or has no objection.
type policy func(Input) (reason, message string, violated bool)

// firstViolated is what the first violated policy of a chain finds; its zero value where none is.
func firstViolated(chain []policy, in Input) desired.Finding {
	for _, link := range chain {
		if reason, message, violated := link(in); violated {
			return desired.Finding{Reason: reason, Message: message}
		}
	}
	return desired.Finding{}
}

// unknowns are the reasons for which nothing is known, in order: what comes first makes what follows meaningless. Whatever is
// missing, old or no number ends here, never in drift.
var unknowns = []policy{
	engineCannotShuffle,
	noPlan,
	engineCannotTell,
	tokensNotObserved,
	notObserved,
	noPromise,
	routersUnreachable,
	nothingObserved,
	notScored,
	tooFewSamples,
	prometheusSilent,
	prometheusStale,
	notARate,
	tooFewValues,
}

// holds are the reasons for which no plan is made for drift that was found, in order: first what the user has asked for, then
// what passes by itself.
var holds = []policy{
	holdPaused,
	holdPinned,
	holdOff,
	holdRollOut,
	holdYoungPlan,
	holdCooldown,
	holdDailyCap,
}

// Assess is what the evidence comes to.
func Assess(in Input) Assessment {
	a := Assessment{Status: Unknown, Plan: in.Plan}
	if in.BatchesMoved && in.Plan != nil {
		a.BatchesMoved, a.BatchHold = true, firstViolated(holds, in)
	}
	if in.Promise != nil { // known, whatever else is not
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
		a.Message = "Requests are no longer those that the plan was made for"
		a.Hold = firstViolated(holds, in)
	case in.below():
		a.Status = BelowPromise
		a.Message = "Requests do not get what the plan promises, but have not been seen to change since it was made: profile requests that are more like those that are served"
	case in.Spec.Source == semmoev1.DriftSourceRouter && in.Rate.Value() < in.bar() && in.given() > 0:
		a.Status = OnTarget
		a.Message = "Requests get what the plan promises, but for what routers give up so that no rank keeps the others waiting"
	default:
		a.Status = OnTarget
		a.Message = "Requests get what the plan promises"
	}
	if !a.Tested {
		a.Message += fmt.Sprintf(". Whether they drift is not tested: its ConfigMap has no calibration (drift.json), as that of a plan that was made from counts, held back fewer than %d requests (or such long ones that fewer are within %d tokens times MoE layers), is for so many ranks (about 200) that a ConfigMap has no room for it, or was made by an earlier version", drift.LeastRequests, drift.MaxRows)
	}
	a.Reason = string(a.Status)
	return a
}

// testResult is the state of the test for drift.
type testResult struct {
	// Tested is false where the plan has no calibration.
	Tested               bool
	Statistic, Threshold float64
	Alarm                bool
	Since                time.Time
	Causes               *drift.Causes
}

// test runs the test of the source.
func (in Input) test() testResult {
	if in.Spec.Source == semmoev1.DriftSourcePrometheus {
		return testValues(in.Prometheus.Points, in.Prometheus.Window, in.bar())
	}
	if in.Routers.Calibration == nil {
		return testResult{}
	}
	return testSamples(in.Routers.Calibration.For(float64(in.Spec.ThresholdPercent)/100), in.Routers.Samples)
}

// promised is the local activation rate that the plan in use promises.
func (in Input) promised() float64 { return float64(in.Promise.LARMilli) / 1000 }

// bar is the promise less the threshold.
func (in Input) bar() float64 {
	return in.promised() * (1 - float64(in.Spec.ThresholdPercent)/100)
}

// belowErrors is how many standard errors below the bar a rate must be to be reported there: a few samples scatter widely.
const belowErrors = 2

// given is the local activation rate that routers have given up for shorter waits, as far as the plan's calibration tells it.
func (in Input) given() float64 {
	if in.Routers.Calibration == nil {
		return 0
	}
	return in.Routers.Calibration.Given(plain(in.Routers.Samples))
}

// below reports whether the routers' samples are below the promise by more than the threshold. Once they are, they stay so until
// half of that is made good: a rate on the bar would come and go. What routers give up to keep no rank waiting is not missing: the
// promise is that of requests which come one at a time.
func (in Input) below() bool {
	if in.Spec.Source != semmoev1.DriftSourceRouter || in.Rate.Requests < enoughSamples {
		return false
	}
	rate := in.Rate.Value() + in.given()
	if in.WasBelow {
		return rate < (in.bar()+in.promised())/2
	}
	return rate+belowErrors*in.Rate.StandardError() < in.bar()
}

// engineCannotShuffle: no plan, and no traffic, changes what is local.
func engineCannotShuffle(in Input) (reason, message string, violated bool) {
	return reasonEngineCannotShuffle, fmt.Sprintf("spec.parallelism.attention is TensorParallel and spec.placement.tokenShuffle is not Enabled: tokens stay where attention leaves them, and one activation in %d is local under any plan. Enable it where the engine's image has a consumer of the plan's tables, or use DataParallel", in.Ranks),
		in.Ranks > 0 && !in.Shuffled
}

// tokensNotObserved: no request has a rank that its experts could be compared with.
func tokensNotObserved(in Input) (reason, message string, violated bool) {
	return "NotObserved", "spec.parallelism.attention is TensorParallel: routers do not see which rank a token was sent to, and cannot measure the local activation rate. Where the consumer in the engine tells it to a Prometheus server, set spec.drift.source to Prometheus",
		in.Ranks > 0 && in.fromRouters()
}

// noPlan: the engine's own placement promises nothing.
func noPlan(in Input) (reason, message string, violated bool) {
	return "NoPlan", "Without a plan there is no promised local activation rate to compare with", !in.Planned
}

// engineCannotTell: no sample will ever come.
func engineCannotTell(in Input) (reason, message string, violated bool) {
	return desired.ReasonEngineCannotTell, fmt.Sprintf("%s does not tell the experts of a request: the local activation rate cannot be measured, and the plan stays until its inputs change", in.Engine),
		in.fromRouters() && !in.EngineTells
}

// notObserved: no sample is asked for.
func notObserved(in Input) (reason, message string, violated bool) {
	return "NotObserved", "Nothing is sampled: set spec.routing.samplePercent above 0", in.fromRouters() && !in.Observed
}

// noPromise: what serves goes on serving when its plan is deleted, and routers go on with tables whose plan is, but what these promised
// went with them.
func noPromise(in Input) (reason, message string, violated bool) {
	return "PlanNotFound", "The PlacementPlan of what is in service does not exist any more, or has not told its figures yet: there is nothing to compare with",
		in.Plan == nil || in.Promise == nil || in.Routers.Tables != "" && in.Routers.Tables != in.Plan.Status.PlanDigest
}

// routersUnreachable: samples are somewhere, and cannot be read.
func routersUnreachable(in Input) (reason, message string, violated bool) {
	return "RoutersUnreachable", "No request router returns its observations: none is ready, or the operator cannot reach port 9091 of their pods", in.fromRouters() && in.Routers.Answered == 0
}

// nothingObserved: samples are old, as in a quiet service, after a clock was set, or while routers do not sample.
func nothingObserved(in Input) (reason, message string, violated bool) {
	return "Stale", fmt.Sprintf("The routers have sampled no request under this plan in the last %d seconds (spec.drift.windowSeconds)", in.Spec.WindowSeconds),
		in.fromRouters() && in.Routers.Newest.IsZero()
}

// notScored: without the tables nothing is known of what a request should have got.
func notScored(in Input) (reason, message string, violated bool) {
	return "TablesNotLoaded", "The routers have not loaded the tables of the plan: what they sample cannot be compared with it", in.fromRouters() && in.Routers.Tables == ""
}

// tooFewSamples: chance has the say.
func tooFewSamples(in Input) (reason, message string, violated bool) {
	samples := int64(len(in.Routers.Samples))
	if in.Routers.Calibration == nil {
		samples = in.Rate.Requests
	}
	return "TooFewSamples", fmt.Sprintf("The routers have sampled fewer than %d requests under this plan that its tables scored", enoughSamples), in.fromRouters() && samples < enoughSamples
}

// prometheusSilent: there is no series to look at.
func prometheusSilent(in Input) (reason, message string, violated bool) {
	return in.Prometheus.Problem.Reason, in.Prometheus.Problem.Message, in.fromPrometheus() && in.Prometheus.Problem.Reason != ""
}

// prometheusStale: the series has ended, as when nothing is scraped any more; its last values say nothing of now.
func prometheusStale(in Input) (reason, message string, violated bool) {
	points := in.Prometheus.Points
	return "PrometheusStale", "The query has no value of the last minutes that is a number",
		in.fromPrometheus() && (len(points) == 0 || in.Now.Sub(points[len(points)-1].Time) > staleSteps*in.Prometheus.step())
}

// notARate: the query is of something else, and everything would seem to be drift, or nothing.
func notARate(in Input) (reason, message string, violated bool) {
	outside := false
	for _, point := range in.Prometheus.Points {
		outside = outside || point.Value < 0 || point.Value > 1
	}
	return "PrometheusNotARate", "The query has values below 0 or above 1: it must be a local activation rate, and a share, not percent", in.fromPrometheus() && outside
}

// tooFewValues: the window is not covered yet, or has gaps.
func tooFewValues(in Input) (reason, message string, violated bool) {
	return "TooFewValues", fmt.Sprintf("The query has had values for less than three quarters of the last %d seconds (spec.drift.windowSeconds) under this plan", in.Spec.WindowSeconds),
		in.fromPrometheus() && !in.Prometheus.covered()
}

func (in Input) fromRouters() bool { return in.Spec.Source == semmoev1.DriftSourceRouter }

func (in Input) fromPrometheus() bool { return in.Spec.Source == semmoev1.DriftSourcePrometheus }

// holdPaused: nothing new is begun.
func holdPaused(in Input) (reason, message string, violated bool) {
	return "Paused", "spec.reconciliation is Paused", in.Paused
}

// holdPinned: a plan that the user has chosen is replaced by him alone.
func holdPinned(in Input) (reason, message string, violated bool) {
	return "PlanPinned", "spec.placement.planRef pins the plan", in.Pinned
}

// holdOff: drift is to be told, not acted upon.
func holdOff(in Input) (reason, message string, violated bool) {
	return "ReplansDisabled", "spec.drift.maxReplansPerDay is 0", *in.Spec.MaxReplansPerDay == 0
}

// holdRollOut: samples are of two revisions, and one of them may be a plan for this very drift.
func holdRollOut(in Input) (reason, message string, violated bool) {
	return "RollingOut", "Revisions, or the tables that routers use, are being changed", in.RollingOut
}

// holdYoungPlan: a plan that is in use since a short time only has seen little of its requests. An age below zero, as after the
// clock was set back, is young.
func holdYoungPlan(in Input) (reason, message string, violated bool) {
	until := in.Plan.CreationTimestamp.Add(in.cooldown())
	return "PlanCooldown", "The plan in use is younger than spec.drift.cooldownSeconds, until " + stamp(until), in.Now.Before(until)
}

// holdCooldown: the last plan that was made for drift was no gain, or failed; another one right after it would fare alike.
func holdCooldown(in Input) (reason, message string, violated bool) {
	if len(in.Replans) == 0 {
		return "", "", false
	}
	until := in.Replans[0].Add(in.cooldown())
	return "ReplanCooldown", "The last plan for drift was made less than spec.drift.cooldownSeconds ago, until " + stamp(until), in.Now.Before(until)
}

// holdDailyCap: requests that change for ever, or a test that is wrong, must not cost without end.
func holdDailyCap(in Input) (reason, message string, violated bool) {
	made := ReplansLastDay(in.Replans, in.Now)
	return "DailyReplanLimit", fmt.Sprintf("%d plans were made for drift within 24 hours; spec.drift.maxReplansPerDay is %d", made, *in.Spec.MaxReplansPerDay),
		made >= int(*in.Spec.MaxReplansPerDay)
}

// ReplansLastDay counts the plans that were made within 24 hours, and those that a clock which was set back puts after now.
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

// stamp is a time as conditions tell it.
func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// reasonEngineCannotShuffle is that of a condition which needs tokens to be sent where their experts are.
const reasonEngineCannotShuffle = "TokenShuffleUnsupported"
