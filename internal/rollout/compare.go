package rollout

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/semmoe/operator/internal/lar"
)

const (
	// leastRequests of either revision are needed: with fewer, sums of requests are not nearly normal.
	leastRequests = 30
	// failureMargin is by how much more of the requests may fail.
	failureMargin = 0.01
	// leastGain is the difference of local activation rates that a comparison must be able to tell before it says that there is
	// none.
	leastGain = 0.02
	// promiseSlack is by how much the local activation rate may be below what a plan promises that is faster although less local: the promise is
	// an estimate from other requests.
	promiseSlack = 0.02
)

// Sample is how requests to a revision went.
type Sample struct {
	// Locality is of the sampled requests.
	Locality lar.Ratio
	// Service is of all requests.
	Service lar.Service
	// Minutes holds the same requests by the minute in which they ended.
	Minutes map[time.Time]lar.Service
}

// Add adds the requests that ended in a minute, but for their locality, which can be of other requests.
func (s *Sample) Add(minute time.Time, served lar.Service) {
	s.Service.Merge(served)
	if s.Minutes == nil {
		s.Minutes = map[time.Time]lar.Service{}
	}
	sum := s.Minutes[minute]
	sum.Merge(served)
	s.Minutes[minute] = sum
}

// Verdict is what a comparison says.
type Verdict string

const (
	// TooFew: the requests do not tell.
	TooFew Verdict = "TooFew"
	// Better: the candidate is not slower, and faster or more local.
	Better Verdict = "Better"
	// NotBetter: it is neither, by as much as matters.
	NotBetter Verdict = "NotBetter"
	// Worse: it is slower or less local, or more requests fail.
	Worse Verdict = "Worse"
)

// Comparison is what a comparison found, and a message that says so. Reason says what is worse.
type Comparison struct {
	Verdict         Verdict
	Reason, Message string
	// Missing says what a promotion lacks; empty where the verdict is not TooFew.
	Missing string
	// Token is the change of the time per output token at the last look; nil where it is not measured.
	Token *Change
	// StepTokens is the number of tokens that all replicas of the stable revision compute in a step of their engines; 0
	// where it is not known.
	StepTokens float64
}

// Terms are what a candidate is compared by.
type Terms struct {
	// Promised is the promised difference of the local activation rates. A plan is chosen by modelled time, and may
	// promise fewer local activations: then the candidate is more local where it keeps that promise.
	Promised float64
	// Since is when the candidate's replicas served, Now the time of the evaluation.
	Since, Now time.Time
	// Soak is how long they must serve. One below timedSoak asks for no proof of times, although a candidate that is
	// proven to be slower is worse all the same.
	Soak time.Duration
}

// Compare compares a candidate with the stable revision by requests of the same time. The requests must have been given
// to either whatever they are, else the two differ by that.
//
// A candidate is promoted for its times: each that counts must be proven not to be longer by more than its margin.
// Either the time per output token is proven to be shorter, or the local activation rate to be higher. A rate that is
// worse than promised, more failures, and a time that is proven to be longer take it back. The error rates are those of
// the constants promotedSlower, takenBackEqual and toldApart.
func Compare(candidate, stable Sample, terms Terms) Comparison {
	locality := compareLocality(candidate.Locality, stable.Locality, terms.Promised)
	if locality.Verdict == Worse {
		return locality
	}
	if failures := compareFailures(candidate.Service, stable.Service); failures.Verdict == Worse {
		return failures
	}
	times := compareTimes(candidate, stable, terms.Since, terms.Now)
	found := locality
	switch {
	case times.verdict == Worse:
		found = Comparison{Verdict: Worse, Reason: times.reason, Message: times.message}
	case times.faster && locality.Verdict != Better:
		found = Comparison{Verdict: Better, Message: times.message}
	case times.verdict == NotBetter:
		found.Message = sentences(locality.Message, times.message)
	case terms.Soak >= timedSoak && (locality.Verdict == Better || locality.Verdict == TooFew):
		found.Verdict, found.Missing = TooFew, sentences(locality.Missing, times.message)
	}
	found.Token, found.StepTokens = times.token, times.stepTokens
	return found
}

// sentences joins those that are not empty.
func sentences(all ...string) string {
	return strings.Join(slices.DeleteFunc(all, func(s string) bool { return s == "" }), "; ")
}

// compareLocality tests the difference of the rates, by the standard errors of ratios of sums.
func compareLocality(candidate, stable lar.Ratio, promised float64) Comparison {
	if candidate.Requests < leastRequests || stable.Requests < leastRequests || candidate.Total == 0 || stable.Total == 0 {
		return Comparison{Verdict: TooFew, Missing: missingSamples(candidate, stable)}
	}
	found := Comparison{Message: fmt.Sprintf("its local activation rate is %.1f%% over %d sampled requests, against %.1f%% over %d of the stable revision",
		100*candidate.Value(), candidate.Requests, 100*stable.Value(), stable.Requests)}
	difference := candidate.Value() - stable.Value()
	if promised < 0 {
		found.Message += fmt.Sprintf("; it promises a difference of %.1f points, and a faster layer", 100*promised)
		difference += promiseSlack - promised
	}
	bound := alwaysValid(min(candidate.Requests, stable.Requests)) * math.Hypot(candidate.StandardError(), stable.StandardError())
	switch {
	case difference-bound > 0:
		found.Verdict = Better
	case difference+bound < 0:
		found.Verdict, found.Reason = Worse, "LocalityWorse"
	case bound <= leastGain:
		found.Verdict = NotBetter
	default:
		found.Verdict, found.Missing = TooFew, found.Message+fmt.Sprintf(": a difference of %.1f points cannot be told from none", 100*bound)
	}
	return found
}

// missingSamples says how many sampled requests a comparison of local activation rates lacks.
func missingSamples(candidate, stable lar.Ratio) string {
	const text = "%d of at least %d sampled requests of %s"
	if candidate.Requests < leastRequests {
		return fmt.Sprintf(text, candidate.Requests, leastRequests, "the canary")
	}
	if stable.Requests < leastRequests {
		return fmt.Sprintf(text, stable.Requests, leastRequests, "the stable revision")
	}
	return "the sampled requests have no activations of routed experts"
}

// compareFailures tests the difference of the shares that fail. Either gets one failure and one success more than it had, without
// which a share of none would have no error (Agresti and Caffo 2000).
func compareFailures(candidate, stable lar.Service) Comparison {
	if candidate.Requests < leastRequests || stable.Requests < leastRequests {
		return Comparison{Verdict: TooFew}
	}
	share := func(s lar.Service) (value, variance float64) {
		n := float64(s.Requests) + 2
		value = (float64(s.Failures) + 1) / n
		return value, value * (1 - value) / n
	}
	ours, ourVariance := share(candidate)
	theirs, theirVariance := share(stable)
	if ours-theirs-failureMargin <= alwaysValid(min(candidate.Requests, stable.Requests))*math.Sqrt(ourVariance+theirVariance) {
		return Comparison{Verdict: NotBetter}
	}
	return Comparison{Verdict: Worse, Reason: "MoreFailures", Message: fmt.Sprintf("%d of its %d requests failed, against %d of %d of the stable revision",
		candidate.Failures, candidate.Requests, stable.Failures, stable.Requests)}
}
