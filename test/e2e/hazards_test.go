// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/semmoe/operator/test/faults"
	"github.com/semmoe/operator/test/tier"
)

const allFailures = "all failures at once"

// hazards lists the failures that every story must survive, in addition to crashes and maxLag levels of cache lag.
//
// The commit tier runs only the story "serving", under allFailures.
var hazards = []hazard{
	{name: "30% conflicts and another writer every 50 ms", schedule: faults.Schedule{Seed: 1, Conflicts: 30}, touched: true},
	{name: "429, 5xx and timeouts", schedule: faults.Schedule{Seed: 2, Throttled: 3, Failed: 10, TimedOut: 5}},
	{name: "lost responses", schedule: faults.Schedule{Seed: 3, Lost: 30}},
	{name: allFailures, schedule: faults.Schedule{Seed: 4, Conflicts: 10, Throttled: 2, Failed: 5, TimedOut: 2, Lost: 10, Lag: 2}, touched: true},
	{name: "a clock that is set back six hours and forward again", schedule: faults.Schedule{ClockBehind: 6 * time.Hour}},
}

// maxLag is the largest tested cache lag, in writes of the manager.
const maxLag = 10

// staleCache returns a hazard in which the manager's cache lags by the given number of writes, and the manager crashes
// after a seeded write. The first list of its successor is equally old, and its cache lags equally.
func staleCache(lag, writes int) hazard {
	random := rand.New(rand.NewPCG(uint64(lag), 1))
	crash := lag + 1 + random.IntN(max(1, writes-lag))
	return hazard{
		name:     fmt.Sprintf("a cache that lags by %d writes and a crash after write %d", lag, crash),
		schedule: faults.Schedule{Lag: lag, CrashAfter: crash}, successors: []faults.Schedule{{Lag: lag}},
	}
}

// TestHazards runs every story under every hazard. The end state equals that of a clean run, no object is created
// twice, and nothing that serves is deleted.
func TestHazards(t *testing.T) {
	t.Parallel()
	for _, s := range stories {
		if !tier.IsNightly() && s.name != "serving" {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			for _, h := range allHazards(cleanRun(t, s).writes) {
				if !tier.IsNightly() && h.name != allFailures {
					continue
				}
				t.Run(h.name, func(t *testing.T) {
					t.Parallel()
					storySlots <- struct{}{}
					defer func() { <-storySlots }()
					runUnderHazard(t, s, h)
				})
			}
		})
	}
}

func allHazards(writes int) []hazard {
	all := slices.Clone(hazards)
	for lag := 1; lag <= maxLag; lag++ {
		all = append(all, staleCache(lag, writes))
	}
	return all
}
