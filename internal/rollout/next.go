package rollout

// Input is what the next step of a roll-out is decided from.
type Input struct {
	Budget Budget
	// Revisions are ordered from newest to oldest.
	Revisions []Revision
	// Stable is the index of the revision that serves; None where it is not known, or changes are paused. Candidate is that of the
	// revision that is tried beside it; None without one.
	Stable, Candidate int
	// Canary is how many replicas a canary has, and Trial what is known of the candidate.
	Canary int32
	Trial  Trial
	// Hold leaves a candidate that has failed on its canary.
	Hold bool
}

// Action is the next step.
type Action struct {
	// Replicas is how many each revision shall have.
	Replicas []int32
	// Decision is on the candidate; its Step is empty without one.
	Decision Decision
	// Proven tells that the candidate serves alone: it is stable from now on.
	Proven bool
}

// Next is the next step of a roll-out.
func Next(in Input) Action {
	goal, action := Goal{Stable: in.Stable, Candidate: None}, Action{}
	if in.Stable != None && in.Candidate != None {
		action.Decision = Judge(in.Trial)
		switch step := action.Decision.Step; {
		case step == StepPromote:
			goal.Stable = in.Candidate
			action.Proven = in.alone(in.Candidate)
		case step == StepCanary || in.Hold:
			goal.Candidate, goal.Canary = in.Candidate, in.Canary
		}
	}
	action.Replicas = Replicas(in.Budget, in.Revisions, goal)
	return action
}

// alone tells that nothing is left but one revision, and that it is complete but for what may be out of service. One at least
// serves: a revision that has been scaled to zero on its way has proven nothing.
func (in Input) alone(revision int) bool {
	for i, r := range in.Revisions {
		if i != revision && (r.Replicas > 0 || r.Existing > 0) {
			return false
		}
	}
	r := in.Revisions[revision]
	return r.Replicas == in.Budget.Replicas && r.ReadyReplicas(r.Replicas) >= max(1, in.Budget.Minimum())
}

// MayTry tells that a candidate may be begun: the revision that serves has all its replicas, can give one up or need not, and nothing
// else is left. What a user changes comes first.
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
