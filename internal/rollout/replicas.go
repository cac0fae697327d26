// SPDX-License-Identifier: Apache-2.0

package rollout

import "slices"

// Revision is the observed state of a revision.
type Revision struct {
	// Replicas is the desired number of replicas.
	Replicas int32
	// Existing is the number of replicas that are not terminating. Placed is how many of these are on nodes and hold
	// devices. Both can exceed Replicas briefly after a scale-down.
	Existing, Placed int32
	// Ready reports for each ordinal below Replicas whether the replica serves. Missing entries count as not ready.
	Ready []bool
	// Homeless reports for each ordinal below Replicas whether no node has room for the replica, or whether the replica
	// is leaving its node (for example a lost node). Missing entries count as false.
	Homeless []bool
	// Trial reports that the revision is on its canary or being promoted, and not proven yet.
	Trial bool
}

func (r Revision) ready(ordinal int32) bool {
	return int(ordinal) < len(r.Ready) && r.Ready[ordinal]
}

// homeless returns the number of homeless replicas among the first replicas ordinals.
func (r Revision) homeless(replicas int32) int32 {
	var count int32
	for _, is := range r.Homeless[:min(int(replicas), len(r.Homeless))] {
		if is {
			count++
		}
	}
	return count
}

// ReadyReplicas returns the number of ready replicas among the first replicas ordinals.
func (r Revision) ReadyReplicas(replicas int32) int32 {
	var ready int32
	for ordinal := range replicas {
		if r.ready(ordinal) {
			ready++
		}
	}
	return ready
}

// Budget limits a rollout.
type Budget struct {
	// Replicas is the desired total number of replicas.
	Replicas int32
	// MaxUnavailable is how many of them may be unavailable; MaxSurge is how many more may exist.
	MaxUnavailable, MaxSurge int32
}

// Minimum returns how many replicas must serve at any time.
func (b Budget) Minimum() int32 {
	if b.MaxSurge > 0 && b.Replicas > 0 {
		return max(1, b.Replicas-b.MaxUnavailable)
	}
	return max(0, b.Replicas-b.MaxUnavailable)
}

// None is the index of a missing revision.
const None = -1

// Goal is the target of a rollout.
type Goal struct {
	// Stable is the index of the target revision; None if unknown, or while changes are paused: then only the total is
	// adjusted.
	Stable int
	// Candidate is the index of the revision that soaks on Canary replicas; None without one.
	Candidate int
	Canary    int32
}

// CanarySize returns how many of the desired replicas a canary gets. With at least two replicas, the stable revision
// keeps at least one.
func CanarySize(replicas, canary int32) int32 {
	return min(canary, max(replicas-1, 1), replicas)
}

// wants returns the final number of replicas per revision.
func (g Goal) wants(b Budget, revisions int) []int32 {
	want := make([]int32, revisions)
	want[g.Stable] = b.Replicas
	if g.Candidate == None {
		return want
	}
	canary := CanarySize(b.Replicas, g.Canary)
	want[g.Candidate], want[g.Stable] = canary, b.Replicas-canary
	if want[g.Stable] == 0 && b.MaxSurge > 0 && b.Replicas > 0 {
		want[g.Stable] = 1 // a single canary replica needs one to be compared with
	}
	return want
}

// Replicas returns the next step of a rollout: the number of replicas per revision, given the observed state. It is
// called after every change until no step is left.
//
// revisions are ordered from newest to oldest.
//
// Terminating replicas do not count: they release their devices, and their successors wait in the scheduler. Desired
// replicas count, and so do existing ones that are no longer desired. Replicas of an outgoing revision that fit no node
// do not count: they hold no device, and below serving replicas they would permanently block the change that replaces
// them.
//
// Bounds: this count never exceeds Replicas + MaxSurge. No ready replica is removed if fewer than Replicas -
// MaxUnavailable would be left, nor the last ready one if MaxSurge allows its successor to start first. A workload
// loses its highest ordinals first, ready or not, so each ordinal is checked individually.
func Replicas(b Budget, revisions []Revision, goal Goal) []int32 {
	target := make([]int32, len(revisions))
	for i, r := range revisions {
		target[i] = r.Replicas
	}
	if len(revisions) == 0 {
		return target
	}
	if goal.Stable == None {
		adjustTotal(b, revisions, target)
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

// retire removes excess replicas from revisions: first from the candidate, then from unproven revisions, then from old
// ones (oldest first), and last from the stable one. Replicas of the stable revision beyond the total are removed
// regardless of readiness: this is a scale-down, not a rollout.
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

// retirement returns the order in which revisions give up replicas.
func retirement(revisions []Revision, goal Goal) []int {
	order := slices.DeleteFunc(unprovenFirst(revisions), func(i int) bool { return i == goal.Stable || i == goal.Candidate })
	if goal.Candidate != None {
		order = slices.Insert(order, 0, goal.Candidate)
	}
	return append(order, goal.Stable)
}

// unprovenFirst returns unproven revisions first, then proven ones, each from oldest to newest.
func unprovenFirst(revisions []Revision) []int {
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

// adjustTotal changes only the total. It grows the proven revision with the most ready replicas, because this revision is
// known to work. It shrinks revisions on trial first, then from the oldest, ready replicas last. While several
// revisions have replicas, surge replicas stay: otherwise serving replicas would be removed for ones that do not serve
// yet.
func adjustTotal(b Budget, revisions []Revision, target []int32) {
	excess := sum(target) - b.Replicas
	if excess < 0 {
		room := b.Replicas + b.MaxSurge - occupied(revisions, target, Goal{Stable: None, Candidate: None})
		target[mostReliable(revisions)] += max(0, min(-excess, room))
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
		for _, i := range unprovenFirst(revisions) {
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

// several reports whether more than one revision has replicas.
func several(target []int32) bool {
	with := 0
	for _, replicas := range target {
		if replicas > 0 {
			with++
		}
	}
	return with > 1
}

// mostReliable returns the revision that most likely works.
func mostReliable(revisions []Revision) int {
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

// occupied returns how many replicas are desired, or exist anyway and hold devices. Replicas of outgoing revisions
// count if they have, or may get, a node.
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
