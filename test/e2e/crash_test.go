package e2e

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/semmoe/operator/test/faults"
)

// The manager is killed after its k-th write, and another started: whatever k, the end is the same as without a crash, nothing
// is made twice, and nothing that serves is deleted on the way.
func TestCrashAfterAnyWrite(t *testing.T) {
	t.Parallel()
	for _, s := range stories {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			clean := cleanRun(t, s)
			if clean.writes < 20 {
				t.Errorf("only %d writes: the story is too short to be worth crashing", clean.writes)
			}
			points := crashPoints(s, clean.writes)
			t.Logf("%d of %d crash points", len(points), clean.writes)
			var runs sync.WaitGroup
			for _, point := range points {
				runs.Go(func() {
					storySlots <- struct{}{}
					defer func() { <-storySlots }()
					t.Run(fmt.Sprintf("write %d", point), func(t *testing.T) {
						survive(t, s, hazard{name: fmt.Sprintf("crash after write %d", point), schedule: faults.Schedule{CrashAfter: point}, successor: &faults.Schedule{}})
					})
				})
			}
			runs.Wait()
		})
	}
}

// crashPoints are all writes, or a seeded few of them.
func crashPoints(s story, writes int) []int {
	points := make([]int, writes)
	for i := range points {
		points[i] = i + 1
	}
	if !*full {
		random := rand.New(rand.NewPCG(1, 2))
		random.Shuffle(len(points), func(i, j int) { points[i], points[j] = points[j], points[i] })
		points = points[:min(s.points, len(points))]
		slices.Sort(points)
	}
	return points
}
