package reports

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/solver/dispatch"
)

// Spent sums what decisions were made by: the components of dispatch.Decision in microseconds, and tokens.
type Spent struct {
	Affinity, Prefix, Price, Load, Wait float64
	// Cached are the tokens that places were thought to hold, Tokens all those of the requests.
	Cached, Tokens float64
	// Waits are the requests that have stood in line, Waited is how long, in seconds.
	Waits, Waited float64
}

// AddWait counts a request that has stood in line for some time.
func (s *Spent) AddWait(waited time.Duration) {
	if waited > 0 {
		s.Waits++
		s.Waited += waited.Seconds()
	}
}

// Add counts a decision on a request of that many tokens.
func (s *Spent) Add(d *dispatch.Decision, tokens int) {
	s.Affinity += d.Affinity
	s.Prefix += d.Prefix
	s.Price += d.Price
	s.Load += d.Load
	s.Wait += d.Wait
	s.Cached += float64(tokens - d.Tokens)
	s.Tokens += float64(tokens)
}

const microsecondsPerSecond = 1e6

// Decisions tell what spoke for the places that were chosen. Prices can be below 0, so that what they come to is a gauge, as all are.
func Decisions(spent func() Spent) []prometheus.Collector {
	var all []prometheus.Collector
	for component, of := range map[string]func(Spent) float64{
		"affinity": func(s Spent) float64 { return s.Affinity },
		"prefix":   func(s Spent) float64 { return s.Prefix },
		"price":    func(s Spent) float64 { return s.Price },
		"load":     func(s Spent) float64 { return s.Load },
		"wait":     func(s Spent) float64 { return s.Wait },
	} {
		all = append(all, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "semmoe_router_decision_seconds", Help: "Sum over requests of what spoke for the chosen rank (affinity, prefix) and against it (price, load, wait), in modelled seconds; it may fall.",
			ConstLabels: prometheus.Labels{"component": component},
		}, func() float64 { return of(spent()) / microsecondsPerSecond }))
	}
	return append(all, prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "semmoe_router_prefix_hit_tokens_total", Help: "Tokens of prompts that the chosen ranks were thought to hold in their KV caches.",
	}, func() float64 { return spent().Cached }), prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "semmoe_router_requested_tokens_total", Help: "Estimated tokens (prompt and limit of output) of all inference requests, cached or not.",
	}, func() float64 { return spent().Tokens }), prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "semmoe_router_held_requests_total", Help: "Requests that waited for the rank of their experts (--hold).",
	}, func() float64 { return spent().Waits }), prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "semmoe_router_held_seconds_total", Help: "Time that they waited, in seconds.",
	}, func() float64 { return spent().Waited }))
}
