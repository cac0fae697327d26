// SPDX-License-Identifier: Apache-2.0

package server

import (
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/semmoe/operator/internal/refengine/locality"
	"github.com/semmoe/operator/internal/refengine/scheduler"
	"github.com/semmoe/operator/internal/refengine/shuffle"
)

// metrics holds the metrics of the dialect's engine, and the locality metric of the reference engine.
type metrics struct {
	registry *prometheus.Registry
	names    metricNames
	// Counters are by rank, and the counter of requests also by finish reason, if the dialect has these labels.
	promptTokens, generationTokens, requests, aborts *prometheus.CounterVec
	firstToken, interToken, latency                  *prometheus.HistogramVec
	// stepTokens, or passes and computed by mode, count steps by rank.
	stepTokens       *prometheus.HistogramVec
	passes, computed *prometheus.CounterVec
	activations      [][]activationCounters // [ranks][layers], unused for dense layers
}

// metricNames are the metric names of an engine. The name of a missing metric is empty. The names of counters end with
// _total.
type metricNames struct {
	// rank is the label of the data-parallel rank. If counterRank is true, counters and histograms also have it.
	rank        string
	counterRank bool
	// reason is the label of the finish reason of requests.
	reason                                                   string
	promptTokens, generationTokens, requests, aborts         string
	firstToken, interToken, latency                          string
	running, waiting, usedTokens, tokenUsage, generationRate string
	// stepTokens is the histogram of tokens per step. passes and computed are the counters of steps and of their
	// tokens, by mode.
	stepTokens, passes, computed string
	// rankLabels are further labels of metrics by rank, with the value 0. labels are further labels of all metrics.
	rankLabels, labels prometheus.Labels
	// streaming is a label of counters of requests and tokens, and of the time to the first token: true for streams.
	streaming string
	// activations enables the locality metric of the reference engine.
	activations bool
}

var (
	sglangMetrics = metricNames{
		rank: "dp_rank", promptTokens: "sglang:prompt_tokens_total", generationTokens: "sglang:generation_tokens_total",
		requests: "sglang:num_requests_total", aborts: "sglang:num_aborted_requests_total",
		firstToken: "sglang:time_to_first_token_seconds", interToken: "sglang:inter_token_latency_seconds", latency: "sglang:e2e_request_latency_seconds",
		running: "sglang:num_running_reqs", waiting: "sglang:num_queue_reqs", usedTokens: "sglang:num_used_tokens", tokenUsage: "sglang:token_usage",
		generationRate: "sglang:gen_throughput", activations: true,
		// srt/observability/metrics_collector.py of 0.5.12 to 0.5.19
		passes: "sglang:cuda_graph_passes_total", computed: "sglang:realtime_tokens_total",
	}
	// vllmMetrics are the metrics in vllm/v1/metrics/loggers.py.
	vllmMetrics = metricNames{
		rank: "engine", counterRank: true, reason: "finished_reason", promptTokens: "vllm:prompt_tokens_total", generationTokens: "vllm:generation_tokens_total",
		requests: "vllm:request_success_total", firstToken: "vllm:time_to_first_token_seconds", interToken: "vllm:inter_token_latency_seconds",
		latency: "vllm:e2e_request_latency_seconds", running: "vllm:num_requests_running", waiting: "vllm:num_requests_waiting", tokenUsage: "vllm:kv_cache_usage_perc",
		stepTokens: "vllm:iteration_tokens_total",
	}
)

// finishedReasons are vLLM's finish reasons that this engine supports.
var finishedReasons = []string{"stop", "length", "abort"}

// activationCounters are the counters of one expert-parallel rank in one layer.
type activationCounters struct{ local, remote prometheus.Counter }

