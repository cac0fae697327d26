// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/semmoe/operator/internal/observation/lar"
)

const (
	// minRequests is the minimum number of requests per revision. Sums of fewer requests are not approximately
	// normal.
	minRequests = 30
	// failureMargin is the increase of the failure share that is tolerated.
	failureMargin = 0.01
	// minDetectableGain is the difference of local activation rates that a comparison must be able to detect before it
	// reports no difference.
	minDetectableGain = 0.02
	// promiseSlack is the tolerated shortfall of the local activation rate from the prediction of a plan that is faster
	// although less local: the prediction is estimated from other requests.
	promiseSlack = 0.02
)

// Sample aggregates the requests to a revision.
type Sample struct {
	// Locality covers the sampled requests.
	Locality lar.Ratio
	// Service covers all requests.
	Service lar.Service
	// Minutes contains the same requests by the minute in which they ended.
	Minutes map[time.Time]lar.Service
}

// Add adds the requests that ended in a minute, without their locality, which may cover other requests.
func (s *Sample) Add(minute time.Time, served lar.Service) {
	s.Service.Merge(served)
	if s.Minutes == nil {
		s.Minutes = map[time.Time]lar.Service{}
	}
	sum := s.Minutes[minute]
	sum.Merge(served)
	s.Minutes[minute] = sum
}

// Verdict is the result of a comparison.
type Verdict string

const (
	// TooFew: the requests allow no conclusion.
	TooFew Verdict = "TooFew"
	// Better: the candidate is not slower, and is faster or more local. Of a candidate with Terms.NotSlower: it is not
	// slower.
	Better Verdict = "Better"
	// NotBetter: the candidate is neither, by a relevant amount.
	NotBetter Verdict = "NotBetter"
	// Worse: the candidate is slower or less local, or more of its requests fail.
	Worse Verdict = "Worse"
)

// Comparison is the result of a comparison, with a message. Reason names what is worse.
type Comparison struct {
	Verdict         Verdict
	Reason, Message string
	// Missing is what a promotion lacks; empty if the verdict is not TooFew.
	Missing string
	// Token is the change of the time per output token at the last evaluation; nil if it is not measured.
	Token *Change
	// StepTokens is the number of tokens that all replicas of the stable revision compute in one engine step; 0 if
	// unknown.
	StepTokens float64
}

// Terms are the parameters of a comparison.
type Terms struct {
	// Promised is the predicted difference of the local activation rates. A plan is chosen by modelled time, and may
	// predict fewer local activations. The candidate then counts as more local if it meets the prediction.
	Promised float64
	// Since is when the candidate's replicas began to serve; Now is the time of the evaluation.
	Since, Now time.Time
	// Soak is how long the replicas must serve. A soak below timedSoak requires no proof of times. A candidate that is
	// proven to be slower is still worse.
	Soak time.Duration
	// NotSlower reports that the candidate changes more than the plan: it need not be faster or more local, and needs the
	// proof of times for any soak.
	NotSlower bool
	// AnyLocality reports that the local activation rates of the two revisions are not comparable.
	AnyLocality bool
}

// Compare compares a candidate with the stable revision by requests from the same time. Requests must be assigned to
// the revisions independent of their content; otherwise the comparison is biased.
//
// A candidate is promoted for its times: each relevant time must be proven not to be longer by more than its margin,
// and either the time per output token is proven to be shorter, or the local activation rate to be higher. A rate below
// the prediction, more failures, or a time that is proven to be longer cause a rollback. The error rates are the
// constants promotedSlower, rolledBackEqual and falseDifference.
//
// With NotSlower the proof that no relevant time is longer suffices.
func Compare(candidate, stable Sample, terms Terms) Comparison {
	locality := compareLocality(candidate.Locality, stable.Locality, terms.Promised)
	if terms.AnyLocality {
		locality = Comparison{Verdict: TooFew}
	}
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
	case terms.NotSlower && times.verdict == NotBetter:
		found = Comparison{Verdict: Better, Message: times.message}
	case terms.NotSlower:
		found = Comparison{Verdict: TooFew, Missing: times.message}
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

// sentences joins the non-empty strings.
func sentences(all ...string) string {
	return strings.Join(slices.DeleteFunc(all, func(s string) bool { return s == "" }), "; ")
}

// compareLocality tests the difference of the rates, with the standard errors of ratios of sums.
func compareLocality(candidate, stable lar.Ratio, promised float64) Comparison {
	if candidate.Requests < minRequests || stable.Requests < minRequests || candidate.Total == 0 || stable.Total == 0 {
		return Comparison{Verdict: TooFew, Missing: missingSamples(candidate, stable)}
	}
	found := Comparison{Message: fmt.Sprintf("its local activation rate is %.1f%% over %d sampled requests, against %.1f%% over %d of the stable revision",
		100*candidate.Value(), candidate.Requests, 100*stable.Value(), stable.Requests)}
	difference := candidate.Value() - stable.Value()
	if promised < 0 {
		found.Message += fmt.Sprintf("; its plan predicts a difference of %.1f points, and a faster layer", 100*promised)
		difference += promiseSlack - promised
	}
	bound := alwaysValid(min(candidate.Requests, stable.Requests)) * math.Hypot(candidate.StandardError(), stable.StandardError())
	switch {
	case difference-bound > 0:
		found.Verdict = Better
	case difference+bound < 0:
		found.Verdict, found.Reason = Worse, "LocalityWorse"
	case bound <= minDetectableGain:
		found.Verdict = NotBetter
	default:
		found.Verdict, found.Missing = TooFew, found.Message+fmt.Sprintf(": a difference of %.1f points is not significant", 100*bound)
	}
	return found
}

// missingSamples returns which sampled requests a comparison of local activation rates lacks.
func missingSamples(candidate, stable lar.Ratio) string {
	const text = "%d of at least %d sampled requests of %s"
	if candidate.Requests < minRequests {
		return fmt.Sprintf(text, candidate.Requests, minRequests, "the canary")
	}
	if stable.Requests < minRequests {
		return fmt.Sprintf(text, stable.Requests, minRequests, "the stable revision")
	}
	return "the sampled requests have no activations of routed experts"
}

// compareFailures tests the difference of the failure shares. Each revision gets one additional failure and one
// additional success, because a share of zero would otherwise have no error (Agresti and Caffo 2000).
func compareFailures(candidate, stable lar.Service) Comparison {
	if candidate.Requests < minRequests || stable.Requests < minRequests {
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
