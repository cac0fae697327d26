// SPDX-License-Identifier: Apache-2.0

package planner

import (
	"errors"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/kube/writes"
)

// +kubebuilder:rbac:groups=semmoe.io,resources=affinityprofiles;placementplans,verbs=get;list;watch;create;delete
// +kubebuilder:rbac:groups=semmoe.io,resources=affinityprofiles;placementplans,verbs=patch
// +kubebuilder:rbac:groups=core,resources=configmaps,verbs=get;list;watch;create;patch;delete

// Decision is the decision on profiles, plans and tables.
type Decision struct {
	Planning
	// Question must be answered before the decision is complete; nil if it is.
	Question Question
	// Writes are the writes that bring the decision about, in order.
	Writes []writes.Write
	// Refused reports objects of other owners that are in the way, and rejected writes. The decision is valid anyway.
	Refused error
	// Err prevented the decision.
	Err error
}

// Decide decides which profile and plan the MoEDeployment needs, and which plan it is served under. Each step depends on the results of the steps before it.
func Decide(s *Snapshot) Decision {
	d := Decision{Planning: Planning{Plans: s.Plans, BatchSizes: s.BatchSizes}}
	if !desired.UsesPlans(s.Moed) && len(s.Profiles)+len(s.Plans) == 0 {
		return Decision{}
	}
	for _, step := range []func(*Decision, *Snapshot){
		(*Decision).decideProfile,
		(*Decision).decideBasePlan,
		(*Decision).decideWantedPlan,
		(*Decision).decideLayout,
		(*Decision).decideTables,
		(*Decision).recordPlanned,
		(*Decision).deleteObsolete, // last, when everything that is needed is known
	} {
		if step(&d, s); d.Question != nil || d.Err != nil {
			return d
		}
	}
	if desired.Paused(s.Moed) { // nothing is created or deleted, but no difference of outputs is lost
		d.Writes = slices.DeleteFunc(d.Writes, func(w writes.Write) bool {
			record, ok := w.(writes.Annotate)
			return !ok || !record.Required
		})
	}
	return d
}

// write appends a write.
func (d *Decision) write(w writes.Write) { d.Writes = append(d.Writes, w) }

// refuse adds the report of an object that is in the way.
func (d *Decision) refuse(err error) { d.Refused = errors.Join(d.Refused, err) }

// mayDelete reports whether objects may be deleted: the spec that does not need them is the latest one. It asks if
// this is unknown.
func (d *Decision) mayDelete(s *Snapshot) bool {
	if s.SpecLatest == nil {
		d.Question = LatestSpec{}
		return false
	}
	return *s.SpecLatest
}

// ProfileName returns the name of the profile that the spec requests or references; empty if there is none.
func ProfileName(moed *semmoev1.MoEDeployment, modelDigest string) string {
	wanted := profileFor(moed, modelDigest)
	switch {
	case wanted != nil:
		return wanted.Name
	case moed.Spec.Profiling != nil:
		return moed.Spec.Profiling.ProfileRef.Name
	}
	return ""
}

// decideProfile determines the profile that plans are made from (nil if it does not exist yet), and the hardware
// profile for which they are made.
func (d *Decision) decideProfile(s *Snapshot) {
	d.Hardware = hardwareOf(s.Moed, s.Hardware, s.HardwareFault, s.Plans)
	wanted, name := profileFor(s.Moed, s.Report.ModelDigest), ProfileName(s.Moed, s.Report.ModelDigest)
	if s.Report.Unprofilable != "" {
		wanted, name = nil, "" // the model is served without a plan
	}
	live := s.NamedProfiles[name]
	d.ProfileName = name
	active := !desired.Paused(s.Moed)
	switch {
	case name == "":
	case live == nil && wanted != nil:
		d.write(writes.Create{Object: wanted})
	case live == nil || wanted == nil:
		d.Profile = live
	case !metav1.IsControlledBy(live, s.Moed):
		d.refuse(writes.Foreign("AffinityProfile %s exists and belongs to another owner: delete it, or name it in spec.profiling.profileRef", name))
	case active && live.DeletionTimestamp == nil && outdated(live, wanted) && d.mayDelete(s):
		// A profile is immutable, so it is recreated: the engine's image or the template was wrong, or changed before
		// the profile was complete.
		d.write(writes.Delete{Object: live})
	default:
		d.Profile = live
	}
}

// outdated reports whether an incomplete profile was made for an older engine, template or size than in the spec. If
// the deployment itself serves the profiling requests, the engine settings do not affect the profiling Job: a running
// Job continues. A stalled Job is outdated, because it may have failed for these settings.
func outdated(live, wanted *semmoev1.AffinityProfile) bool {
	if meta.IsStatusConditionTrue(live.Status.Conditions, semmoev1.ConditionReady) {
		return false
	}
	made := live.Spec.DeepCopy()
	if wanted.Spec.Target == semmoev1.ProfilingTargetServing && !meta.IsStatusConditionTrue(live.Status.Conditions, semmoev1.ConditionStalled) {
		made.Parallelism, made.Engine = wanted.Spec.Parallelism, wanted.Spec.Engine
		made.Engine.Type, made.Engine.Port = live.Spec.Engine.Type, live.Spec.Engine.Port
	}
	return !equality.Semantic.DeepEqual(*made, wanted.Spec)
}

