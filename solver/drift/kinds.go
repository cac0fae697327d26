package drift

import (
	"math"
	"math/rand/v2"
	"slices"
)

// The charts, in the order in which they are listed, and their number.
const (
	residualChart = iota
	levelChart
	noveltyChart
	charts
)

// leastOfKind is the number of requests below which those of a kind do not tell how the requests of that kind vary: a run of one
// request again and again is no traffic.
const leastOfKind = 10

// fearFor is by how many standard errors means are taken to be worse than they are known to be, where they are known from so many
// requests in all. Standard errors are themselves not known from few, and are doubtful where variances are not alike: on resampled
// requests (docs/drift.md) false alarms become rare at five of them with 50 requests, three with 100, and one where there are many.
func fearFor(requests int) float64 { return 0.9 + 200/float64(requests) }

// textFear is as many times the usual fear of residuals where tokens say what to expect. Kinds are then alike, so that a threshold withstands none
// that other documents make worse; and these do: between halves of the documents the means of kinds differ by more than twice what their
// standard errors say, for requests of one document are alike.
const textFear = 5

// kinds is what is known of the evidence that requests give on their best ranks, by kind.
type kinds struct {
	names []int
	of    map[int]*kind
	// deviations are the evidence of each request less the mean of its kind [request][chart]. Varied are those of kinds of two requests
	// or more, made as large as they are about the true mean of a kind.
	deviations, varied [][charts]float64
	// within is the standard deviation about the mean of a kind, worse what the mean of all may be worse by.
	within, worse [charts]float64
	// text tells that residuals are less what the tokens of requests say.
	text bool
}

// kind is what is known of one of them.
type kind struct {
	n float64
	// seen is the mean evidence, likely the mean that is to be expected of more requests, feared the one that they may have.
	seen, likely, feared [charts]float64
}

// kindsOf are those of the requests.
func kindsOf(c *Calibration, requests []Request) *kinds {
	fear := fearFor(len(requests))
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
			of.seen[chart] += (x - of.seen[chart]) / of.n
		}
	}
	slices.Sort(k.names) // sums must not depend on the order of requests
	for i, r := range requests {
		of := k.of[r.Kind]
		varied := k.deviations[i]
		for chart := range varied {
			k.deviations[i][chart] -= of.seen[chart]
			varied[chart] = k.deviations[i][chart] * math.Sqrt(of.n/max(1, of.n-1))
		}
		if of.n > 1 {
			k.varied = append(k.varied, varied)
		}
	}
	for chart := range charts {
		k.judge(chart, fear)
	}
	return k
}

// judge finds what is to be expected and to be feared of each kind in a chart. What a kind of few requests has shown is mostly
// chance: it is drawn to the mean of all as far as kinds differ by less than that (a random effect, by the variances within and
// between kinds, the latter a standard error higher than it seems). A kind of one request stands for those that were not seen at all:
// as many of the requests to come are of such kinds as are of these (Good 1953).
func (k *kinds) judge(chart int, fear float64) {
	within, between, mean := k.variances(chart)
	n, number := float64(len(k.deviations)), float64(len(k.names))
	ofAll := between/number + within/n // the variance of the mean of all
	k.within[chart] = math.Sqrt(within)
	text := k.text && chart == residualChart
	if text {
		fear *= textFear
	}
	k.worse[chart] = fear * math.Sqrt(within/n)
	for _, name := range k.names {
		of := k.of[name]
		known := 1.0
		if within > 0 {
			known = between / (between + within/of.n)
		}
		of.likely[chart] = mean + known*(of.seen[chart]-mean)
		variance := (1-known)*between + (1-known)*(1-known)*ofAll
		if text { // what others of its tokens have shown is not known better than what it has shown itself
			variance = max(variance, within/of.n)
		}
		of.feared[chart] = of.likely[chart] + fear*math.Sqrt(variance)
		if of.n == 1 {
			of.feared[chart] = max(of.feared[chart], mean+fear*math.Sqrt(between+ofAll))
		}
	}
}

// variances are those within kinds and between them, by the analysis of variance of groups of unequal size, and the mean of all.
func (k *kinds) variances(chart int) (within, between, mean float64) {
	n, number := float64(len(k.deviations)), float64(len(k.names))
	squares := 0.0 // of the numbers of requests
	for _, name := range k.names {
		of := k.of[name]
		mean += of.n / n * of.seen[chart]
		squares += of.n * of.n
	}
	for _, d := range k.deviations {
		within += d[chart] * d[chart]
	}
	for _, name := range k.names {
		of := k.of[name]
		between += of.n * (of.seen[chart] - mean) * (of.seen[chart] - mean)
	}
	if number == 1 {
		return within / max(1, n-1), 0, mean
	}
	between /= number - 1
	if n == number {
		return between, between, mean // nothing tells them apart
	}
	within /= n - number
	higher := between * (1 + math.Sqrt(2/(number-1)))
	return within, max(0, (higher-within)*(number-1)/(n-squares/n)), mean
}

// run is the evidence of a request in a run of its kind, which is taken to be as bad as is to be feared. Where a kind has few
// requests, that of one of all requests about the mean of its kind comes in place of its own.
func (k *kinds) run(evidence [charts]float64, request, name int, random *rand.Rand) [charts]float64 {
	of := k.of[name]
	borrowed := of.n < leastOfKind && len(k.varied) > 0
	var varied [charts]float64
	if borrowed {
		varied = k.varied[random.IntN(len(k.varied))]
	}
	for chart := range evidence {
		evidence[chart] += of.feared[chart] - of.seen[chart]
		if borrowed {
			evidence[chart] += varied[chart] - k.deviations[request][chart]
		}
	}
	return evidence
}

// newest is the share of what is new in requests of the kind with most of it, and as many standard deviations of the requests of a
// kind above.
func (k *kinds) newest(deviations float64) float64 {
	most := 0.0
	for _, of := range k.of {
		most = max(most, of.likely[noveltyChart])
	}
	return min(1, max(leastReference, most+deviations*k.within[noveltyChart]))
}

// together are the requests with all kinds of few put together.
func together(requests []Request) []Request {
	const rare = -1
	n := map[int]int{}
	for _, r := range requests {
		n[r.Kind]++
	}
	same := slices.Clone(requests)
	for i := range same {
		if n[same[i].Kind] < leastOfKind {
			same[i].Kind = rare
		}
	}
	return same
}
