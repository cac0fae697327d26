package moedeployment

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/lar"
	"github.com/semmoe/operator/internal/podhealth"
)

const (
	// observePeriod is how often the routers are asked what they observed.
	observePeriod = time.Minute
	// observeTimeout bounds that, so that a router that hangs does not hold up the reconciliation.
	observeTimeout = 2 * time.Second
	// enoughSamples is how many sampled requests a rate is reported from: with fewer it says little.
	enoughSamples = 30
	// larStep is the change, in thousandths, from which the reported rate moves: status is not a metric.
	larStep = 20
)

// traffic is what routers told, summed over them.
type traffic struct {
	// Sketch is of the requests that were sampled of a revision.
	Sketch lar.Sketch
	// Capture compares sampled requests with others.
	Capture lar.CaptureCost
}

// trafficOf sums what routers told of a revision.
func trafficOf(reports []lar.Report, revision string) traffic {
	var sum traffic
	for _, report := range reports {
		sum.Sketch.Merge(report.Revision(revision))
		if report.CaptureCost != nil {
			sum.Capture.Merge(*report.CaptureCost)
		}
	}
	return sum
}

// enough tells that the rate of the requests says something.
func (o traffic) enough() bool {
	return o.Sketch.Overall.Requests >= enoughSamples && o.Sketch.Overall.Total > 0
}

// rankLoads is how much each rank had to do of the sampled requests, in activations: as many for each token.
func (o traffic) rankLoads() map[int]int64 {
	loads := map[int]int64{}
	for rank, ratio := range o.Sketch.Ranks {
		loads[rank] = ratio.Total
	}
	return loads
}

// observeRouters asks the routers what they observed. Routers that cannot be reached are left out: what the others saw is as
// good.
func (r *Reconciler) observeRouters(ctx context.Context, routers []*corev1.Pod) []lar.Report {
	log := logr.FromContextOrDiscard(ctx)
	var reports []lar.Report
	for _, pod := range routers {
		if !podhealth.Ready(pod) || pod.Status.PodIP == "" {
			continue
		}
		report, err := r.fetchReport(ctx, pod.Status.PodIP)
		if err != nil {
			log.V(1).Info("Leaving a router out of the observed local activation rate", "pod", pod.Name, "reason", err.Error())
			continue
		}
		reports = append(reports, report)
	}
	return reports
}

// maxReport bounds a router's report; a usual one is a few hundred kilobytes.
const maxReport = 16 << 20

func (r *Reconciler) fetchReport(ctx context.Context, podIP string) (lar.Report, error) {
	ctx, cancel := context.WithTimeout(ctx, observeTimeout)
	defer cancel()
	url := fmt.Sprintf("http://%s/v1/observations", net.JoinHostPort(podIP, fmt.Sprint(routerMetricsPort)))
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return lar.Report{}, err
	}
	response, err := r.HTTP.Do(request)
	if err != nil {
		return lar.Report{}, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return lar.Report{}, fmt.Errorf("%s", response.Status)
	}
	var report lar.Report
	if err := json.NewDecoder(io.LimitReader(response.Body, maxReport)).Decode(&report); err != nil {
		return lar.Report{}, err
	}
	return report, report.Validate()
}

// forecast is what the plan in use says of itself, or the newest plan while none is in use; nil where neither has told its figures.
func (o observation) forecast() *semmoev1.PlanForecast {
	if plan := cmp.Or(o.Planning.Promise, o.Planning.Plan); plan != nil {
		return plan.Status.Forecast
	}
	return nil
}

// larStatus is the reported rate: what the plan says, and what is observed of the revision. The observed rate stays at the
// previous report until it differs by a step and a minute has passed.
func larStatus(previous *semmoev1.LARStatus, o observation, observes bool, now time.Time) *semmoev1.LARStatus {
	lar := &semmoev1.LARStatus{}
	if forecast := o.forecast(); forecast != nil {
		lar.BaselineMilli = &forecast.BaselineMilli
		lar.BaselineSummary = forecast.BaselineSummary
		if o.Planning.Promise != nil {
			lar.PredictedMilli = &forecast.LARMilli
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

func observeInto(lar, previous *semmoev1.LARStatus, o observation, now time.Time) {
	keep := func() {
		lar.ObservedMilli, lar.ObservedTime, lar.ObservedRevision, lar.Summary = previous.ObservedMilli, previous.ObservedTime, previous.ObservedRevision, previous.Summary
	}
	known := previous != nil && previous.ObservedMilli != nil
	if !o.Enough {
		if known && previous.ObservedRevision == o.Revision {
			keep()
		}
		return
	}
	milli := int32(1000 * o.Observed.Sketch.Overall.Local / o.Observed.Sketch.Overall.Total)
	if known && previous.ObservedRevision == o.Revision {
		change := milli - *previous.ObservedMilli
		if max(change, -change) < larStep || now.Sub(previous.ObservedTime.Time) < observePeriod {
			keep()
			return
		}
	}
	lar.ObservedMilli, lar.ObservedTime = &milli, new(metav1.NewTime(now.Truncate(time.Second)))
	lar.ObservedRevision, lar.Summary = o.Revision, percent(milli)
}

// captureStatus adds the cost of capture to the reported routing, as long as anything is sampled. Like the rate it stays at the
// previous report until it differs by a step and a minute has passed, and besides by two standard errors: times scatter more than
// rates do. It also stays while too few requests tell it.
func captureStatus(routing, previous *semmoev1.RoutingStatus, o observation, observes bool, now time.Time) *semmoev1.RoutingStatus {
	ratio, standardError, told := o.Observed.Capture.Ratio()
	known := previous != nil && previous.CaptureCostMilli != nil
	if !observes || !told && !known {
		return routing
	}
	with := semmoev1.RoutingStatus{}
	if routing != nil {
		with = *routing
	}
	milli := int32(math.Round(min(1000*(ratio-1), math.MaxInt32)))
	if known {
		change := math.Abs(float64(milli) - float64(*previous.CaptureCostMilli))
		if !told || change < max(larStep, 2000*standardError) || now.Sub(previous.CaptureCostTime.Time) < observePeriod {
			with.CaptureCostMilli, with.CaptureCostTime = previous.CaptureCostMilli, previous.CaptureCostTime
			return &with
		}
	}
	with.CaptureCostMilli, with.CaptureCostTime = &milli, new(metav1.NewTime(now.Truncate(time.Second)))
	return &with
}

func percent(milli int32) string { return fmt.Sprintf("%.1f%%", float64(milli)/10) }
