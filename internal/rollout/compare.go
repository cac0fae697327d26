package rollout

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/semmoe/operator/internal/lar"
)

const (
	// sigmas is by how many standard errors a difference must exceed its margin to be told from chance. A single look at a
	// comparison errs once in 700 that way. It is looked at again and again as requests come in: of plans that are no different, 120
	// looks find 2% better and 3% worse (TestCompareErrs).
	sigmas = 3
	// leastRequests of either revision are needed: with fewer, sums of requests are not nearly normal.
	leastRequests = 30
	// latencyMargin is by how much, relative to the stable revision, a candidate's times may be longer: its caches are cold.
	latencyMargin = 0.2
	// slowMinutes is the number of minutes, the last ones with answers of both revisions, in each of which the candidate must be
	// slower by the margin. Times of requests next to each other are not independent: a replica that has just started, or that
	// shares its node with a short job, is slow for seconds, and by standard errors alone that is no chance.
	slowMinutes = 3
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
	// Better: the candidate's local activation rate is higher, and nothing is worse.
	Better Verdict = "Better"
	// NotBetter: the rate is not higher by as much as matters.
	NotBetter Verdict = "NotBetter"
	// Worse: the rate is lower, more requests fail, or answers come later.
	Worse Verdict = "Worse"
)

// Comparison is what a comparison found, and a message that says so. Reason says what is worse.
type Comparison struct {
	Verdict         Verdict
	Reason, Message string
}

// Compare compares a candidate with the stable revision by requests of the same time. The requests must have been given to
// either whatever they are, else the two differ by that. promised is the promised difference of their local activation rates. A plan is chosen by
// modelled time, and may promise fewer local activations: then the candidate is better where it keeps that promise.
func Compare(candidate, stable Sample, promised float64) Comparison {
	locality := compareLocality(candidate.Locality, stable.Locality, promised)
	if locality.Verdict == Worse {
		return locality
	}
	service := []Comparison{
		compareFailures(candidate.Service, stable.Service),
		compareTimes("FirstTokenSlower", "the first token", candidate, stable, func(s lar.Service) lar.Moments { return s.FirstToken }),
		compareTimes("InterTokenSlower", "each further token", candidate, stable, func(s lar.Service) lar.Moments { return s.InterToken }),
		compareTimes("AnswersSlower", "an answer in one piece", candidate, stable, func(s lar.Service) lar.Moments { return s.Answer }),
	}
	for _, found := range service {
		if found.Verdict == Worse {
			return found
		}
	}
	return locality
}

// compareLocality tests the difference of the rates, by the standard errors of ratios of sums.
func compareLocality(candidate, stable lar.Ratio, promised float64) Comparison {
	if candidate.Requests < leastRequests || stable.Requests < leastRequests || candidate.Total == 0 || stable.Total == 0 {
		return Comparison{Verdict: TooFew, Message: fmt.Sprintf("fewer than %d requests of either were sampled", leastRequests)}
	}
	found := Comparison{Message: fmt.Sprintf("its local activation rate is %.1f%% over %d sampled requests, against %.1f%% over %d of the stable revision",
		100*candidate.Value(), candidate.Requests, 100*stable.Value(), stable.Requests)}
	difference := candidate.Value() - stable.Value()
	if promised < 0 {
		found.Message += fmt.Sprintf("; it promises a difference of %.1f points, and a faster layer", 100*promised)
		difference += promiseSlack - promised
	}
	bound := sigmas * math.Hypot(candidate.StandardError(), stable.StandardError())
	switch {
	case difference-bound > 0:
		found.Verdict = Better
	case difference+bound < 0:
		found.Verdict, found.Reason = Worse, "LocalityWorse"
	case bound <= leastGain:
		found.Verdict = NotBetter
	default:
		found.Verdict = TooFew
	}
	return found
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
	if ours-theirs-failureMargin <= sigmas*math.Sqrt(ourVariance+theirVariance) {
		return Comparison{Verdict: NotBetter}
	}
	return Comparison{Worse, "MoreFailures", fmt.Sprintf("%d of its %d requests failed, against %d of %d of the stable revision",
		candidate.Failures, candidate.Requests, stable.Failures, stable.Requests)}
}

// compareTimes tests whether a mean time is longer than the stable revision's and its margin: over all requests by their standard
// errors, and in each of the last minutes.
func compareTimes(reason, what string, candidate, stable Sample, of func(lar.Service) lar.Moments) Comparison {
	const factor = 1 + latencyMargin
	all, allStable := of(candidate.Service), of(stable.Service)
	if all.N < leastRequests || allStable.N < leastRequests {
		return Comparison{Verdict: TooFew}
	}
	var minutes int
	for _, minute := range slices.Backward(slices.SortedFunc(maps.Keys(candidate.Minutes), time.Time.Compare)) {
		ours, theirs := of(candidate.Minutes[minute]), of(stable.Minutes[minute])
		if ours.N == 0 || theirs.N == 0 {
			continue
		}
		if ours.Sum/float64(ours.N) <= factor*theirs.Sum/float64(theirs.N) {
			return Comparison{Verdict: NotBetter}
		}
		if minutes++; minutes == slowMinutes {
			break
		}
	}
	if minutes < slowMinutes {
		return Comparison{Verdict: TooFew}
	}
	ours, ourVariance := mean(all)
	theirs, theirVariance := mean(allStable)
	if ours-factor*theirs <= sigmas*math.Sqrt(ourVariance+factor*factor*theirVariance) {
		return Comparison{Verdict: NotBetter}
	}
	return Comparison{Worse, reason, fmt.Sprintf("%s takes it %.4g s in the mean of %d requests, against %.4g s in %d of the stable revision",
		what, ours, all.N, theirs, allStable.N)}
}

// mean is the mean, and the variance of it as an estimate.
func mean(m lar.Moments) (value, variance float64) {
	n := float64(m.N)
	value = m.Sum / n
	return value, max(0, m.SumSquares-m.Sum*value) / (n - 1) / n
}
