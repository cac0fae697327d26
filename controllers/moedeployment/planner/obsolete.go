package planner

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
)

// deleteObsolete deletes profiles and plans of ours that nothing needs: neither this MoEDeployment nor, as far as the namespace tells,
// anybody else. No plan is to be made from a profile that goes: the lineage is left without it.
func (pl *Planner) deleteObsolete(ctx context.Context, moed *semmoev1.MoEDeployment, p *Planning, profiles []*semmoev1.AffinityProfile, workloads []*revisions.Workload) error {
	now := pl.Now()
	plans := obsoletePlans(moed, p.Plans, *p, workloads, now)
	if len(plans)+len(obsoleteProfiles(profiles, *p, without(p.Plans, plans), now)) == 0 {
		return nil // others are asked only where something is to go
	}
	others, err := pl.neededByOthers(ctx, moed, plans)
	if err != nil {
		return err
	}
	plans = slices.DeleteFunc(plans, others.needPlan)
	old := slices.DeleteFunc(obsoleteProfiles(profiles, *p, without(p.Plans, plans), now), others.needProfile)
	if len(plans)+len(old) == 0 {
		return nil
	}
	if changed, err := desired.SpecChanged(ctx, pl.Live, moed); err != nil || changed {
		return err
	}
	failed := deleteAll(ctx, pl.Client, plans)
	for i := range old {
		gone := old[i : i+1]
		if err := deleteAll(ctx, pl.Client, gone); err != nil {
			failed = errors.Join(failed, err) // it stays, and the next profile is one after it
			continue
		}
		p.Lineage.profiles = without(p.Lineage.profiles, gone)
	}
	return failed
}

// others are what else in a namespace names profiles and plans.
type others struct {
	// pinned are the plans that MoEDeployments pin, profiles the profiles that MoEDeployments and PlacementPlans of others name.
	pinned, profiles map[string]bool
	// layouts are the digests of the plans whose layouts the tables of pinned plans are for.
	layouts map[string]bool
	// configMaps are what pods mount.
	configMaps []string
}

func (o others) needPlan(plan *semmoev1.PlacementPlan) bool {
	return o.pinned[plan.Name] || o.layouts[plan.Status.PlanDigest] || slices.ContainsFunc(o.configMaps, func(name string) bool { return ofPlan(name, plan) })
}

func (o others) needProfile(profile *semmoev1.AffinityProfile) bool { return o.profiles[profile.Name] }

// neededByOthers reads what else names profiles and plans. Pods are read past the cache, which has those of the operator alone, and only
// where a plan is to go.
func (pl *Planner) neededByOthers(ctx context.Context, moed *semmoev1.MoEDeployment, plans []*semmoev1.PlacementPlan) (others, error) {
	o := others{pinned: map[string]bool{}, profiles: map[string]bool{}, layouts: map[string]bool{}}
	var moeds semmoev1.MoEDeploymentList
	var made semmoev1.PlacementPlanList
	here := client.InNamespace(moed.Namespace)
	if err := errors.Join(pl.List(ctx, &moeds, here, client.UnsafeDisableDeepCopy), pl.List(ctx, &made, here, client.UnsafeDisableDeepCopy)); err != nil {
		return o, fmt.Errorf("list what names profiles and plans: %w", err)
	}
	for i := range moeds.Items {
		other := &moeds.Items[i]
		if other.UID == moed.UID {
			continue
		}
		if ref := other.Spec.Placement.PlanRef; ref != nil {
			o.pinned[ref.Name] = true
		}
		if profiling := other.Spec.Profiling; profiling != nil && profiling.ProfileRef != nil {
			o.profiles[profiling.ProfileRef.Name] = true
		}
	}
	for i := range made.Items {
		plan := &made.Items[i]
		if o.pinned[plan.Name] && plan.Status.Tier == semmoev1.TierTables && plan.Spec.Current != nil {
			o.layouts[plan.Spec.Current.PlanDigest] = true
		}
		if plan.Labels[semmoev1.LabelDeployment] != moed.Name {
			o.profiles[plan.Spec.ProfileRef.Name] = true
			if prior := plan.Spec.PriorProfileRef; prior != nil {
				o.profiles[prior.Name] = true
			}
		}
	}
	if len(plans) == 0 {
		return o, nil
	}
	var pods corev1.PodList
	if err := pl.Live.List(ctx, &pods, here); err != nil {
		return o, fmt.Errorf("list pods that mount plans: %w", err)
	}
	for i := range pods.Items {
		o.configMaps = append(o.configMaps, mountedBy(&pods.Items[i])...)
	}
	return o, nil
}

