package simulate

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/trace"
)

// Run serves requests by a method, arriving at a rate in requests per second.
func Run(ctx context.Context, t *trace.Trace, m *Method, requests []Request, rate float64, objective Objective, o *Options) (*Result, error) {
	if !(rate > 0) || math.IsInf(rate, 0) {
		return nil, fmt.Errorf("the rate is %v requests per second; it must be above 0", rate)
	}
	e, err := newEngine(t, m, requests, o)
	if err != nil {
		return nil, err
	}
	if err := e.run(ctx, requests, rate); err != nil {
		return nil, err
	}
	return e.record.result(rate, objective, e.step), nil
}

// lightRequests is how many requests the latency at light load is the mean of.
const lightRequests = 64

// LightLoad is the mean latency of requests that are served one after the other, each alone: the first 64.
func LightLoad(ctx context.Context, t *trace.Trace, m *Method, requests []Request, o *Options) (Objective, error) {
	e, err := newEngine(t, m, requests, o)
	if err != nil {
		return Objective{}, err
	}
	for _, r := range requests[:min(len(requests), lightRequests)] {
		r.Arrival = 0
		if err := errors.Join(e.restart(), e.run(ctx, []Request{r}, 1)); err != nil {
			return Objective{}, err
		}
	}
	x := e.record.result(1, Objective{}, e.step)
	return Objective{TTFT: x.TTFT.Mean, TPOT: x.TPOT.Mean}, nil
}

// Goal is what a service promises.
type Goal struct {
	// Scale times the latency at light load of the first method is the objective.
	Scale float64
	// Share of the requests must be within it.
	Share float64
}

// DefaultGoal is that of the papers: five times the latency at light load, for 90% of the requests.
var DefaultGoal = Goal{Scale: 5, Share: 0.9}

// Curve is one method over rates.
type Curve struct {
	Method string `json:"method"`
	// Goodput is the highest rate that was tried at which the goal's share of requests is within the objective, in requests per second,
	// found to within 1%; 0 where no rate is, or where every rate is, as with few requests: then it is Unbounded. Served is what it was there.
	Goodput   float64 `json:"goodput"`
	Unbounded bool    `json:"unbounded,omitempty"`
	Served    *Result `json:"at_goodput,omitempty"`
	// Rates are the results at the given rates.
	Rates []Result `json:"rates"`
}

// Report compares methods.
type Report struct {
	// Light is the latency at light load of the first method, Objective what was asked for.
	Light     Objective `json:"light_load"`
	Objective Objective `json:"slo"`
	Curves    []Curve   `json:"methods"`
}

// Compare serves the same requests by every method, at the given rates, and finds each one's goodput. The first method is what the others are
// compared with. Without rates they are parts and multiples of its goodput. Where it has none, as with few requests, they are parts and multiples
// of the rate at which one request per rank is in service at light load.
func Compare(ctx context.Context, t *trace.Trace, methods []Method, requests []Request, rates []float64, g Goal, o *Options) (*Report, error) {
	if len(methods) == 0 {
		return nil, errors.New("there is no method to compare")
	}
	if !(g.Scale > 0) || !(g.Share > 0 && g.Share <= 1) {
		return nil, fmt.Errorf("%v of the requests within %v times the latency at light load; the first must be above 0 and at most 1, the second above 0", g.Share, g.Scale)
	}
	methods, err := remembered(ctx, t, methods, requests, o)
	if err != nil {
		return nil, err
	}
	light, err := LightLoad(ctx, t, &methods[0], requests, o)
	if err != nil {
		return nil, err
	}
	r := &Report{Light: light, Objective: Objective{TTFT: g.Scale * light.TTFT, TPOT: g.Scale * light.TPOT}, Curves: make([]Curve, len(methods))}
	begin := float64(o.Topology.Ranks) * 1e3 / (light.TTFT + light.TPOT)
	find := func(i int, rate, factor float64) error {
		r.Curves[i].Method = methods[i].Name
		return r.Curves[i].goodput(ctx, &search{t, &methods[i], requests, r.Objective, g.Share, o}, rate, factor)
	}
	if err := find(0, begin, 2); err != nil {
		return nil, err
	}
	if r.Curves[0].Goodput > 0 {
		begin = r.Curves[0].Goodput
	}
	failures := make([]error, len(methods))
	err = affinity.Parallel(ctx, len(methods)-1, func(i int) { failures[i] = find(i+1, begin, nearby) })
	if err := errors.Join(append(failures, err)...); err != nil {
		return nil, err
	}
	if len(rates) == 0 {
		rates = around(begin)
	}
	failures = make([]error, len(methods))
	err = affinity.Parallel(ctx, len(methods), func(i int) {
		failures[i] = r.Curves[i].serve(ctx, &search{t, &methods[i], requests, r.Objective, g.Share, o}, rates)
	})
	return r, errors.Join(append(failures, err)...)
}

