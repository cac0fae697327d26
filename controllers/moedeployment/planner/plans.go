package planner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/childobjects"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/kube/result"
	"github.com/semmoe/operator/internal/model/checkpoint"
)

// +kubebuilder:rbac:groups=semmoe.io,resources=affinityprofiles;placementplans,verbs=get;list;watch;create;delete
// +kubebuilder:rbac:groups=semmoe.io,resources=affinityprofiles;placementplans,verbs=patch
// +kubebuilder:rbac:groups=core,resources=configmaps,verbs=get;list;watch;create;patch;delete

// Planner creates profiles and plans, and selects among plans.
type Planner struct {
	client.Client
	// Live bypasses the cache, which may be out of date.
	Live client.Reader
	// Recorder records events when routers switch tables, and for objects created for drift.
	Recorder events.EventRecorder
	// HTTP requests the outputs of a model without a plan from engines.
	HTTP *http.Client
	// Now is the clock.
	Now func() time.Time
	// BatchSizes are the sizes that engines report; nil if they report none, or if the spec sets a size.
	BatchSizes []int32
}

// Plan creates the profile and the plan that the spec requests, deletes unneeded ones, and selects the plan to serve
// under. While paused, it creates and deletes nothing.
func (pl *Planner) Plan(ctx context.Context, moed *semmoev1.MoEDeployment, report checkpoint.Report, workloads []*revisions.Workload, pods []*corev1.Pod) (Planning, error) {
	modelDigest, release := report.ModelDigest, revisions.Release(moed, workloads)
	profiles, plans, err := pl.ownProfilesAndPlans(ctx, moed)
	if err != nil {
		return Planning{}, err
	}
	if !desired.UsesPlans(moed) && len(profiles)+len(plans) == 0 {
		return Planning{}, nil
	}
	active := !desired.Paused(moed)
	p := Planning{Plans: plans, BatchSizes: pl.BatchSizes}
	var refused error
	if p.Profile, p.ProfileName, err = pl.reconcileProfile(ctx, moed, modelDigest, active); IsRefused(err) {
		refused = err
	} else if err != nil {
		return p, err
	}
	if p.Hardware, err = pl.hardware(ctx, moed, plans); err != nil {
		return p, err
	}
	if Profiled(p.Profile, modelDigest) && p.Hardware.Known {
		if p.Base, err = pl.reconcilePlan(ctx, moed, p.Profile, report, release, p.Hardware.Digest, active, workloads); IsRefused(err) {
			refused = err
		} else if err != nil {
			return p, err
		}
	}
	p.Lineage = lineageOf(p.Base, profiles, plans)
	serving := ""
	if l := (&choice{moed: moed, report: report, workloads: workloads}).inService(); l != nil {
		serving = l.Digest
	}
	if p.Plan = p.Lineage.wanted(moed, p.Base, modelDigest, serving); moed.Spec.Placement.PlanRef != nil {
		if p.Plan, p.Pin, err = pl.reconcilePin(ctx, moed, modelDigest); err != nil {
			return p, err
		}
		if err := pl.followTables(ctx, moed, report, workloads, &p); err != nil {
			return p, err
		}
	}
	if desired.UsesPlans(moed) {
		changed, err := pl.recordChangedOutputs(ctx, workloads, pods, appendPlan(plans, p.Plan))
		if err != nil {
			return p, err
		}
		c := choice{moed: moed, report: report, release: release, wanted: p.Plan, pinned: p.PlanPinned(moed), workloads: workloads, changed: changed}
		if p.Serving, p.Candidate, p.Hold = c.chooseLayout(); p.Serving != nil || p.Candidate != nil {
			if c.answers, err = pl.reconcileAnswers(ctx, moed, report, workloads, pods, active); IsRefused(err) {
				refused = errors.Join(refused, err)
			} else if err != nil {
				return p, err
			}
			p.Serving, p.Candidate, p.Hold = c.chooseLayout()
		}
		p.Why, p.Warnings, p.Again = c.why(p.Serving), c.warnings(p.Serving), c.answers.Again
		if err := pl.reconcileTables(ctx, moed, modelDigest, &p, workloads, active); IsRefused(err) {
			refused = errors.Join(refused, err)
		} else if err != nil {
			return p, err
		}
		p.Promise = promiseOf(p.Serving, appendPlan(plans, p.Plan)...)
		if p.Tables != nil && p.Tables.Status.Forecast != nil { // a plan from token counts has no forecast
			p.Promise = p.Tables
		}
	}
	if !active {
		return p, refused
	}
	recordErr := pl.recordPlanned(ctx, p.Lineage)
	deleteErr := pl.deleteObsolete(ctx, moed, &p, profiles, workloads)
	return p, errors.Join(refused, recordErr, deleteErr)
}

