package moedeployment

// revisionState is what the roll-out planner sees of a revision.
type revisionState struct {
	// Replicas is the number asked for.
	Replicas int32
	// Existing is the number of its pods that are not terminating. It is above Replicas for a moment after a scale-down.
	Existing int32
	// Ready tells for each ordinal below Replicas whether that pod serves. Missing entries are not ready.
	Ready []bool
}

func (r revisionState) ready(ordinal int32) bool {
	return int(ordinal) < len(r.Ready) && r.Ready[ordinal]
}

// budget bounds a roll-out.
type budget struct {
	// Replicas is how many shall serve.
	Replicas int32
	// MaxUnavailable of them may be out of service, MaxSurge more may exist.
	MaxUnavailable, MaxSurge int32
}

// minimum is how many replicas must serve throughout.
func (b budget) minimum() int32 {
	if b.MaxSurge > 0 && b.Replicas > 0 {
		return max(1, b.Replicas-b.MaxUnavailable)
	}
	return max(0, b.Replicas-b.MaxUnavailable)
}

// planReplicas is the next step of a roll-out: how many replicas each revision shall have, given what is observed. It is
// called again after every change, until nothing is left to do.
//
// revisions are ordered from newest to oldest; current is the index of the one that the spec asks for, or -1 where that
// is not known or changes are paused: then only the total is brought to what is asked.
//
// Pods that are terminating do not count: they give their devices back by themselves, and their successors wait for them
// in the scheduler. Pods that are asked for, or exist although they no longer are, do.
//
// Bounds: that count never rises above Replicas + MaxSurge, and no ready pod is given up where fewer than
// Replicas - MaxUnavailable would be left, nor the last one where MaxSurge lets its successor come first. A workload loses
// its highest ordinals first, ready or not, so each is judged by itself.
func planReplicas(b budget, revisions []revisionState, current int) []int32 {
	target := make([]int32, len(revisions))
	for i, r := range revisions {
		target[i] = r.Replicas
	}
	if len(revisions) == 0 {
		return target
	}
	if current < 0 {
		hold(b, revisions, target)
		return target
	}
	grow := func() {
		room := b.Replicas + b.MaxSurge - occupied(revisions, target)
		target[current] += max(0, min(room, b.Replicas-target[current]))
	}
	grow()
	retire(b, revisions, target, current)
	grow()
	return target
}

// retire takes replicas from old revisions, oldest first, and then what the current one has too many of.
func retire(b budget, revisions []revisionState, target []int32, current int) {
	available := availableReplicas(revisions, target)
	minimum := b.minimum()
	for i := len(revisions) - 1; i >= 0; i-- {
		if i == current {
			continue
		}
		for target[i] > 0 {
			if revisions[i].ready(target[i] - 1) {
				if available <= minimum {
					break
				}
				available--
			}
			target[i]--
		}
	}
	target[current] = min(target[current], b.Replicas)
}

// hold changes the total alone: it grows the revision with most ready replicas, since that one is known to work, and
// shrinks from the oldest.
func hold(b budget, revisions []revisionState, target []int32) {
	missing := b.Replicas - sum(target)
	if missing > 0 {
		best := 0
		for i, r := range revisions {
			if readyReplicas(r, r.Replicas) > readyReplicas(revisions[best], revisions[best].Replicas) {
				best = i
			}
		}
		target[best] += missing
		return
	}
	for i := len(target) - 1; i >= 0 && missing < 0; i-- {
		drop := min(target[i], -missing)
		target[i] -= drop
		missing += drop
	}
}

func availableReplicas(revisions []revisionState, target []int32) int32 {
	var available int32
	for i, r := range revisions {
		available += readyReplicas(r, target[i])
	}
	return available
}

func readyReplicas(r revisionState, replicas int32) int32 {
	var ready int32
	for ordinal := range replicas {
		if r.ready(ordinal) {
			ready++
		}
	}
	return ready
}

// occupied is how many replicas are asked for, or exist all the same.
func occupied(revisions []revisionState, target []int32) int32 {
	var total int32
	for i, r := range revisions {
		total += max(r.Existing, target[i])
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
