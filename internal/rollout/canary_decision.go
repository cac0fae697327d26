// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"slices"
	"time"
)

const (
	// A candidate is rolled back if a replica has had at least crashes restarts and has been unready for crashedFor, or
	// if a replica has been unready for notReady without crashing: engines load for up to an hour.
	crashes    = 3
	crashedFor = 5 * time.Minute
	notReady   = time.Hour
	// A candidate that is not proven to be better is compared for at most maxSoak, or maxSoakFactor times the
	// configured soak if that is longer.
	maxSoak       = time.Hour
	maxSoakFactor = 12
	// A comparison is evaluated looksPerSoak times in a soak, with an interval from minInterval to maxInterval.
	looksPerSoak = 10
	minInterval  = time.Second
	maxInterval  = 30 * time.Second
)

// Replica is the observed state of a candidate's replica.
type Replica struct {
	Name  string
	Ready bool
	// Queued reports that the replica waits for admission by a queue. It does not run yet, so no time limit applies.
	Queued bool
	// Since is when the replica last changed its readiness, or started.
	Since time.Time
	// Restarts is the maximum number of restarts of any container.
	Restarts int32
}

// Trial is the observed state of a candidate.
type Trial struct {
	Now time.Time
	// Canary is how many replicas must serve before the candidate is judged.
	Canary   int32
	Replicas []Replica
	// Soak is how long the replicas must serve. With zero, serving suffices, and nothing is compared.
	Soak time.Duration
	// Promoting reports that the candidate passed its canary, and replicas move to it.
	Promoting bool
	// Approved reports that a user approved the candidate: it is promoted even if requests do not prove that it is
	// better.
	Approved bool
	// Rejected reports that a user ends the trial: the candidate is rolled back.
	Rejected bool
	// Measured reports whether the local activation rate is sampled.
	Measured bool
	// NotSlower reports that the candidate is promoted once it is proven not to be slower (Terms.NotSlower).
	NotSlower bool
	// Comparison compares with the stable revision since ServesSince.
	Comparison Comparison
}

// Step is the next step for a candidate.
type Step string

const (
	// StepCanary keeps the candidate on its canary replicas.
	StepCanary Step = "Canary"
	// StepPromote moves replicas to the candidate.
	StepPromote Step = "Promote"
	// StepRollBack rolls the candidate back.
	StepRollBack Step = "RollBack"
)

// Decision is the next step for a candidate, with its reason. Messages of waiting decisions are stable.
type Decision struct {
	Step            Step
	Reason, Message string
	// Again is the delay until the next decision if no event triggers it; else zero.
	Again time.Duration
}

// Reasons of waiting decisions.
const (
	// ReasonStarting: the canary replicas are not ready yet.
	ReasonStarting = "CanaryStarting"
	// ReasonSoaking: the canary is being compared.
	ReasonSoaking = "Canary"
	// ReasonInconclusive: the longest soak has ended, the requests do not prove that the candidate is better, and no
	// user has approved it.
	ReasonInconclusive = "CanaryInconclusive"
)

// ServesSince returns since when the canary has its number of ready replicas; false if it has not.
func (t Trial) ServesSince() (time.Time, bool) {
	var since []time.Time
	for _, r := range t.Replicas {
		if r.Ready {
			since = append(since, r.Since)
		}
	}
	if len(since) < int(t.Canary) || len(since) == 0 {
		return time.Time{}, false
	}
	slices.SortFunc(since, time.Time.Compare)
	return since[max(t.Canary, 1)-1], true
}

// link is a rule of the decision; it returns nil if it does not apply.
type link func(Trial) *Decision

// chain lists the rules. The first one that applies decides.
var chain = []link{
	rejected,
	// Do not wait for replicas that cannot run.
	broken,
	// Roll back a worse plan, even during its promotion.
	worse,
	// Continue a promotion, unless the previous rule applies.
	promoting,
	starting,
	soaking,
	better,
	// A user may know more than the samples.
	approved,
	noGain,
	inconclusive,
}

// Judge decides the next step for a candidate.
func Judge(t Trial) Decision {
	for _, link := range chain {
		if decision := link(t); decision != nil {
			return *decision
		}
	}
	return Decision{Step: StepCanary, Reason: ReasonSoaking, Message: "it is compared with the stable revision", Again: evaluationInterval(t.Soak)}
}

func rejected(t Trial) *Decision {
	if !t.Rejected {
		return nil
	}
	return &Decision{Step: StepRollBack, Reason: "RollbackRequested", Message: "the annotation semmoe.io/rollback names it"}
}

