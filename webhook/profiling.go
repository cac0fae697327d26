// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"context"
	"fmt"

	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/affinityprofile"
	"github.com/semmoe/operator/internal/calibration/machines"
)

// affinityProfiles validates AffinityProfiles.
type affinityProfiles struct{ client.Reader }

func (a *affinityProfiles) refuse(_ context.Context, profile *semmoev1.AffinityProfile) []error {
	if err := affinityprofile.Validate(profile); err != nil {
		return []error{err}
	}
	return nil
}

func (a *affinityProfiles) warn(ctx context.Context, profile *semmoev1.AffinityProfile) []string {
	var warnings []string
	if ref := profile.Spec.DeploymentRef; ref != nil {
		warnings = missing(ctx, a.Reader, &semmoev1.MoEDeployment{}, "MoEDeployment", "spec.deploymentRef.name", profile.Namespace, ref.Name)
	}
	if live := profile.Spec.Live; live != nil {
		warnings = append(warnings, missing(ctx, a.Reader, &semmoev1.AffinityProfile{}, "AffinityProfile", "spec.live.priorProfileRef.name", profile.Namespace, live.PriorProfileRef.Name)...)
	}
	return warnings
}

// warnDelete returns a warning if a MoEDeployment uses the profile, because devices were used to record it.
func (a *affinityProfiles) warnDelete(ctx context.Context, profile *semmoev1.AffinityProfile) []string {
	return users(ctx, a.Reader, profile.Namespace, func(moed *semmoev1.MoEDeployment) string {
		if moed.Status.Profile != profile.Name {
			return ""
		}
		return fmt.Sprintf("MoEDeployment %s uses this profile: its pods continue to serve, and the model is profiled again unless the artifact store still has the result", moed.Name)
	})
}

// placementPlans validates PlacementPlans.
type placementPlans struct{ client.Reader }

// refuse returns an error for an unknown built-in hardware profile, which the schema cannot detect. The schema detects
// all other errors.
func (p *placementPlans) refuse(_ context.Context, plan *semmoev1.PlacementPlan) []error {
	if _, err := machines.BuiltIn(plan.Spec.Hardware); err != nil {
		return []error{fmt.Errorf("spec.hardware.%w", err)}
	}
	return nil
}

func (p *placementPlans) warn(ctx context.Context, plan *semmoev1.PlacementPlan) []string {
	warnings := missing(ctx, p.Reader, &semmoev1.AffinityProfile{}, "AffinityProfile", "spec.profileRef.name", plan.Namespace, plan.Spec.ProfileRef.Name)
	if prior := plan.Spec.PriorProfileRef; prior != nil {
		warnings = append(warnings, missing(ctx, p.Reader, &semmoev1.AffinityProfile{}, "AffinityProfile", "spec.priorProfileRef.name", plan.Namespace, prior.Name)...)
	}
	return warnings
}

// warnDelete returns a warning if a MoEDeployment uses the plan. Workloads outlive their plan, because they also own
// its ConfigMap, but the predicted rate of the plan is lost.
func (p *placementPlans) warnDelete(ctx context.Context, plan *semmoev1.PlacementPlan) []string {
	return users(ctx, p.Reader, plan.Namespace, func(moed *semmoev1.MoEDeployment) string {
		ref := moed.Spec.Placement.PlanRef
		switch {
		case ref != nil && ref.Name == plan.Name:
			return fmt.Sprintf("MoEDeployment %s pins this plan in spec.placement.planRef: existing and new pods continue to serve it, and no other plan replaces it", moed.Name)
		case moed.Status.Plan == plan.Name:
			return fmt.Sprintf("MoEDeployment %s serves this plan: existing and new pods continue to serve it, and drift is not detected until another plan exists", moed.Name)
		}
		return ""
	})
}

// users returns the warnings for the MoEDeployments of a namespace that use an object.
func users(ctx context.Context, reader client.Reader, namespace string, use func(*semmoev1.MoEDeployment) string) []string {
	var list semmoev1.MoEDeploymentList
	if err := reader.List(ctx, &list, client.InNamespace(namespace), client.UnsafeDisableDeepCopy); err != nil {
		return nil
	}
	var warnings []string
	for i := range list.Items {
		if warning := use(&list.Items[i]); warning != "" {
			warnings = append(warnings, warning)
		}
	}
	return warnings
}
