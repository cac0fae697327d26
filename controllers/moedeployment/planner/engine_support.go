// SPDX-License-Identifier: Apache-2.0

package planner

import (
	"slices"
	"strings"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/model/checkpoint"
)

// Foresee returns what a plan of the spec lacks in the engine, or, as its only finding, that no plan can reach the
// engine. It needs neither a plan nor a profile, so the webhooks report it before a device is used. Empty fields of the
// report are unknown, and exclude nothing.
func Foresee(moed *semmoev1.MoEDeployment, report checkpoint.Report, release engine.Release) []desired.Finding {
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	if err != nil {
		return nil // validation reports an unknown engine
	}
	possible := realizations(moed, report, release, adapter)
	redundant := revisions.MinRedundantExperts(moed)
	keepsGroups := planRealization(possible, report.Groups) == semmoev1.RealizationReshuffledWeights
	if moed.Spec.Placement.PlanRef != nil {
		redundant, keepsGroups = 0, true // both depend on the pinned plan
	}
	if report.Unprofilable != "" && moed.Spec.Placement.PlanRef == nil {
		return []desired.Finding{{Reason: ReasonNotProfilable, Message: "No plan can be made for the model: " + report.Unprofilable}}
	}
	var impossible []string
	for _, realization := range possible {
		support := supportOf(moed, report, release, adapter, realization, redundant, keepsGroups)
		if len(support.Refusals) == 0 {
			var findings []desired.Finding
			for _, warning := range support.Warnings {
				findings = append(findings, desired.Finding{Reason: warning.Reason, Message: warning.Message})
			}
			return findings
		}
		if why := support.Refusals[0].Message; !slices.Contains(impossible, why) {
			impossible = append(impossible, why)
		}
	}
	message := "No plan can reach the engine. " + strings.Join(impossible, ". ")
	return []desired.Finding{{Reason: reasonNotRealizable, Message: message}}
}

// supportOf returns the engine's support for a plan with this number of redundant experts and a realization.
func supportOf(moed *semmoev1.MoEDeployment, report checkpoint.Report, release engine.Release, adapter engine.Adapter, realization semmoev1.Realization,
	redundant int32, keepsGroups bool,
) engine.Support {
	support := adapter.Support(situation(moed, report, release, realization, redundant, keepsGroups))
	if realization == semmoev1.RealizationReshuffledWeights && moed.Spec.Routing.Mode != semmoev1.RoutingModeRouter {
		support.Refuse("RouterRequired", "Reshuffled weights need spec.routing.mode Router: engines return permuted expert IDs, which only the router translates back")
	}
	return support
}

// situation returns the situation of an engine under a plan with this number of redundant experts.
func situation(moed *semmoev1.MoEDeployment, report checkpoint.Report, release engine.Release, realization semmoev1.Realization,
	redundant int32, keepsGroups bool,
) engine.Situation {
	launch := revisions.Launch(moed)
	launch.RedundantExperts = redundant
	return engine.Situation{
		Realization: engine.Realization(realization), Release: release, Launch: launch, UserArgs: moed.Spec.Engine.Args, UserEnv: revisions.UserEnv(moed),
		Family: report.EngineFamily(), Wrapper: report.Wrapper, Quantization: report.Quantization, Groups: report.Groups, KeepsGroups: keepsGroups,
		Unmappable: report.Unmappable, Unpermutable: report.Unpermutable,
	}
}