func newMetrics(e *Engine) *metrics {
	m := &metrics{registry: prometheus.NewRegistry(), names: e.Dialect.metrics}
	labels := prometheus.Labels{"model_name": e.ServedName}
	maps.Copy(labels, m.names.labels)
	rankLabels := maps.Clone(labels)
	maps.Copy(rankLabels, m.names.rankLabels)
	var byRank []string
	if m.names.counterRank {
		byRank = []string{m.names.rank}
	}
	counter := func(name, help string, by ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help, ConstLabels: labels}, append(slices.Clone(byRank), by...))
		if name != "" {
			m.registry.MustRegister(c)
		}
		return c
	}
	histogram := func(name, help string, start float64, by ...string) *prometheus.HistogramVec {
		h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, ConstLabels: labels, Buckets: prometheus.ExponentialBuckets(start, 2, 16)}, append(slices.Clone(byRank), by...))
		m.registry.MustRegister(h)
		return h
	}
	var reason, streaming []string
	if m.names.reason != "" {
		reason = []string{m.names.reason}
	}
	if m.names.streaming != "" {
		streaming = []string{m.names.streaming}
	}
	m.promptTokens = counter(m.names.promptTokens, "Prompt tokens of finished requests.", streaming...)
	m.generationTokens = counter(m.names.generationTokens, "Generated tokens of finished requests.", streaming...)
	m.requests = counter(m.names.requests, "Finished requests.", append(reason, streaming...)...)
	m.aborts = counter(m.names.aborts, "Requests that ended early, because the client left or the engine stopped.")
	m.firstToken = histogram(m.names.firstToken, "Time from the request to its first token.", 0.001, streaming...)
	m.interToken = histogram(m.names.interToken, "Time between two tokens of a request.", 0.0005)
	m.latency = histogram(m.names.latency, "Time from the request to its end.", 0.004)
	m.countSteps(rankLabels)
	m.registry.MustRegister(&loadCollector{engine: e, labels: rankLabels})
	for rank := range e.dataParallelRanks() {
		m.zero(rank)
	}

	activations := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "semmoe_engine_activations_total",
		Help: "Activations (token, MoE layer, chosen expert) by the expert-parallel rank that served the token, by layer, and by whether that rank holds the expert.",
	}, []string{"rank", "layer", "locality"})
	if m.names.activations {
		m.registry.MustRegister(activations, &tablesCollector{e.Tables})
	}
	for rank := range e.ExpertRanks {
		byLayer := make([]activationCounters, e.Model.Layers)
		for layer, moe := range e.Model.MoE {
			if moe {
				byLayer[layer].local = activations.WithLabelValues(strconv.Itoa(rank), strconv.Itoa(layer), "local")
				byLayer[layer].remote = activations.WithLabelValues(strconv.Itoa(rank), strconv.Itoa(layer), "remote")
			}
		}
		m.activations = append(m.activations, byLayer)
	}
	return m
}

// stepBuckets are the bucket bounds of vLLM's histogram.
var stepBuckets = []float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}

// countSteps creates the metrics of steps.
func (m *metrics) countSteps(labels prometheus.Labels) {
	m.stepTokens = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: m.names.stepTokens, Help: "Tokens of a step.", ConstLabels: labels, Buckets: stepBuckets,
	}, []string{m.names.rank})
	by := []string{m.names.rank, "mode"}
	m.passes = prometheus.NewCounterVec(prometheus.CounterOpts{Name: m.names.passes, Help: "Steps by their mode.", ConstLabels: labels}, by)
	m.computed = prometheus.NewCounterVec(prometheus.CounterOpts{Name: m.names.computed, Help: "Computed tokens by the mode of their step.", ConstLabels: labels}, by)
	if m.names.stepTokens != "" { // vLLM also serves process metrics if it has one API server
		m.registry.MustRegister(m.stepTokens, collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	}
	if m.names.passes != "" {
		m.registry.MustRegister(m.passes, m.computed)
	}
}

// step counts a step like the engine of the dialect. vLLM counts steps that generate tokens, and counts a prompt in the
// step that completes it (IterationStats in v1/metrics/stats.py of 0.32.0). SGLang computes prompts and other tokens in
// separate steps, which are one step here.
func (m *metrics) step(ranks []scheduler.RankStep) {
	for i, r := range ranks {
		rank := strconv.Itoa(i)
		if r.Generated > 0 && m.names.stepTokens != "" {
			m.stepTokens.WithLabelValues(rank).Observe(float64(r.Prompts + r.Generated))
		}
		count := func(pass, mode string, tokens int) {
			if tokens > 0 && m.names.passes != "" {
				m.passes.WithLabelValues(rank, pass).Inc()
				m.computed.WithLabelValues(rank, mode).Add(float64(tokens))
			}
		}
		count("prefill_none", "prefill_compute", r.Prefill)
		count("decode_none", "decode", r.Decode)
	}
}

// by returns the label values of a rank's counters.
func (m *metrics) by(rank int, more ...string) []string {
	if !m.names.counterRank {
		return more
	}
	return append([]string{strconv.Itoa(rank)}, more...)
}

// byStream returns the label values of a rank's counters that are counted separately for streams.
func (m *metrics) byStream(rank int, streamed bool, more ...string) []string {
	if m.names.streaming != "" {
		more = append(more, strconv.FormatBool(streamed))
	}
	return m.by(rank, more...)
}

// ended returns the counter of requests with a finish reason.
func (m *metrics) ended(rank int, streamed bool, reason string) prometheus.Counter {
	if m.names.reason == "" {
		return m.requests.WithLabelValues(m.byStream(rank, streamed)...)
	}
	return m.requests.WithLabelValues(m.byStream(rank, streamed, reason)...)
}

// zero creates the counters of a rank, so that they are served before the first request.
func (m *metrics) zero(rank int) {
	for _, c := range []*prometheus.CounterVec{m.promptTokens, m.generationTokens} {
		c.WithLabelValues(m.byStream(rank, false)...)
	}
	if m.names.streaming == "" { // SGLang serves a counter from its first increment
		m.aborts.WithLabelValues(m.by(rank)...)
	}
	if m.names.stepTokens != "" {
		m.stepTokens.WithLabelValues(strconv.Itoa(rank))
	}
	m.firstToken.WithLabelValues(m.byStream(rank, false)...)
	for _, h := range []*prometheus.HistogramVec{m.interToken, m.latency} {
		h.WithLabelValues(m.by(rank)...)
	}
	for _, reason := range finishedReasons {
		m.ended(rank, false, reason)
	}
}

