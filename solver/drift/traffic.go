package drift

import (
	"cmp"
	"fmt"
	"math/rand/v2"

	"github.com/semmoe/operator/solver/dispatch"
)

// Request is a request whose routing is known.
type Request struct {
	// Kind is what successive requests may have in common: the domain of the text.
	Kind int
	// Document is what requests may have been cut from together.
	Document int
	// Tokens is its size, Known and Pairs the shares of its tokens and pairs of successive ones that the plan's tables have seen.
	Tokens       int
	Known, Pairs float64
	// Bag are its tokens by bucket (Bag); nil where requests have a rank.
	Bag []float32
	// Predicted and Local are the forecast and the real local share, by rank; of one element where requests have no rank
	// (attention tensor parallelism).
	Predicted []float32
	Local     []float64
	// text is what its tokens say.
	text float64
}

// best is the rank with the highest forecast.
func (r *Request) best() int {
	best := 0
	for rank, predicted := range r.Predicted {
		if predicted > r.Predicted[best] {
			best = rank
		}
	}
	return best
}

// sample is what the request shows on a rank.
func (r *Request) sample(rank int) Sample {
	best := r.best()
	return Sample{
		Best: best, Rank: rank, Highest: float64(r.Predicted[best]), Predicted: float64(r.Predicted[rank]), Local: r.Local[rank],
		Known: r.Known, Pairs: r.Pairs, Text: r.text,
	}
}

// Order is how simulated requests follow one another.
type Order struct {
	// Sticky is the probability that a request is of the same kind as the one before it where that is of the rarest kind; others are kept a
	// little more often. 0 is a random order, and so is what that has by itself.
	Sticky float64
	// Cap bounds a rank's share of the last requests, as the request router's does; 0 is LoadCap.
	Cap  float64
	Seed uint64
}

// Traffic is an endless stream of requests, dispatched over ranks by price. Requests and order determine it.
type Traffic struct {
	requests []Request
	kinds    map[int][]int
	sticky   float64
	// stay is the probability that the next request is drawn from the kind of the one before it, instead of from all.
	stay   float64
	random *rand.Rand
	now    int
	// scheduler is nil where requests have no rank; places are idle ones of every rank.
	scheduler *dispatch.Scheduler
	places    []dispatch.Place
}

// LoadCap is the bound of a request router that is not told another.
const LoadCap = 1.15

// NewTraffic draws from the requests with replacement.
func NewTraffic(requests []Request, order Order) (*Traffic, error) {
	if len(requests) == 0 {
		return nil, fmt.Errorf("there are no requests to draw from")
	}
	if !(order.Sticky >= 0 && order.Sticky < 1) {
		return nil, fmt.Errorf("sticky is %v; it must be from 0 to below 1", order.Sticky)
	}
	t := &Traffic{sticky: order.Sticky, random: rand.New(rand.NewPCG(order.Seed, 0))}
	if ranks := len(requests[0].Predicted); ranks > 1 {
		var err error
		// Nothing is cached and no rank is far ahead: affinity alone has a cost, in any unit.
		if t.scheduler, err = dispatch.NewScheduler(dispatch.Options{
			Policy: dispatch.Price, Ranks: ranks, Cap: cmp.Or(order.Cap, LoadCap), Weights: dispatch.Weights{Affinity: 1}, Costs: dispatch.Costs{Exchange: 1},
		}); err != nil {
			return nil, err
		}
		for rank := range ranks {
			t.places = append(t.places, dispatch.Place{Rank: rank})
		}
	}
	t.Switch(requests)
	return t, nil
}

// Switch goes on with other requests, of which there must be at least one, on the same ranks.
func (t *Traffic) Switch(requests []Request) {
	t.requests, t.kinds = requests, map[int][]int{}
	for i, r := range requests {
		t.kinds[r.Kind] = append(t.kinds[r.Kind], i)
	}
	t.stay = stay(t.sticky, t.kinds, len(requests))
	t.now = t.random.IntN(len(requests))
}

// stay is how often a kind must be kept for the next request to be of it with the probability that is wanted: what is drawn from all may be
// of that kind again, the rarest least often. All requests come equally often then, as in a random order.
func stay(wanted float64, kinds map[int][]int, requests int) float64 {
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

// Next is the sample of the next request.
func (t *Traffic) Next() Sample {
	r, rank := t.next()
	return t.requests[r].sample(rank)
}

// next is the index of the next request, and the rank that serves it.
func (t *Traffic) next() (request, rank int) {
	if t.random.Float64() < t.stay {
		same := t.kinds[t.requests[t.now].Kind]
		t.now = same[t.random.IntN(len(same))]
	} else {
		t.now = t.random.IntN(len(t.requests))
	}
	return t.now, t.rank(&t.requests[t.now])
}

// rank is where the request is served.
func (t *Traffic) rank(r *Request) int {
	if t.scheduler == nil {
		return 0
	}
	asked := dispatch.Request{Scores: r.Predicted, Tokens: r.Tokens}
	d := t.scheduler.Decide(&asked, t.places)
	t.scheduler.Take(&asked, &d)
	return d.Rank
}