// InService describes the profile and the plan of a serving workload, independent of the spec. It creates and deletes
// nothing. For a workload without a plan, the profile and the plan are the newest ones of the MoEDeployment.
func (pl *Planner) InService(ctx context.Context, moed *semmoev1.MoEDeployment, workload *revisions.Workload) (Planning, error) {
	profiles, plans, err := pl.ownProfilesAndPlans(ctx, moed)
	if err != nil {
		return Planning{}, err
	}
	newestFirst(profiles)
	p := Planning{Plans: plans, Serving: layoutIn(workload)}
	if p.Serving == nil {
		if len(plans) > 0 {
			p.Plan = plans[0]
		}
		if len(profiles) > 0 {
			p.Profile, p.ProfileName = profiles[0], profiles[0].Name
		}
		return p, nil
	}
	inUse, live, err := pl.tablesInUse(ctx, moed)
	if err != nil && !IsRefused(err) {
		return p, err
	}
	if live != nil {
		p.TablesSince = changedAt(live)
	}
	digests := maps.Clone(inUse)
	if digests[p.Serving.Digest] == "" {
		digests = map[string]string{p.Serving.Digest: p.Serving.Digest}
		maps.Copy(digests, inUse)
	}
	if p.InUse, err = pl.plansInUse(ctx, moed, plans, digests); err != nil {
		return p, err
	}
	p.keepTables(inUse)
	p.Plan = PlanWithDigest(p.Serving.Digest, p.InUse)
	if p.Promise = promiseOf(p.Serving, p.InUse...); p.Tables != nil && p.Tables.Status.Forecast != nil {
		p.Promise = p.Tables
	}
	if p.Plan != nil {
		p.ProfileName = p.Plan.Spec.ProfileRef.Name
		profile := &semmoev1.AffinityProfile{}
		if err := pl.Get(ctx, client.ObjectKey{Namespace: moed.Namespace, Name: p.ProfileName}, profile); err == nil {
			p.Profile = profile
		} else if !apierrors.IsNotFound(err) {
			return p, err
		}
	}
	return p, nil
}

// RefusedError reports that the API server rejects the creation or deletion of a profile, plan, baseline outputs or
// tables (by an admission rule or a quota), or that an object of another owner has the same name. Serving does not
// depend on these objects, so the planning returned with this error is valid.
type RefusedError struct{ error }

func (e *RefusedError) Unwrap() error { return e.error }

// refusable wraps an error as a RefusedError if a retry does not fix it.
func refusable(err error) error {
	if result.PermanentErrorText(err) == "" {
		return err
	}
	return &RefusedError{err}
}

// foreign returns a RefusedError for an object of another owner that has the name of a child.
func foreign(format string, args ...any) error {
	return &RefusedError{&result.ForeignError{Message: fmt.Sprintf(format, args...)}}
}

// IsRefused reports whether an error is or wraps a RefusedError.
func IsRefused(err error) bool {
	var refused *RefusedError
	return errors.As(err, &refused)
}

// make creates an object. The object may exist already but be missing in the cache.
func (pl *Planner) make(ctx context.Context, kind string, object client.Object) error {
	err := pl.Create(ctx, object, client.FieldOwner(desired.Manager))
	if err == nil || apierrors.IsAlreadyExists(err) {
		return nil
	}
	return refusable(fmt.Errorf("failed to create %s %s: %w", kind, object.GetName(), err))
}

// followTables replaces a pinned plan that contains only new tables by the plan with the layout that the tables are
// for, if it exists, of any owner: swapping tables restarts no pod. For the same reason, pods that serve under
// the pinned plan's own files keep them.
func (pl *Planner) followTables(ctx context.Context, moed *semmoev1.MoEDeployment, report checkpoint.Report, workloads []*revisions.Workload, p *Planning) error {
	if p.Plan == nil || p.Plan.Status.Tier != semmoev1.TierTables || p.Plan.Spec.Current == nil {
		return nil
	}
	if l := (&choice{moed: moed, report: report, workloads: workloads}).inService(); l != nil && isOf(p.Plan, l.Digest) {
		return nil
	}
	digest := p.Plan.Spec.Current.PlanDigest
	layout := PlanWithDigest(digest, appendPlan(p.Plans, p.Base))
	if layout == nil {
		others, err := pl.fittingPlans(ctx, moed, report.ModelDigest, workloads)
		if err != nil {
			return err
		}
		layout = PlanWithDigest(digest, others)
	}
	if layout != nil {
		p.PinnedTables, p.Plan = p.Plan, layout
	}
	return nil
}