// token records a token of g before g counts it.
func (m *metrics) token(g *generation, now time.Time) {
	if len(g.tokens) == 0 {
		m.firstToken.WithLabelValues(m.byStream(g.rank, g.streamed)...).Observe(now.Sub(g.started).Seconds())
		return
	}
	m.interToken.WithLabelValues(m.by(g.rank)...).Observe(now.Sub(g.lastToken).Seconds())
}

func (m *metrics) done(g *generation, end *outcome) {
	by := m.by(g.rank)
	if end.err != nil {
		m.aborts.WithLabelValues(by...).Inc()
		if m.names.reason != "" { // vLLM itself does not count these requests; tests of clients need the count
			m.ended(g.rank, g.streamed, "abort").Inc()
		}
		return
	}
	m.ended(g.rank, g.streamed, end.reason).Inc()
	m.promptTokens.WithLabelValues(m.byStream(g.rank, g.streamed)...).Add(float64(len(g.prompt)))
	m.generationTokens.WithLabelValues(m.byStream(g.rank, g.streamed)...).Add(float64(len(end.tokens)))
	m.latency.WithLabelValues(by...).Observe(end.latency.Seconds())
}

// accounting counts activations as local or remote. Only the scheduler's goroutine uses it.
type accounting struct {
	*locality.Map
	layers, topK int
	activations  [][]activationCounters
	// spread is the number of ranks that tokens of all requests are assigned to round-robin. It is 0 if requests have
	// ranks. next is the rank of the next token.
	spread, next int
	// tables select the rank of a token in each layer instead, while they have a plan.
	tables *shuffle.Consumer
}

func newAccounting(c Config) *accounting {
	a := &accounting{Map: c.ExpertMap, layers: c.Model.Layers, topK: c.Model.TopK, tables: c.Tables}
	if !c.AttentionDP {
		a.spread = c.ExpertRanks
	}
	return a
}

// add counts the routes of a step.
func (a *accounting) add(step []scheduler.Computed) {
	if s := a.tables.Current(); s != nil && s.Assign(step, a.count) {
		return
	}
	for _, c := range step {
		for i := range c.Tokens {
			rank := c.Rank
			if a.spread > 0 {
				rank, a.next = a.next, (a.next+1)%a.spread
			}
			for l := range a.layers {
				a.count(l, rank, c.Routes[(i*a.layers+l)*a.topK:][:a.topK])
			}
		}
	}
}

// count counts the activations of a token in a layer.
func (a *accounting) count(layer, rank int, experts []uint16) {
	if local, remote := a.CountLayer(layer, rank, experts); local+remote > 0 {
		a.activations[rank][layer].local.Add(float64(local))
		a.activations[rank][layer].remote.Add(float64(remote))
	}
}

// tablesCollector exports the state of the consumer of tables. A nil consumer exports nothing.
type tablesCollector struct{ tables *shuffle.Consumer }

// Describe sends nothing, which makes this an unchecked collector. Collect defines the metrics.
func (c *tablesCollector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c *tablesCollector) Collect(out chan<- prometheus.Metric) {
	if c.tables == nil {
		return
	}
	one := func(name, help, label, value string) {
		out <- prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, []string{label}, nil), prometheus.GaugeValue, 1, value)
	}
	state := c.tables.State()
	if state.Plan != "" {
		one("semmoe_engine_tables_info", "The digest of the plan whose tables the engine uses.", "plan_digest", state.Plan)
	}
	if state.Refused != nil {
		one("semmoe_engine_tables_refused", "Why the engine does not use the present files of a plan.", "reason", state.Refused.Reason)
	}
}

// loadCollector reads the load of the scheduler at each scrape.
type loadCollector struct {
	engine *Engine
	labels prometheus.Labels
}

// Describe sends nothing, which makes this an unchecked collector. Collect defines the metrics.
func (c *loadCollector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c *loadCollector) Collect(out chan<- prometheus.Metric) {
	names := c.engine.Dialect.metrics
	for rank, load := range c.engine.Scheduler.Loads() {
		gauge := func(name, help string, value float64) {
			if name == "" {
				return
			}
			desc := prometheus.NewDesc(name, help, []string{names.rank}, c.labels)
			out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, strconv.Itoa(rank))
		}
		gauge(names.running, "Requests that are being computed.", float64(load.Running))
		gauge(names.waiting, "Requests that wait.", float64(load.Waiting))
		gauge(names.usedTokens, "Tokens in the caches of running requests.", float64(load.UsedTokens))
		gauge(names.tokenUsage, "Used tokens by the most that can be used.", c.engine.tokenUsage(load))
		gauge(names.generationRate, "Generated tokens per second over the last second of work.", load.GenerationThroughput)
	}
}
