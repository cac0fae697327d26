package rollout

import (
	"math"
	"sort"
	"time"
)

// Error rates of the comparison. docs/canary-statistics.md states them, TestTimesErr and TestCompareErrs measure them.
const (
	// promotedSlower bounds the chance, per hour of comparison, that a candidate is promoted although a time is longer
	// by its margin or more. All times that count must pass, so that the bound of each is that of all.
	promotedSlower = 0.025
	// takenBackEqual bounds the chance, per hour of comparison, that a candidate is taken back for its times although
	// none is longer. The three times share it equally.
	takenBackEqual = 0.025
	// toldApart bounds the chance, over all evaluations however many they are, that local activation rates which are
	// equal are found to differ; half of it on either side. Half of it bounds the chance that equal shares of failures
	// are found to differ.
	toldApart = 0.05
)

// hourOfComparison is how long requests are added up. Then times are compared anew, by the requests of the next hour:
// routers report the last hour (lar.ServiceBuckets), and the error rates hold for each.
const hourOfComparison = 60

// looks are the whole minutes of an hour of comparison after which times are evaluated. Their number bounds the cost of
// repeated evaluation: each spends an equal part of an error rate (a group-sequential test; the union bound holds
// however the looks depend on each other). The minutes grow by about a quarter, as a look that adds little to the sums
// would spend more than it finds.
var looks = [...]int{3, 4, 5, 6, 8, 10, 13, 17, 22, 28, 36, 46, 59}

// maxBatches bounds the batches of an hour of comparison. Means of several minutes depend on each other less than those
// of single ones.
const maxBatches = 15

// warmUp is the part of the first hour of comparison, up to a look, that is left out: a quarter. A replica that has
// just started compiles kernels and has cold caches.
const warmUp = 4

// lookAt returns the part of the comparison that is evaluated at a time: minutes whole minutes from a minute on. It is
// the same until the next look, however often it is evaluated. The last look of an hour holds until the first one of
// the next, although routers forget its first minutes by then. It returns no minutes where none is due.
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

// alwaysValid returns how many standard errors a difference of two means must exceed for being told from none with an
// error rate of toldApart/2 on either side, however often it is evaluated: an asymptotic confidence sequence
// (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, Time-uniform central limit theory and asymptotic confidence
// sequences, Annals of Statistics 2024) by a mixture of normal distributions. n is the number of requests of the
// smaller sample. The factor is least, 3.0, at about 8 times mixed requests.
func alwaysValid(n int64) float64 {
	const mixed = 20
	k := float64(max(n, 1)) / mixed
	return math.Sqrt((1 + 1/k) * math.Log((1+k)/(toldApart*toldApart)))
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