// fittingPlans returns the plans of the namespace that can be served. Two plans may have the same digest, each with its
// own ConfigMap. Plans with a mounted ConfigMap come first, because another ConfigMap would restart the pods.
func (pl *Planner) fittingPlans(ctx context.Context, moed *semmoev1.MoEDeployment, modelDigest string, workloads []*revisions.Workload) ([]*semmoev1.PlacementPlan, error) {
	var list semmoev1.PlacementPlanList
	if err := pl.List(ctx, &list, client.InNamespace(moed.Namespace)); err != nil {
		return nil, fmt.Errorf("failed to list plans that tables may be for: %w", err)
	}
	var mounted, free []*semmoev1.PlacementPlan
	for i := range list.Items {
		plan := &list.Items[i]
		switch {
		case !Published(plan, moed, modelDigest) || CheckPin(moed, plan) != nil:
		case slices.ContainsFunc(workloads, func(w *revisions.Workload) bool { return mounts(w, plan) }):
			mounted = append(mounted, plan)
		default:
			free = append(free, plan)
		}
	}
	newestFirst(mounted)
	newestFirst(free)
	return append(mounted, free...), nil
}

// PlanPinned reports whether the spec pins the plan with the wanted layout, directly or by naming new tables for it.
func (p *Planning) PlanPinned(moed *semmoev1.MoEDeployment) bool {
	return p.PinnedTables != nil || Pinned(moed, p.Plan)
}

func (pl *Planner) ownProfilesAndPlans(ctx context.Context, moed *semmoev1.MoEDeployment) ([]*semmoev1.AffinityProfile, []*semmoev1.PlacementPlan, error) {
	var profileList semmoev1.AffinityProfileList
	var planList semmoev1.PlacementPlanList
	// List only own plans: with one plan per MoEDeployment in a namespace, the cost would grow with the square of their
	// number.
	ours := []client.ListOption{client.InNamespace(moed.Namespace), client.MatchingLabels{semmoev1.LabelDeployment: moed.Name}}
	if err := errors.Join(pl.List(ctx, &profileList, ours...), pl.List(ctx, &planList, ours...)); err != nil {
		return nil, nil, fmt.Errorf("failed to list profiles and plans: %w", err)
	}
	var profiles []*semmoev1.AffinityProfile
	for i := range profileList.Items {
		if profile := &profileList.Items[i]; metav1.IsControlledBy(profile, moed) {
			profiles = append(profiles, profile)
		}
	}
	var plans []*semmoev1.PlacementPlan
	for i := range planList.Items {
		if plan := &planList.Items[i]; metav1.IsControlledBy(plan, moed) {
			plans = append(plans, plan)
		}
	}
	newestFirst(plans)
	return profiles, plans, nil
}

