package lar

import (
	"fmt"
	"iter"
	"maps"
	"slices"
	"time"
)

const (
	// ServiceBucketTime is the time that a bucket of service covers, and ServiceBuckets how many are kept: an hour, as long as a
	// canary may be looked at.
	ServiceBucketTime = time.Minute
	ServiceBuckets    = 60
	// maxServed bounds the revisions of a bucket: a roll-out has two or three at a time.
	maxServed = 8
)

// Moments are what the mean of a value over requests and its standard error are computed from.
type Moments struct {
	N          int64   `json:"n"`
	Sum        float64 `json:"sum"`
	SumSquares float64 `json:"sumSquares"`
	// Covariates are of the requests whose covariates are known: of none in the report of a router that counts no
	// covariates.
	Covariates CovariateSums `json:"covariates,omitzero"`
}

// Add counts a request's value without covariates.
func (m *Moments) Add(value float64) { m.Merge(Moments{N: 1, Sum: value, SumSquares: value * value}) }

// AddWith counts a request's value with its covariates.
func (m *Moments) AddWith(value float64, x Covariates) {
	m.Add(value)
	m.Covariates.add(value, x)
}

// Merge adds the requests of others.
func (m *Moments) Merge(other Moments) {
	m.N += other.N
	m.Sum += other.Sum
	m.SumSquares += other.SumSquares
	m.Covariates.merge(&other.Covariates)
}

// Validate refuses sums that no times have.
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

// Service is how inference requests to a revision went, sampled or not. Times are in seconds, from when a request was sent to
// the pod; each request counts once in each of them, because tokens of one answer are alike.
type Service struct {
	// Requests were sent to a pod. Failures are those of them that it answered by a 5xx status, or whose connection it refused or
	// broke, whether the client saw that or another pod answered in its stead. One that was sent to several pods counts for each
	// that answers it, and once for all of a revision that do not.
	// A request that the client is to blame for (4xx), or that the client leaves, is no failure.
	Requests int64 `json:"requests"`
	Failures int64 `json:"failures"`
	// FirstToken is of streamed answers: the time to the first event. InterToken is of those with more than one: the mean time
	// between the events, of which engines send one for each token unless they are told otherwise.
	FirstToken Moments `json:"firstToken"`
	InterToken Moments `json:"interToken"`
	// Answer is of answers in one piece: the time to the end, prompt and all tokens together. Nothing tells it apart into the two
	// above.
	Answer Moments `json:"answer"`
	// Locality is of those that were sampled, and, under a plan, that its tables had scored: of a fleet's one canary the last
	// observations hold too few.
	Locality Ratio `json:"locality"`
}

// Merge adds the requests of others.
func (s *Service) Merge(other Service) {
	s.Requests += other.Requests
	s.Failures += other.Failures
	s.FirstToken.Merge(other.FirstToken)
	s.InterToken.Merge(other.InterToken)
	s.Answer.Merge(other.Answer)
	s.Locality.Merge(other.Locality)
}

// Validate refuses sums that no requests have.
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

// ServiceBucket is how requests went that ended in a time of ServiceBucketTime.
type ServiceBucket struct {
	// Start is when it began: a multiple of ServiceBucketTime, so that those of several routers cover the same times.
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

// ServiceWindow keeps the last buckets of service. It is not safe for concurrent use.
type ServiceWindow struct {
	buckets []ServiceBucket // the oldest first
}

// Add counts requests to a revision that ended now. Those of a revision beyond the bound of a bucket are left out.
func (w *ServiceWindow) Add(now time.Time, revision string, ended Service) {
	of := w.at(now)
	sum, known := of[revision]
	if !known && len(of) == maxServed {
		return
	}
	sum.Merge(ended)
	of[revision] = sum
}

// at are the revisions of a time. A time before the window's, as after a clock was set back, counts in the last bucket.
func (w *ServiceWindow) at(now time.Time) map[string]Service {
	start := now.UTC().Truncate(ServiceBucketTime)
	if n := len(w.buckets); n > 0 && !w.buckets[n-1].Start.Before(start) {
		return w.buckets[n-1].Revisions
	}
	w.expire(now)
	bucket := ServiceBucket{start, map[string]Service{}}
	w.buckets = append(w.buckets, bucket)
	return bucket.Revisions
}

// expire drops the buckets that the window has moved past.
func (w *ServiceWindow) expire(now time.Time) {
	oldest := now.UTC().Truncate(ServiceBucketTime).Add(-(ServiceBuckets - 1) * ServiceBucketTime)
	w.buckets = slices.DeleteFunc(w.buckets, func(b ServiceBucket) bool { return b.Start.Before(oldest) })
}

// Recent is a copy of the window's buckets, the oldest first; minutes without a request have none.
func (w *ServiceWindow) Recent(now time.Time) []ServiceBucket {
	w.expire(now)
	recent := make([]ServiceBucket, len(w.buckets))
	for i, bucket := range w.buckets {
		recent[i] = ServiceBucket{bucket.Start, maps.Clone(bucket.Revisions)}
	}
	return recent
}

// ServiceSince returns how requests to a revision went in each minute that began at a time or later, by when the minute began: of the
// minute in which the time lies nothing counts.
func (r Report) ServiceSince(revision string, t time.Time) iter.Seq2[time.Time, Service] {
	return func(yield func(time.Time, Service) bool) {
		for _, bucket := range r.Service {
			if served, known := bucket.Revisions[revision]; known && !bucket.Start.Before(t) && !yield(bucket.Start.UTC(), served) {
				return
			}
		}
	}
}
