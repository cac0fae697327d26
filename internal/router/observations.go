package router

import (
	"encoding/json"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// ringSize is how many sampled requests an observation remembers: enough for a standard error of about one percent, and
// a few tens of kilobytes.
const ringSize = 1024

// Observation is what one sampled request showed.
type Observation struct {
	Time     time.Time `json:"time"`
	Revision string    `json:"revision"`
	Rank     int       `json:"rank"`
	Activations
}

// Observations keeps the last sampled requests. It is safe for concurrent use.
type Observations struct {
	mu   sync.Mutex
	ring []Observation
	next int
	now  func() time.Time

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
	}, o.rate))
	return o
}

// add remembers an observation.
func (o *Observations) add(revision string, rank int, count Activations) {
	o.activations.WithLabelValues(rankLabel(rank), "local").Add(float64(count.Local))
	o.activations.WithLabelValues(rankLabel(rank), "remote").Add(float64(count.Total - count.Local))
	o.mu.Lock()
	defer o.mu.Unlock()
	observation := Observation{Time: o.now(), Revision: revision, Rank: rank, Activations: count}
	if len(o.ring) < ringSize {
		o.ring = append(o.ring, observation)
		return
	}
	o.ring[o.next] = observation
	o.next = (o.next + 1) % ringSize
}

// recent is a copy of the remembered observations, the oldest first.
func (o *Observations) recent() []Observation {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append(append([]Observation{}, o.ring[o.next:]...), o.ring[:o.next]...)
}

func (o *Observations) rate() float64 {
	var sum Activations
	for _, observation := range o.recent() {
		sum.Local += observation.Local
		sum.Total += observation.Total
	}
	return float64(sum.Local) / float64(sum.Total) // NaN without any
}

// ServeHTTP answers with the remembered observations, so that whoever sums them over routers starts from requests, not
// from averages.
func (o *Observations) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{"observations": o.recent()})
}
