// SPDX-License-Identifier: Apache-2.0

package planner

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/locality"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/internal/kube/printable"
	"github.com/semmoe/operator/internal/kube/writes"
	"github.com/semmoe/operator/internal/observation/stepsizes"
)

const (
	// replanMemory is the minimum retention of plans and profiles made for drift: the daily limit counts them.
	replanMemory = 24 * time.Hour
	// onsetMemory is the maximum age of samples for a live profile. A drift with an earlier onset is as old as the
	// retained samples.
	onsetMemory = 24 * time.Hour
	// datasetPeriod is the retry interval for an unchanged data set while the traffic has drifted.
	datasetPeriod = time.Hour
)

// lineage contains the profiles and plans made for drift since the base plan of the spec was made, newest first.
// Another data set, profile or shape of the deployment results in another base plan with an empty lineage.
type lineage struct {
	profiles []*semmoev1.AffinityProfile
	plans    []*semmoev1.PlacementPlan
}

// lineageOf selects the profiles and plans of a base plan; none without a base plan.
func lineageOf(base *semmoev1.PlacementPlan, profiles []*semmoev1.AffinityProfile, plans []*semmoev1.PlacementPlan) lineage {
	var l lineage
	if base == nil {
		return l
	}
	of := func(object metav1.Object) bool {
		return object.GetLabels()[semmoev1.LabelBase] == base.Name && object.GetDeletionTimestamp() == nil
	}
	for _, profile := range profiles {
		if of(profile) {
			l.profiles = append(l.profiles, profile)
		}
	}
	for _, plan := range plans {
		if of(plan) && plan.Spec.Current != nil {
			l.plans = append(l.plans, plan)
		}
	}
	NewestFirst(l.profiles)
	NewestFirst(l.plans)
	return l
}

// replaces reports whether a plan of this tier should be brought into service.
func replaces(plan *semmoev1.PlacementPlan, moed *semmoev1.MoEDeployment, modelDigest string, tier semmoev1.Tier) bool {
	return Published(plan, moed, modelDigest) && plan.Status.Verdict == semmoev1.VerdictGain && plan.Status.Tier == tier
}

// wanted returns the plan with the layout to serve: the newest plan made for drift that should be brought into service,
// or, if that contains only new tables, the plan that the tables are for. An earlier plan that a user approved comes
// first.
func (l lineage) wanted(moed *semmoev1.MoEDeployment, base *semmoev1.PlacementPlan, modelDigest, serving string) *semmoev1.PlacementPlan {
	for i, plan := range l.plans {
		if replaces(plan, moed, modelDigest, semmoev1.TierLayout) {
			return cmp.Or(approvedOf(l.plans[i+1:], moed, modelDigest, serving), plan)
		}
		if replaces(plan, moed, modelDigest, semmoev1.TierTables) {
			return cmp.Or(approvedOf(l.plans[i+1:], moed, modelDigest, serving), PlanWithDigest(plan.Spec.Current.PlanDigest, l.plans), base)
		}
	}
	return base
}

// approvedOf returns the first of the given plans (newest first) for a new layout that is approved and has neither come
// into service nor failed on its canary; nil if there is none. It may be on its canary, or be promoting: a newer plan
// that waits for approval must not cancel it.
func approvedOf(plans []*semmoev1.PlacementPlan, moed *semmoev1.MoEDeployment, modelDigest, serving string) *semmoev1.PlacementPlan {
	for _, plan := range plans {
		switch {
		case isOf(plan, serving):
			return nil // older plans were in service before
		case !replaces(plan, moed, modelDigest, semmoev1.TierLayout) || !Approved(moed, plan.Status.Plan):
		default:
			if key, _ := failure(moed, plan, ""); key != "" || slices.ContainsFunc(slices.Collect(maps.Keys(plan.Annotations)), isOutputChanged) {
				return nil
			}
			return plan
		}
	}
	return nil
}

// isOutputChanged reports whether a plan's annotation records changed outputs.
func isOutputChanged(key string) bool {
	return strings.HasPrefix(key, semmoev1.AnnotationOutputChanged)
}