// decideBasePlan determines the plan made from the profile; nil if it does not exist yet.
func (d *Decision) decideBasePlan(s *Snapshot) {
	if !Profiled(d.Profile, s.Report.ModelDigest) || !d.Hardware.Known {
		return
	}
	adapter, err := registry.For(string(s.Moed.Spec.Engine.Type))
	if err != nil {
		d.Err = err
		return
	}
	possible := realizations(s.Moed, *s.Report, s.release(), adapter)
	wanted := planFor(s.Moed, d.Profile, planRealization(possible, s.Report.Groups), d.Hardware.Digest)
	// The name does not depend on the sizes: a plan keeps the sizes that it was created with.
	wanted.Spec.ObservedBatchTokens = s.BatchSizes
	live, known := s.planNamed(wanted.Name)
	switch {
	case !known:
		d.Question = PlanNamed{wanted.Name}
	case live == nil:
		d.write(writes.Create{Object: wanted})
	case !metav1.IsControlledBy(live, s.Moed):
		d.refuse(writes.Foreign("PlacementPlan %s exists and belongs to another owner: delete it", wanted.Name))
	default:
		if d.Base = live; !desired.Paused(s.Moed) && outgrown(s, live) {
			d.recreatePlan(s, live)
		}
	}
}

// planNamed returns the plan with this name, of any owner, and whether it is known.
func (s *Snapshot) planNamed(name string) (*semmoev1.PlacementPlan, bool) {
	for _, plan := range s.Plans {
		if plan.Name == name {
			return plan, true
		}
	}
	plan, known := s.NamedPlans[name]
	return plan, known
}

// outgrown reports whether to recreate the plan that the spec requests: its verdict was no gain, no workload serves
// under a plan, and engines compute other batch sizes than it was made for.
func outgrown(s *Snapshot, plan *semmoev1.PlacementPlan) bool {
	lost := plan.Status.Verdict == semmoev1.VerdictNoGainExpected || plan.Status.Verdict == semmoev1.VerdictLocalityDoesNotPay
	cooldown := time.Duration(*s.Moed.Spec.Drift.CooldownSeconds) * time.Second
	return lost && plan.DeletionTimestamp == nil && (Planning{Base: plan, BatchSizes: s.BatchSizes}).BatchesMoved() &&
		s.Moed.Spec.Placement.PlanRef == nil && *s.Moed.Spec.Drift.MaxReplansPerDay > 0 && s.Now.Sub(plan.CreationTimestamp.Time) >= cooldown &&
		!slices.ContainsFunc(s.Workloads, func(w *revisions.Workload) bool { return LayoutIn(w) != nil })
}

// recreatePlan deletes an unused plan, so that it is created again for the batch sizes that engines report then.
func (d *Decision) recreatePlan(s *Snapshot, plan *semmoev1.PlacementPlan) {
	if s.References == nil || !s.References.pods {
		d.Question = ReferencesOfOthers{Pods: true}
		return
	}
	if !s.References.needPlan(plan) && d.mayDelete(s) {
		d.write(writes.Delete{Object: plan})
	}
}

// decideWantedPlan determines the plan with the wanted layout: the pinned plan, or the newest one made for drift, or
// the plan that the spec requests.
func (d *Decision) decideWantedPlan(s *Snapshot) {
	d.Lineage = lineageOf(d.Base, s.Profiles, s.Plans)
	inService := (&choice{moed: s.Moed, report: *s.Report, workloads: s.Workloads}).inService()
	if s.Moed.Spec.Placement.PlanRef == nil {
		serving := ""
		if inService != nil {
			serving = inService.Digest
		}
		d.Plan = d.Lineage.wanted(s.Moed, d.Base, s.Report.ModelDigest, serving)
		return
	}
	pinned := s.NamedPlans[s.Moed.Spec.Placement.PlanRef.Name]
	if d.Pin = pinFault(s.Moed, pinned, s.Report.ModelDigest); d.Pin.Reason == "" {
		d.Plan = pinned
		d.followTables(s, inService)
	}
}

// followTables replaces a pinned plan that contains only new tables by the plan with the layout that the tables are
// for, if it exists, of any owner: swapping tables restarts no pod. For the same reason, pods that serve under
// the pinned plan's own files keep them.
func (d *Decision) followTables(s *Snapshot, inService *revisions.Layout) {
	if d.Plan.Status.Tier != semmoev1.TierTables || d.Plan.Spec.Current == nil || inService != nil && isOf(d.Plan, inService.Digest) {
		return
	}
	digest := d.Plan.Spec.Current.PlanDigest
	layout := PlanWithDigest(digest, appendPlan(s.Plans, d.Base))
	if layout == nil {
		if s.OtherPlans == nil {
			d.Question = EveryPlan{}
			return
		}
		layout = PlanWithDigest(digest, fittingPlans(s))
	}
	if layout != nil {
		d.PinnedTables, d.Plan = d.Plan, layout
	}
}

