package router

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/solver/dispatch"
)

// spent sums what decisions were made by: the components of dispatch.Decision in microseconds, and tokens.
type spent struct {
	affinity, prefix, price, load, wait float64
	// cached are the tokens that places were thought to hold, tokens all those of the requests.
	cached, tokens float64
}

func (s *spent) add(d *dispatch.Decision, tokens int) {
	s.affinity += d.Affinity
	s.prefix += d.Prefix
	s.price += d.Price
	s.load += d.Load
	s.wait += d.Wait
	s.cached += float64(tokens - d.Tokens)
	s.tokens += float64(tokens)
}

const microsecondsPerSecond = 1e6

// Spent is a copy of the pool's sums.
func (p *Pool) Spent() spent {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.spent
}

// decisionMetrics tell what spoke for the places that were chosen. Prices can be below 0, so that what they come to is a gauge, as all are.
func decisionMetrics(pool *Pool) []prometheus.Collector {
	var all []prometheus.Collector
	for component, of := range map[string]func(spent) float64{
		"affinity": func(s spent) float64 { return s.affinity },
		"prefix":   func(s spent) float64 { return s.prefix },
		"price":    func(s spent) float64 { return s.price },
		"load":     func(s spent) float64 { return s.load },
		"wait":     func(s spent) float64 { return s.wait },
	} {
		all = append(all, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "semmoe_router_decision_seconds", Help: "Sum over requests of what spoke for the chosen rank (affinity, prefix) and against it (price, load, wait), in modelled seconds; it may fall.",
			ConstLabels: prometheus.Labels{"component": component},
		}, func() float64 { return of(pool.Spent()) / microsecondsPerSecond }))
	}
	return append(all, prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "semmoe_router_prefix_hit_tokens_total", Help: "Tokens of prompts that the chosen ranks were thought to hold in their KV caches.",
	}, func() float64 { return pool.Spent().cached }), prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "semmoe_router_requested_tokens_total", Help: "Estimated tokens (prompt and limit of output) of all inference requests, cached or not.",
	}, func() float64 { return pool.Spent().tokens }))
}