// mountedBy are the ConfigMaps that a pod mounts; none of a pod that has ended.
func mountedBy(pod *corev1.Pod) []string {
	if pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
		return nil
	}
	var names []string
	for _, volume := range pod.Spec.Volumes {
		if volume.ConfigMap != nil {
			names = append(names, volume.ConfigMap.Name)
		}
		if volume.Projected != nil {
			for _, source := range volume.Projected.Sources {
				if source.ConfigMap != nil {
					names = append(names, source.ConfigMap.Name)
				}
			}
		}
	}
	return names
}

// needs tells that a plan is asked for, is what drift has led to last, or is named to the routers.
func (p *Planning) needs(plan *semmoev1.PlacementPlan) bool {
	for _, needed := range append([]*semmoev1.PlacementPlan{p.Plan, p.Base, p.Tables}, p.Lineage.plans[:min(1, len(p.Lineage.plans))]...) {
		if needed != nil && needed.Name == plan.Name {
			return true
		}
	}
	return slices.Contains(p.Named, plan.Name)
}

// baseUnknown tells that a base plan is asked for that is not known, as while its profile is not complete, or after its status was lost:
// which plans drift has led to since is not known then either.
func (p *Planning) baseUnknown() bool { return p.Base == nil && p.ProfileName != "" }

// obsoletePlans are plans of ours that nothing of ours needs: not asked for, not made for a drift of late, and named by no workload.
// While the base plan is not known, plans of its profile, and those that drift has led to, are kept, and with them what they have
// failed at.
func obsoletePlans(moed *semmoev1.MoEDeployment, plans []*semmoev1.PlacementPlan, p Planning, workloads []*revisions.Workload, now time.Time) []*semmoev1.PlacementPlan {
	return slices.DeleteFunc(slices.Clone(plans), func(plan *semmoev1.PlacementPlan) bool {
		unknown := p.Plan == nil && p.ProfileName != "" && p.ProfileName == plan.Spec.ProfileRef.Name
		wanted := p.needs(plan) || unknown || p.keeps(plan, now) || Pinned(moed, plan)
		return plan.DeletionTimestamp != nil || wanted || slices.ContainsFunc(workloads, func(w *revisions.Workload) bool { return mounts(w, plan) })
	})
}

// keeps tells of a profile or plan that was made for a drift that it was of late, or that it is not known whether it still counts.
func (p *Planning) keeps(object client.Object, now time.Time) bool {
	return recentReplan(object, now) || p.baseUnknown() && object.GetLabels()[semmoev1.LabelBase] != ""
}

// mounts tells that a workload's pods mount the plan's ConfigMap, which would go with the plan.
func mounts(workload *revisions.Workload, plan *semmoev1.PlacementPlan) bool {
	return slices.ContainsFunc(workload.Template().Spec.Volumes, func(v corev1.Volume) bool {
		return v.Name == semmoev1.PlanVolume && v.ConfigMap != nil && ofPlan(v.ConfigMap.Name, plan)
	})
}

// ofPlan tells that a ConfigMap is a plan's. Its name begins with the plan's, so that this holds also while the plan's status is not known.
func ofPlan(configMap string, plan *semmoev1.PlacementPlan) bool {
	return strings.HasPrefix(configMap, plan.Name+"-")
}

// obsoleteProfiles are profiles of ours that neither the spec nor a plan that is kept names, and that were not made for a drift of
// late.
func obsoleteProfiles(profiles []*semmoev1.AffinityProfile, p Planning, kept []*semmoev1.PlacementPlan, now time.Time) []*semmoev1.AffinityProfile {
	return slices.DeleteFunc(slices.Clone(profiles), func(profile *semmoev1.AffinityProfile) bool {
		return profile.DeletionTimestamp != nil || profile.Name == p.ProfileName || p.keeps(profile, now) || slices.ContainsFunc(kept, func(plan *semmoev1.PlacementPlan) bool {
			prior := plan.Spec.PriorProfileRef
			return plan.Spec.ProfileRef.Name == profile.Name || prior != nil && prior.Name == profile.Name
		})
	})
}

// without are all but for some.
func without[T comparable](all, some []T) []T {
	return slices.DeleteFunc(slices.Clone(all), func(one T) bool { return slices.Contains(some, one) })
}
