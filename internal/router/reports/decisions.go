// SPDX-License-Identifier: Apache-2.0

package reports

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/solver/dispatch"
)

// DecisionSums sums the components of dispatch.Decision over all decisions, in microseconds, and tokens.
type DecisionSums struct {
	Affinity, Prefix, Price, Load, Wait float64
	// Cached is the number of tokens that the chosen places were assumed to have cached. Tokens is the number of all
	// tokens of the requests.
	Cached, Tokens float64
	// Waits is the number of requests that have queued. Waited is their total waiting time in seconds.
	Waits, Waited float64
}

// AddWait counts a request that has queued for some time.
func (s *DecisionSums) AddWait(waited time.Duration) {
	if waited > 0 {
		s.Waits++
		s.Waited += waited.Seconds()
	}
}

// Add counts the decision on a request with this number of tokens.
func (s *DecisionSums) Add(d *dispatch.Decision, tokens int) {
	s.Affinity += d.Affinity
	s.Prefix += d.Prefix
	s.Price += d.Price
	s.Load += d.Load
	s.Wait += d.Wait
	s.Cached += float64(tokens - d.Tokens)
	s.Tokens += float64(tokens)
}

const microsecondsPerSecond = 1e6

// Decisions returns collectors for the score components of the chosen places. They are gauges because prices can be
// negative.
func Decisions(sums func() DecisionSums) []prometheus.Collector {
	var all []prometheus.Collector
	for component, of := range map[string]func(DecisionSums) float64{
		"affinity": func(s DecisionSums) float64 { return s.Affinity },
		"prefix":   func(s DecisionSums) float64 { return s.Prefix },
		"price":    func(s DecisionSums) float64 { return s.Price },
		"load":     func(s DecisionSums) float64 { return s.Load },
		"wait":     func(s DecisionSums) float64 { return s.Wait },
	} {
		all = append(all, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "semmoe_router_decision_seconds", Help: "Sum over requests of the components of the decision for the chosen rank, in modelled seconds: benefits (affinity, prefix) and costs (price, load, wait). The value can decrease.",
			ConstLabels: prometheus.Labels{"component": component},
		}, func() float64 { return of(sums()) / microsecondsPerSecond }))
	}
	return append(all, prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "semmoe_router_prefix_hit_tokens_total", Help: "Estimated prompt tokens in the KV cache of the chosen rank.",
	}, func() float64 { return sums().Cached }), prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "semmoe_router_requested_tokens_total", Help: "Estimated tokens (prompt and output limit) of all inference requests, cached or not.",
	}, func() float64 { return sums().Tokens }), prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "semmoe_router_held_requests_total", Help: "Requests that waited for the rank of their experts (--hold).",
	}, func() float64 { return sums().Waits }), prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "semmoe_router_held_seconds_total", Help: "Time that requests waited for the rank of their experts, in seconds.",
	}, func() float64 { return sums().Waited }))
}
