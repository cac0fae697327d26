// SPDX-License-Identifier: Apache-2.0

package lar

import (
	"cmp"
	"slices"
	"time"
)

const (
	// BucketTime is the length of a bucket. Buckets is the number of buckets in a window: two minutes, so that rates
	// follow the traffic.
	BucketTime = 10 * time.Second
	Buckets    = 12
)

// Bucket contains the requests of one BucketTime.
type Bucket struct {
	// Start is the beginning of the bucket in seconds since 1970, a multiple of BucketTime, so that buckets of several
	// routers align.
	Start int64 `json:"start"`
	// Eligible is the number of requests that could have been sampled. Sketches aggregates the sampled ones.
	Eligible int64 `json:"eligible"`
	Sketches Set   `json:"sketches"`
}

// Window retains the most recent buckets. It is not safe for concurrent use.
type Window struct {
	buckets []Bucket // oldest first
}

// Add adds a sampled request.
func (w *Window) Add(o Observation) { w.at(o.Time).Sketches.Add(o) }

// AddEligible counts a request that could have been sampled.
func (w *Window) AddEligible(now time.Time) { w.at(now).Eligible++ }

// at returns the bucket of a time. A time before the window, for example after a clock change, uses the last bucket.
func (w *Window) at(now time.Time) *Bucket {
	w.expire(now)
	start := startOf(now)
	if n := len(w.buckets); n > 0 && w.buckets[n-1].Start >= start {
		return &w.buckets[n-1]
	}
	w.buckets = append(w.buckets, Bucket{Start: start, Sketches: Set{}})
	return &w.buckets[len(w.buckets)-1]
}

func startOf(now time.Time) int64 { return now.Truncate(BucketTime).Unix() }

// expire drops the buckets that are older than the window.
func (w *Window) expire(now time.Time) {
	oldest := startOf(now) - int64((Buckets-1)*BucketTime/time.Second)
	w.buckets = slices.DeleteFunc(w.buckets, func(b Bucket) bool { return b.Start < oldest })
}

// Recent returns a copy of the window's buckets, oldest first, without empty ones.
func (w *Window) Recent(now time.Time) []Bucket {
	w.expire(now)
	return mergeBuckets(w.buckets)
}

// mergeBuckets sums windows by time. The result shares no memory with them.
func mergeBuckets(windows ...[]Bucket) []Bucket {
	byStart := map[int64]int{}
	merged := []Bucket{}
	for _, window := range windows {
		for _, bucket := range window {
			at, known := byStart[bucket.Start]
			if !known {
				at = len(merged)
				byStart[bucket.Start] = at
				merged = append(merged, Bucket{Start: bucket.Start, Sketches: Set{}})
			}
			merged[at].Eligible += bucket.Eligible
			merged[at].Sketches.Merge(bucket.Sketches)
		}
	}
	slices.SortFunc(merged, func(a, b Bucket) int { return cmp.Compare(a.Start, b.Start) })
	return merged
}

// Sum returns the sum over buckets.
func Sum(buckets []Bucket) Set {
	set := Set{}
	for _, bucket := range buckets {
		set.Merge(bucket.Sketches)
	}
	return set
}

// SavedBytesPerSecond returns the sum of Count.SavedBytes over a window of length covered, scaled from the sampled to
// the eligible requests, per second. It is NaN if no request was sampled.
func SavedBytesPerSecond(buckets []Bucket, covered time.Duration) float64 {
	var eligible int64
	for _, bucket := range buckets {
		eligible += bucket.Eligible
	}
	sampled := Sum(buckets).All()
	return sampled.SavedBytes * float64(eligible) / float64(sampled.Overall.Requests) / covered.Seconds()
}
