// SPDX-License-Identifier: Apache-2.0

package lar

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"
)

// EngineCounts are the activations that the engine of a pod counted itself over all requests, in about the last two
// minutes.
type EngineCounts struct {
	Pod      string `json:"pod"`
	Revision string `json:"revision"`
	Activations
	// Tables is the digest of the plan by whose tables the engine shuffles tokens; empty if it does not report one.
	Tables string `json:"tables,omitempty"`
	// Refused is the reason for which the engine does not use the files of a plan; empty if there is none.
	Refused string `json:"refused,omitempty"`
	// Problem is why the counts are not used; there are none then. It is empty if they are used.
	Problem string `json:"problem,omitempty"`
}

// EngineBucket are the activations that the engines of a revision counted while they shuffled tokens by the tables of a
// plan, in an interval of EngineBucketTime.
type EngineBucket struct {
	Start    time.Time `json:"start"`
	Revision string    `json:"revision"`
	Tables   string    `json:"tables"`
	Activations
}

const (
	// EngineBucketTime is the length of an EngineBucket. A report covers EngineBuckets of them.
	EngineBucketTime = 30 * time.Second
	EngineBuckets    = 240
	// maxEngineBuckets is the maximum number of buckets in a report: several revisions and tables overlap in a roll-out.
	maxEngineBuckets = 16 * EngineBuckets
	// minBucketActivations is the minimum number of activations of an interval for a rate.
	minBucketActivations = 10_000
	// MaxEngineProblem is the maximum length of the texts of EngineCounts, in bytes.
	MaxEngineProblem = 256
)

const (
	// MaxActivations is the maximum of a count: every integer up to it is exact as a float64.
	MaxActivations = 1 << 53
	// maxEngines is the maximum number of pods in a report.
	maxEngines = 1 << 14
)

func validateEngines(engines []EngineCounts) error {
	if len(engines) > maxEngines {
		return fmt.Errorf("engines: %d pods: at most %d are allowed", len(engines), maxEngines)
	}
	for i, e := range engines {
		if e.Local < 0 || e.Total < e.Local || e.Total > MaxActivations {
			return fmt.Errorf("engines[%d]: local and total are %d and %d: want 0 to total, and at most %d", i, e.Local, e.Total, int64(MaxActivations))
		}
		if n := max(len(e.Tables), len(e.Refused), len(e.Problem)); n > MaxEngineProblem {
			return fmt.Errorf("engines[%d]: a text has %d bytes: at most %d are allowed", i, n, MaxEngineProblem)
		}
	}
	return nil
}

func validateEngineBuckets(buckets []EngineBucket) error {
	if len(buckets) > maxEngineBuckets {
		return fmt.Errorf("engineBuckets: %d buckets: at most %d are allowed", len(buckets), maxEngineBuckets)
	}
	for i, b := range buckets {
		if b.Local < 0 || b.Total < b.Local || b.Total > MaxActivations {
			return fmt.Errorf("engineBuckets[%d]: local and total are %d and %d: want 0 to total, and at most %d", i, b.Local, b.Total, int64(MaxActivations))
		}
	}
	return nil
}

// EnginePoints returns the local activation rates that engines counted while they used the tables of a plan, oldest
// first. Several routers read the same pods; the largest count of an interval is used.
func EnginePoints(reports []Report, tables string) []Point {
	largest := map[time.Time]Activations{}
	for _, report := range reports {
		sums := map[time.Time]Activations{}
		for _, b := range report.EngineBuckets {
			if b.Tables == tables {
				start := b.Start.UTC()
				sums[start] = Activations{Local: sums[start].Local + b.Local, Total: sums[start].Total + b.Total}
			}
		}
		for start, counts := range sums {
			if counts.Total > largest[start].Total {
				largest[start] = counts
			}
		}
	}
	var points []Point
	for start, counts := range largest {
		if counts.Total >= minBucketActivations {
			points = append(points, Point{Time: start, Value: float64(counts.Local) / float64(counts.Total)})
		}
	}
	slices.SortFunc(points, func(a, b Point) int { return cmp.Compare(a.Time.UnixNano(), b.Time.UnixNano()) })
	return points
}

// EnginesOf returns what engines of a revision report, by pod in ascending order. Of several routers, the one with the
// largest count of a pod is used.
func EnginesOf(reports []Report, revision string) []EngineCounts {
	byPod := map[string]EngineCounts{}
	for _, report := range reports {
		for _, e := range report.Engines {
			if known, has := byPod[e.Pod]; e.Revision == revision && (!has || e.Total > known.Total) {
				byPod[e.Pod] = e
			}
		}
	}
	return slices.SortedFunc(maps.Values(byPod), func(a, b EngineCounts) int { return cmp.Compare(a.Pod, b.Pod) })
}

// EngineActivations sums the counts of the engines of a revision.
func EngineActivations(reports []Report, revision string) Activations {
	var sum Activations
	for _, e := range EnginesOf(reports, revision) {
		sum.Local += e.Local
		sum.Total += e.Total
	}
	return sum
}
