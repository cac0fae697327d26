// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/kube/printable"
	"github.com/semmoe/operator/internal/observation/stepsizes"
	"github.com/semmoe/operator/solver"
)

const (
	// maxBatchMessage is the maximum length, in bytes, of the message about batch sizes.
	maxBatchMessage = 512
	// setBatchTokens is the advice for engines that report no steps.
	setBatchTokens = "set spec.rollout.batchTokens to the number of tokens per engine step under load"
)

// unobserved returns why no batch sizes are observed. It returns the zero value if they are observed.
func unobserved(moed *semmoev1.MoEDeployment, steps stepsizes.Sum, reports int) desired.Finding {
	switch {
	case steps.Sizes != nil:
		return desired.Finding{}
	case !desired.EngineCountsSteps(moed):
		return desired.Finding{Reason: "NoMetric", Message: fmt.Sprintf("%s exports no metric of its steps: %s", moed.Spec.Engine.Type, setBatchTokens)}
	case moed.Spec.Routing.Mode == semmoev1.RoutingModeNone:
		return desired.Finding{Reason: "NoRouter", Message: "Engine metrics are not read without a request router (spec.routing.mode None): " + setBatchTokens}
	case steps.Problem != "":
		message := fmt.Sprintf("The steps of %s cannot be read: %s", podsText(steps.Pod, steps.Pods), steps.Problem)
		if adapter, err := registry.For(string(moed.Spec.Engine.Type)); err == nil && adapter.StepMetrics.Requirement != "" {
			message += ". If the metric is off, " + adapter.StepMetrics.Requirement
		}
		return desired.Finding{Reason: "MetricsUnreadable", Message: printable.Line(message+"; or "+setBatchTokens, maxBatchMessage)}
	case reports == 0:
		return desired.Finding{Reason: "NotReported", Message: "No request router reports engine steps: no router is ready, or no replica serves"}
	}
	return desired.Finding{Reason: "TooFewSteps", Message: fmt.Sprintf("The engines have counted fewer than %d steps since routers read their metrics", stepsizes.MinSteps)}
}

// podsText names one pod and counts the others.
func podsText(name string, pods int) string {
	if pods > 1 {
		return fmt.Sprintf("pod %s and %d more pods", name, pods-1)
	}
	return "pod " + name
}

// batchTokensStatus reports the batch sizes of a plan (nil if there is no plan yet) and the sizes that engines report
// now. The observed sizes keep the previous report until they differ by the replan threshold and one minute has passed.
func batchTokensStatus(previous *semmoev1.BatchTokensStatus, moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan, o observation, now time.Time) *semmoev1.BatchTokensStatus {
	if !desired.UsesPlans(moed) {
		return nil
	}
	tokens, observed := moed.Spec.Rollout.BatchTokens, o.Steps.Sizes
	if plan != nil {
		tokens, observed = plan.Spec.BatchTokens, plan.Spec.ObservedBatchTokens
	}
	status := &semmoev1.BatchTokensStatus{Source: semmoev1.BatchTokensDefault}
	switch {
	case tokens > 0:
		status.Source, status.Sizes = semmoev1.BatchTokensSpec, []int32{tokens}
	case len(observed) > 0:
		status.Source, status.Sizes = semmoev1.BatchTokensObserved, slices.Clone(observed)
	default:
		for _, size := range solver.DefaultBatchTokens {
			status.Sizes = append(status.Sizes, int32(size))
		}
	}
	if moed.Spec.Rollout.BatchTokens > 0 && o.Steps.Sizes == nil {
		return status // which needs no observation
	}
	if why := unobserved(moed, o.Steps, len(o.Reports)); why.Reason != "" {
		status.Reason, status.Message = why.Reason, why.Message
		return status
	}
	if o.Drift.BatchesMoved && o.Drift.BatchHold.Reason != "" {
		status.Reason, status.Message = o.Drift.BatchHold.Reason, printable.Line("The sizes differ much from those of the plan, but no new plan is made now: "+o.Drift.BatchHold.Message, maxBatchMessage)
	}
	if previous != nil && previous.ObservedTime != nil && (!stepsizes.Differ(previous.Observed, o.Steps.Sizes) || justReported(previous.ObservedTime, now)) {
		status.Observed, status.PrefillMilli, status.ObservedTime = previous.Observed, previous.PrefillMilli, previous.ObservedTime
		return status
	}
	status.Observed, status.PrefillMilli, status.ObservedTime = o.Steps.Sizes, ptr.To(o.Steps.PrefillMilli), ptr.To(metav1.NewTime(now.Truncate(time.Second)))
	return status
}
