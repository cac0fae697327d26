package rollout

import "slices"

// Revision is what is observed of a revision.
type Revision struct {
	// Replicas is the number asked for.
	Replicas int32
	// Existing is the number of its replicas that are not terminating, Placed how many of those are on nodes and hold devices. Both can
	// be above Replicas for a moment after a scale-down.
	Existing, Placed int32
	// Ready tells for each ordinal below Replicas whether that replica serves. Missing entries are not ready.
	Ready []bool
	// Homeless tells for each ordinal below Replicas whether no node has room for that replica, or it is leaving one, lost perhaps.
	// Missing entries are not.
	Homeless []bool
	// Trial tells that it is a canary, or being promoted: it has not proven itself.
	Trial bool
}

func (r Revision) ready(ordinal int32) bool {
	return int(ordinal) < len(r.Ready) && r.Ready[ordinal]
}

// homeless is how many of the first replicas are.
func (r Revision) homeless(replicas int32) int32 {
	var count int32
	for _, is := range r.Homeless[:min(int(replicas), len(r.Homeless))] {
		if is {
			count++
		}
	}
	return count
}

// ReadyReplicas is how many of the first replicas serve.
func (r Revision) ReadyReplicas(replicas int32) int32 {
	var ready int32
	for ordinal := range replicas {
		if r.ready(ordinal) {
			ready++
		}
	}
	return ready
}

// Budget bounds a roll-out.
type Budget struct {
	// Replicas is how many shall serve.
	Replicas int32
	// MaxUnavailable of them may be out of service, MaxSurge more may exist.
	MaxUnavailable, MaxSurge int32
}

// Minimum is how many replicas must serve throughout.
func (b Budget) Minimum() int32 {
	if b.MaxSurge > 0 && b.Replicas > 0 {
		return max(1, b.Replicas-b.MaxUnavailable)
	}
	return max(0, b.Replicas-b.MaxUnavailable)
}

// None stands for a revision that there is not.
const None = -1

// Goal is what the replicas are moved towards.
type Goal struct {
	// Stable is the index of the revision that shall serve; None where it is not known, or changes are paused: then only the
	// total is brought to what is asked.
	Stable int
	// Candidate is the index of the revision that soaks beside it, on Canary replicas; None without one.
	Candidate int
	Canary    int32
}

// CanarySize is how many replicas a canary has of those that shall serve: one at least is left to the stable revision, as long as
// there are two.
func CanarySize(replicas, canary int32) int32 {
	return min(canary, max(replicas-1, 1), replicas)
}

// wants is how many replicas each revision shall have in the end.
func (g Goal) wants(b Budget, revisions int) []int32 {
	want := make([]int32, revisions)
	want[g.Stable] = b.Replicas
	if g.Candidate == None {
		return want
	}
	canary := CanarySize(b.Replicas, g.Canary)
	want[g.Candidate], want[g.Stable] = canary, b.Replicas-canary
	if want[g.Stable] == 0 && b.MaxSurge > 0 && b.Replicas > 0 {
		want[g.Stable] = 1 // else a single replica would have nothing to be compared with
	}
	return want
}

// Replicas is the next step of a roll-out: how many replicas each revision shall have, given what is observed. It is
// called again after every change, until nothing is left to do.
//
// revisions are ordered from newest to oldest.
//
// Replicas that are terminating do not count: they give their devices back by themselves, and their successors wait for them
// in the scheduler. Those that are asked for, or exist although they no longer are, do, but for those of a revision that goes which no
// node takes: they hold no device, and below others that serve would keep back for ever the change that cures them.
//
// Bounds: that count is never raised above Replicas + MaxSurge, and no ready replica is given up where fewer than
// Replicas - MaxUnavailable would be left, nor the last one where MaxSurge lets its successor come first. A workload loses
// its highest ordinals first, ready or not, so each is judged by itself.
func Replicas(b Budget, revisions []Revision, goal Goal) []int32 {
	target := make([]int32, len(revisions))
	for i, r := range revisions {
		target[i] = r.Replicas
	}
	if len(revisions) == 0 {
		return target
	}
	if goal.Stable == None {
		hold(b, revisions, target)
		return target
	}
	want := goal.wants(b, len(revisions))
	grow := func() {
		for _, i := range []int{goal.Stable, goal.Candidate} {
			if i != None {
				room := b.Replicas + b.MaxSurge - occupied(revisions, target, goal)
				target[i] += max(0, min(room, want[i]-target[i]))
			}
		}
	}
	grow()
	retire(b, revisions, target, want, goal)
	grow()
	return target
}

