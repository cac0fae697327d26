// SPDX-License-Identifier: Apache-2.0

package router

import (
	"net/http"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/reports"
)

// Reasons why an attempt was repeated on another pod.
const (
	retryUnreachable = "unreachable"
	retryUnavailable = "unavailable"
	retryFallback    = "fallback" // by a gateway
)

// metrics are the metrics of the router. Their labels are bounded by HTTP status codes, the ranks of one replica, the
// names of API keys and the reasons above.
type metrics struct {
	requests *prometheus.CounterVec
	retries  *prometheus.CounterVec
	tokens   *prometheus.CounterVec
	unscored *prometheus.CounterVec
	// otherRanks counts responses that report another rank than the chosen one.
	otherRanks *prometheus.CounterVec
	firstByte  prometheus.Histogram
	// clients counts the requests of each API key. The number of keys is bounded.
	clients *prometheus.CounterVec
	// limited counts the requests of a client above its limits.
	limited *prometheus.CounterVec
}

func newMetrics(registry prometheus.Registerer, pool *Pool) *metrics {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "semmoe_router_requests_total", Help: "Answered requests, by HTTP status code.",
		}, []string{"code"}),
		retries: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "semmoe_router_retries_total", Help: "Retries on another pod, by reason: unreachable or unavailable; fallback if a gateway retried.",
		}, []string{"reason"}),
		tokens: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "semmoe_router_estimated_tokens_total", Help: "Estimated tokens (prompt and output limit) sent to each rank, over all pods.",
		}, []string{"rank"}),
		unscored: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "semmoe_router_unscored_requests_total", Help: "Inference requests to pods with a plan that were balanced only by load, by reason: plan_pending, no_table, no_prompt, no_tokenizer, ranks_differ or not_pinned.",
		}, []string{"reason"}),
		otherRanks: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "semmoe_router_rank_mismatches_total", Help: "Responses that report another rank than the one the request was sent to, by route.",
		}, []string{"route"}),
		firstByte: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "semmoe_router_time_to_response_header_seconds", Help: "Time from the arrival of a request to the engine's response header.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2.5, 14),
		}),
	}
	m.clients = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "semmoe_router_client_requests_total", Help: "Authenticated requests, by the name of the client's API key; requests without a valid key have code 401 in semmoe_router_requests_total.",
	}, []string{"client"})
	m.limited = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "semmoe_router_limited_requests_total", Help: "Requests with status 429 because their client has reached its limit, by reason: rate or pending.",
	}, []string{"client", "reason"})
	// Series that alerts or dashboards start at 0, because a series that starts at 1 hides its first increment.
	for _, code := range []int{http.StatusTooManyRequests, http.StatusServiceUnavailable} {
		m.requests.WithLabelValues(strconv.Itoa(code))
	}
	for _, reason := range []string{retryUnreachable, retryUnavailable, retryFallback} {
		m.retries.WithLabelValues(reason)
	}
	for _, route := range pinnedRoutes {
		m.otherRanks.WithLabelValues(route)
	}
	registry.MustRegister(m.requests, m.retries, m.tokens, m.unscored, m.otherRanks, m.firstByte, m.clients, m.limited, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "semmoe_router_backends", Help: "Engine pods that accept new requests.",
	}, func() float64 { return float64(pool.Len()) }),
		plansGauge("loaded", func() int { loaded, _ := pool.Plans(); return loaded }),
		plansGauge("pending", func() int { _, pending := pool.Plans(); return pending }))
	registry.MustRegister(reports.Decisions(pool.DecisionSums)...)
	registry.MustRegister(tablesCollector{pool}, pinsCollector{pool}, breakersCollector{pool}, pool.queueSeconds, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "semmoe_router_queued_requests", Help: "Requests that wait in the queue of the router because all ranks are at their limit.",
	}, func() float64 { return float64(pool.waitingForPlace()) }))
	return m
}

func plansGauge(state string, count func() int) prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "semmoe_router_plans", Help: "Plans that engine pods name, by state: loaded, or pending if they cannot be read.",
		ConstLabels: prometheus.Labels{"state": state},
	}, func() float64 { return float64(count()) })
}

// tablesCollector exports the plan that provides the tables for scoring, for each plan that engine pods name: nearly
// always one or two.
type tablesCollector struct{ pool *Pool }

var tablesMetric = prometheus.NewDesc("semmoe_router_tables_info", "1 for each loaded plan that engine pods name, with the plan whose tables score its requests: the same plan, or one with newer tables for the same layout.",
	[]string{"plan", "tables"}, nil)

func (c tablesCollector) Describe(descriptions chan<- *prometheus.Desc) { descriptions <- tablesMetric }

func (c tablesCollector) Collect(metrics chan<- prometheus.Metric) {
	for plan, tables := range c.pool.Tables() {
		metrics <- prometheus.MustNewConstMetric(tablesMetric, prometheus.GaugeValue, 1, artifact.Digest(plan).Short(), artifact.Digest(tables).Short())
	}
}

func rankLabel(rank int) string {
	if rank == discovery.NoRank {
		return "none"
	}
	return strconv.Itoa(rank)
}
