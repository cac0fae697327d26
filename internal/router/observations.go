// SPDX-License-Identifier: Apache-2.0

package router

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/router/balance"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/enginecounts"
	"github.com/semmoe/operator/internal/router/expertload"
	"github.com/semmoe/operator/internal/router/livesamples"
	"github.com/semmoe/operator/internal/router/reports"
)

// ringSize is the number of sampled requests that are kept individually: enough for a standard error of about 1%, in a
// few hundred kilobytes.
const ringSize = 1024

// Observations records the results of sampled requests (the last ones, and sums over the last two minutes) and the
// service quality of all requests of the last hour. It is safe for concurrent use.
type Observations struct {
	pool *Pool

	mu      sync.Mutex
	ring    []lar.Observation
	next    int
	sums    lar.Window
	capture captureWatch
	// service records failures and times of all requests, sampled or not.
	service lar.ServiceWindow
	// population counts the requests that the sample is drawn from.
	population lar.Population
	started    time.Time
	now        func() time.Time
	// window holds the loads of the last requests, sampled or not.
	window balance.Window

	// engines reads the counters of the engines.
	engines enginecounts.Poller
	// experts counts the activations of each expert.
	experts *expertload.Window
	// live stores the tokens of sampled requests.
	live *livesamples.Keeper
	// counting limits the concurrent counts in the background (see aside).
	counting chan struct{}
	// reserved is the memory reserved for the routed experts of the sampled requests in flight, in bytes.
	reserved atomic.Int64

	activations *prometheus.CounterVec
	failures    prometheus.Counter
	// givenUp counts responses that did not fit into the memory for samples.
	givenUp prometheus.Counter
}

// newObservations registers the metrics of the observations.
func newObservations(registry prometheus.Registerer, options ProxyOptions, pool *Pool) *Observations {
	o := &Observations{
		pool:       pool,
		population: lar.Population{Requests: lar.RequestsAll, Replicas: lar.ReplicasAll, SamplePercent: options.SamplePercent},
		now:        time.Now, started: time.Now(),
		experts: expertload.New(options.ExpertLoadSeries),
		live:    livesamples.New(registry, options.LiveSamples), counting: make(chan struct{}, runtime.GOMAXPROCS(0)),
		activations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "semmoe_activations_total", Help: "Activations of routed experts in sampled requests, by serving rank and by whether the expert is on that rank.",
		}, []string{"rank", "locality"}),
		failures: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "semmoe_router_sample_failures_total", Help: "Sampled requests whose routed experts were missing or unreadable, or whose rank is unknown.",
		}),
	}
	var unnamed engine.Adapter // pods that do not name their engine are not polled
	o.engines = enginecounts.Poller{Transport: newTransport(options.Engines), Now: time.Now, Backends: func() []discovery.Backend {
		return slices.DeleteFunc(pool.backends(), func(b discovery.Backend) bool {
			adapter := b.Adapter(&unnamed)
			return !adapter.CountsActivations && !adapter.CountsSteps()
		})
	}}
	o.givenUp = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "semmoe_router_sample_given_up_total",
		Help: "Responses that were forwarded with their routed experts and not counted, because the memory for samples was full.",
	})
	if options.RoutedExperts.NonStreamingOnly {
		o.population.Requests = lar.RequestsUnstreamed
	}
	o.capture.compares = options.RoutedExperts.Decode != nil && !options.RoutedExperts.Unrequested
	registry.MustRegister(o.activations, o.failures, o.givenUp, o.experts, &reports.Collector{Report: o.report, Covered: o.covered}, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "semmoe_router_window_imbalance", Help: "Maximum over mean of the estimated token load of the ranks, over the last 128 requests; NaN before the first request.",
	}, o.window.Imbalance))
	return o
}

// add records an observation with the current time.
func (o *Observations) add(observation lar.Observation) {
	rank := rankLabel(observation.Rank)
	o.activations.WithLabelValues(rank, "local").Add(float64(observation.Local))
	o.activations.WithLabelValues(rank, "remote").Add(float64(observation.Total - observation.Local))
	o.mu.Lock()
	defer o.mu.Unlock()
	observation.Time = o.now()
	o.sums.Add(observation)
	if observation.Routed() {
		var locality lar.Ratio
		locality.Add(observation.Activations)
		o.service.Add(observation.Time, observation.Revision, lar.Service{Locality: locality})
	}
	if len(o.ring) < ringSize {
		o.ring = append(o.ring, observation)
		return
	}
	o.ring[o.next] = observation
	o.next = (o.next + 1) % ringSize
}

// countAsync runs a count in the background, so that the client gets the end of its response without delay. If too many
// counts run already, aside blocks instead: each count holds a large response in memory.
func (o *Observations) countAsync(count func()) {
	select {
	case o.counting <- struct{}{}:
		go func() {
			defer func() { <-o.counting }()
			count()
		}()
	default:
		count()
	}
}

// addStreamed counts a request without reported experts because the response is streamed.
func (o *Observations) addStreamed() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.population.Streamed++
}

// addLong counts a request that is not sampled because its experts would take too much memory.
func (o *Observations) addLong() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.population.Long++
}

// addEligible counts a request that could be sampled, and whether it is.
func (o *Observations) addEligible(sampled bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.sums.AddEligible(o.now())
	o.population.Eligible++
	if sampled {
		o.population.Sampled++
	}
}

// recent returns a copy of the kept observations, oldest first.
func (o *Observations) recent() []lar.Observation {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append(append([]lar.Observation{}, o.ring[o.next:]...), o.ring[:o.next]...)
}

// report returns all observations. The caller owns the result.
func (o *Observations) report() lar.Report {
	r := lar.Report{
		Observations: o.recent(), Last: lar.Set{}, Tables: o.pool.Tables(), IgnoredRanks: o.pool.ignoredRanks(), Engines: o.engines.Counts(), EngineBuckets: o.engines.Buckets(), Steps: o.engines.Steps(),
	}
	for _, observation := range r.Observations {
		r.Last.Add(observation)
	}
	if value := o.window.Imbalance(); !math.IsNaN(value) {
		r.Imbalance = &value
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	now := o.now()
	r.Window, r.Population, r.Service = o.sums.Recent(now), o.population, o.service.Recent(now)
	if o.capture.narrowed(now) {
		r.Population.Replicas = lar.ReplicasOne
	}
	if o.capture.compares {
		cost := o.capture.cost(now)
		r.CaptureCost = &cost
	}
	return r
}

// covered returns the time span that the buckets of the window cover.
func (o *Observations) covered() time.Duration {
	now := o.now()
	return min(now.Sub(o.started), now.Sub(now.Truncate(lar.BucketTime))+(lar.Buckets-1)*lar.BucketTime)
}

// ServeHTTP answers with a lar.Report, which contains sums to be added to those of other routers and the individual
// requests. The response is compressed if the client accepts gzip, as Go clients do: the operator polls the routers of
// all deployments once a minute.
func (o *Observations) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Vary", "Accept-Encoding")
	if !strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		_ = json.NewEncoder(w).Encode(o.report()) // the client has disconnected
		return
	}
	w.Header().Set("Content-Encoding", "gzip")
	compressed := gzip.NewWriter(w)
	_ = errors.Join(json.NewEncoder(compressed).Encode(o.report()), compressed.Close()) // the client has disconnected
}
