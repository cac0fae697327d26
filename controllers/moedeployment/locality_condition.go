// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"fmt"
	"math"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/locality"
	"github.com/semmoe/operator/internal/kube/conditions"
)

const (
	// driftSteps sets the step of the reported statistic to 1/driftSteps of the threshold or of the statistic,
	// whichever is larger. Status is not a metric, and the statistic fluctuates around zero.
	driftSteps = 4
	// causeStep is the minimum change, in thousandths, that updates the reported causes.
	causeStep = 100
)

// driftStatus returns the reported state of the drift test. It keeps the previous report until the value differs by a
// step and one minute has passed. An alarm is reported immediately.
func driftStatus(previous *semmoev1.DriftStatus, a locality.Assessment, now time.Time) *semmoev1.DriftStatus {
	switch {
	case a.Status == "":
		return previous
	case !a.Tested:
		return nil
	}
	status := &semmoev1.DriftStatus{StatisticMilli: milliOf(a.Statistic), ThresholdMilli: milliOf(a.Threshold), ObservedTime: new(metav1.NewTime(now.Truncate(time.Second)))}
	if a.Status == locality.Drifted {
		status.Since = new(metav1.NewTime(a.Since.Truncate(time.Second)))
		if a.Causes != nil {
			status.Causes = &semmoev1.DriftCauses{NewTokensMilli: milliOf(a.Causes.NewTokens), ChangedMixMilli: milliOf(a.Causes.Mix), LoadBalancingMilli: milliOf(a.Causes.Balance)}
		}
	}
	if previous == nil || (previous.Since == nil) != (status.Since == nil) || previous.ThresholdMilli != status.ThresholdMilli || previous.ObservedTime == nil {
		return status
	}
	// The samples in which a long drift began are eventually dropped. The start time stays.
	status.Since = previous.Since
	if justReported(previous.ObservedTime, now) || !moved(previous, status) {
		return previous.DeepCopy()
	}
	return status
}

// moved reports whether a report differs from the previous one by a step.
func moved(previous, status *semmoev1.DriftStatus) bool {
	far := func(a, b, step int32) bool { return max(a-b, b-a) >= step }
	if far(previous.StatisticMilli, status.StatisticMilli, max(status.ThresholdMilli, previous.StatisticMilli)/driftSteps) {
		return true
	}
	if previous.Causes == nil || status.Causes == nil {
		return previous.Causes != status.Causes
	}
	was, is := previous.Causes, status.Causes
	return far(was.NewTokensMilli, is.NewTokensMilli, causeStep) || far(was.ChangedMixMilli, is.ChangedMixMilli, causeStep) || far(was.LoadBalancingMilli, is.LoadBalancingMilli, causeStep)
}

// maxMilli keeps differences of thousandths within the range of an int32.
const maxMilli = 1e9

func milliOf(value float64) int32 {
	return int32(math.Round(min(max(1000*value, 0), maxMilli)))
}

// localityVerdict returns the condition LocalityOnTarget. It uses the figures of the status, which change in steps.
// With raw figures the condition would be written every minute.
func localityVerdict(a locality.Assessment, rate *semmoev1.LARStatus, test *semmoev1.DriftStatus) conditions.Verdict {
	status := metav1.ConditionTrue
	switch a.Status {
	case "":
		return conditions.Unknown("NotEvaluated", "The serving revision is not known yet")
	case locality.Unknown:
		return conditions.Unknown(a.Reason, a.Message)
	case locality.BelowPromise, locality.Drifted:
		status = metav1.ConditionFalse
	}
	text := a.Message + "."
	if rate != nil && rate.ObservedMilli != nil {
		text += fmt.Sprintf(" The observed local activation rate is %s", desired.Percent(*rate.ObservedMilli))
		if promised := a.Promise.LARSummary; promised != "" { // a plan from token counts predicts no rate
			text += ", the plan predicts " + promised
		}
		text += "."
	}
	if a.Status != locality.Drifted {
		return conditions.Verdict{Status: status, Reason: a.Reason, Message: text}
	}
	if test != nil && test.Causes != nil {
		text += " " + causesText(*test.Causes)
	}
	if a.Hold.Reason != "" {
		text += fmt.Sprintf(" No new plan is made now (%s): %s.", a.Hold.Reason, a.Hold.Message)
	}
	return conditions.Verdict{Status: status, Reason: a.Reason, Message: text}
}

// causesText explains the lost locality by cause.
func causesText(c semmoev1.DriftCauses) string {
	rest := max(0, 1000-c.NewTokensMilli-c.ChangedMixMilli-c.LoadBalancingMilli)
	return fmt.Sprintf("Causes of the loss: new tokens %s, changed mix of requests %s, load balancing %s, changed expert activations %s.",
		desired.Percent(c.NewTokensMilli), desired.Percent(c.ChangedMixMilli), desired.Percent(c.LoadBalancingMilli), desired.Percent(rest))
}
