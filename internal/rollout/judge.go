package rollout

import (
	"fmt"
	"slices"
	"time"
)

const (
	// crashes of a replica, and as long not ready, are what a candidate is given up for; notReady is how long one may take that
	// does not end: engines load for up to an hour.
	crashes    = 3
	crashedFor = 5 * time.Minute
	notReady   = time.Hour
	// longestSoak is how long a candidate is compared before it is given up that is not seen to be better, or as many times the
	// soak that is asked for.
	longestSoak  = time.Hour
	longestSoaks = 12
	// A comparison is evaluated looksPerSoak times in a soak, at most every leastLook and at least every longestLook.
	looksPerSoak = 10
	leastLook    = time.Second
	longestLook  = 30 * time.Second
)

// Replica is what is observed of a replica of a candidate.
type Replica struct {
	Name  string
	Ready bool
	// Since is when it became ready, or ceased to be, or began.
	Since time.Time
	// Restarts of its containers, the most of any.
	Restarts int32
}

// Trial is what is known of a candidate.
type Trial struct {
	Now time.Time
	// Canary is how many replicas must serve for it to be judged.
	Canary   int32
	Replicas []Replica
	// Soak is how long they must serve; zero judges nothing but that they do.
	Soak time.Duration
	// Promoting tells that it has been found good already, and replicas move to it.
	Promoting bool
	// Approved tells that a user has approved it: it is promoted although requests do not prove that it is better.
	Approved bool
	// Measured tells that the local activation rate is sampled at all.
	Measured bool
	// Comparison is with the stable revision, since ServesSince.
	Comparison Comparison
}

// Step is what is to be done with a candidate.
type Step string

const (
	// StepCanary leaves it on its few replicas.
	StepCanary Step = "Canary"
	// StepPromote moves replicas to it.
	StepPromote Step = "Promote"
	// StepRollBack takes it back.
	StepRollBack Step = "RollBack"
)

// Decision is what is to be done with a candidate, and why. Messages of decisions that are only waiting are stable.
type Decision struct {
	Step            Step
	Reason, Message string
	// Again is when to decide again, where nothing else will call; zero otherwise.
	Again time.Duration
}

// Reasons of decisions that wait.
const (
	// ReasonStarting: its replicas are not ready yet.
	ReasonStarting = "CanaryStarting"
	// ReasonSoaking: it is being compared.
	ReasonSoaking = "Canary"
	// ReasonInconclusive: after the longest soak the requests do not prove that it is better, and no user has approved
	// it.
	ReasonInconclusive = "CanaryInconclusive"
)

// ServesSince is from when on as many replicas serve as a canary has; false while they do not.
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

// link is a reason to decide; nil where it has nothing to say.
type link func(Trial) *Decision

// chain is asked in order.
var chain = []link{
	// What does not run cannot be waited for.
	broken,
	// A worse plan never stays, however far its roll-out has come.
	worse,
	// What has been found good goes on; where it turns out to be worse, the link above says so.
	promoting,
	starting,
	soaking,
	better,
	// A human may know what no sample tells.
	approved,
	noGain,
	inconclusive,
}

// Judge decides what is to be done with a candidate.
func Judge(t Trial) Decision {
	for _, link := range chain {
		if decision := link(t); decision != nil {
			return *decision
		}
	}
	return Decision{Step: StepCanary, Reason: ReasonSoaking, Message: "it is compared with the stable revision", Again: look(t.Soak)}
}

func broken(t Trial) *Decision {
	for _, r := range t.Replicas {
		age := t.Now.Sub(r.Since)
		switch {
		case r.Ready:
		case r.Restarts >= crashes && age >= crashedFor:
			return &Decision{Step: StepRollBack, Reason: "CanaryCrashing", Message: fmt.Sprintf("replica %s ends again and again, and has not been ready for %s", r.Name, crashedFor)}
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
	again := look(t.Soak)
	if first := soonest(t); again == 0 || first != 0 && first < again {
		again = first // what serves goes on being compared while one of its replicas does not
	}
	return &Decision{Step: StepPromote, Reason: "Promoting", Message: "replicas move to it", Again: again}
}

func starting(t Trial) *Decision {
	if _, serves := t.ServesSince(); serves {
		return nil
	}
	return &Decision{Step: StepCanary, Reason: ReasonStarting, Message: "its replicas are not ready yet", Again: soonest(t)}
}

func soaking(t Trial) *Decision {
	soaked := t.soaked()
	if soaked >= t.Soak {
		return nil
	}
	return &Decision{Step: StepCanary, Reason: ReasonSoaking, Message: "it is compared with the stable revision", Again: min(look(t.Soak), t.Soak-soaked)}
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
	return &Decision{Step: StepPromote, Reason: "Approved", Message: "it has served as long as is asked for, and was approved; the requests do not prove that it is better"}
}

func noGain(t Trial) *Decision {
	if t.Comparison.Verdict != NotBetter || t.soaked() < t.longest() {
		return nil
	}
	return &Decision{Step: StepRollBack, Reason: "NoGainObserved", Message: t.Comparison.Message}
}

// inconclusive keeps a candidate on its canary that is not proven to be better by the deadline, and says what the proof
// lacks. Where nothing is sampled, waiting does not help: the deadline is the end of the soak.
func inconclusive(t Trial) *Decision {
	if t.Comparison.Verdict != TooFew || t.Measured && t.soaked() < t.longest() {
		return nil
	}
	message := "the requests do not prove that it is better"
	if t.Comparison.Missing != "" {
		message += ": " + t.Comparison.Missing
	}
	return &Decision{Step: StepCanary, Reason: ReasonInconclusive, Message: message, Again: longestLook}
}

// soaked is how long the canary has served.
func (t Trial) soaked() time.Duration {
	since, serves := t.ServesSince()
	if !serves {
		return 0
	}
	return t.Now.Sub(since)
}

func (t Trial) longest() time.Duration { return max(longestSoak, longestSoaks*t.Soak) }

// look is how often a comparison is looked at; zero where there is none.
func look(soak time.Duration) time.Duration {
	if soak == 0 {
		return 0
	}
	return min(max(soak/looksPerSoak, leastLook), longestLook)
}

// soonest is when the first replica that is not ready may be given up; zero where all are.
func soonest(t Trial) time.Duration {
	var first time.Duration
	for _, r := range t.Replicas {
		if r.Ready {
			continue
		}
		limit := notReady
		if r.Restarts >= crashes {
			limit = crashedFor
		}
		if wait := max(limit-t.Now.Sub(r.Since), leastLook); first == 0 || wait < first {
			first = wait
		}
	}
	return first
}
