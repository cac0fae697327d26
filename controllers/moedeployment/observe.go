package moedeployment

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
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

// observeLAR sums what the routers observed of a revision. Routers that cannot be reached are left out: the rate of the
// others is as good. It reports false where too few requests were sampled.
func (r *Reconciler) observeLAR(ctx context.Context, routers []*corev1.Pod, revision string) (lar.Activations, map[int]int64, bool) {
	log := logr.FromContextOrDiscard(ctx)
	var sum lar.Activations
	tokens := map[int]int64{} // by rank
	samples := 0
	for _, pod := range routers {
		if !podhealth.Ready(pod) || pod.Status.PodIP == "" {
			continue
		}
		observations, err := r.fetchObservations(ctx, pod.Status.PodIP)
		if err != nil {
			log.V(1).Info("Leaving a router out of the observed local activation rate", "pod", pod.Name, "reason", err.Error())
			continue
		}
		for _, observation := range observations {
			if observation.Revision == revision {
				samples++
				sum.Local += observation.Local
				sum.Total += observation.Total
				tokens[observation.Rank] += int64(observation.Tokens)
			}
		}
	}
	return sum, tokens, samples >= enoughSamples && sum.Total > 0
}

func (r *Reconciler) fetchObservations(ctx context.Context, podIP string) ([]lar.Observation, error) {
	ctx, cancel := context.WithTimeout(ctx, observeTimeout)
	defer cancel()
	url := fmt.Sprintf("http://%s/v1/observations", net.JoinHostPort(podIP, fmt.Sprint(routerMetricsPort)))
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := r.HTTP.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s", response.Status)
	}
	var told struct {
		Observations []lar.Observation `json:"observations"`
	}
	return told.Observations, json.NewDecoder(response.Body).Decode(&told)
}

// larStatus is the reported rate: what the plan says, and what is observed of the revision. The observed rate stays at the
// previous report until it differs by a step and a minute has passed.
func larStatus(previous *semmoev1.LARStatus, o observation, observes bool, now time.Time) *semmoev1.LARStatus {
	lar := &semmoev1.LARStatus{}
	if plan := cmp.Or(o.Planning.Promise, o.Planning.Plan); plan != nil && plan.Status.Forecast != nil {
		lar.BaselineMilli = &plan.Status.Forecast.BaselineMilli
		lar.BaselineSummary = plan.Status.Forecast.BaselineSummary
		if plan == o.Planning.Promise {
			lar.PredictedMilli = &plan.Status.Forecast.LARMilli
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
	milli := int32(1000 * o.Observed.Local / o.Observed.Total)
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

func percent(milli int32) string { return fmt.Sprintf("%.1f%%", float64(milli)/10) }
