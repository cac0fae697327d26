package lar

import (
	"errors"
	"fmt"

	"github.com/semmoe/operator/internal/stepsizes"
)

// Report is what a router answers at /v1/observations. Those of several routers are merged by their sums: Last, Window,
// Service and CaptureCost.
type Report struct {
	Population Population `json:"population"`
	// Imbalance is the largest over the mean load of the ranks, over the last requests; nil before the first.
	Imbalance *float64 `json:"imbalance"`
	// Last is the sum of Observations, Window of what was sampled in the last Buckets times BucketTime.
	Last   Set      `json:"last"`
	Window []Bucket `json:"window"`
	// Service are the last ServiceBuckets times ServiceBucketTime of all inference requests, sampled or not.
	Service []ServiceBucket `json:"service"`
	// Tables tells for the full digest of each plan that pods serve under, and that is loaded, that of the plan whose tables
	// score its requests: its own, or one with newer tables for the same layout.
	Tables map[string]string `json:"tables"`
	// IgnoredRanks lists the routes on which engine pods ignore the rank that the router sends requests to, as far as it can see.
	IgnoredRanks []IgnoredRank `json:"ignoredRanks,omitempty"`
	// CaptureCost is of the last hour; nil where the engine tells the experts unasked: there is nothing to compare with.
	CaptureCost *CaptureCost `json:"captureCost"`
	// Engines are the counts of the engine pods that count activations themselves.
	Engines []EngineCounts `json:"engines,omitempty"`
	// Steps are the tokens of the steps of the engine pods that count steps.
	Steps []stepsizes.Pod `json:"steps,omitempty"`
	// Observations are the last sampled requests, the oldest first.
	Observations []Observation `json:"observations"`
}

// IgnoredRank is a route on which engine pods of a revision ignore the rank of requests.
type IgnoredRank struct {
	Revision string `json:"revision"`
	Route    string `json:"route"`
	// Pods is how many they are.
	Pods int `json:"pods"`
}

// maxIgnoredRanks bounds the list: a router serves few routes, and a roll-out has few revisions.
const maxIgnoredRanks = 256

// Which requests a sample is of.
const (
	// RequestsAll: every inference request whose client does not ask for the routed experts itself.
	RequestsAll = "all"
	// RequestsUnstreamed: of those, the ones that are answered in one piece. The engine tells no others.
	RequestsUnstreamed = "unstreamed"
	// ReplicasAll: on every pod.
	ReplicasAll = "all"
	// ReplicasOne: on one pod of each plan, because capture costs too much.
	ReplicasOne = "one"
)

// Population is what a sample was drawn from: counts since the router started.
type Population struct {
	Requests      string `json:"requests"`
	Replicas      string `json:"replicas"`
	SamplePercent int    `json:"samplePercent"`
	// Eligible is how many requests could be sampled, Sampled how many were, Streamed how many could not because they were
	// streamed, Long how many because what is told of so long ones would take too much memory.
	Eligible int64 `json:"eligible"`
	Sampled  int64 `json:"sampled"`
	Streamed int64 `json:"streamed"`
	Long     int64 `json:"long"`
}

// Revision sums what is known of a revision: of the window, or of the last sampled requests where these are more, as in a
// quiet service.
func (r Report) Revision(revision string) Sketch {
	last, recent := r.Last.Revision(revision), Sum(r.Window).Revision(revision)
	if recent.Overall.Requests > last.Overall.Requests {
		return recent
	}
	return last
}

// Validate refuses what no router observed. Sets are validated as they are decoded.
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
	if err := errors.Join(validateEngines(r.Engines), stepsizes.Validate(r.Steps)); err != nil {
		return err
	}
	if r.CaptureCost != nil {
		if err := r.CaptureCost.Validate(); err != nil {
			return fmt.Errorf("captureCost.%w", err)
		}
	}
	return nil
}