// fittingPlans returns the plans of the namespace that can be served. Two plans may have the same digest, each with its
// own ConfigMap. Plans with a mounted ConfigMap come first, because another ConfigMap would restart the pods.
func fittingPlans(s *Snapshot) []*semmoev1.PlacementPlan {
	var mounted, free []*semmoev1.PlacementPlan
	for _, plan := range *s.OtherPlans {
		switch {
		case !Published(plan, s.Moed, s.Report.ModelDigest) || CheckPin(s.Moed, plan) != nil:
		case slices.ContainsFunc(s.Workloads, func(w *revisions.Workload) bool { return mounts(w, plan) }):
			mounted = append(mounted, plan)
		default:
			free = append(free, plan)
		}
	}
	NewestFirst(mounted)
	NewestFirst(free)
	return append(mounted, free...)
}

// decideLayout determines the layout to serve under, and the candidate for a canary.
func (d *Decision) decideLayout(s *Snapshot) {
	if !desired.UsesPlans(s.Moed) {
		return
	}
	c := choice{
		moed: s.Moed, report: *s.Report, release: s.release(), wanted: d.Plan, pinned: d.PlanPinned(s.Moed), workloads: s.Workloads,
		changed: d.recordChangedOutputs(s),
	}
	if d.decideOverlap(s, &c); d.Question != nil || d.Err != nil {
		return
	}
	if d.Serving, d.Candidate, d.Hold = c.chooseLayout(); d.Serving != nil || d.Candidate != nil {
		if c.answers = d.baselineOutputs(s); d.Question != nil {
			return
		}
		d.Serving, d.Candidate, d.Hold = c.chooseLayout()
	}
	d.Why, d.Warnings, d.Again = c.why(d.Serving), c.warnings(d.Serving), c.answers.Again
}

// recordPlanned records on profiles that a plan was made from them. The record outlives the plan: after its deletion,
// no other plan is made in its place. The record is written once the plan is in the cache; until then, the plan's name
// prevents a second one.
func (d *Decision) recordPlanned(*Snapshot) {
	for _, profile := range d.Lineage.profiles {
		i := slices.IndexFunc(d.Lineage.plans, func(plan *semmoev1.PlacementPlan) bool { return plan.Spec.ProfileRef.Name == profile.Name })
		if i >= 0 && profile.Annotations[semmoev1.AnnotationPlanned] == "" {
			d.write(writes.Annotate{Object: profile, Annotations: map[string]string{semmoev1.AnnotationPlanned: d.Lineage.plans[i].Name}})
		}
	}
}

// appendPlan appends a plan that the list may lack: a user-provided plan, or one that the cache does not contain yet.
func appendPlan(plans []*semmoev1.PlacementPlan, plan *semmoev1.PlacementPlan) []*semmoev1.PlacementPlan {
	if plan == nil || slices.ContainsFunc(plans, func(p *semmoev1.PlacementPlan) bool { return p.Name == plan.Name }) {
		return plans
	}
	return append(slices.Clone(plans), plan)
}

// PlansWithDigest returns the plans with a layout of the given digest; none for an empty digest.
func (p *Planning) PlansWithDigest(digest string) []*semmoev1.PlacementPlan {
	return slices.DeleteFunc(slices.Clone(appendPlan(p.Plans, p.Plan)), func(plan *semmoev1.PlacementPlan) bool {
		return digest == "" || plan.Status.PlanDigest != digest
	})
}

// PlanPinned reports whether the spec pins the plan with the wanted layout, directly or by naming new tables for it.
func (p *Planning) PlanPinned(moed *semmoev1.MoEDeployment) bool {
	return p.PinnedTables != nil || Pinned(moed, p.Plan)
}

// InService describes the profile and the plan of a serving workload, independent of the spec. For a workload without a
// plan, the profile and the plan are the newest ones of the MoEDeployment.
func InService(s *Snapshot, workload *revisions.Workload) (Planning, Question) {
	p := Planning{Plans: s.Plans, Serving: LayoutIn(workload)}
	if p.Serving == nil {
		profiles := slices.Clone(s.Profiles)
		NewestFirst(profiles)
		if len(s.Plans) > 0 {
			p.Plan = s.Plans[0]
		}
		if len(profiles) > 0 {
			p.Profile, p.ProfileName = profiles[0], profiles[0].Name
		}
		return p, nil
	}
	inUse := s.tablesInUse()
	p.TablesSince = s.tablesSince()
	digests := map[string]string{p.Serving.Digest: p.Serving.Digest}
	maps.Copy(digests, inUse)
	var question Question
	if p.InUse, question = s.plansInUse(digests); question != nil {
		return p, question
	}
	p.keepTables(inUse)
	p.Plan = PlanWithDigest(p.Serving.Digest, p.InUse)
	p.Promise = p.promise(p.InUse)
	if p.Plan == nil {
		return p, nil
	}
	p.ProfileName = p.Plan.Spec.ProfileRef.Name
	profile, known := s.NamedProfiles[p.ProfileName]
	if !known {
		return p, ProfileNamed{p.ProfileName}
	}
	p.Profile = profile
	return p, nil
}
