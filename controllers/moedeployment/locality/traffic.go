// SPDX-License-Identifier: Apache-2.0

package locality

import (
	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/observation/lar"
)

// enoughSamples is the minimum number of sampled requests for reporting a rate.
const enoughSamples = 30

// Traffic is the sum of the routers' reports.
type Traffic struct {
	// Sketch summarizes the sampled requests of a revision.
	Sketch lar.Sketch
	// Capture compares sampled requests with others.
	Capture lar.CaptureCost
	// Engine contains the counts of the revision's engines over all requests.
	Engine lar.Activations
}

// enoughActivations is the minimum number of activations for using the engines' own counts: several thousand tokens.
const enoughActivations = 250_000

// Activations returns the activations behind the observed rate, and their source: the engines' own counts if available,
// else the sample. It reports false if neither covers enough requests.
func (o Traffic) Activations() (_ lar.Activations, _ semmoev1.LARSource, enough bool) {
	if o.Engine.Total >= enoughActivations {
		return o.Engine, semmoev1.LARSourceEngine, true
	}
	return o.Sketch.Overall.Activations, semmoev1.LARSourceRouter, o.Enough()
}

// TrafficOf sums the reports of routers for a revision.
func TrafficOf(reports []lar.Report, revision string) Traffic {
	sum := Traffic{Engine: lar.EngineActivations(reports, revision)}
	for _, report := range reports {
		sum.Sketch.Merge(report.Revision(revision))
		if report.CaptureCost != nil {
			sum.Capture.Merge(*report.CaptureCost)
		}
	}
	return sum
}

// Enough reports whether there are enough requests for a rate.
func (o Traffic) Enough() bool {
	return o.Sketch.Overall.Requests >= enoughSamples && o.Sketch.Overall.Total > 0
}

// RankLoads returns the load of each rank by the sampled requests, in activations. Each token has the same number of
// activations.
func (o Traffic) RankLoads() map[int]int64 {
	loads := map[int]int64{}
	for rank, ratio := range o.Sketch.Ranks {
		loads[rank] = ratio.Total
	}
	return loads
}