// tablesFor returns the newest usable plan with new tables for a layout: it is in use already, or nothing holds it.
// held is why a newer one is not used.
func (l lineage) tablesFor(moed *semmoev1.MoEDeployment, workloads []*revisions.Workload, modelDigest, layout, inUse string) (tables *semmoev1.PlacementPlan, held desired.Finding) {
	for _, plan := range l.plans {
		if !replaces(plan, moed, modelDigest, semmoev1.TierTables) || plan.Spec.Current.PlanDigest != layout {
			continue
		}
		hold := holdTables(moed, workloads, plan)
		if hold.Reason == "" || plan.Status.PlanDigest == inUse {
			return plan, held
		}
		held = cmp.Or(held, hold)
	}
	return nil, held
}

// holdTables returns why new tables are not used although they predict a gain; its zero value if they are used.
func holdTables(moed *semmoev1.MoEDeployment, workloads []*revisions.Workload, plan *semmoev1.PlacementPlan) desired.Finding {
	short, gain := plan.Status.Plan, comparisonText(plan)
	readsOnce := func(w *revisions.Workload) bool {
		return w.Template().Annotations[semmoev1.AnnotationPlanDigest] == plan.Spec.Current.PlanDigest && !revisions.FollowsTables(w)
	}
	switch {
	case moed.Spec.Parallelism.Attention != semmoev1.AttentionDataParallel && slices.ContainsFunc(workloads, readsOnce):
		return desired.Finding{Reason: "TablesRequireRestart", Message: fmt.Sprintf("Plan %s has new tables for the placement in service (%s), which are not used: the pods in service read tables only at start", short, gain)}
	case moed.Spec.Placement.Approval == semmoev1.ApprovalAdvisory:
		return desired.Finding{Reason: "Advisory", Message: fmt.Sprintf("Plan %s has new tables for the placement in service (%s); spec.placement.approval is Advisory: they are not used", short, gain)}
	case moed.Spec.Placement.Approval == semmoev1.ApprovalManual && !Approved(moed, short) && !Pinned(moed, plan):
		return desired.Finding{Reason: "AwaitingApproval", Message: fmt.Sprintf("Plan %s has new tables for the placement in service (%s); approve them with: %s", short, gain, ApproveCommand(moed, short)), Pending: short}
	}
	return desired.Finding{}
}

// comparisonText compares a plan with the one in service.
func comparisonText(plan *semmoev1.PlacementPlan) string {
	c := plan.Status.Comparison
	if c == nil {
		return "it was not compared with the plan in service"
	}
	text := fmt.Sprintf("%s versus %s for the plan in service, on recent requests", desired.Percent(c.CandidateLARMilli), desired.Percent(c.CurrentLARMilli))
	if c.CurrentNanos > 0 {
		text += fmt.Sprintf("; a layer takes %.1f µs versus %.1f µs", float64(c.CandidateNanos)/1000, float64(c.CurrentNanos)/1000)
	}
	return text
}

// PlanWithDigest returns the plan with this digest; nil if there is none.
func PlanWithDigest(digest string, plans []*semmoev1.PlacementPlan) *semmoev1.PlacementPlan {
	for _, plan := range plans {
		if plan != nil && digest != "" && plan.Status.PlanDigest == digest {
			return plan
		}
	}
	return nil
}

// Pinned reports whether the spec names the plan.
func Pinned(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan) bool {
	return plan != nil && moed.Spec.Placement.PlanRef != nil && moed.Spec.Placement.PlanRef.Name == plan.Name
}

// DriftSignal is the input, in addition to objects, for the next step after a drift.
type DriftSignal struct {
	// Drifted reports that traffic has drifted away from the plan, and that a plan may be made for it now. OnTarget
	// reports that traffic is known to match the plan: work that was started for an ended drift is cancelled.
	Drifted, OnTarget bool
	// BatchesMoved reports that engines compute other batch sizes than plans were made for, and that a plan may be made
	// for them now.
	BatchesMoved bool
	// Since is the estimated start of the drift; zero if unknown.
	Since time.Time
	// Now is the current time.
	Now time.Time
}

