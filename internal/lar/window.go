package lar

import (
	"cmp"
	"slices"
	"time"
)

const (
	// BucketTime is the time that a bucket covers, and Buckets how many a window keeps: two minutes, by which rates follow
	// the traffic.
	BucketTime = 10 * time.Second
	Buckets    = 12
)

// Bucket is what was seen in a time of BucketTime.
type Bucket struct {
	// Start is when it began, in seconds since 1970: a multiple of BucketTime, so that those of several routers cover the same
	// times.
	Start int64 `json:"start"`
	// Eligible is the number of requests that could have been sampled, Sketches what the sampled ones showed.
	Eligible int64 `json:"eligible"`
	Sketches Set   `json:"sketches"`
}

// Window keeps the last buckets. It is not safe for concurrent use.
type Window struct {
	buckets []Bucket // the oldest first
}

// Add counts a sampled request.
func (w *Window) Add(o Observation) { w.at(o.Time).Sketches.Add(o) }

// AddEligible counts a request that could have been sampled.
func (w *Window) AddEligible(now time.Time) { w.at(now).Eligible++ }

// at is the bucket of a time. A time before the window's, as after a clock was set back, counts in the last one.
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

// expire drops the buckets that the window has moved past.
func (w *Window) expire(now time.Time) {
	oldest := startOf(now) - int64((Buckets-1)*BucketTime/time.Second)
	w.buckets = slices.DeleteFunc(w.buckets, func(b Bucket) bool { return b.Start < oldest })
}

// Recent is a copy of the window's buckets, the oldest first; those without a request are left out.
func (w *Window) Recent(now time.Time) []Bucket {
	w.expire(now)
	return MergeBuckets(w.buckets)
}

// MergeBuckets sums windows, by time; the result shares nothing with them.
func MergeBuckets(windows ...[]Bucket) []Bucket {
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

// Sum is the sum over buckets.
func Sum(buckets []Bucket) Set {
	set := Set{}
	for _, bucket := range buckets {
		set.Merge(bucket.Sketches)
	}
	return set
}

// SavedBytesPerSecond is the sum of Count.SavedBytes of a window that covers a time, scaled from the sampled requests to the
// eligible ones, per second. It is NaN where none was sampled.
func SavedBytesPerSecond(buckets []Bucket, covered time.Duration) float64 {
	var eligible int64
	for _, bucket := range buckets {
		eligible += bucket.Eligible
	}
	sampled := Sum(buckets).All()
	return sampled.SavedBytes * float64(eligible) / float64(sampled.Overall.Requests) / covered.Seconds()
}