func broken(t Trial) *Decision {
	for _, r := range t.Replicas {
		age := t.Now.Sub(r.Since)
		switch {
		case r.Ready, r.Queued:
		case r.Restarts >= crashes && age >= crashedFor:
			return &Decision{Step: StepRollBack, Reason: "CanaryCrashing", Message: fmt.Sprintf("replica %s crashes repeatedly, and has not been ready for %s", r.Name, crashedFor)}
		case age >= notReady:
			return &Decision{Step: StepRollBack, Reason: "CanaryNotReady", Message: fmt.Sprintf("replica %s has not been ready for %s", r.Name, notReady)}
		}
	}
	return nil
}

func worse(t Trial) *Decision {
	if t.Soak == 0 || t.Comparison.Verdict != Worse {
		return nil
	}
	return &Decision{Step: StepRollBack, Reason: t.Comparison.Reason, Message: t.Comparison.Message}
}

func promoting(t Trial) *Decision {
	if !t.Promoting {
		return nil
	}
	again := evaluationInterval(t.Soak)
	if first := firstTimeout(t); again == 0 || first != 0 && first < again {
		again = first // ready replicas are compared while another one is not ready
	}
	return &Decision{Step: StepPromote, Reason: "Promoting", Message: "replicas move to it", Again: again}
}

func starting(t Trial) *Decision {
	if _, serves := t.ServesSince(); serves {
		return nil
	}
	message := "its replicas are not ready yet"
	if slices.ContainsFunc(t.Replicas, func(r Replica) bool { return r.Queued }) {
		message = "its replicas wait for admission by a queue"
	}
	return &Decision{Step: StepCanary, Reason: ReasonStarting, Message: message, Again: firstTimeout(t)}
}

func soaking(t Trial) *Decision {
	soaked := t.soaked()
	if soaked >= t.Soak {
		return nil
	}
	return &Decision{Step: StepCanary, Reason: ReasonSoaking, Message: "it is compared with the stable revision", Again: min(evaluationInterval(t.Soak), t.Soak-soaked)}
}

func better(t Trial) *Decision {
	switch {
	case t.Soak == 0:
		return &Decision{Step: StepPromote, Reason: "Ready", Message: "it serves, and rollout.soakSeconds is 0: nothing is compared"}
	case t.Comparison.Verdict == Better:
		return &Decision{Step: StepPromote, Reason: "Better", Message: t.Comparison.Message}
	}
	return nil
}

func approved(t Trial) *Decision {
	if !t.Approved || t.Comparison.Verdict != TooFew {
		return nil
	}
	return &Decision{Step: StepPromote, Reason: "Approved", Message: "it has completed its soak and was approved; " + t.unproven()}
}

func noGain(t Trial) *Decision {
	if t.Comparison.Verdict != NotBetter || t.soaked() < t.longest() {
		return nil
	}
	return &Decision{Step: StepRollBack, Reason: "NoGainObserved", Message: t.Comparison.Message}
}

// inconclusive keeps a candidate that is not proven to be better by the deadline on its canary, and names what the
// proof lacks. If nothing is sampled, waiting does not help: the deadline is then the end of the soak. Times are always
// measured.
func inconclusive(t Trial) *Decision {
	if t.Comparison.Verdict != TooFew || (t.Measured || t.NotSlower) && t.soaked() < t.longest() {
		return nil
	}
	message := t.unproven()
	if t.Comparison.Missing != "" {
		message += ": " + t.Comparison.Missing
	}
	return &Decision{Step: StepCanary, Reason: ReasonInconclusive, Message: message, Again: maxInterval}
}

// unproven returns what the requests do not prove.
func (t Trial) unproven() string {
	if t.NotSlower {
		return "the requests do not prove that it is not slower"
	}
	return "the requests do not prove that it is better"
}

// soaked returns how long the canary has served; zero if the clock is behind that of its nodes.
func (t Trial) soaked() time.Duration {
	since, serves := t.ServesSince()
	if !serves {
		return 0
	}
	return max(0, t.Now.Sub(since))
}

func (t Trial) longest() time.Duration { return max(maxSoak, maxSoakFactor*t.Soak) }

// evaluationInterval returns the interval between evaluations of a comparison; zero without a comparison.
func evaluationInterval(soak time.Duration) time.Duration {
	if soak == 0 {
		return 0
	}
	return min(max(soak/looksPerSoak, minInterval), maxInterval)
}

// firstTimeout returns the delay until the first unready replica can cause a rollback; zero if all are ready.
func firstTimeout(t Trial) time.Duration {
	var first time.Duration
	for _, r := range t.Replicas {
		if r.Ready || r.Queued {
			continue
		}
		limit := notReady
		if r.Restarts >= crashes {
			limit = crashedFor
		}
		// The clock may be behind, and be corrected during the delay.
		if wait := min(max(limit-t.Now.Sub(r.Since), minInterval), limit); first == 0 || wait < first {
			first = wait
		}
	}
	return first
}