// replanStep is the next step after a drift, with its finding.
type replanStep struct {
	// Profile and Plan are to be created, Abandoned is to be deleted; nil for none.
	Profile, Abandoned *semmoev1.AffinityProfile
	Plan               *semmoev1.PlacementPlan
	// Say is the state of the plan for a drift; its zero value if none is being made.
	Say desired.Finding
}

// nextReplan decides the next step after a drift from existing objects: first a profile of the traffic, then a plan
// that replaces the one in service. Names follow from the observations, so creating an object twice is a no-op.
func nextReplan(moed *semmoev1.MoEDeployment, modelDigest string, p Planning, d DriftSignal) replanStep {
	say := func(reason, message string) replanStep {
		return replanStep{Say: desired.Finding{Reason: reason, Message: message}}
	}
	switch {
	case p.Base == nil || p.Serving == nil || desired.Paused(moed):
		return replanStep{}
	case moed.Spec.Placement.PlanRef != nil && d.Drifted:
		return say("Pinned", fmt.Sprintf("The traffic has drifted; spec.placement.planRef pins PlacementPlan %s, so no other plan is made", moed.Spec.Placement.PlanRef.Name))
	case moed.Spec.Placement.PlanRef != nil:
		return replanStep{}
	case p.otherKind() && d.Drifted:
		return say("LayoutMismatch", fmt.Sprintf("The traffic has drifted, but plan %s in service differs from spec.placement in its objective or redundant experts, so no plan can replace it. Roll out plan %s, or revert the change",
			p.Serving.Short(), p.Base.Status.Plan))
	case p.otherKind():
		return replanStep{}
	}
	if profile := p.Lineage.pending(); profile != nil {
		return p.afterProfile(moed, modelDigest, profile, d)
	}
	if len(p.Lineage.plans) > 0 {
		// A stalled plan will never be solved, for example with too few requests.
		if plan := p.Lineage.plans[0]; plan.Status.Verdict == "" && !meta.IsStatusConditionTrue(plan.Status.Conditions, semmoev1.ConditionStalled) {
			return say(ChildVerdict("PlacementPlan", plan.Name, plan.Status.Conditions, "Planning"))
		}
	}
	switch {
	case d.Drifted:
		return p.newProfileStep(moed, modelDigest, d)
	case d.BatchesMoved:
		return p.replanForBatches(moed, modelDigest)
	}
	return replanStep{Say: p.Lineage.outcome(moed, modelDigest)}
}

// otherKind reports whether the plan in service has another objective or other copies than the spec requests now: a
// plan that replaces another keeps both.
func (p Planning) otherKind() bool {
	if p.Serving.RedundantExperts != p.Base.RedundantExperts() {
		return true
	}
	serving, asked := PlanWithDigest(p.Serving.Digest, appendPlan(p.Plans, p.Base)), p.Base.Spec.Objective
	return serving != nil && asked != "" && cmp.Or(serving.Spec.Objective, semmoev1.ObjectiveActivation) != asked
}

// outcome returns the result of the last plan made for drift, if it changes nothing.
func (l lineage) outcome(moed *semmoev1.MoEDeployment, modelDigest string) desired.Finding {
	if len(l.plans) > 0 && meta.IsStatusConditionTrue(l.plans[0].Status.Conditions, semmoev1.ConditionStalled) {
		reason, message := ChildVerdict("PlacementPlan", l.plans[0].Name, l.plans[0].Status.Conditions, "Planning")
		return desired.Finding{Reason: reason, Message: message}
	}
	if len(l.plans) == 0 || !Published(l.plans[0], moed, modelDigest) || l.plans[0].Status.Verdict == semmoev1.VerdictGain {
		return desired.Finding{}
	}
	plan := l.plans[0]
	return desired.Finding{Reason: string(plan.Status.Verdict), Message: fmt.Sprintf("PlacementPlan %s for the changed traffic is no improvement: %s", plan.Name, comparisonText(plan))}
}

// pending returns the newest profile if no plan was made from it; nil if one was, even if that plan was deleted since.
func (l lineage) pending() *semmoev1.AffinityProfile {
	if len(l.profiles) == 0 {
		return nil
	}
	newest := l.profiles[0]
	if newest.Annotations[semmoev1.AnnotationPlanned] != "" || slices.ContainsFunc(l.plans, func(plan *semmoev1.PlacementPlan) bool { return plan.Spec.ProfileRef.Name == newest.Name }) {
		return nil
	}
	return newest
}

