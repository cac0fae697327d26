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
	"github.com/semmoe/operator/controllers/moedeployment/childobjects"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
)

// deleteObsolete deletes operator-managed profiles and plans that neither this MoEDeployment nor other objects in the
// namespace need. It removes deleted profiles from the lineage, so that no plan is made from them.
func (pl *Planner) deleteObsolete(ctx context.Context, moed *semmoev1.MoEDeployment, p *Planning, profiles []*semmoev1.AffinityProfile, workloads []*revisions.Workload) error {
	now := pl.Now()
	plans := obsoletePlans(moed, p.Plans, *p, workloads, now)
	if len(plans)+len(obsoleteProfiles(profiles, *p, without(p.Plans, plans), now)) == 0 {
		return nil // read other objects only if there is something to delete
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
	if changed, err := childobjects.SpecChanged(ctx, pl.Live, moed); err != nil || changed {
		return err
	}
	failed := deleteAll(ctx, pl.Client, plans)
	for i := range old {
		gone := old[i : i+1]
		if err := deleteAll(ctx, pl.Client, gone); err != nil {
			failed = errors.Join(failed, err) // not deleted: the next profile is its successor
			continue
		}
		p.Lineage.profiles = without(p.Lineage.profiles, gone)
	}
	return failed
}

// others are the references of other objects in a namespace to profiles and plans.
type others struct {
	// pinned are the plans that MoEDeployments pin. profiles are the profiles that MoEDeployments, and PlacementPlans
	// of other owners, reference.
	pinned, profiles map[string]bool
	// layouts are the digests of the plans with the layouts that the pinned tables are for.
	layouts map[string]bool
	// configMaps are the ConfigMaps that pods mount.
	configMaps []string
}

func (o others) needPlan(plan *semmoev1.PlacementPlan) bool {
	return o.pinned[plan.Name] || o.layouts[plan.Status.PlanDigest] || slices.ContainsFunc(o.configMaps, func(name string) bool { return ofPlan(name, plan) })
}

func (o others) needProfile(profile *semmoev1.AffinityProfile) bool { return o.profiles[profile.Name] }

// neededByOthers reads the references of other objects to profiles and plans. It reads pods without the cache, which
// contains only the operator's pods, and only if a plan is to be deleted.
func (pl *Planner) neededByOthers(ctx context.Context, moed *semmoev1.MoEDeployment, plans []*semmoev1.PlacementPlan) (others, error) {
	o := others{pinned: map[string]bool{}, profiles: map[string]bool{}, layouts: map[string]bool{}}
	var moeds semmoev1.MoEDeploymentList
	var made semmoev1.PlacementPlanList
	here := client.InNamespace(moed.Namespace)
	if err := errors.Join(pl.List(ctx, &moeds, here, client.UnsafeDisableDeepCopy), pl.List(ctx, &made, here, client.UnsafeDisableDeepCopy)); err != nil {
		return o, fmt.Errorf("failed to list the users of profiles and plans: %w", err)
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
		return o, fmt.Errorf("failed to list pods that mount plans: %w", err)
	}
	for i := range pods.Items {
		o.configMaps = append(o.configMaps, mountedBy(&pods.Items[i])...)
	}
	return o, nil
}

// mountedBy returns the ConfigMaps that a pod mounts; none for a terminated pod.
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

// needs reports whether the spec wants a plan, whether it is the latest result of drift, or whether the routers use it.
func (p *Planning) needs(plan *semmoev1.PlacementPlan) bool {
	for _, needed := range append([]*semmoev1.PlacementPlan{p.Plan, p.Base, p.Tables}, p.Lineage.plans[:min(1, len(p.Lineage.plans))]...) {
		if needed != nil && needed.Name == plan.Name {
			return true
		}
	}
	return slices.Contains(p.Named, plan.Name)
}

// baseUnknown reports whether the spec wants a base plan that is unknown, for example because its profile is not
// complete or its status was lost. The plans made for drift since then are then unknown too.
func (p *Planning) baseUnknown() bool { return p.Base == nil && p.ProfileName != "" }

// obsoletePlans returns the operator-managed plans that the MoEDeployment does not need: not wanted by the spec, not
// recently made for drift, and not used by a workload. While the base plan is unknown, it keeps the plans of its
// profile and the plans made for drift, with their records of failures.
func obsoletePlans(moed *semmoev1.MoEDeployment, plans []*semmoev1.PlacementPlan, p Planning, workloads []*revisions.Workload, now time.Time) []*semmoev1.PlacementPlan {
	return slices.DeleteFunc(slices.Clone(plans), func(plan *semmoev1.PlacementPlan) bool {
		unknown := p.Plan == nil && p.ProfileName != "" && p.ProfileName == plan.Spec.ProfileRef.Name
		wanted := p.needs(plan) || unknown || p.keeps(plan, now) || Pinned(moed, plan)
		return plan.DeletionTimestamp != nil || wanted || slices.ContainsFunc(workloads, func(w *revisions.Workload) bool { return mounts(w, plan) })
	})
}

// keeps reports whether a profile or plan was made for drift recently, or whether its state is unknown.
func (p *Planning) keeps(object client.Object, now time.Time) bool {
	return recentReplan(object, now) || p.baseUnknown() && object.GetLabels()[semmoev1.LabelBase] != ""
}

// mounts reports whether the pods of a workload mount the plan's ConfigMap, which would be deleted with the plan.
func mounts(workload *revisions.Workload, plan *semmoev1.PlacementPlan) bool {
	return slices.ContainsFunc(workload.Template().Spec.Volumes, func(v corev1.Volume) bool {
		return v.Name == semmoev1.PlanVolume && v.ConfigMap != nil && ofPlan(v.ConfigMap.Name, plan)
	})
}

// ofPlan reports whether a ConfigMap belongs to a plan. Its name starts with the plan's name, so this works without the
// plan's status.
func ofPlan(configMap string, plan *semmoev1.PlacementPlan) bool {
	return strings.HasPrefix(configMap, plan.Name+"-")
}

// obsoleteProfiles returns the operator-managed profiles that neither the spec nor a kept plan references, and that
// were not made for drift recently.
func obsoleteProfiles(profiles []*semmoev1.AffinityProfile, p Planning, kept []*semmoev1.PlacementPlan, now time.Time) []*semmoev1.AffinityProfile {
	return slices.DeleteFunc(slices.Clone(profiles), func(profile *semmoev1.AffinityProfile) bool {
		return profile.DeletionTimestamp != nil || profile.Name == p.ProfileName || p.keeps(profile, now) || slices.ContainsFunc(kept, func(plan *semmoev1.PlacementPlan) bool {
			prior := plan.Spec.PriorProfileRef
			return plan.Spec.ProfileRef.Name == profile.Name || prior != nil && prior.Name == profile.Name
		})
	})
}

// without returns the elements of all that are not in some.
func without[T comparable](all, some []T) []T {
	return slices.DeleteFunc(slices.Clone(all), func(one T) bool { return slices.Contains(some, one) })
}
