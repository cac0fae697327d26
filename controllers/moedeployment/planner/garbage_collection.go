// SPDX-License-Identifier: Apache-2.0

package planner

import (
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/writes"
)

// deleteObsolete deletes operator-managed profiles and plans that neither this MoEDeployment nor other objects in the
// namespace need. It removes the profiles from the lineage, so that no plan is made from them.
func (d *Decision) deleteObsolete(s *Snapshot) {
	if desired.Paused(s.Moed) {
		return
	}
	plans := obsoletePlans(s.Moed, s.Plans, d.Planning, s.Workloads, s.Now)
	if len(plans)+len(obsoleteProfiles(s.Profiles, d.Planning, without(s.Plans, plans), s.Now)) == 0 {
		return // ask about other objects only if there is something to delete
	}
	if s.References == nil || len(plans) > 0 && !s.References.pods {
		d.Question = ReferencesOfOthers{Pods: len(plans) > 0}
		return
	}
	plans = slices.DeleteFunc(plans, s.References.needPlan)
	profiles := slices.DeleteFunc(obsoleteProfiles(s.Profiles, d.Planning, without(s.Plans, plans), s.Now), func(profile *semmoev1.AffinityProfile) bool {
		return s.References.needProfile(profile) || s.Undeletable[profile.Name] // not deleted: the next profile is its successor
	})
	if len(plans)+len(profiles) == 0 || !d.mayDelete(s) {
		return
	}
	for _, plan := range plans {
		d.write(writes.Delete{Object: plan})
	}
	for _, profile := range profiles {
		d.write(writes.Delete{Object: profile})
	}
	d.Lineage.profiles = without(d.Lineage.profiles, profiles)
}

// ReferenceSet contains the references of other objects in a namespace to profiles and plans.
type ReferenceSet struct {
	// pinned are the plans that MoEDeployments pin. profiles are the profiles that MoEDeployments, and PlacementPlans
	// of other owners, reference.
	pinned, profiles map[string]bool
	// layouts are the digests of the plans with the layouts that the pinned tables are for.
	layouts map[string]bool
	// configMaps are the ConfigMaps that pods mount, if pods is set.
	configMaps []string
	pods       bool
}

func (o *ReferenceSet) needPlan(plan *semmoev1.PlacementPlan) bool {
	return o.pinned[plan.Name] || o.layouts[plan.Status.PlanDigest] || slices.ContainsFunc(o.configMaps, func(name string) bool { return ofPlan(name, plan) })
}

func (o *ReferenceSet) needProfile(profile *semmoev1.AffinityProfile) bool {
	return o.profiles[profile.Name]
}

// NewReferenceSet collects the references in the MoEDeployments and plans of a namespace, and in its pods if pods is
// not nil.
func NewReferenceSet(moed *semmoev1.MoEDeployment, moeds []semmoev1.MoEDeployment, plans []semmoev1.PlacementPlan, pods *corev1.PodList) *ReferenceSet {
	o := &ReferenceSet{pinned: map[string]bool{}, profiles: map[string]bool{}, layouts: map[string]bool{}}
	for i := range moeds {
		other := &moeds[i]
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
	for i := range plans {
		plan := &plans[i]
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
	if pods != nil {
		o.pods = true
		for i := range pods.Items {
			o.configMaps = append(o.configMaps, mountedBy(&pods.Items[i])...)
		}
	}
	return o
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
func (p *Planning) keeps(object metav1.Object, now time.Time) bool {
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