// afterProfile returns the next step for a profile from which no plan was made yet.
func (p Planning) afterProfile(moed *semmoev1.MoEDeployment, modelDigest string, profile *semmoev1.AffinityProfile, d DriftSignal) replanStep {
	complete := Profiled(profile, modelDigest)
	source := p.source()
	unchanged := complete && source != nil && source.Status.Result != nil && profile.Status.Result.Digest == source.Status.Result.Digest
	say := func(reason, message string) replanStep {
		return replanStep{Say: desired.Finding{Reason: reason, Message: message}}
	}
	switch {
	case complete && *moed.Spec.Drift.MaxReplansPerDay == 0:
		return say("ReplansDisabled", fmt.Sprintf("spec.drift.maxReplansPerDay is 0: no plan is made from AffinityProfile %s", profile.Name))
	case unchanged && d.Drifted && (moed.Spec.Profiling.Refresh != semmoev1.RefreshJob || d.Now.Sub(profile.CreationTimestamp.Time) >= datasetPeriod):
		return p.newProfileStep(moed, modelDigest, d)
	case unchanged && d.OnTarget:
		return replanStep{}
	case unchanged:
		return say("DatasetUnchanged", "The traffic has drifted, but the data set has not changed since the plan in service. Update the data set, or set spec.profiling.refresh to Live")
	case !complete && d.OnTarget:
		step := say("DriftEnded", "The traffic matches the plan again, so the profile for the drift is discarded")
		step.Abandoned = profile
		return step
	case !complete && superseded(moed, modelDigest, profile):
		return replanStep{Abandoned: profile}
	case !complete && profile.Status.Model != nil && profile.Status.Model.Digest != modelDigest:
		return replanStep{Abandoned: profile} // the profile belongs to another checkpoint
	case !complete:
		return say(ChildVerdict("AffinityProfile", profile.Name, profile.Status.Conditions, "Profiling"))
	}
	step := say("Replanning", fmt.Sprintf("A plan is made from AffinityProfile %s to replace plan %s", profile.Name, p.Serving.Short()))
	step.Plan = p.replanFor(moed, profile)
	return step
}

// superseded reports whether the spec no longer wants an incomplete profile, or whether the profile will receive no
// samples. Without this check, the operator would wait for unneeded work (routers keep prompts while it runs), or for a
// Job whose cause of failure has been fixed since.
func superseded(moed *semmoev1.MoEDeployment, modelDigest string, profile *semmoev1.AffinityProfile) bool {
	live := profile.Spec.Target == semmoev1.ProfilingTargetLive
	switch {
	case *moed.Spec.Drift.MaxReplansPerDay == 0, live != (moed.Spec.Profiling.Refresh != semmoev1.RefreshJob):
		return true
	case live:
		return !desired.Observes(moed) || profile.Spec.Live.Samples != moed.Spec.Profiling.LiveSamples
	}
	wanted := profileFor(moed, modelDigest)
	return wanted != nil && outdated(profile, wanted)
}

// newProfileStep returns the step that creates the profile, of the traffic or of the data set, for a plan after a
// drift.
func (p Planning) newProfileStep(moed *semmoev1.MoEDeployment, modelDigest string, d DriftSignal) replanStep {
	after := ""
	if len(p.Lineage.profiles) > 0 {
		after = p.Lineage.profiles[0].Name
	}
	current := p.current()
	name := moed.Name + "-" + ownership.ShortHash(struct{ Model, Base, Plan, Tables, After string }{
		modelDigest, p.Base.Name, current.PlanDigest, current.TablesDigest, after,
	}, 8)
	var profile *semmoev1.AffinityProfile
	if moed.Spec.Profiling.Refresh == semmoev1.RefreshJob {
		profile = profileFor(moed, modelDigest)
	} else if desired.Observes(moed) {
		profile = p.liveProfile(moed, d)
	} else {
		return replanStep{Say: desired.Finding{Reason: "NoTrafficSamples", Message: "The traffic has drifted and spec.profiling.refresh is Live, but routers collect no samples for a profile. Set refresh to Job, or, with attention DataParallel, set spec.routing.samplePercent above 0"}}
	}
	if profile == nil {
		return replanStep{Say: desired.Finding{Reason: "NoDataset", Message: "The traffic has drifted and spec.profiling.refresh is Job, but spec.profiling has no data set. Set one, or set refresh to Live"}}
	}
	profile.Name, profile.Labels[semmoev1.LabelBase] = name, p.Base.Name
	return replanStep{
		Profile: profile,
		Say:     desired.Finding{Reason: "Profiling", Message: fmt.Sprintf("The traffic has drifted. AffinityProfile %s records the new traffic", name)},
	}
}

