// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/conditions"
)

// reasonSpecInvalid is the reason of steps that wait for a valid spec.
const reasonSpecInvalid = "WaitingForValidSpec"

// profiled returns the verdict for a complete profile.
func profiled(profile *semmoev1.AffinityProfile) conditions.Verdict {
	r := profile.Status.Result
	return conditions.True("Profiled", fmt.Sprintf("AffinityProfile %s contains %d tokens of %d requests", profile.Name, r.Tokens, r.Requests))
}

func profiledVerdict(moed *semmoev1.MoEDeployment, o observation) conditions.Verdict {
	no := conditions.False
	profile := o.described().Profile
	switch {
	case moed.Spec.Profiling == nil:
		return no("NoProfile", "The model is not profiled, and is served with the engine's own expert placement. To profile it, set a data set in spec.profiling")
	case o.unplanned() && profile != nil && profile.Status.Result != nil:
		return profiled(profile)
	case o.unplanned() && profile != nil:
		return no(planner.ChildVerdict("AffinityProfile", profile.Name, profile.Status.Conditions, "Profiling"))
	case o.Invalid != nil:
		return no(reasonSpecInvalid, "The profile waits for a valid spec. See the condition Degraded for the cause")
	case !o.Download.Complete():
		return no(reasonDownloading, "The profile waits for the download of the model")
	case o.Inspection.Report == nil:
		return no("InspectingModel", "The profile waits for the inspection of the model")
	case o.Inspection.Report.Unprofilable != "":
		return no(planner.ReasonNotProfilable, "The model is served without a plan: "+o.Inspection.Report.Unprofilable)
	case profile == nil && moed.Spec.Profiling.ProfileRef != nil:
		return no(planner.ReasonProfileNotFound, fmt.Sprintf("spec.profiling.profileRef: AffinityProfile %q does not exist in namespace %s. Create it, or reference another one", moed.Spec.Profiling.ProfileRef.Name, moed.Namespace))
	case profile == nil && desired.Paused(moed):
		return no("Paused", "The profile is created once spec.reconciliation is Active")
	case profile == nil:
		return no("WaitingForProfile", "The profile is being created")
	case planner.Profiled(profile, o.Inspection.Report.ModelDigest):
		return profiled(profile)
	case profile.Status.Model != nil && profile.Status.Model.Digest != o.Inspection.Report.ModelDigest:
		return no(planner.ReasonOtherModel, fmt.Sprintf("AffinityProfile %s belongs to checkpoint digest %s, but digest %s is served. Profile the served model", profile.Name, profile.Status.Model.Digest, o.Inspection.Report.ModelDigest))
	}
	return no(planner.ChildVerdict("AffinityProfile", profile.Name, profile.Status.Conditions, "Profiling"))
}

func plannedVerdict(moed *semmoev1.MoEDeployment, o observation) conditions.Verdict {
	no := conditions.False
	plan := o.Planning.Plan
	switch {
	case o.Planning.Pin.Reason != "":
		return notYet(o.Planning.Pin)
	case moed.Spec.Placement.PlanRef != nil && plan != nil && o.Inspection.Report != nil:
		plan = cmp.Or(o.Planning.PinnedTables, plan)
		return conditions.True("Pinned", fmt.Sprintf("spec.placement.planRef pins PlacementPlan %s (%s), which %s", plan.Name, plan.Status.Plan, planner.PlannedText(plan)))
	case o.unplanned() && o.ServingPlanning().Plan != nil && o.ServingPlanning().Plan.Status.PlanDigest != "":
		plan := o.ServingPlanning().Plan
		return conditions.True("Planned", fmt.Sprintf("PlacementPlan %s (%s) %s. The current spec has no plan yet", plan.Name, plan.Status.Plan, planner.PlannedText(plan)))
	case o.Invalid != nil && desired.UsesPlans(moed):
		return no(reasonSpecInvalid, "The plan waits for a valid spec. See the condition Degraded for the cause")
	case moed.Spec.Profiling == nil:
		return no("NoProfile", "A plan needs a profile. Set spec.profiling")
	case o.Inspection.Report != nil && o.Inspection.Report.Unprofilable != "":
		return no(planner.ReasonNotProfilable, "No plan can be made for the model. See the condition Profiled for the reason")
	case o.Inspection.Report == nil || !planner.Profiled(o.Planning.Profile, o.Inspection.Report.ModelDigest):
		return no("WaitingForProfile", "The plan waits for the profile of the model")
	case o.Planning.Hardware.Fault.Reason != "":
		return notYet(o.Planning.Hardware.Fault)
	case plan == nil && desired.Paused(moed):
		return no("Paused", "The plan is created once spec.reconciliation is Active")
	case plan == nil:
		return no("WaitingForPlan", "The plan is being created")
	case planner.Published(plan, moed, o.Inspection.Report.ModelDigest):
		reason := "Planned"
		if plan.Status.Verdict != semmoev1.VerdictGain {
			reason = string(plan.Status.Verdict)
		}
		text := fmt.Sprintf("PlacementPlan %s (%s) %s", plan.Name, plan.Status.Plan, planner.PlannedText(plan))
		if o.Replan.Reason != "" {
			text += ". " + o.Replan.Reason + ": " + o.Replan.Message
		}
		return conditions.True(reason, text)
	}
	return no(planner.ChildVerdict("PlacementPlan", plan.Name, plan.Status.Conditions, "Planning"))
}