// retire takes from revisions what they have beyond what they shall have: from a candidate first, then from what has not
// proven itself, from old ones, the oldest first, and from the stable one last. What that has beyond all replicas goes whatever
// serves: it is a scale-down, not a roll-out.
func retire(b Budget, revisions []Revision, target, want []int32, goal Goal) {
	available := availableReplicas(revisions, target)
	for _, i := range retirement(revisions, goal) {
		for target[i] > want[i] {
			if revisions[i].ready(target[i] - 1) {
				if available <= b.Minimum() {
					break
				}
				available--
			}
			target[i]--
		}
	}
	target[goal.Stable] = min(target[goal.Stable], b.Replicas)
}

// retirement is the order in which revisions give replicas up.
func retirement(revisions []Revision, goal Goal) []int {
	order := slices.DeleteFunc(leastProven(revisions), func(i int) bool { return i == goal.Stable || i == goal.Candidate })
	if goal.Candidate != None {
		order = slices.Insert(order, 0, goal.Candidate)
	}
	return append(order, goal.Stable)
}

// leastProven is the order of what has not proven itself, then of what has, the oldest first.
func leastProven(revisions []Revision) []int {
	var order []int
	for _, trial := range []bool{true, false} {
		for i := len(revisions) - 1; i >= 0; i-- {
			if revisions[i].Trial == trial {
				order = append(order, i)
			}
		}
	}
	return order
}

// hold changes the total alone: it grows the proven revision with most ready replicas, since that one is known to work, and
// shrinks those on trial, then from the oldest, ready replicas last. While several revisions have replicas what surges stays: it is no
// scale-down, and what serves would go for what does not yet.
func hold(b Budget, revisions []Revision, target []int32) {
	excess := sum(target) - b.Replicas
	if excess < 0 {
		room := b.Replicas + b.MaxSurge - occupied(revisions, target, Goal{Stable: None, Candidate: None})
		target[known(revisions)] += max(0, min(-excess, room))
		return
	}
	if !several(target) {
		for i := range target {
			target[i] = min(target[i], b.Replicas)
		}
		return
	}
	if b.Replicas > 0 {
		excess -= b.MaxSurge
	}
	spare := availableReplicas(revisions, target) - b.Minimum()
	for _, ready := range []bool{false, true} {
		for _, i := range leastProven(revisions) {
			for excess > 0 && target[i] > 0 {
				if revisions[i].ready(target[i] - 1) {
					if !ready || spare <= 0 {
						break
					}
					spare--
				}
				target[i]--
				excess--
			}
		}
	}
}

// several tells that more than one revision has replicas.
func several(target []int32) bool {
	with := 0
	for _, replicas := range target {
		if replicas > 0 {
			with++
		}
	}
	return with > 1
}

// known is the revision that is best known to work.
func known(revisions []Revision) int {
	best := 0
	for i, r := range revisions {
		better := r.ReadyReplicas(r.Replicas) > revisions[best].ReadyReplicas(revisions[best].Replicas)
		if r.Trial == revisions[best].Trial && better || !r.Trial && revisions[best].Trial {
			best = i
		}
	}
	return best
}

func availableReplicas(revisions []Revision, target []int32) int32 {
	var available int32
	for i, r := range revisions {
		available += r.ReadyReplicas(target[i])
	}
	return available
}

// occupied is how many replicas are asked for, or exist all the same and hold devices. Of revisions that go, those count that have, or
// may get, a node.
func occupied(revisions []Revision, target []int32, goal Goal) int32 {
	var total int32
	for i, r := range revisions {
		asked := target[i]
		if i != goal.Stable && i != goal.Candidate {
			asked -= r.homeless(asked)
		}
		total += max(r.Placed, asked)
	}
	return total
}

func sum(values []int32) int32 {
	var total int32
	for _, v := range values {
		total += v
	}
	return total
}