// liveProfile returns a profile of the traffic that routers sample, without a name.
func (p Planning) liveProfile(moed *semmoev1.MoEDeployment, d DriftSignal) *semmoev1.AffinityProfile {
	since := d.Since
	if since.IsZero() || d.Now.Sub(since) > onsetMemory {
		since = d.Now
	}
	return &semmoev1.AffinityProfile{
		ObjectMeta: metav1.ObjectMeta{Namespace: moed.Namespace, Labels: desired.Labels(moed, semmoev1.ComponentProfile), OwnerReferences: ownership.ControllerReference(moed, "MoEDeployment")},
		Spec: semmoev1.AffinityProfileSpec{
			Model: moed.Spec.Model.Mounted(), Engine: moed.Spec.Engine.ForProfile(), Parallelism: placedAs(moed),
			SamplingSpec: moed.Spec.Profiling.SamplingSpec, Target: semmoev1.ProfilingTargetLive,
			DeploymentRef: &semmoev1.DeploymentReference{Name: moed.Name},
			Live: &semmoev1.LiveSpec{
				Samples: moed.Spec.Profiling.LiveSamples, Since: new(metav1.NewTime(since.Truncate(time.Second))),
				PriorProfileRef: semmoev1.ProfileReference{Name: p.priorName()},
			},
		},
	}
}

// plannedSizes returns the batch sizes that the newest plan was made for; nil without a plan, or if the spec set its
// size.
func (p Planning) plannedSizes() []int32 {
	newest := p.Base
	if len(p.Lineage.plans) > 0 {
		newest = p.Lineage.plans[0]
	}
	if newest == nil || newest.Spec.BatchTokens > 0 {
		return nil
	}
	return planSizes(newest)
}

// BatchesMoved reports whether engines compute batch sizes that differ much from those of the newest plan, in service
// or not: a plan that was found to change nothing is not solved again.
func (p Planning) BatchesMoved() bool {
	planned := p.plannedSizes()
	return planned != nil && p.BatchSizes != nil && stepsizes.Differ(planned, p.BatchSizes)
}

// replanForBatches returns a plan for other batch sizes, made from the profile of the plan in service: the requests are
// unchanged.
func (p Planning) replanForBatches(moed *semmoev1.MoEDeployment, modelDigest string) replanStep {
	for _, profile := range p.sources() {
		if !Profiled(profile, modelDigest) || profile.Spec.Live != nil && profile.Status.Result.TracedTokens == 0 {
			continue // a profile of token counts gives no layout
		}
		plan := p.replanFor(moed, profile)
		if plan.Spec.PriorProfileRef.Name == profile.Name {
			plan.Spec.PriorProfileRef = nil
		}
		after := p.Base.Name
		if len(p.Lineage.plans) > 0 {
			after = p.Lineage.plans[0].Name
		}
		plan.Name = moed.Name + "-" + ownership.ShortHash(struct{ Like, After string }{plan.Name, after}, 8)
		return replanStep{Plan: plan, Say: desired.Finding{Reason: "BatchSizesChanged", Message: fmt.Sprintf(
			"The batch sizes of the engines (status.batchTokens) differ from those of plan %s. PlacementPlan %s is made for them", p.Serving.Short(), plan.Name)}}
	}
	return replanStep{}
}

// current returns the reference to the plan in service.
func (p Planning) current() semmoev1.CurrentPlan {
	current := semmoev1.CurrentPlan{PlanDigest: p.Serving.Digest}
	if p.Tables != nil {
		current.TablesDigest = p.Tables.Status.PlanDigest
	}
	return current
}

