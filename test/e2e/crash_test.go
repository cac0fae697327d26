package e2e

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/semmoe/operator/test/faults"
)

// The manager is killed after its k-th write, and another started: whatever k, the end is the same as without a crash, nothing
// is made twice, and nothing that serves is deleted on the way. The full form tells a story once for each write; the short form tells
// it once, and one manager after another dies.
func TestCrashAfterAnyWrite(t *testing.T) {
	t.Parallel()
	var allTried, allWrites atomic.Int64
	t.Cleanup(func() {
		t.Logf("all stories: %d of %d crash points", allTried.Load(), allWrites.Load())
		if 10*allTried.Load() < allWrites.Load() {
			t.Error("less than a tenth of the writes was crashed after")
		}
	})
	for _, s := range stories {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			clean := cleanRun(t, s)
			if clean.writes < 20 {
				t.Errorf("only %d writes: the story is too short to be worth crashing", clean.writes)
			}
			var tried atomic.Int64
			var runs sync.WaitGroup
			for _, points := range crashPoints(clean.writes) {
				runs.Go(func() {
					storySlots <- struct{}{}
					defer func() { <-storySlots }()
					h := crashes(points)
					t.Run(h.name, func(t *testing.T) { tried.Add(int64(survive(t, s, h))) })
				})
			}
			runs.Wait()
			t.Logf("%s: %d of %d crash points", s.name, tried.Load(), clean.writes)
			allTried.Add(tried.Load())
			allWrites.Add(int64(clean.writes))
		})
	}
}

// fewWrites are so few that one of them in each run is more than a tenth of all, even where the last points are not reached: a run may
// need a quarter fewer writes than the clean one, as changes of status come together or one by one.
const fewWrites = 7

// crashPoints are the writes, counted from 1, that managers die with in each run of a story: every write in a run of its own, or in
// the short form one run, with a seeded write of each fewWrites.
func crashPoints(writes int) [][]int {
	var runs [][]int
	if *full {
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

// crashes has a manager die with each of some writes of a story, which ascend, and the last successor live.
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
