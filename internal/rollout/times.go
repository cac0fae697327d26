// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/semmoe/operator/internal/observation/lar"
)

const (
	// timedSoak is the shortest soak that requires a proof of times: shorter soaks do not contain the whole minutes of
	// the first look, and start within a minute.
	timedSoak = 4 * time.Minute
	// minTimed is the minimum number of requests with a time, per revision, for a proof that the time is not longer.
	// With a standard deviation of half the mean, the standard error of the difference is then 5%: with fewer requests
	// no interval ends below the margin.
	minTimed = 200
	// relevantShare is the minimum share of the timed requests for a kind of time to be relevant for a promotion.
	relevantShare = 1. / 3
	// slowMinutes is the number of most recent minutes, with requests of both revisions, in each of which the candidate
	// must be slower for a rollback. A replica that has just started, or that shares its node with a short job, is slow
	// for seconds.
	slowMinutes = 3
)

// timeKind is a kind of time by which revisions are compared.
type timeKind struct {
	what, reason string
	// requests names the requests that have the time, for messages.
	requests string
	of       func(lar.Service) lar.Moments
	// margin is the relative change that must be excluded for a promotion. tolerance is the relative change that must
	// be exceeded for a rollback.
	margin, tolerance float64
}

// timeKinds are the compared times.
//
// The margin of the time per output token is 5%: with a standard deviation of half the mean, the proof takes about
// 1,500 requests of the candidate for a plan that changes nothing, and 400 for a plan that is 5% faster. The tolerance
// is 2%, the default of rollout.minimumGainPercent: a smaller difference does not decide for a plan either. Times to
// the first token, and of unstreamed responses, depend on the prefix caches, which are cold on a canary, and are sums
// of more parts: both values are 10%.
var timeKinds = []timeKind{
	{
		what: "time per output token", reason: "InterTokenSlower", requests: "streamed requests",
		of: func(s lar.Service) lar.Moments { return s.InterToken }, margin: 0.05, tolerance: 0.02,
	}, {
		what: "time to the first token", reason: "FirstTokenSlower", requests: "streamed requests",
		of: func(s lar.Service) lar.Moments { return s.FirstToken }, margin: 0.10, tolerance: 0.10,
	}, {
		what: "time of an unstreamed response", reason: "ResponsesSlower", requests: "unstreamed requests",
		of: func(s lar.Service) lar.Moments { return s.Answer }, margin: 0.10, tolerance: 0.10,
	},
}

// Change is the difference of a time between the candidate and the stable revision, at equal prompt length, output
// length and requests in flight.
type Change struct {
	// Requests and StableRequests are the numbers of requests with the time.
	Requests, StableRequests int64
	// Stable is the mean time of the stable revision, in seconds.
	Stable float64
	// Relative is the relative change of the mean: negative is faster. Low and High are the bounds of its interval,
	// which contains the change with a probability of 95% in each hour of comparison, for any number of evaluations.
	Relative, Low, High float64
	// Adjusted is true if the covariates of all requests are known. Otherwise the raw means are compared.
	Adjusted bool

	// rollbackBound is the lower bound that decides on a rollback. slowLately reports that the candidate was slower in
	// each of the last minutes.
	rollbackBound float64
	slowLately    bool
}

// String describes the change.
func (c Change) String() string {
	text := fmt.Sprintf("%+.1f%% (95%% interval %+.1f%% to %+.1f%%; %d and %d requests",
		100*c.Relative, 100*c.Low, 100*c.High, c.Requests, c.StableRequests)
	if !c.Adjusted {
		text += ", not adjusted"
	}
	return text + ")"
}

// times is the result of the comparison of times.
type times struct {
	verdict Verdict
	// faster is true if the time per output token, or of a response, is proven to be shorter.
	faster          bool
	reason, message string
	// token is the change of the time per output token; nil if it is not measured.
	token *Change
	// stepTokens is the number of tokens that the stable revision computes in the time of one output token; 0 if
	// unknown.
	stepTokens float64
}

