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
	// expected is the output that a router takes a request to have.
	expected int
	step     *stepper
	lanes    []*lane
	// scheduler sends requests to ranks, which are its places (attention DP).
	scheduler *dispatch.Scheduler
	// holder is in its place where requests may wait for a rank.
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

// restart empties the engine.
func (e *engine) restart() error {
	lanes := e.options.Lanes()
	e.now, e.lanes = 0, nil
	for range lanes {
		e.lanes = append(e.lanes, &lane{
			free: e.options.CacheTokens / lanes, stepTokens: e.options.StepTokens / lanes, mostRunning: e.options.Running / lanes,
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

// run serves requests that arrive at a rate, in requests per second, and returns when the last has ended.
func (e *engine) run(ctx context.Context, requests []Request, rate float64) error {
	const second = 1e6
	all := make([]served, len(requests))
	for i := range requests {
		all[i] = served{Request: &requests[i], arrival: requests[i].Arrival / rate * second}
	}
	const warming = 4 // a quarter
	e.record.from = all[len(all)/warming].arrival
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
			e.now = math.Inf(1) // a lane with requests has tokens: what is left has yet to come, or waits for a rank
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
		next = e.arrive(all, next) // a router does not know how the present step ends when it sends them
		ended += e.finish()
		e.record.step(stages, tokens, e.now)
	}
	return nil
}

// arrive sends the requests, from one on, that have come by now, and returns the first that has not.
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

// finish ends a step, and returns the number of requests that end with it. Where it has begun or ended an answer, a router knows that it is over,
// and that the prompts which it has sent so far are in the next one.
func (e *engine) finish() (ended int) {
	told := false
	for _, l := range e.lanes {
		l.finish(e.now, func(s *served) {
			e.record.token(s, e.now)
			told = told || s.produced == 1
		}, func(s *served) {
			l.outstanding -= e.size(s)
			e.record.end(s, e.now)
			told = true
			ended++
		})
	}
	if told {
		for _, l := range e.lanes {
			l.next = 0
		}
	}
	return ended
}

// send gives a request to a lane.
func (e *engine) send(s *served) {
	at := 0
	if e.scheduler != nil {
		asked := e.ask(s, e.scores)
		d := e.scheduler.Decide(&asked, e.look())
		e.scheduler.Take(&asked, &d)
		at = d.Rank
	}
	e.give(s, at)
}

// ask is what a router asks of a request; its scores are put into a slice of one for each lane.
func (e *engine) ask(s *served, scores []float32) dispatch.Request {
	asked := dispatch.Request{Tokens: int(e.size(s)), Prompt: s.Prompt}
	if e.method.Requests != nil {
		e.method.Requests.ScoreFirst(scores, s.Source, min(s.Prompt, e.trace.Length(s.Source)))
		asked.Scores = scores
	}
	return asked
}

// look lists the lanes as a router sees them. The list is valid until the next call.
func (e *engine) look() []dispatch.Place {
	for rank, l := range e.lanes {
		e.places[rank] = dispatch.Place{Rank: rank, Outstanding: l.outstanding, Next: l.next}
	}
	return e.places
}

// give puts a request into a lane.
func (e *engine) give(s *served, at int) {
	l := e.lanes[at]
	l.waiting = append(l.waiting, s)
	l.outstanding += e.size(s)
	l.next += int64(s.Prompt)
}

// size is what a router takes a request to need.
func (e *engine) size(s *served) int64 { return int64(s.Prompt + e.expected) }