// sources returns the known profiles that the tables in use, the layout in service, and the plan of the spec were made
// from.
func (p Planning) sources() []*semmoev1.AffinityProfile {
	var found []*semmoev1.AffinityProfile
	for _, plan := range []*semmoev1.PlacementPlan{p.Tables, p.Promise, p.Base} {
		if plan == nil {
			continue
		}
		for _, profile := range append(slices.Clone(p.Lineage.profiles), p.Profile) {
			if profile != nil && profile.Name == plan.Spec.ProfileRef.Name {
				found = append(found, profile)
			}
		}
	}
	return found
}

// source returns the profile that the plan in service was made from; nil if unknown.
func (p Planning) source() *semmoev1.AffinityProfile {
	if known := p.sources(); len(known) > 0 {
		return known[0]
	}
	return p.Profile
}

// priorName returns the profile that the plan in service was made from. A profile without a routing trace contains less
// about tokens that are rare now than its predecessor.
func (p Planning) priorName() string {
	for _, profile := range p.sources() {
		if profile.Status.Result != nil && profile.Status.Result.TracedTokens > 0 {
			return profile.Name
		}
	}
	return p.ProfileName
}

// replanFor returns the plan, made from a profile, that replaces the one in service.
func (p Planning) replanFor(moed *semmoev1.MoEDeployment, profile *semmoev1.AffinityProfile) *semmoev1.PlacementPlan {
	plan := planFor(moed, profile, p.Base.Spec.Realization, p.Base.Spec.HardwareDigest)
	if plan.Spec.ChoosesRedundantExperts() {
		plan.Spec.RedundantExperts, plan.Spec.RedundantMemoryBytes = nil, nil
		if copies := p.Serving.RedundantExperts; copies > 0 {
			plan.Spec.RedundantExperts = ptr.To(intstr.FromInt32(copies))
		}
	}
	current := p.current()
	current.TargetLARMilli = forecastOf(p.Promise).LARMilli * (100 - moed.Spec.Drift.ThresholdPercent) / 100
	plan.Spec.Current, plan.Spec.PriorProfileRef = &current, &semmoev1.ProfileReference{Name: p.priorName()}
	plan.Labels[semmoev1.LabelBase] = p.Base.Name
	plan.Name = moed.Name + "-" + ownership.ShortHash(struct {
		Like    string
		Current semmoev1.CurrentPlan
		Gain    *int32
		Batch   int32 `json:",omitempty"`
	}{plan.Name, current, plan.Spec.MinimumGainPercent, plan.Spec.BatchTokens}, 8)
	plan.Spec.ObservedBatchTokens = p.BatchSizes
	return plan
}

// NextReplan decides the next step after a drift, and returns its finding and its writes.
func NextReplan(s *Snapshot, p Planning, drift DriftSignal) (desired.Finding, []writes.Write, Question) {
	step := nextReplan(s.Moed, s.Report.ModelDigest, p, drift)
	var ordered []writes.Write
	if step.Abandoned != nil {
		d := Decision{}
		if latest := d.mayDelete(s); !latest {
			return step.Say, nil, d.Question // the latest spec may need it
		}
		ordered = append(ordered, writes.Delete{Object: step.Abandoned})
	}
	var made writes.Object
	switch {
	case step.Profile != nil:
		made = step.Profile
	case step.Plan != nil:
		made = step.Plan
	default:
		return step.Say, ordered, nil
	}
	return step.Say, append(ordered, writes.Create{
		Object: made, Event: &writes.Event{Name: step.Say.Reason, Action: "Replan", Related: made, Message: printable.Line(step.Say.Message, 900)},
	}), nil
}

// recentReplan reports whether an object was made for drift within replanMemory.
func recentReplan(object metav1.Object, now time.Time) bool {
	return object.GetLabels()[semmoev1.LabelBase] != "" && now.Sub(object.GetCreationTimestamp().Time) < replanMemory
}

