// SPDX-License-Identifier: Apache-2.0

package rollout

// Input is the input for the next step of a rollout.
type Input struct {
	Budget Budget
	// Revisions are ordered from newest to oldest.
	Revisions []Revision
	// Stable is the index of the revision that serves; None if unknown, or while changes are paused. Candidate is the
	// index of the revision on trial; None without one.
	Stable, Candidate int
	// Canary is the number of canary replicas, and Trial the observed state of the candidate.
	Canary int32
	Trial  Trial
	// Hold keeps a failed candidate on its canary replicas.
	Hold bool
}

// Action is the next step.
type Action struct {
	// Replicas is the desired number of replicas per revision.
	Replicas []int32
	// Decision is the decision on the candidate; its Step is empty without a candidate.
	Decision Decision
	// Proven reports that only the candidate serves: it becomes the stable revision.
	Proven bool
}

// Next returns the next step of a rollout.
func Next(in Input) Action {
	goal, action := Goal{Stable: in.Stable, Candidate: None}, Action{}
	if in.Stable != None && in.Candidate != None {
		action.Decision = Judge(in.Trial)
		switch step := action.Decision.Step; {
		case step == StepPromote:
			goal.Stable = in.Candidate
			action.Proven = in.onlyServing(in.Candidate)
		case step == StepCanary || in.Hold:
			goal.Candidate, goal.Canary = in.Candidate, in.Canary
		}
	}
	action.Replicas = Replicas(in.Budget, in.Revisions, goal)
	return action
}

// onlyServing reports whether only one revision is left, complete except for the unavailable replicas that the budget
// allows. At least one replica must serve: a revision that was scaled to zero during its promotion is not proven.
func (in Input) onlyServing(revision int) bool {
	for i, r := range in.Revisions {
		if i != revision && (r.Replicas > 0 || r.Existing > 0) {
			return false
		}
	}
	r := in.Revisions[revision]
	return r.Replicas == in.Budget.Replicas && r.ReadyReplicas(r.Replicas) >= max(1, in.Budget.Minimum())
}

// MayTry reports whether a canary may start: the serving revision is complete, can give up a replica or need not, and
// no other revision is left. Changes by the user come first.
func MayTry(b Budget, revisions []Revision, stable int) bool {
	for i, r := range revisions {
		if i != stable && (r.Replicas > 0 || r.Existing > 0) {
			return false
		}
	}
	r := revisions[stable]
	ready := r.ReadyReplicas(r.Replicas)
	if r.Replicas != b.Replicas || ready < max(1, b.Minimum()) {
		return false
	}
	return b.MaxSurge > 0 || ready > b.Minimum() || !r.ready(r.Replicas-1)
}
