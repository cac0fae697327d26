package router

import (
	"encoding/json"
	"math"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/lar"
)

// ringSize is how many sampled requests an observation remembers: enough for a standard error of about one percent, and
// a few tens of kilobytes.
const ringSize = 1024

// Observations keeps the last sampled requests. It is safe for concurrent use.
type Observations struct {
	mu   sync.Mutex
	ring []lar.Observation
	next int
	now  func() time.Time
	// window holds the last requests, sampled or not.
	window window

	activations *prometheus.CounterVec
	failures    prometheus.Counter
}

// newObservations registers the metrics of the local activation rate.
func newObservations(registry prometheus.Registerer) *Observations {
	o := &Observations{
		now: time.Now,
		activations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "semmoe_activations_total", Help: "Activations of routed experts in sampled requests, by the rank that served and whether the expert lies on it.",
		}, []string{"rank", "locality"}),
		failures: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "semmoe_router_sample_failures_total", Help: "Sampled requests whose routed experts were absent or unreadable.",
		}),
	}
	registry.MustRegister(o.activations, o.failures, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "semmoe_local_activation_rate", Help: "Local activations over all activations in the last sampled requests (at most 1024); NaN before the first.",
	}, o.rate), prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "semmoe_predicted_local_activation_rate", Help: "The local activation rate that plans forecast for the last sampled requests (at most 1024); NaN before the first that was scored.",
	}, o.predictedRate), prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "semmoe_router_window_imbalance", Help: "Largest over mean estimated token load of the ranks, over the last 128 requests; NaN before the first.",
	}, o.window.imbalance))
	return o
}

// add remembers an observation, and when it was made.
func (o *Observations) add(observation lar.Observation) {
	rank := rankLabel(observation.Rank)
	o.activations.WithLabelValues(rank, "local").Add(float64(observation.Local))
	o.activations.WithLabelValues(rank, "remote").Add(float64(observation.Total - observation.Local))
	o.mu.Lock()
	defer o.mu.Unlock()
	observation.Time = o.now()
	if len(o.ring) < ringSize {
		o.ring = append(o.ring, observation)
		return
	}
	o.ring[o.next] = observation
	o.next = (o.next + 1) % ringSize
}

// recent is a copy of the remembered observations, the oldest first.
func (o *Observations) recent() []lar.Observation {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append(append([]lar.Observation{}, o.ring[o.next:]...), o.ring[:o.next]...)
}

func (o *Observations) rate() float64 {
	var sum lar.Activations
	for _, observation := range o.recent() {
		sum.Local += observation.Local
		sum.Total += observation.Total
	}
	return float64(sum.Local) / float64(sum.Total) // NaN without any
}

// predictedRate is what was forecast for the activations of the requests that were scored.
func (o *Observations) predictedRate() float64 {
	var local, total float64
	for _, observation := range o.recent() {
		if observation.Predicted != nil {
			local += *observation.Predicted * float64(observation.Total)
			total += float64(observation.Total)
		}
	}
	return local / total // NaN without any
}

// ServeHTTP answers with the remembered observations, so that whoever sums them over routers starts from requests, not
// from averages, and with the balance of the last requests (null before the first).
func (o *Observations) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	var imbalance *float64
	if value := o.window.imbalance(); !math.IsNaN(value) {
		imbalance = &value
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{"observations": o.recent(), "imbalance": imbalance})
}