// reasonPlanNotFound to reasonOtherEngine are the reasons, in addition to ReasonOtherModel, of a pinned plan that
// cannot be served. pinFaults lists all of them.
const (
	reasonPlanNotFound     = "PlanNotFound"
	reasonOtherParallelism = "ParallelismMismatch"
	reasonOtherEngine      = "EngineMismatch"
)

var PinFaults = []string{reasonPlanNotFound, reasonOtherParallelism, reasonOtherEngine, ReasonOtherModel}

// CheckPin returns why a pinned plan will never fit the MoEDeployment; nil if it may.
func CheckPin(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan) error {
	if fault := shapeFault(moed, plan); fault.Reason != "" {
		return errors.New("spec.placement.planRef: " + fault.Message)
	}
	return nil
}

// shapeFault returns why a plan (with its immutable spec) does not fit a MoEDeployment; its zero value if it does.
func shapeFault(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan) desired.Finding {
	switch {
	case plan.Spec.ExpertParallelSize != moed.Spec.Parallelism.ExpertParallelSize || plan.Spec.Attention != moed.Spec.Parallelism.Attention:
		return desired.Finding{Reason: reasonOtherParallelism, Message: fmt.Sprintf("PlacementPlan %s is for attention %s on %d ranks, but spec.parallelism sets %s on %d. Reference a plan of that shape",
			plan.Name, plan.Spec.Attention, plan.Spec.ExpertParallelSize, moed.Spec.Parallelism.Attention, moed.Spec.Parallelism.ExpertParallelSize)}
	case (plan.Spec.TokenShuffle == semmoev1.TokenShuffleDisabled) != (plannedShuffle(moed) == semmoev1.TokenShuffleDisabled):
		return desired.Finding{Reason: reasonOtherParallelism, Message: fmt.Sprintf("PlacementPlan %s has tokenShuffle %s, but spec.placement.tokenShuffle is %s. Reference a plan for an engine of that kind",
			plan.Name, cmp.Or(plan.Spec.TokenShuffle, semmoev1.TokenShuffleEnabled), cmp.Or(moed.Spec.Placement.TokenShuffle, semmoev1.TokenShuffleDisabled))}
	case plan.Spec.Engine != moed.Spec.Engine.Type:
		return desired.Finding{Reason: reasonOtherEngine, Message: fmt.Sprintf("PlacementPlan %s contains the expert map of %s, but spec.engine.type is %s. Reference a plan for that engine", plan.Name, plan.Spec.Engine, moed.Spec.Engine.Type)}
	}
	return desired.Finding{}
}

// pinFault returns why a pinned plan cannot be served; its zero value if it can.
func pinFault(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan, modelDigest string) desired.Finding {
	name := moed.Spec.Placement.PlanRef.Name
	no := func(reason, format string, args ...any) desired.Finding {
		return desired.Finding{Reason: reason, Message: fmt.Sprintf("spec.placement.planRef: "+format, args...)}
	}
	if plan == nil {
		return no(reasonPlanNotFound, "PlacementPlan %q does not exist in namespace %s. Create it, or reference another one", name, moed.Namespace)
	}
	if shape := shapeFault(moed, plan); shape.Reason != "" {
		return no(shape.Reason, "%s", shape.Message)
	}
	switch {
	case plan.Status.ModelDigest != "" && plan.Status.ModelDigest != modelDigest:
		return no(ReasonOtherModel, "PlacementPlan %s belongs to checkpoint digest %s, but digest %s is served. Reference a plan of the served model", name, plan.Status.ModelDigest, modelDigest)
	case plan.DeletionTimestamp != nil || !meta.IsStatusConditionTrue(plan.Status.Conditions, semmoev1.ConditionReady) || plan.Status.PlanDigest == "":
		reason, message := ChildVerdict("PlacementPlan", name, plan.Status.Conditions, "Planning")
		return desired.Finding{Reason: reason, Message: message}
	}
	return desired.Finding{}
}

// DriftOf converts the assessment to the input for the next step.
func DriftOf(a locality.Assessment, now time.Time) DriftSignal {
	return DriftSignal{Drifted: a.Replan(), OnTarget: a.Status == locality.OnTarget, BatchesMoved: a.BatchesMoved && a.BatchHold.Reason == "", Since: a.Since, Now: now}
}
