// SPDX-License-Identifier: Apache-2.0

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

// Run serves requests that arrive at a rate, in requests per second, by a method.
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

// lightRequests is the number of requests for the latency at light load.
const lightRequests = 64

// lightLoad returns the mean latency of the first 64 requests, served one at a time.
func lightLoad(ctx context.Context, t *trace.Trace, m *Method, requests []Request, o *Options) (Objective, error) {
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

// Goal is a service level objective.
type Goal struct {
	// Scale is the objective as a multiple of the latency at light load of the first method.
	Scale float64
	// Share is the share of requests that must meet the objective.
	Share float64
}

// DefaultGoal is the goal in publications: five times the latency at light load, for 90% of the requests.
var DefaultGoal = Goal{Scale: 5, Share: 0.9}

// Curve contains the results of one method over rates.
type Curve struct {
	Method string `json:"method"`
	// Goodput is the highest tested rate, in requests per second and within 1%, at which the goal's share of requests
	// meets the objective. It is 0 if no rate does, or if every rate does, which happens with few requests; then
	// Unbounded is set. Served is the result at the goodput.
	Goodput   float64 `json:"goodput"`
	Unbounded bool    `json:"unbounded,omitempty"`
	Served    *Result `json:"at_goodput,omitempty"`
	// Rates are the results at the given rates.
	Rates []Result `json:"rates"`
}

// Report compares methods.
type Report struct {
	// Light is the latency at light load of the first method, Objective the resulting objective.
	Light     Objective `json:"light_load"`
	Objective Objective `json:"slo"`
	Curves    []Curve   `json:"methods"`
}

// Compare serves the same requests by every method at the given rates and finds the goodput of each method. The first
// method is the baseline. Without rates, it uses fractions and multiples of the baseline's goodput, or, if that is 0 as
// with few requests, of the rate at which one request per rank is in service at light load.
func Compare(ctx context.Context, t *trace.Trace, methods []Method, requests []Request, rates []float64, g Goal, o *Options) (*Report, error) {
	if len(methods) == 0 {
		return nil, errors.New("there is no method to compare")
	}
	if !(g.Scale > 0) || !(g.Share > 0 && g.Share <= 1) {
		return nil, fmt.Errorf("the goal is %v of the requests within %v times the latency at light load; the share must be above 0 and at most 1, the factor above 0", g.Share, g.Scale)
	}
	methods, err := withCachedScores(ctx, t, methods, requests, o)
	if err != nil {
		return nil, err
	}
	light, err := lightLoad(ctx, t, &methods[0], requests, o)
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

// withCachedScores returns the methods with cached forecasts.
func withCachedScores(ctx context.Context, t *trace.Trace, methods []Method, requests []Request, o *Options) ([]Method, error) {
	methods = slices.Clone(methods)
	for i := range methods {
		if methods[i].Tokens == nil {
			continue
		}
		if err := o.check(t, &methods[i]); err != nil {
			return nil, err
		}
		var err error
		if methods[i].Tokens, err = cacheScores(ctx, t, methods[i].Tokens, requests, o.Topology.Ranks); err != nil {
			return nil, err
		}
	}
	return methods, nil
}

// around returns fractions and multiples of a rate, to three digits. Methods differ most around the goodput of the
// first method.
func around(rate float64) []float64 {
	var rates []float64
	unit := math.Pow(10, math.Floor(math.Log10(rate))-2)
	for _, part := range []float64{0.25, 0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5} {
		rates = append(rates, math.Round(part*rate/unit)*unit)
	}
	return slices.Compact(rates)
}

// search contains the input of the search for a method's goodput.
type search struct {
	trace     *trace.Trace
	method    *Method
	requests  []Request
	objective Objective
	share     float64
	options   *Options
}

const (
	// minRate and maxRate bound the search for the goodput, in requests per second.
	minRate, maxRate = 1.0 / 1024, 1 << 30
	// ratePrecision is the precision of a goodput, as a ratio of two rates.
	ratePrecision = 1.01
	// nearby is the first step of a search that starts near the expected goodput.
	nearby = 1.03
)

// serve adds the results at the given rates. Only one goroutine at a time may use the forecasts of a method.
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

// goodput searches from a rate, by a factor and then by growing factors, for rates at which the goal is met and missed,
// and bisects the interval between them.
func (c *Curve) goodput(ctx context.Context, s *search, rate, factor float64) error {
	keeps := func(rate float64) (bool, error) {
		x, err := Run(ctx, s.trace, s.method, s.requests, rate, s.objective, s.options)
		if err != nil || x.Within < s.share {
			return false, err
		}
		c.Goodput, c.Served = rate, x
		return true, nil
	}
	met, missed := 0.0, 0.0
	for met == 0 || missed == 0 {
		ok, err := keeps(rate)
		if err != nil {
			return err
		}
		if ok {
			met, rate = rate, rate*factor
		} else {
			missed, rate = rate, rate/factor
		}
		if rate < minRate {
			return nil
		}
		if rate > maxRate { // all requests arrive together
			c.Goodput, c.Served, c.Unbounded = 0, nil, true
			return nil
		}
		factor = min(factor*factor, 16)
	}
	for missed/met > ratePrecision {
		middle := math.Sqrt(met * missed)
		ok, err := keeps(middle)
		if err != nil {
			return err
		}
		if ok {
			met = middle
		} else {
			missed = middle
		}
	}
	return nil
}
