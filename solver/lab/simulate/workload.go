// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"fmt"
	"math/rand/v2"

	"github.com/semmoe/operator/solver/trace"
)

// Independent streams of random numbers: additional requests do not change earlier ones.
const (
	arrivalStream = 0x6172726976
	promptStream  = 0x70726f6d7074
	outputStream  = 0x6f7574707574
)

// Workload describes the requests to serve.
type Workload struct {
	// Sources are the requests of the trace to draw from, in seeded order. When all have been drawn, they are drawn
	// again.
	Sources []int
	// Count is the number of requests.
	Count int
	// Prompts and Outputs are the distributions of lengths.
	Prompts, Outputs Lengths
	Seed             uint64
}

// Request is a request to serve. Its tokens are those of a request of the trace, repeated from the first if it is
// longer: a prompt and its output activate the experts of the same text.
type Request struct {
	// Source is the request of the trace.
	Source int
	// Prompt and Output are numbers of tokens, at least 1.
	Prompt, Output int
	// Arrival is the time at a rate of one request per unit of time.
	Arrival float64
}

// Tokens returns the number of tokens that pass through the model: the last output token does not.
func (r *Request) Tokens() int { return r.Prompt + r.Output - 1 }

// Draw returns the requests in order of arrival, with exponential times between arrivals.
func (w *Workload) Draw(t *trace.Trace) ([]Request, error) {
	switch {
	case w.Count < 1:
		return nil, fmt.Errorf("%d requests; at least 1 is needed", w.Count)
	case len(w.Sources) == 0:
		return nil, fmt.Errorf("there is no request of the trace to draw from")
	case w.Outputs == Recorded:
		return nil, fmt.Errorf("lengths of outputs are %q, but a trace does not mark the beginning of an output; set a distribution", recordedLengths)
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