// reconcileProfile returns the profile that plans are made from (nil if it does not exist yet), and its name.
func (pl *Planner) reconcileProfile(ctx context.Context, moed *semmoev1.MoEDeployment, modelDigest string, active bool) (*semmoev1.AffinityProfile, string, error) {
	wanted := profileFor(moed, modelDigest)
	name := ""
	switch {
	case wanted != nil:
		name = wanted.Name
	case moed.Spec.Profiling != nil:
		name = moed.Spec.Profiling.ProfileRef.Name
	default:
		return nil, "", nil
	}
	live := &semmoev1.AffinityProfile{}
	err := pl.Get(ctx, client.ObjectKey{Namespace: moed.Namespace, Name: name}, live)
	switch {
	case apierrors.IsNotFound(err) && wanted != nil && active:
		return nil, name, pl.make(ctx, "AffinityProfile", wanted)
	case apierrors.IsNotFound(err):
		return nil, name, nil
	case err != nil:
		return nil, name, err
	case wanted == nil:
		return live, name, nil
	case !metav1.IsControlledBy(live, moed):
		return nil, name, foreign("AffinityProfile %s exists and belongs to another owner: delete it, or name it in spec.profiling.profileRef", name)
	case active && live.DeletionTimestamp == nil && outdated(live, wanted):
		// A profile is immutable, so it is recreated: the engine's image or the template was wrong, or changed before
		// the profile was complete.
		if changed, err := childobjects.SpecChanged(ctx, pl.Live, moed); err != nil || changed {
			return live, name, err
		}
		return nil, name, deleteAll(ctx, pl.Client, []*semmoev1.AffinityProfile{live})
	}
	return live, name, nil
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

// reconcilePlan returns the plan made from the profile; nil if it does not exist yet.
func (pl *Planner) reconcilePlan(ctx context.Context, moed *semmoev1.MoEDeployment, profile *semmoev1.AffinityProfile, report checkpoint.Report, release engine.Release, hardwareDigest string, active bool, workloads []*revisions.Workload) (*semmoev1.PlacementPlan, error) {
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	if err != nil {
		return nil, err
	}
	wanted := planFor(moed, profile, planRealization(realizations(moed, report, release, adapter), report.Groups), hardwareDigest)
	// The name does not depend on the sizes: a plan keeps the sizes that it was created with.
	wanted.Spec.ObservedBatchTokens = pl.BatchSizes
	live := &semmoev1.PlacementPlan{}
	err = pl.Get(ctx, client.ObjectKeyFromObject(wanted), live)
	switch {
	case apierrors.IsNotFound(err) && active:
		return nil, pl.make(ctx, "PlacementPlan", wanted)
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, err
	case !metav1.IsControlledBy(live, moed):
		return nil, foreign("PlacementPlan %s exists and belongs to another owner: delete it", wanted.Name)
	case active && pl.outgrown(moed, live, workloads):
		return live, pl.recreatePlan(ctx, moed, live)
	}
	return live, nil
}

// outgrown reports whether to recreate the plan that the spec requests: its verdict was no gain, no workload serves
// under a plan, and engines compute other batch sizes than it was made for.
func (pl *Planner) outgrown(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan, workloads []*revisions.Workload) bool {
	lost := plan.Status.Verdict == semmoev1.VerdictNoGainExpected || plan.Status.Verdict == semmoev1.VerdictLocalityDoesNotPay
	cooldown := time.Duration(*moed.Spec.Drift.CooldownSeconds) * time.Second
	return lost && plan.DeletionTimestamp == nil && (Planning{Base: plan, BatchSizes: pl.BatchSizes}).BatchesMoved() &&
		moed.Spec.Placement.PlanRef == nil && *moed.Spec.Drift.MaxReplansPerDay > 0 && pl.Now().Sub(plan.CreationTimestamp.Time) >= cooldown &&
		!slices.ContainsFunc(workloads, func(w *revisions.Workload) bool { return layoutIn(w) != nil })
}

// recreatePlan deletes an unused plan, so that it is created again for the batch sizes that engines report then.
func (pl *Planner) recreatePlan(ctx context.Context, moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan) error {
	plans := []*semmoev1.PlacementPlan{plan}
	others, err := pl.neededByOthers(ctx, moed, plans)
	if err != nil || others.needPlan(plan) {
		return err
	}
	if changed, err := childobjects.SpecChanged(ctx, pl.Live, moed); err != nil || changed {
		return err
	}
	return deleteAll(ctx, pl.Client, plans)
}

// appendPlan appends a plan that the list may lack: a user-provided plan, or one that the cache does not contain yet.
func appendPlan(plans []*semmoev1.PlacementPlan, plan *semmoev1.PlacementPlan) []*semmoev1.PlacementPlan {
	if plan == nil || slices.ContainsFunc(plans, func(p *semmoev1.PlacementPlan) bool { return p.Name == plan.Name }) {
		return plans
	}
	return append(slices.Clone(plans), plan)
}

// deleteAll deletes the given versions of objects that it may delete.
func deleteAll[T client.Object](ctx context.Context, c client.Client, objects []T) error {
	var failed error
	for _, object := range objects {
		if object.GetDeletionTimestamp() != nil {
			continue
		}
		err := c.Delete(ctx, object, client.Preconditions{UID: new(object.GetUID())}, client.PropagationPolicy(metav1.DeletePropagationBackground))
		if client.IgnoreNotFound(err) != nil {
			failed = errors.Join(failed, refusable(fmt.Errorf("failed to delete %T %s: %w", object, object.GetName(), err)))
		}
	}
	return failed
}
