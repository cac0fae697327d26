// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"math"
	"slices"
)

// Objective is the target latency of a request in milliseconds: to its first token, and the mean time per further
// token.
type Objective struct {
	TTFT float64 `json:"ttft_ms"`
	TPOT float64 `json:"tpot_ms"`
}

// Latency summarises the latencies of requests in milliseconds.
type Latency struct {
	Mean float64 `json:"mean_ms"`
	P50  float64 `json:"p50_ms"`
	P90  float64 `json:"p90_ms"`
	P99  float64 `json:"p99_ms"`
}

// Result describes the service at one arrival rate.
type Result struct {
	// Rate is the arrival rate, in requests per second.
	Rate float64 `json:"rate"`
	// Within is the share of the requests within the objective.
	Within float64 `json:"within_slo"`
	// Seconds is the length of the measured interval. It begins after the first quarter of the requests, which fills
	// the engine and is excluded from all fields but Step, and ends when all requests have their first token, after
	// which the engine drains. Requests (completed), Tokens (computed) and OutputTokens are rates per second.
	Seconds      float64 `json:"seconds"`
	Requests     float64 `json:"requests_per_second"`
	Tokens       float64 `json:"tokens_per_second"`
	OutputTokens float64 `json:"output_tokens_per_second"`
	// TTFT is the time to first token, TPOT the mean time per output token of requests with more than one token.
	TTFT Latency `json:"ttft"`
	TPOT Latency `json:"tpot"`
	// TBT90 is the 90th percentile of the times between two tokens, over all tokens.
	TBT90 float64 `json:"tbt_p90_ms"`
	// LAR is the local activation rate of all computed tokens; nil if no tokens are dispatched (AllReduce).
	LAR *float64 `json:"lar"`
	// StepTokens is the mean number of tokens of a step over all ranks, Step its mean time.
	StepTokens float64   `json:"step_tokens"`
	Step       StepTimes `json:"step"`
}

// StepTimes are the stages of the mean step, in milliseconds.
type StepTimes struct {
	Attention   float64 `json:"attention_ms"`
	Dense       float64 `json:"dense_ms"`
	Collectives float64 `json:"collectives_ms"`
	Gate        float64 `json:"gate_ms"`
	Dispatch    float64 `json:"dispatch_ms"`
	Products    float64 `json:"products_ms"`
	Combine     float64 `json:"combine_ms"`
}

// Total returns the time of the step.
func (s *StepTimes) Total() float64 {
	return s.Attention + s.Dense + s.Collectives + s.Gate + s.Dispatch + s.Products + s.Combine
}

// record collects measurements. Times are in microseconds.
type record struct {
	// from is the start of the measured interval.
	from float64
	// first, each and between belong to measured requests: times to first token, mean times between tokens (-1 for a
	// single token), and all times between tokens.
	first, each, between []float64
	// done is the work in the measured interval. full is its value at the latest first token of a request, which
	// starting signals.
	done, full work
	starting   bool
	// stages and stepTokens are of all steps.
	steps, stepTokens int
	stages            Stages
}

// work contains the numbers of completed requests, computed tokens and output tokens up to a time.
type work struct {
	requests, tokens, outputs int
	until                     float64
}

func (r *record) counts(now float64) bool { return now >= r.from }

// step records a finished step, after its tokens and requests.
func (r *record) step(us Stages, tokens int, now float64) {
	r.stages.add(us)
	r.stepTokens += tokens
	r.steps++
	if r.counts(now) {
		r.done.tokens += tokens
		r.done.until = now
	}
	if r.starting {
		r.full, r.starting = r.done, false
	}
}

// token records a new token of a request, before the request's last is updated.
func (r *record) token(s *served, now float64) {
	if r.counts(now) {
		r.done.outputs++
	}
	if s.produced == 1 {
		s.first, r.starting = now, true
	} else if r.counts(s.arrival) {
		r.between = append(r.between, now-s.last)
	}
}

func (r *record) end(s *served, now float64) {
	if r.counts(now) {
		r.done.requests++
	}
	if !r.counts(s.arrival) {
		return
	}
	r.first = append(r.first, s.first-s.arrival)
	each := -1.0
	if s.Output > 1 {
		each = (now - s.first) / float64(s.Output-1)
	}
	r.each = append(r.each, each)
}

const millisecond = 1e3

// result returns the result of all requests; s contains the counts of their activations.
func (r *record) result(rate float64, objective Objective, s *stepper) *Result {
	x := &Result{
		Rate: rate, Seconds: (r.full.until - r.from) / (1e3 * millisecond),
		StepTokens: float64(r.stepTokens) / float64(r.steps), Step: r.meanStep(),
	}
	if !s.options.allReduced() {
		lar := float64(s.local) / float64(s.rows)
		x.LAR = &lar
	}
	if x.Seconds > 0 {
		x.Requests, x.Tokens, x.OutputTokens = float64(r.full.requests)/x.Seconds, float64(r.full.tokens)/x.Seconds, float64(r.full.outputs)/x.Seconds
	}
	within := 0
	for i, first := range r.first {
		if first <= objective.TTFT*millisecond && r.each[i] <= objective.TPOT*millisecond {
			within++
		}
	}
	x.Within = float64(within) / float64(len(r.first))
	x.TTFT = latency(slices.Clone(r.first))
	x.TPOT = latency(slices.DeleteFunc(slices.Clone(r.each), func(us float64) bool { return us < 0 }))
	x.TBT90 = latency(slices.Clone(r.between)).P90
	return x
}

func (r *record) meanStep() StepTimes {
	per := 1 / (float64(r.steps) * millisecond)
	s := &r.stages
	return StepTimes{
		Attention: per * s.Attention, Dense: per * s.Dense, Collectives: per * s.Collectives,
		Gate: per * s.Experts.Gate, Dispatch: per * s.Experts.Dispatch, Products: per * s.Experts.Products, Combine: per * s.Experts.Combine,
	}
}

// latency summarises times and sorts them. Percentiles use the nearest-rank method. Without times all fields are 0.
func latency(us []float64) Latency {
	if len(us) == 0 {
		return Latency{}
	}
	slices.Sort(us)
	sum := 0.0
	for _, v := range us {
		sum += v
	}
	percentile := func(p float64) float64 {
		return us[int(math.Ceil(p/100*float64(len(us))))-1] / millisecond
	}
	return Latency{Mean: sum / float64(len(us)) / millisecond, P50: percentile(50), P90: percentile(90), P99: percentile(99)}
}
