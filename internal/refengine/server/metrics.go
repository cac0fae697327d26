package server

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/refengine/locality"
	"github.com/semmoe/operator/internal/refengine/scheduler"
	"github.com/semmoe/operator/internal/refengine/shuffle"
)

// metrics are SGLang's where it has one of the meaning, and the engine's own for locality.
type metrics struct {
	registry                                         *prometheus.Registry
	promptTokens, generationTokens, requests, aborts prometheus.Counter
	firstToken, interToken, latency                  prometheus.Histogram
	activations                                      []activationCounters
}

// activationCounters are those of one expert-parallel rank.
type activationCounters struct{ local, remote prometheus.Counter }

func newMetrics(e *Engine) *metrics {
	labels := prometheus.Labels{"model_name": e.ServedName}
	m := &metrics{registry: prometheus.NewRegistry()}
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help, ConstLabels: labels})
		m.registry.MustRegister(c)
		return c
	}
	histogram := func(name, help string, start float64) prometheus.Histogram {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, ConstLabels: labels, Buckets: prometheus.ExponentialBuckets(start, 2, 16)})
		m.registry.MustRegister(h)
		return h
	}
	m.promptTokens = counter("sglang:prompt_tokens_total", "Prompt tokens of finished requests.")
	m.generationTokens = counter("sglang:generation_tokens_total", "Generated tokens of finished requests.")
	m.requests = counter("sglang:num_requests_total", "Finished requests.")
	m.aborts = counter("sglang:num_aborted_requests_total", "Requests that ended early, because the client left or the engine stopped.")
	m.firstToken = histogram("sglang:time_to_first_token_seconds", "Time from the request to its first token.", 0.001)
	m.interToken = histogram("sglang:inter_token_latency_seconds", "Time between two tokens of a request.", 0.0005)
	m.latency = histogram("sglang:e2e_request_latency_seconds", "Time from the request to its end.", 0.004)

	activations := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "semmoe_engine_activations_total",
		Help: "Activations (token, MoE layer, chosen expert) by the expert-parallel rank that served the token and by whether that rank holds the expert.",
	}, []string{"rank", "locality"})
	m.registry.MustRegister(activations, &loadCollector{engine: e, labels: labels})
	for rank := range e.ExpertRanks {
		m.activations = append(m.activations, activationCounters{
			local:  activations.WithLabelValues(strconv.Itoa(rank), "local"),
			remote: activations.WithLabelValues(strconv.Itoa(rank), "remote"),
		})
	}
	return m
}

// token observes a token of g before g counts it.
func (m *metrics) token(g *generation, now time.Time) {
	if len(g.tokens) == 0 {
		m.firstToken.Observe(now.Sub(g.started).Seconds())
		return
	}
	m.interToken.Observe(now.Sub(g.lastToken).Seconds())
}

func (m *metrics) done(g *generation, end *outcome) {
	if end.err != nil {
		m.aborts.Inc()
		return
	}
	m.requests.Inc()
	m.promptTokens.Add(float64(len(g.prompt)))
	m.generationTokens.Add(float64(len(end.tokens)))
	m.latency.Observe(end.latency.Seconds())
}

// accounting counts activations as local or remote. It is used by the scheduler's goroutine alone.
type accounting struct {
	*locality.Map
	layers, topK int
	activations  []activationCounters
	// spread is the number of ranks over which tokens go round robin, whatever request they are of; 0 if requests have
	// ranks. next is the rank of the next token.
	spread, next int
	// shuffle, where there is one, chooses a token's rank in each layer instead.
	shuffle *shuffle.Shuffle
	// own are the ranks of a token [layers].
	own []int
}

func newAccounting(c Config) *accounting {
	a := &accounting{Map: c.ExpertMap, layers: c.Model.Layers, topK: c.Model.TopK, shuffle: c.Shuffle, own: make([]int, c.Model.Layers)}
	if !c.AttentionDP {
		a.spread = c.ExpertRanks
	}
	return a
}

// lookAhead is how many experts of each look-ahead add wants.
func (a *accounting) lookAhead() int {
	if a.shuffle == nil {
		return 0
	}
	return a.shuffle.Width()
}

// add counts the routes of consecutive tokens of a request.
func (a *accounting) add(c scheduler.Computed) {
	perToken := a.layers * a.topK
	for i, token := range c.Tokens {
		routes := c.Routes[i*perToken : (i+1)*perToken]
		a.place(c, token, routes, i)
		for l, rank := range a.own {
			local, remote := a.CountLayer(l, rank, routes[l*a.topK:(l+1)*a.topK])
			a.activations[rank].local.Add(float64(local))
			a.activations[rank].remote.Add(float64(remote))
		}
	}
}

// place sets the ranks of the i'th token.
func (a *accounting) place(c scheduler.Computed, token int32, routes []uint16, i int) {
	if a.shuffle != nil {
		a.shuffle.Assign(a.own, token, routes, c.LookAhead, i)
		return
	}
	rank := c.Rank
	if a.spread > 0 {
		rank, a.next = a.next, (a.next+1)%a.spread
	}
	for l := range a.own {
		a.own[l] = rank
	}
}

// loadCollector reads the scheduler's load when it is scraped.
type loadCollector struct {
	engine *Engine
	labels prometheus.Labels
}

// Describe sends nothing: the collector is unchecked, its metrics are defined where they are made.
func (c *loadCollector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c *loadCollector) Collect(out chan<- prometheus.Metric) {
	for rank, load := range c.engine.Scheduler.Loads() {
		gauge := func(name, help string, value float64) {
			desc := prometheus.NewDesc(name, help, []string{"dp_rank"}, c.labels)
			out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, strconv.Itoa(rank))
		}
		gauge("sglang:num_running_reqs", "Requests that are being computed.", float64(load.Running))
		gauge("sglang:num_queue_reqs", "Requests that wait.", float64(load.Waiting))
		gauge("sglang:num_used_tokens", "Tokens in the caches of running requests.", float64(load.UsedTokens))
		gauge("sglang:token_usage", "Used tokens by the most that can be used.", c.engine.tokenUsage(load))
		gauge("sglang:gen_throughput", "Generated tokens per second over the last second of work.", load.GenerationThroughput)
	}
}
