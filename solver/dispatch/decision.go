// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Request contains the properties of a request that are known at its arrival.
type Request struct {
	// Scores are the forecast local shares per rank; nil without a forecast.
	Scores []float32
	// Tokens is the size of the request: its prompt and the expected output, which the prompt's forecast covers too.
	Tokens int
	// Prompt is the number of prompt tokens, which are computed before the first output token.
	Prompt int
}

// Place is one rank of a pod, as known to the router at the arrival of a request.
type Place struct {
	// Rank is the rank within the pod.
	Rank int
	// Outstanding is the number of tokens of requests that were sent to the place and have not ended.
	Outstanding int64
	// Next is the estimated number of prompt tokens that the pod's next step computes on this rank: those sent since
	// the pod last started or ended a response, which shows that a step is complete.
	Next int64
	// Cached is the part of the request that the place probably has cached (see Prefixes).
	Cached Hit
}

// Costs convert the savings of a decision into microseconds; both are at least 0.
type Costs struct {
	// Exchange is the time in which all MoE layers send and return one token without any local activation.
	Exchange float64
	// Compute is the time to process one prompt token.
	Compute float64
}

// Weights scale the components of a decision's value: 1 is the modelled value, 0 ignores the component.
type Weights struct{ Affinity, Prefix, Load, Wait float64 }

// DefaultWeights use every component as modelled.
var DefaultWeights = Weights{Affinity: 1, Prefix: 1, Load: 1, Wait: 1}

// ParseWeights parses weights such as "affinity=1,prefix=0.5,load=1,wait=1"; unnamed weights keep their defaults.
func ParseWeights(text string) (Weights, error) {
	w := DefaultWeights
	if text == "" {
		return w, nil
	}
	for _, part := range strings.Split(text, ",") {
		name, number, _ := strings.Cut(part, "=")
		value, err := strconv.ParseFloat(number, 64)
		if err != nil {
			return w, fmt.Errorf("weight %q is invalid: the format is name=number", part)
		}
		switch name {
		case "affinity":
			w.Affinity = value
		case "prefix":
			w.Prefix = value
		case "load":
			w.Load = value
		case "wait":
			w.Wait = value
		default:
			return w, fmt.Errorf("weight %q is unknown; allowed is affinity, prefix, load, wait", name)
		}
	}
	return w, w.validate()
}

func (w Weights) validate() error {
	for _, weight := range []struct {
		name  string
		value float64
	}{{"affinity", w.Affinity}, {"prefix", w.Prefix}, {"load", w.Load}, {"wait", w.Wait}} {
		if !(weight.value >= 0) || math.IsInf(weight.value, 1) {
			return fmt.Errorf("weight %s is %v; it must be a number of at least 0", weight.name, weight.value)
		}
	}
	return nil
}

// Decision is the chosen place of a request with the components of its value, in weighted microseconds relative to an
// idle place with an empty cache and no local activations. Policies other than Price report the same components of the
// place that they choose.
type Decision struct {
	// Place is the index of the place, Rank its rank.
	Place, Rank int
	// Tokens is the load that the place takes on: the tokens that are not cached there and have to be computed.
	Tokens int
	// Affinity is the communication time that local activations save over the length of the request. Cached tokens need
	// no communication now, but count for future tokens, which follow the prefix to its place: requests that share a
	// beginning of n tokens are expected to bring about n more.
	Affinity float64
	// Prefix is the computation time that cached tokens save, as far as they are due (see Hit).
	Prefix float64
	// Price is the cost of the rank's load for the next requests that prefer the rank, over the length of the request.
	// It is scaled by the affinity weight, and negative on a rank that has received less than its share.
	Price float64
	// Load is the time for the outstanding tokens by which the place is far ahead of the others.
	Load float64
	// Wait is the time by which prompts on one rank extend the next step of all ranks.
	Wait float64
}

// Value returns the objective of the policy Price, which it maximizes.
func (d *Decision) Value() float64 { return d.Affinity + d.Prefix - d.Price - d.Load - d.Wait }

// Slack is the number of requests of the current size by which a place may be ahead of the others before its load
// counts. At low load, chance puts a few requests on one rank, and an engine computes them in one batch.
const Slack = 4

// slowest is the cost of one more token on the slowest rank of a step, in computations of a token: attention and small
// products run far below the rate of grouped products, and sending takes time as well. Of 0.5, 2 and 8, simulated
// services on PCIe perform best with 2; on NVLink there is no difference.
const slowest = 2

// crowd summarizes the outstanding load of all candidate places.
type crowd struct {
	total  int64
	places int
	// next is the maximum Next of a place.
	next int64
}

func newCrowd(places []Place) crowd {
	c := crowd{places: len(places)}
	for i := range places {
		c.total += places[i].Outstanding
		c.next = max(c.next, places[i].Next)
	}
	return c
}

// ahead returns by how many tokens a place exceeds twice the mean of the others plus Slack requests, at least 0. It
// grows without bound on a rank that stopped answering.
func (c crowd) ahead(outstanding int64, tokens int) float64 {
	slope, threshold := c.aheadLine(tokens)
	return max(0, slope*float64(outstanding)-threshold)
}

// aheadLine returns slope and threshold of the linear function of outstanding tokens with the positive part ahead. Both
// are 0 with a single place.
func (c crowd) aheadLine(tokens int) (slope, threshold float64) {
	if c.places < 2 {
		return 0, 0
	}
	share := 2 / float64(c.places-1)
	return 1 + share, share*float64(c.total) + float64(Slack*tokens)
}

// longer returns by how many tokens the request extends the next step at this place, beyond the extension at an idle
// place. All ranks share each step, which takes as long as the rank with the most tokens: two prompts on one rank delay
// all ranks if another rank has none.
func (c crowd) longer(r *Request, place *Place) float64 {
	computed := int64(r.Prompt - min(max(place.Cached.Tokens, 0), r.Prompt))
	return float64(max(0, place.Next+computed-max(c.next, int64(r.Prompt))))
}

// perLonger returns the weighted time of a step per additional token on its slowest rank.
func (s *Scheduler) perLonger() float64 { return s.weights.Wait * slowest * s.costs.Compute }

// cachedOf returns the number of the request's tokens that a place has cached.
func cachedOf(r *Request, place *Place) int { return min(max(place.Cached.Tokens, 0), r.Tokens) }

// weigh returns the decision for the place with the given index.
func (s *Scheduler) weigh(r *Request, index int, place *Place, c crowd) Decision {
	cached := cachedOf(r, place)
	d := Decision{Place: index, Rank: place.Rank, Tokens: r.Tokens - cached}
	share, ask := 0.0, s.asks[place.Rank]
	if r.Scores != nil {
		share = float64(r.Scores[place.Rank])
	}
	exchange := s.weights.Affinity * s.costs.Exchange
	d.Affinity = exchange * share * float64(r.Tokens)
	d.Price = exchange * ask * float64(r.Tokens)
	d.Prefix = s.weights.Prefix * s.costs.Compute * min(place.Cached.Due, float64(cached))
	d.Load = s.weights.Load * s.costs.Compute * c.ahead(place.Outstanding, r.Tokens)
	d.Wait = s.perLonger() * c.longer(r, place)
	return d
}
