// SPDX-License-Identifier: Apache-2.0

package store

import (
	"net/http"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// The results of token reviews.
const (
	reviewAccepted = "accepted"
	reviewRefused  = "refused"
	reviewError    = "error"
)

// metrics holds the metrics of the store. The label values are the operations of the protocol, HTTP status codes and
// the values below.
type metrics struct {
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	bytes    *prometheus.CounterVec
	reviews  *prometheus.CounterVec
	corrupt  prometheus.Counter
}

func newMetrics(registry *prometheus.Registry) *metrics {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "semmoe_store_requests_total", Help: "Answered requests, by operation and HTTP status code.",
		}, []string{"operation", "code"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "semmoe_store_request_duration_seconds", Help: "Duration of requests, including the transfer, by operation.",
			Buckets: prometheus.ExponentialBuckets(0.001, 4, 10),
		}, []string{"operation"}),
		bytes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "semmoe_store_transferred_bytes_total", Help: "Bytes of artifacts received and sent, by direction: in or out.",
		}, []string{"direction"}),
		reviews: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "semmoe_store_token_reviews_total", Help: "Token reviews by the API server, by result: accepted, refused or error.",
		}, []string{"result"}),
		corrupt: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "semmoe_store_corrupt_reads_total", Help: "Reads of an artifact whose stored bytes do not match its digest.",
		}),
	}
	// The counters are initialized with 0, because an increase from a missing series is not visible in alerts and
	// dashboards.
	m.requests.WithLabelValues("put", strconv.Itoa(http.StatusInsufficientStorage))
	for _, result := range []string{reviewAccepted, reviewRefused, reviewError} {
		m.reviews.WithLabelValues(result)
	}
	registry.MustRegister(m.requests, m.seconds, m.bytes, m.reviews, m.corrupt,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// watchSpace registers the space metrics of a store on a directory.
func watchSpace(registry *prometheus.Registry, store *Store) {
	if store.dir == nil {
		return
	}
	registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "semmoe_store_free_bytes", Help: "Free bytes of the store's volume; absent with a bucket.",
	}, func() float64 {
		free, _, _ := store.dir.space() // an error counts as no free space
		return float64(free)
	}), prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "semmoe_store_capacity_bytes", Help: "Capacity of the store's volume, in bytes; absent with a bucket.",
	}, func() float64 {
		_, capacity, _ := store.dir.space()
		return float64(capacity)
	}))
}
