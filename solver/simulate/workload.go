package simulate

import (
	"fmt"
	"math/rand/v2"

	"github.com/semmoe/operator/solver/trace"
)

// Streams of random numbers that must not depend on one another: more requests leave those before them as they are.
const (
	arrivalStream = 0x6172726976
	promptStream  = 0x70726f6d7074
	outputStream  = 0x6f7574707574
)

// Workload says which requests are served.
type Workload struct {
	// Sources are the requests of the trace that are drawn from, in seeded order; when all have been, they are drawn again.
	Sources []int
	// Count is the number of requests.
	Count int
	// Prompts and Outputs are their lengths.
	Prompts, Outputs Lengths
	Seed             uint64
}

// Request is one that is served. Its tokens are those of a request of the trace, and again from the first where it is longer: what a prompt and
// its answer activate is that of the same text.
type Request struct {
	// Source is the request of the trace.
	Source int
	// Prompt and Output are numbers of tokens, at least 1.
	Prompt, Output int
	// Arrival is the time at a rate of one request per unit of time.
	Arrival float64
}

// Tokens is the number of tokens that go through the model: the last one of the output does not.
func (r *Request) Tokens() int { return r.Prompt + r.Output - 1 }

// Draw returns the requests in the order of their arrival, with exponential times between two.
func (w *Workload) Draw(t *trace.Trace) ([]Request, error) {
	switch {
	case w.Count < 1:
		return nil, fmt.Errorf("%d requests; at least 1 is needed", w.Count)
	case len(w.Sources) == 0:
		return nil, fmt.Errorf("there is no request of the trace to draw from")
	case w.Outputs == Recorded:
		return nil, fmt.Errorf("lengths of outputs are %q; a trace does not tell where an output begins: give a distribution", recordedLengths)
	}
	arrivals, prompts, outputs := rand.New(rand.NewPCG(w.Seed, arrivalStream)), rand.New(rand.NewPCG(w.Seed, promptStream)), rand.New(rand.NewPCG(w.Seed, outputStream))
	requests, order, now := make([]Request, w.Count), []int(nil), 0.0
	for i := range requests {
		if at := i % len(w.Sources); at == 0 {
			order = trace.Shuffled(w.Sources, w.Seed+uint64(i/len(w.Sources)))
		}
		source := order[i%len(w.Sources)]
		now += arrivals.ExpFloat64()
		requests[i] = Request{Source: source, Prompt: w.Prompts.draw(prompts, t.Length(source)), Output: w.Outputs.draw(outputs, 1), Arrival: now}
	}
	return requests, nil
}
