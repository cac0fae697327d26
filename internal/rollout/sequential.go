// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"math"
	"sort"
	"time"
)

// Error rates of the comparison. docs/canary-statistics.md states them; TestTimesErr and TestCompareErrs measure them.
const (
	// promotedSlower is the maximum probability, per hour of comparison, that a candidate is promoted although a time
	// is longer by its margin or more. All relevant times must pass, so the bound for each is the bound for all.
	promotedSlower = 0.025
	// rolledBackEqual is the maximum probability, per hour of comparison, that a candidate is rolled back for its times
	// although none is longer. The three times share it equally.
	rolledBackEqual = 0.025
	// falseDifference is the maximum probability, over any number of evaluations, that equal local activation rates are
	// found to differ; half of it on each side. Half of it also limits the probability that equal failure shares are
	// found to differ.
	falseDifference = 0.05
)

// hourOfComparison is the length, in minutes, of a comparison period. The times of the next period are compared from
// scratch: routers report the last hour (lar.ServiceBuckets), and the error rates apply per period.
const hourOfComparison = 60

// looks are the minutes of an hour of comparison after which times are evaluated. Their number limits the cost of
// repeated evaluation: each look spends an equal part of an error rate (a group-sequential test; the union bound holds
// for any dependence between looks). The minutes grow by about a quarter, because a look that adds little data would
// cost more than it finds.
var looks = [...]int{3, 4, 5, 6, 8, 10, 13, 17, 22, 28, 36, 46, 59}

// maxBatches is the maximum number of batches in an hour of comparison. Means of several minutes are less correlated
// than means of single minutes.
const maxBatches = 15

// warmUp sets the omitted part of the first hour of comparison, up to a look: 1/warmUp of it. A replica that has just
// started compiles kernels and has cold caches.
const warmUp = 4

// lookAt returns the evaluated part of the comparison at time now: minutes whole minutes from from. The result stays
// the same until the next look. The last look of an hour applies until the first look of the next hour, although
// routers drop its first minutes by then. It returns 0 minutes if no look is due.
func lookAt(since, now time.Time) (from time.Time, minutes int) {
	first := since.Truncate(time.Minute)
	if first.Before(since) {
		first = first.Add(time.Minute)
	}
	whole := int(now.Sub(first) / time.Minute)
	if whole < looks[0] {
		return first, 0
	}
	hour := whole / hourOfComparison
	i := sort.SearchInts(looks[:], whole%hourOfComparison+1)
	if i == 0 {
		hour, i = hour-1, len(looks)
	}
	from, minutes = first.Add(time.Duration(hour)*hourOfComparison*time.Minute), looks[i-1]
	if hour == 0 {
		from, minutes = from.Add(time.Duration(minutes/warmUp)*time.Minute), minutes-minutes/warmUp
	}
	return from, minutes
}

// alwaysValid returns how many standard errors a difference of two means must exceed to be significant, with an error
// rate of falseDifference/2 on each side for any number of evaluations: an asymptotic confidence sequence
// (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, Time-uniform central limit theory and asymptotic confidence
// sequences, Annals of Statistics 2024) by a mixture of normal distributions. n is the number of requests of the
// smaller sample. The factor has its minimum of 3.0 at about 8 times mixed requests.
func alwaysValid(n int64) float64 {
	const mixed = 20
	k := float64(max(n, 1)) / mixed
	return math.Sqrt((1 + 1/k) * math.Log((1+k)/(falseDifference*falseDifference)))
}

// studentQuantile returns the value that a variable of Student's t distribution with df degrees of freedom exceeds with
// probability tail, at most 0.5.
func studentQuantile(tail float64, df int) float64 {
	low, high := 0.0, 1.0
	for studentTail(high, df) > tail {
		high *= 2
	}
	for range 60 {
		if middle := (low + high) / 2; studentTail(middle, df) > tail {
			low = middle
		} else {
			high = middle
		}
	}
	return high
}

// studentTail returns the probability that a variable of Student's t distribution exceeds t, at least 0, by the finite
// series for integer degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4).
func studentTail(t float64, df int) float64 {
	theta := math.Atan(t / math.Sqrt(float64(df)))
	sin, cos := math.Sincos(theta)
	term, sum := 1.0, 1.0
	if df%2 == 1 {
		term = cos
		sum = cos
	}
	for i := 2 + df%2; i <= df-2; i += 2 {
		term *= cos * cos * float64(i-1) / float64(i)
		sum += term
	}
	inside := sin * sum // probability of an absolute value below t
	switch {
	case df == 1:
		inside = 2 * theta / math.Pi
	case df%2 == 1:
		inside = 2 / math.Pi * (theta + sin*sum)
	}
	return (1 - inside) / 2
}