func rolledOutVerdict(moed *semmoev1.MoEDeployment, o observation, complete bool) conditions.Verdict {
	no := func(reason, format string, args ...any) conditions.Verdict {
		return conditions.False(reason, fmt.Sprintf(format, args...))
	}
	p := o.Planning
	former := o.ServingPlanning().Serving
	switch {
	case o.unplanned() && former != nil:
		return no("NotInService", "Plan %s serves with revision %s; the current spec is not in service. See the conditions Progressing and Degraded for the cause", former.Short(), o.ServingRevision())
	case o.Change != nil && desired.Paused(moed):
		return no("Paused", "Revision %s is compared with revision %s once spec.reconciliation is Active", o.Revision, o.StableRevision())
	case o.Change != nil && o.Rollout.Reason == "": // an error occurred; Degraded reports it
		return no("WaitingForReplicas", "Revision %s waits for its canary next to revision %s", o.Revision, o.StableRevision())
	case o.Change != nil:
		return no(o.Rollout.Reason, "%s", o.Rollout.Message)
	case p.Hold.Reason != "":
		return notYet(p.Hold)
	case p.Candidate != nil && desired.Paused(moed):
		return no("Paused", "Plan %s starts its canary once spec.reconciliation is Active", p.Candidate.Short())
	case p.Candidate != nil && o.Rollout.Reason == "": // an error occurred; Degraded reports it
		return no("WaitingForReplicas", "Plan %s waits for its canary next to revision %s", p.Candidate.Short(), o.Revision)
	case p.Candidate != nil:
		return no(o.Rollout.Reason, "%s", o.Rollout.Message)
	case p.Serving == nil && former != nil:
		return no("RollingOut", "Plan %s serves with revision %s until revision %s, which has no plan, is ready", former.Short(), o.ServingRevision(), o.Revision)
	case p.Serving == nil:
		return no("NoPlan", "There is no plan to roll out")
	case p.Plan == nil || p.Plan.Status.PlanDigest != p.Serving.Digest:
		return no("WaitingForPlan", "Plan %s is in service; the plan for the current inputs is not ready yet", p.Serving.Short())
	case !complete && desired.Paused(moed):
		return no("Paused", "Plan %s is rolled out once spec.reconciliation is Active", p.Serving.Short())
	case !complete:
		return no("RollingOut", "Plan %s is being rolled out", p.Serving.Short())
	}
	return conditions.True("RolledOut", uniqueSentences(fmt.Sprintf("All replicas serve under plan %s, by %s%s", p.Serving.Short(), planner.RealizationText[p.Serving.Realization], p.Why)+p.Warnings+p.TablesText()+shuffleText(moed, o)))
}

// uniqueSentences removes repeated sentences from a text: two warnings may contain the same advice.
func uniqueSentences(text string) string {
	var sentences []string
	for _, sentence := range strings.Split(text, ". ") {
		if !slices.Contains(sentences, sentence) {
			sentences = append(sentences, sentence)
		}
	}
	return strings.Join(sentences, ". ")
}

// profilingFault returns the failure that a profile or plan reports, or that makes the referenced one unusable. The
// model serves anyway.
func profilingFault(moed *semmoev1.MoEDeployment, o observation) *conditions.Fault {
	if profile := profiledVerdict(moed, o); profile.Reason == planner.ReasonProfileNotFound || profile.Reason == planner.ReasonOtherModel {
		return &conditions.Fault{Reason: profile.Reason, Message: profile.Message}
	}
	if pin := o.Planning.Pin; slices.Contains(planner.PinFaults, pin.Reason) {
		return &conditions.Fault{Reason: pin.Reason, Message: pin.Message}
	}
	p := o.Planning
	if p.Hardware.Fault.Reason != "" {
		return &conditions.Fault{Reason: p.Hardware.Fault.Reason, Message: p.Hardware.Fault.Message}
	}
	if p.Hold.Reason == planner.ReasonOutputChanged {
		return &conditions.Fault{Reason: p.Hold.Reason, Message: p.Hold.Message}
	}
	var source []metav1.Condition
	kind, name := "", ""
	switch {
	case p.Plan != nil && meta.IsStatusConditionTrue(p.Plan.Status.Conditions, semmoev1.ConditionDegraded):
		kind, name, source = "PlacementPlan", p.Plan.Name, p.Plan.Status.Conditions
	case p.Profile != nil && meta.IsStatusConditionTrue(p.Profile.Status.Conditions, semmoev1.ConditionDegraded):
		kind, name, source = "AffinityProfile", p.Profile.Name, p.Profile.Status.Conditions
	default:
		return nil
	}
	degraded := meta.FindStatusCondition(source, semmoev1.ConditionDegraded)
	return &conditions.Fault{Reason: degraded.Reason, Message: fmt.Sprintf("%s %s: %s", kind, name, degraded.Message)}
}

// reshuffleStatus sums the cost of the checkpoint copies of a revision's pods. It returns nil if no pod reports a cost.
func reshuffleStatus(pods []*corev1.Pod, revision string) *semmoev1.ReshuffleStatus {
	var sum semmoev1.ReshuffleStatus
	for _, pod := range pods {
		if pod.Labels[semmoev1.LabelRevision] != revision || pod.DeletionTimestamp != nil {
			continue
		}
		result, ok := revisions.ReshuffleOf(pod)
		switch {
		case !ok:
			continue
		case result.Reused:
			sum.Found++
		default:
			sum.Made++
			sum.Bytes += result.Bytes
		}
		sum.Seconds = max(sum.Seconds, int64(math.Round(result.Seconds)))
	}
	if sum.Made+sum.Found == 0 {
		return nil
	}
	return &sum
}

// notYet returns a False verdict with the reason and message of a finding.
func notYet(why desired.Finding) conditions.Verdict {
	return conditions.False(why.Reason, why.Message)
}
