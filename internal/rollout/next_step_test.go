// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/test/tier"
)

var (
	rewrite = flag.Bool("rewrite", false, "write testdata anew")
	// orders is the number of random orders of events.
	orders = tier.Choose[uint64](150, 150, 10_000)
)

// Each scenario logs all changes of the planner.
func TestScenarios(t *testing.T) {
	old, fresh := &layout{name: "old"}, &layout{name: "new", verdict: Better}
	cases := map[string]struct {
		budget Budget
		change func(w *world)
	}{
		"better":            {Budget{3, 1, 0}, func(w *world) { w.wanted = fresh; w.settle(time.Hour) }},
		"better-with-surge": {Budget{2, 0, 1}, func(w *world) { w.wanted = fresh; w.settle(time.Hour) }},
		"two-canaries":      {Budget{6, 2, 0}, func(w *world) { w.canary, w.wanted = 2, fresh; w.settle(time.Hour) }},
		"without-soak":      {Budget{3, 1, 0}, func(w *world) { w.soak, w.wanted = 0, fresh; w.settle(time.Hour) }},
		"single-replica": {Budget{1, 1, 0}, func(w *world) {
			w.approved, w.wanted = true, &layout{name: "new", verdict: TooFew}
			w.settle(time.Hour)
		}},
		"single-with-surge": {Budget{1, 1, 1}, func(w *world) { w.wanted = fresh; w.settle(time.Hour) }},
		"worse":             {Budget{3, 1, 0}, func(w *world) { w.wanted = &layout{name: "new", verdict: Worse}; w.settle(time.Hour) }},
		"worse-held":        {Budget{3, 1, 0}, func(w *world) { w.hold, w.wanted = true, &layout{name: "new", verdict: Worse}; w.settle(time.Hour) }},
		"no-gain":           {Budget{3, 1, 0}, func(w *world) { w.wanted = &layout{name: "new", verdict: NotBetter}; w.settle(3 * time.Hour) }},
		"inconclusive":      {Budget{3, 1, 0}, func(w *world) { w.wanted = &layout{name: "new", verdict: TooFew}; w.settle(3 * time.Hour) }},
		"crashing":          {Budget{3, 1, 0}, func(w *world) { w.wanted = &layout{name: "new", broken: true, crashing: true}; w.settle(time.Hour) }},
		"never-ready":       {Budget{3, 1, 0}, func(w *world) { w.wanted = &layout{name: "new", broken: true}; w.settle(2 * time.Hour) }},
		"change-on-canary":  {Budget{3, 1, 0}, func(w *world) { w.wanted = fresh; w.settle(2 * time.Minute); w.template++; w.settle(time.Hour) }},
		"scaled-on-canary": {Budget{3, 1, 0}, func(w *world) {
			w.wanted = fresh
			w.settle(2 * time.Minute)
			w.budget.Replicas = 5
			w.settle(2 * time.Minute)
			w.budget.Replicas = 2
			w.settle(time.Hour)
		}},
		"another-plan": {Budget{3, 1, 0}, func(w *world) {
			w.wanted = fresh
			w.settle(2 * time.Minute)
			w.wanted = &layout{name: "newer", verdict: Better}
			w.settle(time.Hour)
		}},
		"worse-when-it-goes": {Budget{4, 1, 0}, func(w *world) {
			w.wanted = &layout{name: "new", verdict: Better}
			w.settle(5*time.Minute + 40*time.Second)
			w.wanted.verdict = Worse
			w.settle(time.Hour)
		}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			w := newWorld(tc.budget, old)
			w.settle(time.Minute)
			tc.change(w)
			got := strings.Join(w.log, "\n") + "\n"
			file := filepath.Join("testdata", name+".golden")
			if *rewrite {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// A candidate is proven when only it serves. It may start when the serving revision can make room for it.
func TestProvenAndMayStart(t *testing.T) {
	for name, tc := range map[string]struct {
		budget    Budget
		candidate Revision
		proven    bool
	}{
		"it serves": {Budget{3, 1, 0}, revision(3, 0, 1, 2), true},
		"except for the unavailable replicas that are allowed": {Budget{3, 1, 0}, revision(3, 0, 1), true},
		"too many are unavailable":                             {Budget{3, 1, 0}, revision(3, 0), false},
		"the only replica may be unavailable":                  {Budget{1, 1, 0}, revision(1), false},
		"scaled to zero during the promotion":                  {Budget{0, 1, 0}, revision(0), false},
		"replicas of another revision exist":                   {Budget{3, 1, 0}, revision(2, 0, 1), false},
	} {
		in := Input{Budget: tc.budget, Revisions: []Revision{tc.candidate, revision(0)}, Stable: 1, Candidate: 0, Trial: Trial{Promoting: true, Now: start}}
		if got := Next(in).Proven; got != tc.proven {
			t.Errorf("%s: proven %v", name, got)
		}
	}
	for name, tc := range map[string]struct {
		budget Budget
		stable Revision
		may    bool
	}{
		"all serve": {Budget{3, 1, 0}, revision(3, 0, 1, 2), true},
		"one is unavailable, and no other may be":  {Budget{3, 1, 0}, revision(3, 1, 2), false},
		"one is unavailable, and is removed first": {Budget{3, 1, 0}, revision(3, 0, 1), true},
		"one of two allowed is unavailable":        {Budget{4, 2, 0}, revision(4, 1, 2, 3), true},
		"one is unavailable, with surge":           {Budget{3, 1, 1}, revision(3, 1, 2), true},
		"scaled to zero":                           {Budget{0, 1, 0}, revision(0), false},
	} {
		if got := MayTry(tc.budget, []Revision{tc.stable}, 0); got != tc.may {
			t.Errorf("%s: may be tried %v", name, got)
		}
	}
}

// For any sequence of events, no step leaves fewer serving replicas than the budget allows, or requests more than the
// maximum. A canary has at most its share until it is promoted. Without events, the planner converges, and the target
// revision serves.
func TestAnyOrder(t *testing.T) {
	worst := 0
	for seed := range orders {
		random := rand.New(rand.NewPCG(seed, 7))
		b := Budget{Replicas: random.Int32N(6), MaxUnavailable: random.Int32N(3), MaxSurge: random.Int32N(3)}
		if b.MaxUnavailable == 0 && b.MaxSurge == 0 {
			b.MaxSurge = 1
		}
		w := newWorld(b, &layout{name: "first"})
		w.canary, w.hold, w.approved = 1+random.Int32N(3), random.IntN(4) == 0, random.IntN(3) == 0
		if random.IntN(4) == 0 {
			w.soak = 0
		}
		for range 60 {
			happen(w, random)
			check(t, seed, w)
		}
		w.hold, w.unknown = false, false // a user rolls back failed plans, and resumes changes
		moves := w.settle(5 * time.Hour)
		worst = max(worst, moves)
		if bound := 8 * (int(w.budget.Replicas+w.budget.MaxSurge) + 5); moves > bound {
			t.Fatalf("seed %d: %d steps after the last event, want at most %d:\n%s", seed, moves, bound, strings.Join(w.log, "\n"))
		}
		if w.decide() {
			t.Fatalf("seed %d: it does not end:\n%s", seed, strings.Join(w.log, "\n"))
		}
		ended(t, seed, w)
	}
	t.Logf("at most %d steps after the last event", worst)
}

// happen applies a random event.
func happen(w *world, random *rand.Rand) {
	w.now = w.now.Add(time.Duration(random.IntN(120)) * time.Second)
	w.unknown = random.IntN(8) == 0
	switch random.IntN(12) {
	case 0:
		w.template++
	case 1:
		verdicts := []Verdict{Better, Better, NotBetter, Worse, TooFew}
		w.wanted = &layout{name: fmt.Sprint("p", random.IntN(1000000)), verdict: verdicts[random.IntN(len(verdicts))], broken: random.IntN(4) == 0, crashing: random.IntN(2) == 0}
	case 2:
		w.budget.Replicas = random.Int32N(6)
	case 3:
		w.now = w.now.Add(time.Duration(random.IntN(90)) * time.Minute)
	case 4:
		w.now = w.now.Add(-time.Duration(random.IntN(30)) * time.Minute) // the clock is set back
	}
	for _, work := range w.workloads {
		if random.IntN(2) == 0 {
			clear(work.leaving)
		}
		for _, ordinal := range ordinals(work) {
			pod := work.pods[ordinal]
			switch {
			case random.IntN(40) == 0:
				delete(work.pods, ordinal)
			case random.IntN(30) == 0 && pod.ready:
				pod.ready, pod.since = false, w.now
			case random.IntN(40) == 0 && work.template != w.template:
				pod.ready, pod.homeless = false, true
			case random.IntN(2) == 0 && !pod.ready && !pod.homeless && !work.plan.broken:
				pod.ready, pod.since = true, w.now
			}
		}
		work.fill(w.now)
	}
}

// check runs the controller once, and verifies the result.
func check(t *testing.T, seed uint64, w *world) {
	t.Helper()
	type numbers struct {
		total, available int32
		replicas         map[*workload]int32
	}
	count := func() numbers {
		n := numbers{replicas: map[*workload]int32{}}
		for _, work := range w.workloads {
			r := w.revision(work)
			n.total += max(r.Placed, r.Replicas-r.homeless(r.Replicas))
			n.available += r.ReadyReplicas(r.Replicas)
			n.replicas[work] = work.replicas
		}
		return n
	}
	before := count()
	scaledDown := false
	for _, work := range w.workloads {
		scaledDown = scaledDown || work.replicas > w.budget.Replicas
	}
	w.decide()
	after := count()
	fatal := func(format string, args ...any) {
		t.Helper()
		t.Fatalf("seed %d, %+v: %s:\n%s", seed, w.budget, fmt.Sprintf(format, args...), strings.Join(w.log, "\n"))
	}
	if after.total > max(before.total, w.budget.Replicas+w.budget.MaxSurge) {
		fatal("%d replicas", after.total)
	}
	if !scaledDown && after.available < min(before.available, w.budget.Minimum()) {
		fatal("%d available of %d", after.available, before.available)
	}
	trials := 0
	for _, work := range w.workloads {
		if work.trial == "" {
			continue
		}
		if work.replicas > 0 && work.template == w.template && work.plan == w.wanted {
			trials++
		}
		canary := CanarySize(w.budget.Replicas, w.canary)
		if work.trial == "Canary" && work.replicas > max(canary, before.replicas[work]) {
			fatal("a canary of %d replicas, want at most %d", work.replicas, canary)
		}
	}
	if trials > 1 {
		fatal("%d candidates at a time", trials)
	}
}

// ended verifies the final state.
func ended(t *testing.T, seed uint64, w *world) {
	t.Helper()
	fatal := func(format string, args ...any) {
		t.Helper()
		t.Fatalf("seed %d, %+v: %s; %+v is wanted:\n%s", seed, w.budget, fmt.Sprintf(format, args...), *w.wanted, strings.Join(w.log, "\n"))
	}
	stable := w.workloads[w.find(w.template, w.stablePlan())]
	ready := w.revision(stable).ReadyReplicas(stable.replicas)
	if w.budget.Replicas == 0 {
		if stable.replicas != 0 {
			fatal("%s has %d replicas, none is wanted", stable.name(), stable.replicas)
		}
		return
	}
	good := !w.wanted.broken && (w.soak == 0 || w.wanted.verdict == Better || w.wanted.verdict == TooFew && w.approved)
	switch {
	case w.failed[w.wanted.name] != "" || stable.plan == w.wanted, w.wanted.verdict == TooFew && !w.wanted.broken:
	case good:
		fatal("it has not been promoted")
	default:
		fatal("it was not rolled back")
	}
	if stable.plan.broken && stable.plan.name != "first" {
		fatal("%s serves, and cannot", stable.name())
	}
	var total int32
	for _, work := range w.workloads {
		total += work.replicas
	}
	if total < w.budget.Replicas || ready < w.budget.Replicas-CanarySize(w.budget.Replicas, w.canary) {
		fatal("%d replicas, %d ready of %s", total, ready, stable.name())
	}
}