// compareTimes compares the times of the requests up to the last look. The verdict is Worse if a time is proven to be
// longer, NotBetter if each relevant time is proven not to be longer, and TooFew otherwise.
func compareTimes(candidate, stable Sample, since, now time.Time) times {
	from, minutes := lookAt(since, now)
	if minutes == 0 {
		return times{verdict: TooFew, message: fmt.Sprintf("its times are compared after %d whole minutes", looks[0])}
	}
	ours, theirs := candidate.window(from, minutes), stable.window(from, minutes)
	whole, wholeStable := ours.sum(), theirs.sum()
	found := times{verdict: NotBetter}
	var missing, changes []string
	counted := 0
	timed := float64(whole.FirstToken.N + whole.Answer.N + wholeStable.FirstToken.N + wholeStable.Answer.N)
	for i, kind := range timeKinds {
		n, stableN := kind.of(whole).N, kind.of(wholeStable).N
		change, ok := changeOf(kind, ours, theirs, minutes)
		if ok && i == 0 {
			found.token, found.stepTokens = &change, change.Stable*throughput(wholeStable, time.Duration(minutes)*time.Minute)
		}
		if ok && change.rollbackBound > kind.tolerance && change.slowLately {
			found.verdict, found.faster, found.reason = Worse, false, kind.reason
			found.message = fmt.Sprintf("its %s changes by %v", kind.what, change)
			return found
		}
		if timed == 0 || float64(n+stableN) < relevantShare*timed {
			continue
		}
		counted++
		switch {
		case n < minTimed:
			missing = append(missing, fmt.Sprintf("%d of at least %d %s of the canary", n, minTimed, kind.requests))
		case stableN < minTimed:
			missing = append(missing, fmt.Sprintf("%d of at least %d %s of the stable revision", stableN, minTimed, kind.requests))
		case !ok:
			missing = append(missing, fmt.Sprintf("the %s covers too few minutes with requests of both revisions", kind.what))
		case change.High > kind.margin:
			missing = append(missing, fmt.Sprintf("the %s changes by %v, and more than %+.0f%% cannot be excluded",
				kind.what, change, 100*kind.margin))
		default:
			changes = append(changes, fmt.Sprintf("its %s changes by %v", kind.what, change))
			found.faster = found.faster || change.High < 0 && kind.reason != "FirstTokenSlower"
		}
	}
	if counted == 0 {
		missing = []string{fmt.Sprintf("0 of at least %d requests with a time", minTimed)}
	}
	if len(missing) > 0 {
		found.verdict, found.faster, found.message = TooFew, false, strings.Join(slices.Compact(missing), "; ")
		return found
	}
	found.message = strings.Join(changes, "; ")
	return found
}

// throughput returns the number of prompt and output tokens per second of requests that ended within a time; 0 unless
// it is known for all requests.
func throughput(served lar.Service, within time.Duration) float64 {
	var tokens float64
	for _, m := range []lar.Moments{served.FirstToken, served.Answer} {
		if m.Covariates.N != m.N {
			return 0
		}
		tokens += m.Covariates.X[0] + m.Covariates.X[1]
	}
	return tokens / within.Seconds()
}

// window returns the minutes of a sample, starting at from.
func (s Sample) window(from time.Time, minutes int) series {
	window := make(series, minutes)
	for minute, served := range s.Minutes {
		if at := int(minute.Sub(from) / time.Minute); !minute.Before(from) && at < minutes {
			window[at].Merge(served)
		}
	}
	return window
}

// series contains the requests of a revision by minute.
type series []lar.Service

func (s series) sum() (sum lar.Service) {
	for _, served := range s {
		sum.Merge(served)
	}
	return sum
}

