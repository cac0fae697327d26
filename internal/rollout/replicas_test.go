// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func revision(replicas int32, ready ...int) Revision {
	r := Revision{Replicas: replicas, Existing: replicas, Placed: replicas, Ready: make([]bool, replicas)}
	for _, ordinal := range ready {
		r.Ready[ordinal] = true
	}
	return r
}

// homeless marks replicas of a revision that fit no node.
func homeless(r Revision, ordinals ...int) Revision {
	r.Homeless = make([]bool, r.Replicas)
	for _, ordinal := range ordinals {
		r.Homeless[ordinal] = true
		r.Placed--
	}
	return r
}

func TestReplicas(t *testing.T) {
	cases := map[string]struct {
		budget    Budget
		revisions []Revision
		current   int
		want      []int32
	}{
		"first revision starts at once":                              {Budget{3, 1, 0}, []Revision{revision(0)}, 0, []int32{3}},
		"one is removed first, without spare devices":                {Budget{3, 1, 0}, []Revision{revision(0), revision(3, 0, 1, 2)}, 0, []int32{0, 2}},
		"its pod still exists":                                       {Budget{3, 1, 0}, []Revision{revision(0), {Replicas: 2, Existing: 3, Placed: 3, Ready: []bool{true, true}}}, 0, []int32{0, 2}},
		"then one is added":                                          {Budget{3, 1, 0}, []Revision{revision(0), revision(2, 0, 1)}, 0, []int32{1, 2}},
		"waits for the new one to be ready":                          {Budget{3, 1, 0}, []Revision{revision(1), revision(2, 0, 1)}, 0, []int32{1, 2}},
		"continues when it is ready":                                 {Budget{3, 1, 0}, []Revision{revision(1, 0), revision(2, 0, 1)}, 0, []int32{1, 1}},
		"the last one is removed":                                    {Budget{3, 1, 0}, []Revision{revision(2, 0, 1), revision(1, 0)}, 0, []int32{2, 0}},
		"surge first, nothing unavailable":                           {Budget{2, 0, 1}, []Revision{revision(0), revision(2, 0, 1)}, 0, []int32{1, 2}},
		"surge, then one old replica is removed":                     {Budget{2, 0, 1}, []Revision{revision(1, 0), revision(2, 0, 1)}, 0, []int32{1, 1}},
		"a broken old revision does not block":                       {Budget{2, 1, 0}, []Revision{revision(0), revision(1), revision(1, 0)}, 0, []int32{0, 0, 1}},
		"an unready old pod with the highest ordinal does not count": {Budget{2, 1, 0}, []Revision{revision(0), revision(2, 0)}, 0, []int32{0, 1}},
		"no node takes the first: another comes":                     {Budget{3, 1, 0}, []Revision{revision(0), homeless(revision(3, 1, 2), 0)}, 0, []int32{1, 3}},
		"and one is removed for it":                                  {Budget{3, 1, 0}, []Revision{revision(1, 0), homeless(revision(3, 1, 2), 0)}, 0, []int32{1, 2}},
		"room is made only once":                                     {Budget{3, 1, 0}, []Revision{revision(1), homeless(revision(3, 1, 2), 0)}, 0, []int32{1, 3}},
		"nor while an outgoing replica holds its node":               {Budget{3, 1, 0}, []Revision{revision(1, 0), func() Revision { r := homeless(revision(2, 1), 0); r.Existing, r.Placed = 3, 2; return r }()}, 0, []int32{1, 2}},
		"an outgoing revision gets no room":                          {Budget{3, 1, 0}, []Revision{homeless(revision(3, 1, 2), 0), revision(0)}, 0, []int32{3, 0}},
		"a broken first one holds its device":                        {Budget{3, 1, 0}, []Revision{revision(0), revision(3, 1, 2)}, 0, []int32{0, 3}},
		"a single replica has a gap":                                 {Budget{1, 1, 0}, []Revision{revision(0), revision(1, 0)}, 0, []int32{0, 0}},
		"a single replica, surge: none":                              {Budget{1, 1, 1}, []Revision{revision(0), revision(1, 0)}, 0, []int32{1, 1}},
		"its successor does not serve yet":                           {Budget{1, 1, 1}, []Revision{revision(1), revision(1, 0)}, 0, []int32{1, 1}},
		"its successor serves":                                       {Budget{1, 1, 1}, []Revision{revision(1, 0), revision(1, 0)}, 0, []int32{1, 0}},
		"scaled to zero, surge":                                      {Budget{0, 1, 1}, []Revision{revision(1), revision(1, 0)}, 0, []int32{0, 0}},
		"scaled down during a rollout":                               {Budget{1, 1, 0}, []Revision{revision(2, 0), revision(2, 0, 1)}, 0, []int32{1, 0}},
		"scaled to zero":                                             {Budget{0, 1, 0}, []Revision{revision(2, 0, 1)}, 0, []int32{0}},
		"unknown revision: nothing moves":                            {Budget{2, 1, 0}, []Revision{revision(1, 0), revision(1, 0)}, -1, []int32{1, 1}},
		"unknown revision: grows what works":                         {Budget{3, 1, 0}, []Revision{revision(1), revision(1, 0)}, -1, []int32{1, 2}},
		"unknown revision: shrinks the oldest":                       {Budget{1, 1, 0}, []Revision{revision(1, 0), revision(1, 0)}, -1, []int32{1, 0}},
		"unknown revision: what serves stays":                        {Budget{1, 1, 0}, []Revision{revision(1), revision(1, 0)}, -1, []int32{0, 1}},
		"unknown revision: so does a surge":                          {Budget{1, 1, 1}, []Revision{revision(1), revision(1, 0)}, -1, []int32{1, 1}},
		"unknown revision: but not of one alone":                     {Budget{1, 1, 1}, []Revision{revision(0), revision(2, 0, 1)}, -1, []int32{0, 1}},
		"unknown revision: nor when scaled down":                     {Budget{1, 0, 1}, []Revision{revision(1), revision(2, 0, 1)}, -1, []int32{0, 2}},
		"unknown revision: nor to zero":                              {Budget{0, 1, 1}, []Revision{revision(1), revision(1, 0)}, -1, []int32{0, 0}},
		"no revision at all":                                         {Budget{1, 1, 0}, nil, -1, []int32{}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, Replicas(tc.budget, tc.revisions, Goal{Stable: tc.current, Candidate: None})); diff != "" {
				t.Errorf("replicas (-want +got):\n%s", diff)
			}
		})
	}
}

