// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"cmp"
	"math"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/locality"
)

const (
	// observePeriod is the interval at which the routers are polled.
	observePeriod = time.Minute
	// larStep is the minimum change, in thousandths, that updates the reported rate: status is not a metric.
	larStep = 20
)

// forecast returns the forecast of the plan in use, or of the newest plan if none is in use; nil if neither has one.
func (o observation) forecast() *semmoev1.PlanForecast {
	if plan := cmp.Or(o.ServingPlanning().Promise, o.ServingPlanning().Plan, o.Planning.Plan); plan != nil {
		return plan.Status.Forecast
	}
	return nil
}

// larStatus returns the reported local activation rate: the forecast of the plan in batches of the reported sizes, and
// the observed rate of the revision. The observed rate keeps the previous report until it differs by a step and one
// minute has passed.
func larStatus(previous *semmoev1.LARStatus, batches *semmoev1.BatchTokensStatus, o observation, observes bool, now time.Time) *semmoev1.LARStatus {
	lar := &semmoev1.LARStatus{}
	if forecast := o.forecast(); forecast != nil {
		lar.BaselineMilli = &forecast.BaselineMilli
		lar.BaselineSummary = forecast.BaselineSummary
		if o.ServingPlanning().Promise != nil {
			lar.PredictedMilli = &locality.PromiseAt(forecast, batches).LARMilli
		}
	}
	if observes {
		observeInto(lar, previous, o, now)
	}
	if *lar == (semmoev1.LARStatus{}) {
		return nil
	}
	return lar
}

// justReported reports whether a report is too recent to be replaced. A report dated more than a minute in the future
// (its clock was set back since) can be replaced, and so can a report without a time, which another client wrote.
func justReported(at *metav1.Time, now time.Time) bool {
	return at != nil && now.Sub(at.Time).Abs() < observePeriod
}

func observeInto(lar, previous *semmoev1.LARStatus, o observation, now time.Time) {
	keep := func() {
		lar.ObservedMilli, lar.ObservedTime, lar.ObservedRevision, lar.Summary = previous.ObservedMilli, previous.ObservedTime, previous.ObservedRevision, previous.Summary
		lar.Source = previous.Source
	}
	known := previous != nil && previous.ObservedMilli != nil
	observed, source, enough := o.Observed.Activations()
	if !enough {
		if known && previous.ObservedRevision == o.ServingRevision() {
			keep()
		}
		return
	}
	milli := int32(1000 * observed.Local / observed.Total)
	if known && previous.ObservedRevision == o.ServingRevision() {
		change := milli - *previous.ObservedMilli
		if previous.Source == source && max(change, -change) < larStep || justReported(previous.ObservedTime, now) {
			keep()
			return
		}
	}
	lar.ObservedMilli, lar.ObservedTime = &milli, new(metav1.NewTime(now.Truncate(time.Second)))
	lar.ObservedRevision, lar.Summary, lar.Source = o.ServingRevision(), desired.Percent(milli), source
}

// captureStatus adds the capture overhead to the reported routing while requests are sampled. The overhead keeps the
// previous report until it differs by a step and by two standard errors and one minute has passed: times vary more than
// rates. It also stays while there are too few requests.
func captureStatus(routing, previous *semmoev1.RoutingStatus, o observation, observes bool, now time.Time) *semmoev1.RoutingStatus {
	ratio, standardError, measured := o.Observed.Capture.Ratio()
	known := previous != nil && previous.CaptureCostMilli != nil
	if !observes || !measured && !known {
		return routing
	}
	with := semmoev1.RoutingStatus{}
	if routing != nil {
		with = *routing
	}
	milli := int32(math.Round(min(1000*(ratio-1), math.MaxInt32)))
	if known {
		change := math.Abs(float64(milli) - float64(*previous.CaptureCostMilli))
		if !measured || change < max(larStep, 2000*standardError) || justReported(previous.CaptureCostTime, now) {
			with.CaptureCostMilli, with.CaptureCostTime = previous.CaptureCostMilli, previous.CaptureCostTime
			return &with
		}
	}
	with.CaptureCostMilli, with.CaptureCostTime = &milli, new(metav1.NewTime(now.Truncate(time.Second)))
	return &with
}
