// SPDX-License-Identifier: Apache-2.0

package drift

import (
	"math"
	"math/rand/v2"
	"slices"
)

// The indices of the charts, and their number.
const (
	residualChart = iota
	levelChart
	noveltyChart
	charts
)

// minRequestsPerKind is the minimum number of requests of a kind for an estimate of the variance within the kind.
// Repeating the same few requests is not representative traffic.
const minRequestsPerKind = 10

// marginFor returns the safety margin of estimated means, in standard errors, as a function of the total number of
// requests. With few requests, the standard errors are uncertain themselves, and they are unreliable if variances
// differ between kinds. On resampled requests (docs/drift.md), false alarms become rare at five standard errors with 50
// requests, three with 100, and one with many.
func marginFor(requests int) float64 { return 0.9 + 200/float64(requests) }

// textMargin is the factor of the margin of residuals with a text model. The text model makes kinds similar, so the
// decision interval has no reserve for kinds that are worse in other documents. Such kinds occur: between halves of the
// documents, the means of kinds differ by more than twice their standard errors, because the requests of one document
// are alike.
const textMargin = 5

// kinds contains estimates by kind of the evidence of requests on their best ranks.
type kinds struct {
	names []int
	of    map[int]*kind
	// deviations are the evidence of each request minus the mean of its kind [request][chart]. varied contains the
	// deviations of kinds with at least two requests, scaled to the deviation from the true mean of a kind.
	deviations, varied [][charts]float64
	// within is the standard deviation within a kind. worstShift is the safety margin of the overall mean.
	within, worstShift [charts]float64
	// text reports whether the residuals are those of a text model.
	text bool
}

// kind contains the estimates of one kind.
type kind struct {
	n float64
	// observed is the mean evidence of the held-out requests, estimate the estimated true mean, worst the estimate plus
	// its safety margin.
	observed, estimate, worst [charts]float64
}

// estimateKinds estimates the evidence of the requests by kind under the calibration.
func estimateKinds(c *Calibration, requests []Request) *kinds {
	margin := marginFor(len(requests))
	k := &kinds{text: c.Text != nil, of: map[int]*kind{}, deviations: make([][charts]float64, len(requests))}
	for i, r := range requests {
		k.deviations[i] = c.evidence(r.sample(r.best()))
		if k.of[r.Kind] == nil {
			k.of[r.Kind] = &kind{}
			k.names = append(k.names, r.Kind)
		}
		of := k.of[r.Kind]
		of.n++
		for chart, x := range k.deviations[i] {
			of.observed[chart] += (x - of.observed[chart]) / of.n
		}
	}
	slices.Sort(k.names) // sums must not depend on the order of requests
	for i, r := range requests {
		of := k.of[r.Kind]
		varied := k.deviations[i]
		for chart := range varied {
			k.deviations[i][chart] -= of.observed[chart]
			varied[chart] = k.deviations[i][chart] * math.Sqrt(of.n/max(1, of.n-1))
		}
		if of.n > 1 {
			k.varied = append(k.varied, varied)
		}
	}
	for chart := range charts {
		k.estimate(chart, margin)
	}
	return k
}

// estimate sets the estimated and worst-case means of each kind in a chart. The observed mean of a kind with few
// requests is mostly chance. It is shrunk towards the overall mean by the ratio of the variances within and between
// kinds (a random-effects model, with the variance between kinds raised by one standard error). A kind of one request
// represents unseen kinds: the expected share of future requests of unseen kinds equals the share of such requests
// (Good 1953).
func (k *kinds) estimate(chart int, margin float64) {
	within, between, mean := k.variances(chart)
	n, number := float64(len(k.deviations)), float64(len(k.names))
	ofMean := between/number + within/n // variance of the overall mean
	k.within[chart] = math.Sqrt(within)
	text := k.text && chart == residualChart
	if text {
		margin *= textMargin
	}
	k.worstShift[chart] = margin * math.Sqrt(within/n)
	for _, name := range k.names {
		of := k.of[name]
		reliability := 1.0
		if within > 0 {
			reliability = between / (between + within/of.n)
		}
		of.estimate[chart] = mean + reliability*(of.observed[chart]-mean)
		variance := (1-reliability)*between + (1-reliability)*(1-reliability)*ofMean
		if text { // the shrunk mean is no more certain than the kind's own mean
			variance = max(variance, within/of.n)
		}
		of.worst[chart] = of.estimate[chart] + margin*math.Sqrt(variance)
		if of.n == 1 {
			of.worst[chart] = max(of.worst[chart], mean+margin*math.Sqrt(between+ofMean))
		}
	}
}

// variances returns the variances within and between kinds, by analysis of variance with groups of unequal size, and
// the overall mean.
func (k *kinds) variances(chart int) (within, between, mean float64) {
	n, number := float64(len(k.deviations)), float64(len(k.names))
	squares := 0.0 // sum of the squared numbers of requests
	for _, name := range k.names {
		of := k.of[name]
		mean += of.n / n * of.observed[chart]
		squares += of.n * of.n
	}
	for _, d := range k.deviations {
		within += d[chart] * d[chart]
	}
	for _, name := range k.names {
		of := k.of[name]
		between += of.n * (of.observed[chart] - mean) * (of.observed[chart] - mean)
	}
	if number == 1 {
		return within / max(1, n-1), 0, mean
	}
	between /= number - 1
	if n == number {
		return between, between, mean // within and between cannot be separated
	}
	within /= n - number
	higher := between * (1 + math.Sqrt(2/(number-1)))
	return within, max(0, (higher-within)*(number-1)/(n-squares/n)), mean
}

// worstCase returns the evidence of a request in a run of its kind, with the worst-case mean of the kind. If the kind
// has few requests, the deviation of a random request of any kind replaces the request's own deviation.
func (k *kinds) worstCase(evidence [charts]float64, request, name int, random *rand.Rand) [charts]float64 {
	of := k.of[name]
	borrowed := of.n < minRequestsPerKind && len(k.varied) > 0
	var varied [charts]float64
	if borrowed {
		varied = k.varied[random.IntN(len(k.varied))]
	}
	for chart := range evidence {
		evidence[chart] += of.worst[chart] - of.observed[chart]
		if borrowed {
			evidence[chart] += varied[chart] - k.deviations[request][chart]
		}
	}
	return evidence
}

// noveltyReference returns the reference value of the novelty chart: the share of unseen content of the kind with most
// of it, plus the given number of standard deviations within a kind.
func (k *kinds) noveltyReference(deviations float64) float64 {
	maxNovelty := 0.0
	for _, of := range k.of {
		maxNovelty = max(maxNovelty, of.estimate[noveltyChart])
	}
	return min(1, max(minReference, maxNovelty+deviations*k.within[noveltyChart]))
}

// mergeRareKinds returns a copy of the requests in which all kinds with few requests are one kind.
func mergeRareKinds(requests []Request) []Request {
	const rare = -1
	n := map[int]int{}
	for _, r := range requests {
		n[r.Kind]++
	}
	merged := slices.Clone(requests)
	for i := range merged {
		if n[merged[i].Kind] < minRequestsPerKind {
			merged[i].Kind = rare
		}
	}
	return merged
}
