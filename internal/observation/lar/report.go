// SPDX-License-Identifier: Apache-2.0

package lar

import (
	"errors"
	"fmt"

	"github.com/semmoe/operator/internal/observation/stepsizes"
)

// Report is the response of a router at /v1/observations. Reports of several routers are merged by adding their sums:
// Last, Window, Service and CaptureCost.
type Report struct {
	Population Population `json:"population"`
	// Imbalance is the maximum over the mean load of the ranks, over the last requests; nil before the first request.
	Imbalance *float64 `json:"imbalance"`
	// Last is the sum of Observations. Window contains the samples of the last Buckets times BucketTime.
	Last   Set      `json:"last"`
	Window []Bucket `json:"window"`
	// Service contains all inference requests, sampled or not, of the last ServiceBuckets times serviceBucketTime.
	Service []ServiceBucket `json:"service"`
	// Tables maps the full digest of each loaded plan that pods serve under to the digest of the plan whose tables
	// score its requests: the plan itself, or a plan with newer tables for the same layout.
	Tables map[string]string `json:"tables"`
	// IgnoredRanks lists the routes on which engine pods ignore the rank that the router selected, as far as the router
	// can detect this.
	IgnoredRanks []IgnoredRank `json:"ignoredRanks,omitempty"`
	// CaptureCost covers the last hour; nil if the engine always returns the experts, so that there is no comparison.
	CaptureCost *CaptureCost `json:"captureCost"`
	// Engines contains the counts of the engine pods that count activations themselves.
	Engines []EngineCounts `json:"engines,omitempty"`
	// EngineBuckets contains the counts of engines that shuffle tokens over time, oldest first.
	EngineBuckets []EngineBucket `json:"engineBuckets,omitempty"`
	// Steps contains the tokens per step of the engine pods that count steps.
	Steps []stepsizes.Pod `json:"steps,omitempty"`
	// Observations are the last sampled requests, oldest first.
	Observations []Observation `json:"observations"`
}

// IgnoredRank is a route on which engine pods of a revision ignore the rank of requests.
type IgnoredRank struct {
	Revision string `json:"revision"`
	Route    string `json:"route"`
	// Pods is the number of these pods.
	Pods int `json:"pods"`
}

// maxIgnoredRanks is the maximum length of the list: a router serves few routes, and a rollout has few revisions.
const maxIgnoredRanks = 256

// Populations of a sample.
const (
	// RequestsAll: every inference request except those that request the routed experts themselves.
	RequestsAll = "all"
	// RequestsUnstreamed: only unstreamed requests of RequestsAll. The engine returns no experts for streamed ones.
	RequestsUnstreamed = "unstreamed"
	// ReplicasAll: on every pod.
	ReplicasAll = "all"
	// ReplicasOne: on one pod of each plan, because capture is expensive.
	ReplicasOne = "one"
)

// Population describes the requests from which a sample was drawn: counts since the router started.
type Population struct {
	Requests      string `json:"requests"`
	Replicas      string `json:"replicas"`
	SamplePercent int    `json:"samplePercent"`
	// Eligible is the number of requests that could be sampled, Sampled the number of sampled ones, Streamed the number
	// excluded because they were streamed, and Long the number excluded because their routed experts would need too
	// much memory.
	Eligible int64 `json:"eligible"`
	Sampled  int64 `json:"sampled"`
	Streamed int64 `json:"streamed"`
	Long     int64 `json:"long"`
}

// Revision returns the sum for a revision: of the window, or of the last sampled requests if there are more of them
// (low traffic).
func (r Report) Revision(revision string) Sketch {
	last, recent := r.Last.Revision(revision), Sum(r.Window).Revision(revision)
	if recent.Overall.Requests > last.Overall.Requests {
		return recent
	}
	return last
}

// Validate rejects reports that no router produces. Sets are validated while they are decoded.
func (r Report) Validate() error {
	if len(r.Window) > 2*Buckets {
		return fmt.Errorf("window: %d buckets: at most %d are allowed", len(r.Window), 2*Buckets)
	}
	for i, bucket := range r.Window {
		if bucket.Eligible < 0 {
			return fmt.Errorf("window[%d].eligible is %d: it cannot be negative", i, bucket.Eligible)
		}
	}
	if len(r.Service) > 2*ServiceBuckets {
		return fmt.Errorf("service: %d buckets: at most %d are allowed", len(r.Service), 2*ServiceBuckets)
	}
	for i, bucket := range r.Service {
		if err := bucket.validate(); err != nil {
			return fmt.Errorf("service[%d].%w", i, err)
		}
	}
	for i, observation := range r.Observations {
		if observation.Forecast == nil {
			continue
		}
		if err := observation.Forecast.Validate(); err != nil {
			return fmt.Errorf("observations[%d].forecast.%w", i, err)
		}
	}
	if len(r.IgnoredRanks) > maxIgnoredRanks {
		return fmt.Errorf("ignoredRanks: %d entries: at most %d are allowed", len(r.IgnoredRanks), maxIgnoredRanks)
	}
	if err := errors.Join(validateEngines(r.Engines), validateEngineBuckets(r.EngineBuckets), stepsizes.Validate(r.Steps)); err != nil {
		return err
	}
	if r.CaptureCost != nil {
		if err := r.CaptureCost.Validate(); err != nil {
			return fmt.Errorf("captureCost.%w", err)
		}
	}
	return nil
}
