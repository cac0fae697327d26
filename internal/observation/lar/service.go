// SPDX-License-Identifier: Apache-2.0

package lar

import (
	"fmt"
	"iter"
	"maps"
	"slices"
	"time"
)

const (
	// serviceBucketTime is the length of a service bucket. ServiceBuckets is the number of retained buckets: one hour,
	// the length of a comparison period of a canary.
	serviceBucketTime = time.Minute
	ServiceBuckets    = 60
	// maxServed is the maximum number of revisions in a bucket: a rollout has two or three at a time.
	maxServed = 8
)

// Moments are the sums from which the mean of a value over requests and its standard error are computed.
type Moments struct {
	N          int64   `json:"n"`
	Sum        float64 `json:"sum"`
	SumSquares float64 `json:"sumSquares"`
	// Covariates covers the requests with known covariates. It is empty in reports of routers that do not record
	// covariates.
	Covariates CovariateSums `json:"covariates,omitzero"`
}

// Add adds the value of a request without covariates.
func (m *Moments) Add(value float64) { m.Merge(Moments{N: 1, Sum: value, SumSquares: value * value}) }

// AddWith adds the value of a request with its covariates.
func (m *Moments) AddWith(value float64, x Covariates) {
	m.Add(value)
	m.Covariates.add(value, x)
}

// Merge adds the requests of other.
func (m *Moments) Merge(other Moments) {
	m.N += other.N
	m.Sum += other.Sum
	m.SumSquares += other.SumSquares
	m.Covariates.merge(&other.Covariates)
}

// Validate rejects sums that no values can have.
func (m Moments) Validate() error {
	if m.N < 0 || m.N == 0 && m.Sum != 0 {
		return fmt.Errorf("n is %d and sum %v: want none without a request", m.N, m.Sum)
	}
	if err := finite(map[string]float64{"sum": m.Sum, "sumSquares": m.SumSquares}, true); err != nil {
		return err
	}
	if err := m.Covariates.validate(m); err != nil {
		return fmt.Errorf("covariates.%w", err)
	}
	return nil
}

// Service aggregates the inference requests to a revision, sampled or not. Times are in seconds from sending the
// request to the pod. Each request counts once in each time, because tokens of one response are correlated.
type Service struct {
	// Requests is the number of requests sent to a pod. Failures is the number of those that the pod answered with a
	// 5xx status, or whose connection it refused or broke, even if another pod served the request on retry. A request
	// that was sent to several pods counts once for each pod that answers it, and once per revision for all pods that
	// do not.
	// A client error (4xx) or a client disconnect is not a failure.
	Requests int64 `json:"requests"`
	Failures int64 `json:"failures"`
	// FirstToken covers streamed responses: the time to the first event. InterToken covers streamed responses with more
	// than one event: the mean time between events. Engines send one event per token unless configured differently.
	FirstToken Moments `json:"firstToken"`
	InterToken Moments `json:"interToken"`
	// Answer covers unstreamed responses: the time to the end of the response, for the prompt and all output tokens. It
	// cannot be split into the two times above.
	Answer Moments `json:"answer"`
	// Locality covers sampled requests; under a plan, only those that its tables scored. The last observations contain
	// too few requests for a single canary in a large deployment.
	Locality Ratio `json:"locality"`
}

// Merge adds the requests of other.
func (s *Service) Merge(other Service) {
	s.Requests += other.Requests
	s.Failures += other.Failures
	s.FirstToken.Merge(other.FirstToken)
	s.InterToken.Merge(other.InterToken)
	s.Answer.Merge(other.Answer)
	s.Locality.Merge(other.Locality)
}

// Validate rejects sums that no requests can have.
func (s Service) Validate() error {
	if s.Failures < 0 || s.Failures > s.Requests {
		return fmt.Errorf("failures are %d of %d requests: want 0 to as many as there are", s.Failures, s.Requests)
	}
	for name, moments := range map[string]Moments{"firstToken": s.FirstToken, "interToken": s.InterToken, "answer": s.Answer} {
		if err := moments.Validate(); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if moments.N > s.Requests {
			return fmt.Errorf("%s.n is %d of %d requests: it cannot be more", name, moments.N, s.Requests)
		}
	}
	if err := s.Locality.Validate(); err != nil {
		return fmt.Errorf("locality: %w", err)
	}
	return nil
}

// ServiceBucket contains the requests that ended in one serviceBucketTime.
type ServiceBucket struct {
	// Start is the beginning of the bucket, a multiple of serviceBucketTime, so that buckets of several routers align.
	Start     time.Time          `json:"start"`
	Revisions map[string]Service `json:"revisions"`
}

func (b ServiceBucket) validate() error {
	if len(b.Revisions) > maxServed {
		return fmt.Errorf("%d revisions: at most %d are allowed", len(b.Revisions), maxServed)
	}
	for revision, service := range b.Revisions {
		if err := service.Validate(); err != nil {
			return fmt.Errorf("revisions[%q].%w", revision, err)
		}
	}
	return nil
}

// ServiceWindow retains the most recent service buckets. It is not safe for concurrent use.
type ServiceWindow struct {
	buckets []ServiceBucket // oldest first
}

// Add adds requests to a revision that ended now. It drops requests if the bucket already has the maximum number of
// revisions.
func (w *ServiceWindow) Add(now time.Time, revision string, ended Service) {
	of := w.at(now)
	sum, known := of[revision]
	if !known && len(of) == maxServed {
		return
	}
	sum.Merge(ended)
	of[revision] = sum
}

// at returns the revisions of the bucket at now. A time before the window, for example after a clock change, uses the
// last bucket.
func (w *ServiceWindow) at(now time.Time) map[string]Service {
	start := now.UTC().Truncate(serviceBucketTime)
	if n := len(w.buckets); n > 0 && !w.buckets[n-1].Start.Before(start) {
		return w.buckets[n-1].Revisions
	}
	w.expire(now)
	bucket := ServiceBucket{start, map[string]Service{}}
	w.buckets = append(w.buckets, bucket)
	return bucket.Revisions
}

// expire drops the buckets that are older than the window.
func (w *ServiceWindow) expire(now time.Time) {
	oldest := now.UTC().Truncate(serviceBucketTime).Add(-(ServiceBuckets - 1) * serviceBucketTime)
	w.buckets = slices.DeleteFunc(w.buckets, func(b ServiceBucket) bool { return b.Start.Before(oldest) })
}

// Recent returns a copy of the window's buckets, oldest first. Minutes without a request have no bucket.
func (w *ServiceWindow) Recent(now time.Time) []ServiceBucket {
	w.expire(now)
	recent := make([]ServiceBucket, len(w.buckets))
	for i, bucket := range w.buckets {
		recent[i] = ServiceBucket{bucket.Start, maps.Clone(bucket.Revisions)}
	}
	return recent
}

// ServiceSince returns the requests to a revision for each minute that began at or after t, with the start of the
// minute. The partial minute that contains t is omitted.
func (r Report) ServiceSince(revision string, t time.Time) iter.Seq2[time.Time, Service] {
	return func(yield func(time.Time, Service) bool) {
		for _, bucket := range r.Service {
			if served, known := bucket.Revisions[revision]; known && !bucket.Start.Before(t) && !yield(bucket.Start.UTC(), served) {
				return
			}
		}
	}
}
