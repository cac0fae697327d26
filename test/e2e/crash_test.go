// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/semmoe/operator/test/faults"
	"github.com/semmoe/operator/test/tier"
)

// TestCrashAfterAnyWrite kills the manager after its k-th write and starts another one. For every k the end state
// equals that of a run without a crash, no object is created twice, and nothing that serves is deleted. The nightly tier
// runs every story once for each write. The commit tier runs the longest story once, with several managers that crash
// one after another.
func TestCrashAfterAnyWrite(t *testing.T) {
	t.Parallel()
	var allTried, allWrites atomic.Int64
	t.Cleanup(func() {
		t.Logf("all stories: %d of %d crash points", allTried.Load(), allWrites.Load())
		if 10*allTried.Load() < allWrites.Load() {
			t.Error("fewer than 10% of the writes were followed by a crash")
		}
	})
	for _, s := range stories {
		if !tier.IsNightly() && s.name != longestStory {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			clean := cleanRun(t, s)
			if clean.writes < 20 {
				t.Errorf("the story has only %d writes, too few for crash tests", clean.writes)
			}
			var mu sync.Mutex
			tried, written := 0, 0 // written are the writes of the longest run
			var runs sync.WaitGroup
			for _, points := range crashPoints(clean.writes) {
				runs.Go(func() {
					storySlots <- struct{}{}
					defer func() { <-storySlots }()
					h := crashes(points)
					t.Run(h.name, func(t *testing.T) {
						crashed, writes := runUnderHazard(t, s, h)
						mu.Lock()
						defer mu.Unlock()
						tried, written = tried+crashed, max(written, writes)
					})
				})
			}
			runs.Wait()
			written = min(written, clean.writes)
			t.Logf("%s: %d of %d crash points", s.name, tried, written)
			allTried.Add(int64(tried))
			allWrites.Add(int64(written))
		})
	}
}

// fewWrites is the number of consecutive writes of which the commit tier picks one to crash after. With 7, more than 10%
// of the writes of the run are tried. On a busy machine it can have a third fewer than the clean run, because status
// changes are merged or written one by one; the last points are then not reached.
const fewWrites = 7

// crashPoints returns the writes, counted from 1, after which managers crash, for each run of a story. In the nightly
// tier every write has a separate run. In the commit tier there is one run, with one seeded write of every fewWrites.
func crashPoints(writes int) [][]int {
	var runs [][]int
	if tier.IsNightly() {
		for point := range writes {
			runs = append(runs, []int{point + 1})
		}
		return runs
	}
	random := rand.New(rand.NewPCG(1, 2))
	var points []int
	for before := 0; before < writes; before += fewWrites {
		points = append(points, before+1+random.IntN(min(fewWrites, writes-before)))
	}
	return [][]int{points}
}

// crashes returns a hazard in which one manager crashes after each of the given writes, in ascending order. The last
// successor survives.
func crashes(points []int) hazard {
	var managers []faults.Schedule
	before := 0
	for _, point := range points {
		managers = append(managers, faults.Schedule{CrashAfter: point - before})
		before = point
	}
	managers = append(managers, faults.Schedule{})
	return hazard{name: "crash after write " + strings.Trim(fmt.Sprint(points), "[]"), schedule: managers[0], successors: managers[1:]}
}