// From random states, with pods that become ready in random order (pods of a broken revision, or without a node, never
// do), every step stays within the bounds, and a rollout to a working revision terminates.
func TestReplicasKeepsBoundsAndEnds(t *testing.T) {
	for seed := range uint64(3000) {
		random := rand.New(rand.NewPCG(seed, 1))
		b := Budget{Replicas: random.Int32N(6), MaxUnavailable: random.Int32N(4), MaxSurge: random.Int32N(3)}
		if b.MaxUnavailable == 0 && b.MaxSurge == 0 {
			b.MaxSurge = 1
		}
		revisions := make([]Revision, 1+random.IntN(4))
		broken := make([]bool, len(revisions))
		for i := range revisions {
			broken[i] = random.IntN(3) == 0
			revisions[i] = revision(random.Int32N(4))
			revisions[i].Existing += random.Int32N(2)
			revisions[i].Placed = revisions[i].Existing
			for ordinal := range revisions[i].Ready {
				revisions[i].Ready[ordinal] = !broken[i] && random.IntN(2) == 0
			}
		}
		current := random.IntN(len(revisions))
		broken[current] = false
		for i, r := range revisions {
			if i != current && r.Replicas > 0 && random.IntN(3) == 0 {
				lost := random.IntN(int(r.Replicas))
				revisions[i] = homeless(r, lost)
				revisions[i].Ready[lost] = false
			}
		}

		done := false
		for step := 0; step < 200 && !done; step++ {
			before := make([]int32, len(revisions))
			for i, r := range revisions {
				before[i] = r.Replicas
			}
			availableBefore := availableReplicas(revisions, before)
			target := Replicas(b, revisions, Goal{Stable: current, Candidate: None})
			goal := Goal{Stable: current, Candidate: None}
			if total := occupied(revisions, target, goal); total > max(occupied(revisions, before, goal), b.Replicas+b.MaxSurge) {
				t.Fatalf("seed %d: %d replicas, above %d + surge %d", seed, total, b.Replicas, b.MaxSurge)
			}
			// The current revision is reduced to the desired number regardless of readiness: this is a scale-down, not
			// a rollout.
			if cut := before[current] > b.Replicas; !cut {
				if available := availableReplicas(revisions, target); available < min(availableBefore, b.Minimum()) {
					t.Fatalf("seed %d: %d available, want %d of budget %+v", seed, available, b.Minimum(), b)
				}
			}
			var starting [][2]int
			done = target[current] == b.Replicas && sum(target) == b.Replicas
			for i := range revisions {
				next := revision(target[i])
				copy(next.Ready, revisions[i].Ready)
				next.Homeless = revisions[i].Homeless[:min(len(revisions[i].Homeless), int(target[i]))]
				next.Placed -= next.homeless(target[i])
				if next.Existing < revisions[i].Existing && random.IntN(2) == 0 {
					next.Existing, next.Placed = revisions[i].Existing, revisions[i].Placed // the pods are not terminating yet
					done = false
				}
				revisions[i] = next
				for ordinal, ready := range next.Ready {
					if !ready && !broken[i] && (len(next.Homeless) <= ordinal || !next.Homeless[ordinal]) {
						starting = append(starting, [2]int{i, ordinal})
						done = false
					}
				}
			}
			if len(starting) > 0 {
				pick := starting[random.IntN(len(starting))]
				revisions[pick[0]].Ready[pick[1]] = true
			}
		}
		if !done {
			t.Fatalf("seed %d: the roll-out does not end: budget %+v, revisions %+v, current %d", seed, b, revisions, current)
		}
	}
}

