// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"fmt"
	"math"

	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// engine serves requests by one method.
type engine struct {
	trace   *trace.Trace
	method  *Method
	options *Options
	// expected is the number of output tokens that a router assumes for a request.
	expected int
	step     *stepper
	lanes    []*lane
	// scheduler assigns requests to ranks, which are its places (attention DP).
	scheduler *dispatch.Scheduler
	// holder replaces scheduler if requests may wait for a rank.
	holder *holder
	places []dispatch.Place
	scores []float32
	now    float64
	record *record
}

func newEngine(t *trace.Trace, m *Method, requests []Request, o *Options) (*engine, error) {
	if err := o.check(t, m); err != nil {
		return nil, err
	}
	e := &engine{trace: t, method: m, options: o, step: newStepper(t, m, o), record: &record{}}
	lanes, outputs := o.Lanes(), 0
	for i, r := range requests {
		if room := o.CacheTokens / lanes; r.Prompt+r.Output > room {
			return nil, fmt.Errorf("request %d has %d tokens; the KV cache of a rank has room for %d", i, r.Prompt+r.Output, room)
		}
		outputs += r.Output
	}
	e.expected = (outputs + len(requests)/2) / len(requests)
	return e, e.restart()
}

// restart resets the engine to its initial state.
func (e *engine) restart() error {
	lanes := e.options.Lanes()
	e.now, e.lanes = 0, nil
	for range lanes {
		e.lanes = append(e.lanes, &lane{
			free: e.options.CacheTokens / lanes, stepTokens: e.options.StepTokens / lanes, maxRunning: e.options.Running / lanes,
		})
	}
	if e.options.Attention != placement.DataParallel {
		return nil
	}
	e.places, e.scores = make([]dispatch.Place, lanes), make([]float32, lanes)
	scheduling := dispatch.Options{
		Policy: e.method.Policy, Ranks: lanes, Cap: e.options.Cap, Weights: e.options.Weights, Costs: e.options.costs(),
	}
	var err error
	if e.options.Hold > 0 && e.method.Policy == dispatch.Price && e.method.Requests != nil {
		e.holder, err = newHolder(e, scheduling)
		return err
	}
	e.scheduler, err = dispatch.NewScheduler(scheduling)
	return err
}

// run serves requests that arrive at a rate, in requests per second, and returns when the last one has ended.
func (e *engine) run(ctx context.Context, requests []Request, rate float64) error {
	const second = 1e6
	all := make([]served, len(requests))
	for i := range requests {
		all[i] = served{Request: &requests[i], arrival: requests[i].Arrival / rate * second}
	}
	const warmup = 4 // the first quarter
	e.record.from = all[len(all)/warmup].arrival
	for ended, next := 0, 0; ended < len(all); {
		if err := ctx.Err(); err != nil {
			return err
		}
		next = e.arrive(all, next)
		tokens := 0
		for _, l := range e.lanes {
			tokens += l.batch()
		}
		if tokens == 0 {
			e.now = math.Inf(1) // all lanes are empty: the remaining requests have not arrived or wait for a rank
			if next < len(all) {
				e.now = all[next].arrival
			}
			if e.holder != nil {
				e.now = min(e.now, e.holder.ends())
			}
			continue
		}
		stages := e.step.time(e.lanes)
		e.now += stages.Total()
		next = e.arrive(all, next) // the router does not know the result of the current step yet
		ended += e.finish()
		e.record.step(stages, tokens, e.now)
	}
	return nil
}

// arrive dispatches the requests from index next on that have arrived by now, and returns the index of the first that
// has not.
func (e *engine) arrive(all []served, next int) int {
	for ; next < len(all) && all[next].arrival <= e.now; next++ {
		if e.holder != nil {
			e.holder.arrive(&all[next])
		} else {
			e.send(&all[next])
		}
	}
	if e.holder != nil {
		e.holder.release(e.now)
	}
	return next
}

// finish ends a step and returns the number of requests that end with it. If the step starts or ends a response, the
// router learns that the step is over, and that the prompts sent so far are in the next step.
func (e *engine) finish() (ended int) {
	observed := false
	for _, l := range e.lanes {
		l.finish(e.now, func(s *served) {
			e.record.token(s, e.now)
			observed = observed || s.produced == 1
		}, func(s *served) {
			l.outstanding -= e.size(s)
			e.record.end(s, e.now)
			observed = true
			ended++
		})
	}
	if observed {
		for _, l := range e.lanes {
			l.next = 0
		}
	}
	return ended
}

// send assigns a request to a lane.
func (e *engine) send(s *served) {
	at := 0
	if e.scheduler != nil {
		request := e.dispatchRequest(s, e.scores)
		d := e.scheduler.Decide(&request, e.currentPlaces())
		e.scheduler.Take(&request, &d)
		at = d.Rank
	}
	e.enqueue(s, at)
}

// dispatchRequest returns the request as the router sees it, with scores in the given slice of one score per lane.
func (e *engine) dispatchRequest(s *served, scores []float32) dispatch.Request {
	request := dispatch.Request{Tokens: int(e.size(s)), Prompt: s.Prompt}
	if e.method.Requests != nil {
		e.method.Requests.ScoreFirst(scores, s.Source, min(s.Prompt, e.trace.Length(s.Source)))
		request.Scores = scores
	}
	return request
}

// currentPlaces returns the lanes as the router sees them. The list is valid until the next call.
func (e *engine) currentPlaces() []dispatch.Place {
	for rank, l := range e.lanes {
		e.places[rank] = dispatch.Place{Rank: rank, Outstanding: l.outstanding, Next: l.next}
	}
	return e.places
}

// enqueue adds a request to a lane.
func (e *engine) enqueue(s *served, at int) {
	l := e.lanes[at]
	l.waiting = append(l.waiting, s)
	l.outstanding += e.size(s)
	l.next += int64(s.Prompt)
}

// size returns the number of tokens that the router assumes for a request.
func (e *engine) size(s *served) int64 { return int64(s.Prompt + e.expected) }
