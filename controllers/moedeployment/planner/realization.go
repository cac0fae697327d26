// SPDX-License-Identifier: Apache-2.0

package planner

import (
	"fmt"
	"slices"
	"strings"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/model/checkpoint"
)

// RealizationText contains the names of realizations in messages.
var RealizationText = map[semmoev1.Realization]string{
	semmoev1.RealizationEngineMap:         "the engine's expert map",
	semmoev1.RealizationReshuffledWeights: "reshuffled weights",
}

// realizations returns the realizations that the spec allows, preferred one first: the engine's map, unless it cannot
// be used or has no effect and reshuffled weights can be used.
func realizations(moed *semmoev1.MoEDeployment, report checkpoint.Report, release engine.Release, adapter engine.Adapter) []semmoev1.Realization {
	switch wanted := moed.Spec.Placement.Realization; {
	case wanted == semmoev1.RealizationEngineMap || wanted == semmoev1.RealizationReshuffledWeights:
		return []semmoev1.Realization{wanted}
	case adapter.ExpertMap == nil:
		return []semmoev1.Realization{semmoev1.RealizationReshuffledWeights}
	}
	byMap := supportOf(moed, report, release, adapter, semmoev1.RealizationEngineMap, revisions.MinRedundantExperts(moed), true)
	byWeights := supportOf(moed, report, release, adapter, semmoev1.RealizationReshuffledWeights, revisions.MinRedundantExperts(moed), true)
	useless := slices.ContainsFunc(byMap.Warnings, func(f engine.Finding) bool { return f.Reason == engine.ReasonExpertMapWithoutEffect })
	if (useless || len(byMap.Refusals) > 0) && len(byWeights.Refusals) == 0 {
		return []semmoev1.Realization{semmoev1.RealizationReshuffledWeights, semmoev1.RealizationEngineMap}
	}
	return []semmoev1.Realization{semmoev1.RealizationEngineMap, semmoev1.RealizationReshuffledWeights}
}

// CheckMap returns an error if the spec requests an expert map (or redundant experts, which require a map), and the
// engine is known to compute wrong outputs with it, or to exit at start. The error names the field.
func CheckMap(moed *semmoev1.MoEDeployment, report checkpoint.Report, release engine.Release) error {
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	if err != nil || adapter.ExpertMap == nil || !desired.UsesPlans(moed) {
		return nil // validation reports an unknown engine, and a map that it cannot read
	}
	byMap, redundant := moed.Spec.Placement.Realization == semmoev1.RealizationEngineMap, revisions.MinRedundantExperts(moed)
	if !byMap && redundant == 0 {
		return nil
	}
	field, value := "spec.placement.realization", string(semmoev1.RealizationEngineMap)
	if redundant > 0 {
		field, value = "spec.placement.redundantExperts", moed.Spec.Placement.RedundantExperts.String()
	}
	support := adapter.Support(situation(moed, report, release, semmoev1.RealizationEngineMap, redundant, true))
	for _, refusal := range support.Refusals {
		switch refusal.Reason {
		case engine.ReasonUnprovenMap, engine.ReasonNoAllToAll, engine.ReasonDraftModelExperts:
			return fmt.Errorf("%s: %s is invalid: %s", field, value, refusal.Message)
		}
	}
	return nil
}

// planRealization returns the realization that the plan must be solved for. For a gate without groups there is no
// difference, and one plan serves both realizations.
func planRealization(possible []semmoev1.Realization, groups int) semmoev1.Realization {
	if groups > 1 && len(possible) > 0 && possible[0] == semmoev1.RealizationReshuffledWeights {
		return semmoev1.RealizationReshuffledWeights
	}
	return semmoev1.RealizationEngineMap
}

// realizationOf returns how the plan of a workload reaches its engine.
func realizationOf(workload *revisions.Workload) semmoev1.Realization {
	if realization := workload.Template().Annotations[semmoev1.AnnotationRealization]; realization != "" {
		return semmoev1.Realization(realization)
	}
	return semmoev1.RealizationEngineMap
}

// outputChangedText explains why a plan is not tried again.
func outputChangedText(l *revisions.Layout, difference string) string {
	return fmt.Sprintf("With %s, the outputs of the model under plan %s differ from those without a plan: %s", RealizationText[l.Realization], l.Short(), difference)
}

// refusedText explains that a plan changes outputs with each possible layout, and what to do if the cause is not the
// plan.
func (c *choice) refusedText(refused []*revisions.Layout) string {
	last := refused[len(refused)-1]
	var marks []string
	for _, l := range refused {
		marks = append(marks, semmoev1.AnnotationOutputChanged+revisions.Of(c.moed, c.report, l)+"-")
	}
	return fmt.Sprintf("%s; it is not tried again until the engine's image, its arguments or the plan change. "+
		"If arguments or other model files are meant to change outputs, delete ConfigMap %s once replicas serve without a plan, and then run: kubectl annotate pplan -n %s %s %s",
		outputChangedText(last, c.refusal(last)), revisions.AnswersName(c.moed, c.report.ModelDigest), c.moed.Namespace, c.wanted.Name, strings.Join(marks, " "))
}

// why explains why a plan reaches the engine by reshuffled weights although the spec leaves the choice; empty if no
// explanation is needed.
func (c *choice) why(serving *revisions.Layout) string {
	if !serving.Reshuffled() || c.wanted == nil || c.moed.Spec.Placement.Realization == semmoev1.RealizationReshuffledWeights {
		return ""
	}
	if difference := c.refusal(&revisions.Layout{Digest: serving.Digest, ConfigMap: serving.ConfigMap, Realization: semmoev1.RealizationEngineMap, Overlap: serving.Overlap}); difference != "" {
		return fmt.Sprintf(", because outputs change with %s: %s", RealizationText[semmoev1.RealizationEngineMap], difference)
	}
	for _, candidate := range c.candidates() {
		if candidate.layout.Realization != semmoev1.RealizationEngineMap {
			continue
		}
		for _, finding := range slices.Concat(candidate.support.Refusals, candidate.support.Warnings) {
			if len(candidate.support.Refusals) > 0 || finding.Reason == engine.ReasonExpertMapWithoutEffect {
				return ", because " + finding.Message
			}
		}
		return ", which was in service already"
	}
	return fmt.Sprintf(", because %s accepts no expert map", c.moed.Spec.Engine.Type)
}

// warnings returns the features that the engine may lack under the serving plan, as sentences to append.
func (c *choice) warnings(serving *revisions.Layout) string {
	text := ""
	for _, candidate := range c.candidates() {
		if serving != nil && candidate.layout.Same(serving) {
			for _, finding := range slices.Concat(candidate.support.Refusals, candidate.support.Warnings) {
				text += ". " + finding.Message
			}
		}
	}
	return text
}
