// SPDX-License-Identifier: Apache-2.0

package lar

import "fmt"

// EngineCounts are the activations that the engine of a pod counted itself over all requests, in about the last two
// minutes.
type EngineCounts struct {
	Pod      string `json:"pod"`
	Revision string `json:"revision"`
	Activations
}

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
	}
	return nil
}

// EngineActivations sums the counts of the engines of a revision. Several routers read the same pods at different
// times; the largest count per pod is used.
func EngineActivations(reports []Report, revision string) Activations {
	largest := map[string]Activations{}
	for _, report := range reports {
		for _, e := range report.Engines {
			if e.Revision == revision && e.Total > largest[e.Pod].Total {
				largest[e.Pod] = e.Activations
			}
		}
	}
	var sum Activations
	for _, counts := range largest {
		sum.Local += counts.Local
		sum.Total += counts.Total
	}
	return sum
}