// changeOf estimates the change of a time. In each minute with requests of both revisions, the difference of the means
// is adjusted by the slopes of the time on the covariates within minutes and revisions (analysis of covariance).
// Requests in one minute are correlated, so the error is computed from batches of minutes, not from requests: the
// estimate is a ratio of sums over batches, and its interval uses Student's t distribution. It returns false with fewer
// than minRequests of either revision, or with fewer than three batches.
func changeOf(kind timeKind, ours, theirs series, minutes int) (change Change, ok bool) {
	var used []int
	for i := range ours {
		if kind.of(ours[i]).N > 0 && levelOf(kind.of(theirs[i])) > 0 {
			used = append(used, i)
		}
	}
	slopes, adjusted := slopesOf(kind, used, ours, theirs)
	change.Adjusted = adjusted
	size := (minutes + maxBatches - 1) / maxBatches
	batches := map[int]*struct{ weight, difference, level float64 }{}
	var weight, difference, level float64
	change.slowLately = len(used) >= slowMinutes
	for at, i := range used {
		a, b := kind.of(ours[i]), kind.of(theirs[i])
		change.Requests, change.StableRequests = change.Requests+a.N, change.StableRequests+b.N
		y := levelOf(b)
		d := a.Sum/float64(a.N) - y
		for j := range slopes {
			if adjusted {
				d -= y * slopes[j] * (a.Covariates.X[j]/float64(a.N) - b.Covariates.X[j]/float64(b.N))
			}
		}
		if at >= len(used)-slowMinutes && d <= 0 {
			change.slowLately = false
		}
		w := float64(a.N) * float64(b.N) / float64(a.N+b.N)
		batch := batches[i/size]
		if batch == nil {
			batch = new(struct{ weight, difference, level float64 })
			batches[i/size] = batch
		}
		batch.weight, batch.difference, batch.level = batch.weight+w, batch.difference+w*d, batch.level+w*y
		weight, difference, level = weight+w, difference+w*d, level+w*y
	}
	if change.Requests < minRequests || change.StableRequests < minRequests || level == 0 {
		return change, false
	}
	change.Stable, change.Relative = level/weight, difference/level
	var squares, weights float64
	for _, index := range slices.Sorted(maps.Keys(batches)) {
		batch := batches[index]
		residual := batch.difference - change.Relative*batch.level
		squares += residual * residual
		weights += batch.weight * batch.weight
	}
	effective := weight * weight / weights // equivalent number of batches of equal weight
	df := int(effective+1e-9) - 1
	if df < 2 {
		return change, false
	}
	err := math.Sqrt(squares*effective/(effective-1)) / level
	bound := err * studentQuantile(promotedSlower/float64(len(looks)), df)
	change.Low, change.High = change.Relative-bound, change.Relative+bound
	change.rollbackBound = change.Relative - err*studentQuantile(rolledBackEqual/float64(len(looks)*len(timeKinds)), df)
	return change, true
}

// levelOf returns the mean time; 0 without a request.
func levelOf(m lar.Moments) float64 { return m.Sum / float64(max(m.N, 1)) }

// slopesOf returns the slopes of a linear regression of a time on the covariates, common to both revisions, within
// minutes and revisions. The time is relative to the stable revision's mean of the minute, because a slowdown of the
// engine affects requests of any length proportionally. It returns false unless the covariates of all requests are
// known: routers of earlier releases do not report them.
func slopesOf(kind timeKind, used []int, ours, theirs series) (slopes lar.Covariates, known bool) {
	const count = lar.CovariateCount
	var xx [count]lar.Covariates
	var xy, total lar.Covariates
	for _, i := range used {
		level := levelOf(kind.of(theirs[i]))
		for _, m := range []lar.Moments{kind.of(ours[i]), kind.of(theirs[i])} {
			c := &m.Covariates
			if c.N != m.N {
				return slopes, false
			}
			n := float64(c.N)
			for j := range count {
				xy[j] += (c.XY[j] - c.X[j]*m.Sum/n) / level
				total[j] += c.Product(j, j)
				for k := range count {
					xx[j][k] += c.Product(j, k) - c.X[j]*c.X[k]/n
				}
			}
		}
	}
	return solve(xx, xy, total), len(used) > 0
}

// solve solves the normal equations by Gauss-Jordan elimination. A covariate that is constant or linearly dependent
// gets no slope: total contains the uncentred sums of squares, relative to which a centred sum of squares counts as
// zero.
func solve(xx [lar.CovariateCount]lar.Covariates, xy, total lar.Covariates) (slopes lar.Covariates) {
	var kept []int
	left := xx
	for p := range left {
		if pivot := left[p][p]; pivot <= 1e-9*total[p] || pivot <= 1e-6*xx[p][p] {
			continue
		}
		kept = append(kept, p)
		for r := range left {
			if r == p {
				continue
			}
			f := left[r][p] / left[p][p]
			xy[r] -= f * xy[p]
			for c := range left[r] {
				left[r][c] -= f * left[p][c]
			}
		}
	}
	for _, p := range kept {
		slopes[p] = xy[p] / left[p][p]
	}
	return slopes
}
