// SPDX-License-Identifier: Apache-2.0

package router

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/router/tokenize"
)

// stages are the steps of a request, in order. Each stage holds only what it needs, and the proxy and the endpoint
// picker call the stages one after another. Between reading and writing, the pool scores the request, lets it wait in a
// queue and reserves a rank (reservation.go, rank_selection.go, wait_queue.go).
type stages struct {
	// reader reads the client request (request_reader.go).
	reader *requestReader
	// sampler adds the request for routed experts to the body, and counts the sample (sampler.go).
	sampler *sampler
	// writer writes the request for the reserved rank, and sends it (engine_request.go).
	writer *requestWriter
	// recorder records load, failures and times of the response (outcome.go).
	recorder *outcomeRecorder
	// rewriter removes or renumbers the routed experts in the response, and counts them (response_rewriter.go).
	rewriter *responseRewriter

	pool         *Pool
	metrics      *metrics
	observations *Observations
}

func newStages(pool *Pool, registry prometheus.Registerer, options ProxyOptions) *stages {
	metrics, observations, unnamed := newMetrics(registry, pool), newObservations(registry, options, pool), options.adapter()
	transport := newTransport(options.Engines)
	s := &stages{
		reader: &requestReader{
			engine: unnamed, samplePercent: options.SamplePercent, readsPrompts: pool.readsPrompts, stored: newStoredResponses(pool, transport),
		},
		sampler:  &sampler{pool: pool, engine: unnamed, percent: options.SamplePercent, observations: observations},
		writer:   &requestWriter{engine: unnamed, transport: transport},
		recorder: &outcomeRecorder{engine: unnamed, metrics: metrics, observations: observations},
		rewriter: &responseRewriter{engine: unnamed, observations: observations},
		pool:     pool, metrics: metrics, observations: observations,
	}
	s.reader.tokenizer = tokenize.New(func(plan string) (url string, ok bool) {
		backend, ok := pool.backendUnder(plan)
		path := backend.Adapter(unnamed).Generation.TokenizePath
		return backend.URL(path), ok && path != ""
	}, transport)
	return s
}