// remembered are the methods with forecasts that remember what they have scored.
func remembered(ctx context.Context, t *trace.Trace, methods []Method, requests []Request, o *Options) ([]Method, error) {
	methods = slices.Clone(methods)
	for i := range methods {
		if methods[i].Tokens == nil {
			continue
		}
		if err := o.check(t, &methods[i]); err != nil {
			return nil, err
		}
		var err error
		if methods[i].Tokens, err = remember(ctx, t, methods[i].Tokens, requests, o.Topology.Ranks); err != nil {
			return nil, err
		}
	}
	return methods, nil
}

// around returns parts and multiples of a rate, to three digits. Around the goodput of the first method, methods differ.
func around(rate float64) []float64 {
	var rates []float64
	unit := math.Pow(10, math.Floor(math.Log10(rate))-2)
	for _, part := range []float64{0.25, 0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5} {
		rates = append(rates, math.Round(part*rate/unit)*unit)
	}
	return slices.Compact(rates)
}

// search is for a method's goodput.
type search struct {
	trace     *trace.Trace
	method    *Method
	requests  []Request
	objective Objective
	share     float64
	options   *Options
}

const (
	// leastRate is that below which no goodput is looked for, mostRate that above which it is not, in requests per second.
	leastRate, mostRate = 1.0 / 1024, 1 << 30
	// ratePrecision is to which ratio of two rates a goodput is found.
	ratePrecision = 1.01
	// nearby is the first step away from a rate that the goodput is thought to be near to.
	nearby = 1.03
)

// serve fills in the results at given rates. Forecasts are asked by one goroutine at a time.
func (c *Curve) serve(ctx context.Context, s *search, rates []float64) error {
	for _, rate := range rates {
		x, err := Run(ctx, s.trace, s.method, s.requests, rate, s.objective, s.options)
		if err != nil {
			return err
		}
		c.Rates = append(c.Rates, *x)
	}
	return nil
}

// goodput goes from a rate, by a factor and then by ever larger ones, to where the goal is no longer kept, or no longer missed, and parts the
// interval between.
func (c *Curve) goodput(ctx context.Context, s *search, rate, factor float64) error {
	keeps := func(rate float64) (bool, error) {
		x, err := Run(ctx, s.trace, s.method, s.requests, rate, s.objective, s.options)
		if err != nil || x.Within < s.share {
			return false, err
		}
		c.Goodput, c.Served = rate, x
		return true, nil
	}
	kept, missed := 0.0, 0.0
	for kept == 0 || missed == 0 {
		ok, err := keeps(rate)
		if err != nil {
			return err
		}
		if ok {
			kept, rate = rate, rate*factor
		} else {
			missed, rate = rate, rate/factor
		}
		if rate < leastRate {
			return nil
		}
		if rate > mostRate { // all requests have come at once
			c.Goodput, c.Served, c.Unbounded = 0, nil, true
			return nil
		}
		factor = min(factor*factor, 16)
	}
	for missed/kept > ratePrecision {
		middle := math.Sqrt(kept * missed)
		ok, err := keeps(middle)
		if err != nil {
			return err
		}
		if ok {
			kept = middle
		} else {
			missed = middle
		}
	}
	return nil
}
