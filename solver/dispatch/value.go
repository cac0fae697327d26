package dispatch

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Request is what is known about a request when it arrives.
type Request struct {
	// Scores are the forecast local shares per rank; nil where there is no forecast.
	Scores []float32
	// Tokens is the size of the request: its prompt and the output that is expected of it, to which the forecast of the prompt
	// applies as well.
	Tokens int
	// Prompt are the tokens of its prompt, which are computed before its answer begins.
	Prompt int
}

// Place is one rank of a pod, as the router sees it when a request arrives.
type Place struct {
	// Rank is the rank within the pod.
	Rank int
	// Outstanding are the tokens of the requests that were sent there and have not ended.
	Outstanding int64
	// Next are the tokens of the prompts that the pod's next step computes there, as far as is known: those that were sent since an answer of the
	// pod, begun or ended, last told that a step was over.
	Next int64
	// Cached is what it probably holds of the request (see Prefixes).
	Cached Hit
}

// Costs turn what a decision saves into microseconds; both are at least 0.
type Costs struct {
	// Exchange is the time in which all MoE layers send and return one token none of whose activations are local.
	Exchange float64
	// Compute is the time to process one token of a prompt.
	Compute float64
}

// Weights scale the components of a decision's value: 1 is as modelled, 0 leaves the component out.
type Weights struct{ Affinity, Prefix, Load, Wait float64 }

// DefaultWeights take every component as modelled.
var DefaultWeights = Weights{Affinity: 1, Prefix: 1, Load: 1, Wait: 1}

// ParseWeights reads weights as in "affinity=1,prefix=0.5,load=1,wait=1"; those that are not named are the default's.
func ParseWeights(text string) (Weights, error) {
	w := DefaultWeights
	if text == "" {
		return w, nil
	}
	for _, part := range strings.Split(text, ",") {
		name, number, _ := strings.Cut(part, "=")
		value, err := strconv.ParseFloat(number, 64)
		if err != nil {
			return w, fmt.Errorf("weight %q is not name=number", part)
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

// Decision is the place of a request and what spoke for it, in weighted microseconds against a place that holds nothing of
// the request, has no local activation and is idle. Policies other than Price report the same of the place that they take.
type Decision struct {
	// Place is the index of the place, Rank its rank.
	Place, Rank int
	// Tokens is the load that the place takes on: what is not cached there has to be computed.
	Tokens int
	// Affinity is the communication that local activations save over the length of the request. Cached tokens need none now; they
	// stand for what is still to come, which goes where the prefix is: of what has begun so, about as much again.
	Affinity float64
	// Prefix is the computation that cached tokens save, as far as they are due (see Hit).
	Prefix float64
	// Price is what load on the rank takes away from the requests that want it next, over the length of the request: it is paid in
	// affinity, and 0 with a weight of affinity of 0. It is negative on a rank that has had less than its share.
	Price float64
	// Load is the time that tokens far ahead of the other places' take.
	Load float64
	// Wait is the time by which prompts on one rank make the next step of all ranks longer.
	Wait float64
}

// Value is what the policy Price makes as large as it can.
func (d *Decision) Value() float64 { return d.Affinity + d.Prefix - d.Price - d.Load - d.Wait }

// Slack is the number of requests of the present one's size that a place may be ahead of the others before its load counts:
// at low load, chance alone puts a few on one rank, and an engine computes them in one batch.
const Slack = 4

// slowest is what one more token on the slowest rank of a step costs, in computations of a token: attention and small products are far below the
// rate of grouped ones, and what the rank sends takes time as well. Of a half, 2 and 8, simulated services on PCIe do best with 2; on
// NVLink they do not differ.
const slowest = 2

// crowd is what is outstanding over all places that may be chosen.
type crowd struct {
	total  int64
	places int
	// next are the most of a place.
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

// ahead is how many tokens a place has beyond twice the mean of the others and Slack requests: 0 for a place in line. A rank
// that has stopped answering has ever more.
func (c crowd) ahead(outstanding int64, tokens int) float64 {
	slope, threshold := c.aheadLine(tokens)
	return max(0, slope*float64(outstanding)-threshold)
}

// aheadLine is the line by outstanding tokens of which ahead is the part above 0; a place alone is never ahead.
func (c crowd) aheadLine(tokens int) (slope, threshold float64) {
	if c.places < 2 {
		return 0, 0
	}
	share := 2 / float64(c.places-1)
	return 1 + share, share*float64(c.total) + float64(Slack*tokens)
}

// longer is by how many tokens the prompts of a place's next step, with those of a request that it has to compute, exceed what the next step of any
// place has, beyond what the request does at an idle place. Ranks share each step, which takes as long as that of the rank with the most tokens:
// two prompts on one rank, with none on another, keep all of them waiting.
func (c crowd) longer(r *Request, place *Place) float64 {
	computed := int64(r.Prompt - min(max(place.Cached.Tokens, 0), r.Prompt))
	return float64(max(0, place.Next+computed-max(c.next, int64(r.Prompt))))
}

// perLonger is the weighted time of a step for one more token on its slowest rank.
func (s *Scheduler) perLonger() float64 { return s.weights.Wait * slowest * s.costs.Compute }

// cachedOf is how much of a request a place holds.
func cachedOf(r *Request, place *Place) int { return min(max(place.Cached.Tokens, 0), r.Tokens) }

// weigh is the decision for the place of an index.
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