// The candidate is revision 0; revision 1 serves.
func TestReplicasOfACanary(t *testing.T) {
	trial := func(r Revision) Revision { r.Trial = true; return r }
	cases := map[string]struct {
		budget    Budget
		revisions []Revision
		canary    int32
		paused    bool
		want      []int32
	}{
		"one is removed for it":                           {Budget{3, 1, 0}, []Revision{trial(revision(0)), revision(3, 0, 1, 2)}, 1, false, []int32{0, 2}},
		"it is added":                                     {Budget{3, 1, 0}, []Revision{trial(revision(0)), revision(2, 0, 1)}, 1, false, []int32{1, 2}},
		"it serves, and stays small":                      {Budget{3, 1, 0}, []Revision{trial(revision(1, 0)), revision(2, 0, 1)}, 1, false, []int32{1, 2}},
		"with surge it is added first":                    {Budget{3, 0, 1}, []Revision{trial(revision(0)), revision(3, 0, 1, 2)}, 1, false, []int32{1, 3}},
		"and one is removed when it serves":               {Budget{3, 0, 1}, []Revision{trial(revision(1, 0)), revision(3, 0, 1, 2)}, 1, false, []int32{1, 2}},
		"two at a time":                                   {Budget{6, 2, 0}, []Revision{trial(revision(0)), revision(6, 0, 1, 2, 3, 4, 5)}, 2, false, []int32{0, 4}},
		"never all of them":                               {Budget{2, 1, 0}, []Revision{trial(revision(1, 0)), revision(1, 0)}, 5, false, []int32{1, 1}},
		"the only replica":                                {Budget{1, 1, 0}, []Revision{trial(revision(0)), revision(0)}, 1, false, []int32{1, 0}},
		"the only replica stays, with surge":              {Budget{1, 1, 1}, []Revision{trial(revision(1, 0)), revision(1, 0)}, 1, false, []int32{1, 1}},
		"no serving replica is removed below the minimum": {Budget{3, 1, 0}, []Revision{trial(revision(0)), revision(3, 1, 2)}, 1, false, []int32{0, 3}},
		"scaled up: the rest grows":                       {Budget{5, 1, 0}, []Revision{trial(revision(1, 0)), revision(2, 0, 1)}, 1, false, []int32{1, 4}},
		"scaled down: the rest shrinks":                   {Budget{2, 1, 0}, []Revision{trial(revision(1, 0)), revision(4, 0, 1, 2, 3)}, 1, false, []int32{1, 1}},
		"scaled to zero":                                  {Budget{0, 1, 0}, []Revision{trial(revision(1, 0)), revision(2, 0, 1)}, 1, false, []int32{0, 0}},
		"a smaller canary":                                {Budget{4, 1, 0}, []Revision{trial(revision(2, 0, 1)), revision(2, 0, 1)}, 1, false, []int32{1, 2}},
		"paused: what serves grows":                       {Budget{4, 1, 0}, []Revision{trial(revision(1, 0)), revision(1, 0)}, 1, true, []int32{1, 3}},
		"paused: also where the canary is larger":         {Budget{4, 1, 0}, []Revision{trial(revision(2, 0, 1)), revision(1, 0)}, 1, true, []int32{2, 2}},
		"paused: what surges stays":                       {Budget{2, 0, 1}, []Revision{trial(revision(1)), revision(2, 0, 1)}, 1, true, []int32{1, 2}},
		"paused: the canary shrinks first":                {Budget{2, 1, 0}, []Revision{trial(revision(1, 0)), revision(2, 0, 1)}, 1, true, []int32{0, 2}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			goal := Goal{Stable: 1, Candidate: 0, Canary: tc.canary}
			if tc.paused {
				goal.Stable, goal.Candidate = None, None
			}
			if diff := cmp.Diff(tc.want, Replicas(tc.budget, tc.revisions, goal)); diff != "" {
				t.Errorf("replicas (-want +got):\n%s", diff)
			}
		})
	}
}
