package webhook

import (
	"context"
	"fmt"

	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/affinityprofile"
	"github.com/semmoe/operator/internal/calibration/machines"
)

// affinityProfiles are the rules of AffinityProfiles.
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

// warnDelete: devices were spent on it.
func (a *affinityProfiles) warnDelete(ctx context.Context, profile *semmoev1.AffinityProfile) []string {
	return users(ctx, a.Reader, profile.Namespace, func(moed *semmoev1.MoEDeployment) string {
		if moed.Status.Profile != profile.Name {
			return ""
		}
		return fmt.Sprintf("MoEDeployment %s plans from this profile: what serves goes on, and unless the artifact store still has its result it is profiled again", moed.Name)
	})
}

// placementPlans are the rules of PlacementPlans.
type placementPlans struct{ client.Reader }

// refuse: the schema does not know the hardware profiles that are built in, and tells all else that is wrong with one by itself.
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

// warnDelete: what serves outlives its plan, whose ConfigMap its workloads own as well, but the plan's promise does not.
func (p *placementPlans) warnDelete(ctx context.Context, plan *semmoev1.PlacementPlan) []string {
	return users(ctx, p.Reader, plan.Namespace, func(moed *semmoev1.MoEDeployment) string {
		ref := moed.Spec.Placement.PlanRef
		switch {
		case ref != nil && ref.Name == plan.Name:
			return fmt.Sprintf("MoEDeployment %s pins this plan in spec.placement.planRef: its pods go on serving, those to come too, and no other plan takes its place", moed.Name)
		case moed.Status.Plan == plan.Name:
			return fmt.Sprintf("MoEDeployment %s serves this plan: its pods go on serving, those to come too, and drift is not told until there is another one", moed.Name)
		}
		return ""
	})
}

// users are the warnings that the MoEDeployments of a namespace give rise to.
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
