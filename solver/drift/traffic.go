// SPDX-License-Identifier: Apache-2.0

package drift

import (
	"cmp"
	"fmt"
	"math/rand/v2"

	"github.com/semmoe/operator/solver/dispatch"
)

// Request is a request with known routing.
type Request struct {
	// Kind groups requests that may follow one another: the domain of the text.
	Kind int
	// Document identifies the document that the request was cut from.
	Document int
	// Tokens is the number of tokens. Known and Pairs are the shares of its tokens and of its pairs of successive
	// tokens that the plan's tables have seen.
	Tokens       int
	Known, Pairs float64
	// Bag contains the shares of its tokens by bucket (see the function Bag); nil if requests have ranks.
	Bag []float32
	// Predicted and Local are the forecast and the actual local share, by rank. They have one element if requests have
	// no rank (attention tensor parallelism).
	Predicted []float32
	Local     []float64
	// text is the text term of the request (Text.Of).
	text float64
}

// best returns the rank with the highest forecast.
func (r *Request) best() int {
	best := 0
	for rank, predicted := range r.Predicted {
		if predicted > r.Predicted[best] {
			best = rank
		}
	}
	return best
}

// sample returns the sample of the request when it is served by the rank.
func (r *Request) sample(rank int) Sample {
	best := r.best()
	return Sample{
		Best: best, Rank: rank, Highest: float64(r.Predicted[best]), Predicted: float64(r.Predicted[rank]), Local: r.Local[rank],
		Known: r.Known, Pairs: r.Pairs, Text: r.text,
	}
}

// Order describes the sequence of simulated requests.
type Order struct {
	// Sticky is the probability that a request of the rarest kind is followed by another of that kind. Larger kinds are
	// kept slightly more often. 0, and any value below the probability in random order, is random order.
	Sticky float64
	// Cap is the maximum share of recent requests on a rank, relative to an equal share, as in the request router; 0 is
	// LoadCap.
	Cap  float64
	Seed uint64
}

// simulator is an endless stream of requests, dispatched to ranks by price. The stream is determined by requests and
// order.
type simulator struct {
	requests []Request
	kinds    map[int][]int
	sticky   float64
	// stay is the probability that the next request is drawn from the kind of the previous request instead of from all
	// requests.
	stay   float64
	random *rand.Rand
	now    int
	// scheduler is nil if requests have no rank. places contains one idle place per rank.
	scheduler *dispatch.Scheduler
	places    []dispatch.Place
}

// LoadCap is the default load limit of the request router.
const LoadCap = 1.15

// newSimulator returns traffic that is drawn from the requests with replacement.
func newSimulator(requests []Request, order Order) (*simulator, error) {
	if len(requests) == 0 {
		return nil, fmt.Errorf("there are no requests to draw from")
	}
	if !(order.Sticky >= 0 && order.Sticky < 1) {
		return nil, fmt.Errorf("sticky is %v; it must be from 0 to below 1", order.Sticky)
	}
	t := &simulator{sticky: order.Sticky, random: rand.New(rand.NewPCG(order.Seed, 0))}
	if ranks := len(requests[0].Predicted); ranks > 1 {
		var err error
		// The cache is empty and no rank is far ahead, so only affinity has a cost, in an arbitrary unit.
		if t.scheduler, err = dispatch.NewScheduler(dispatch.Options{
			Policy: dispatch.Price, Ranks: ranks, Cap: cmp.Or(order.Cap, LoadCap),
			Weights: dispatch.Weights{Affinity: 1}, Costs: dispatch.Costs{Exchange: 1},
		}); err != nil {
			return nil, err
		}
		for rank := range ranks {
			t.places = append(t.places, dispatch.Place{Rank: rank})
		}
	}
	t.replaceRequests(requests)
	return t, nil
}

// replaceRequests continues the stream with other requests on the same ranks. There must be at least one request.
func (t *simulator) replaceRequests(requests []Request) {
	t.requests, t.kinds = requests, map[int][]int{}
	for i, r := range requests {
		t.kinds[r.Kind] = append(t.kinds[r.Kind], i)
	}
	t.stay = stayProbability(t.sticky, t.kinds, len(requests))
	t.now = t.random.IntN(len(requests))
}

// stayProbability returns the probability of drawing from the same kind, such that the next request has the same kind
// with probability wanted. A draw from all requests may also yield the same kind, least often the rarest one. All
// requests remain equally frequent, as in random order.
func stayProbability(wanted float64, kinds map[int][]int, requests int) float64 {
	rarest := requests
	for _, same := range kinds {
		rarest = min(rarest, len(same))
	}
	again := float64(rarest) / float64(requests)
	if again >= wanted {
		return 0
	}
	return (wanted - again) / (1 - again)
}

// nextSample returns the sample of the next request.
func (t *simulator) nextSample() Sample {
	r, rank := t.next()
	return t.requests[r].sample(rank)
}

// next returns the index of the next request and the rank that serves it.
func (t *simulator) next() (request, rank int) {
	if t.random.Float64() < t.stay {
		same := t.kinds[t.requests[t.now].Kind]
		t.now = same[t.random.IntN(len(same))]
	} else {
		t.now = t.random.IntN(len(t.requests))
	}
	return t.now, t.rank(&t.requests[t.now])
}

// rank assigns the request to a rank.
func (t *simulator) rank(r *Request) int {
	if t.scheduler == nil {
		return 0
	}
	request := dispatch.Request{Scores: r.Predicted, Tokens: r.Tokens}
	d := t.scheduler.Decide(&request, t.places)
	t.scheduler.Take(&request, &d)
	return d.Rank
}
