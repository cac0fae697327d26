// SPDX-License-Identifier: Apache-2.0

package router

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/router/breaker"
)

// breakersCollector exports the circuit breakers of the backends.
type breakersCollector struct{ pool *Pool }

var (
	ejectionsMetric = prometheus.NewDesc("semmoe_router_ejections_total",
		"Times that an engine pod was ejected: it gets no request while other pods can take it. By reason: unreachable, unavailable (503), failures (consecutive 5xx) or error_rate.", []string{"reason"}, nil)
	breakersMetric = prometheus.NewDesc("semmoe_router_ejected_backends",
		"Engine pods that are ejected, by state: open, or half_open until they serve a request again.", []string{"state"}, nil)
)

func (c breakersCollector) Describe(descriptions chan<- *prometheus.Desc) {
	descriptions <- ejectionsMetric
	descriptions <- breakersMetric
}

func (c breakersCollector) Collect(metrics chan<- prometheus.Metric) {
	ejections, open, halfOpen := c.pool.breakers()
	for _, reason := range breaker.Reasons() {
		metrics <- prometheus.MustNewConstMetric(ejectionsMetric, prometheus.CounterValue, float64(ejections[reason]), reason.String())
	}
	metrics <- prometheus.MustNewConstMetric(breakersMetric, prometheus.GaugeValue, float64(open), "open")
	metrics <- prometheus.MustNewConstMetric(breakersMetric, prometheus.GaugeValue, float64(halfOpen), "half_open")
}

// breakers returns the numbers of ejections by reason, and of the backends by state.
func (p *Pool) breakers() (ejections [breaker.ReasonCount]int, open, halfOpen int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	for _, g := range p.groups {
		for _, b := range g.backends {
			switch b.breaker.State(now) {
			case breaker.Open:
				open++
			case breaker.HalfOpen:
				halfOpen++
			}
		}
	}
	return p.ejections, open, halfOpen
}
