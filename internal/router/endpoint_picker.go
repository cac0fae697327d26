// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/router/client"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/picker"
	"github.com/semmoe/operator/internal/router/telemetry"
	"github.com/semmoe/operator/internal/router/wire"
)

// endpointPicker chooses endpoints for a gateway. It chooses, samples and counts like the proxy, but sends no request.
type endpointPicker struct {
	stages *stages
	// routes are the routes of the service, with those of passThrough.
	routes      client.Routes
	passThrough []string
	recorder    *telemetry.Recorder
	// fallbacks is the number of endpoints that a gateway gets in addition to the chosen one.
	fallbacks int
}

// NewEndpointPicker returns a picker for gateways and the observations that it records. fallbacks is the maximum number
// of endpoints to try after the chosen one. The picker ignores EndpointWait and never waits for a pod: a gateway gives
// up earlier and may have another pool.
func NewEndpointPicker(pool *Pool, registry prometheus.Registerer, options ProxyOptions, fallbacks int) (picker.Picker, *Observations) {
	s := newStages(pool, registry, options)
	return &endpointPicker{stages: s, routes: newRoutes(options.PassThrough), passThrough: options.PassThrough, recorder: options.Recorder, fallbacks: fallbacks}, s.observations
}

// Count counts an answer by its status code.
func (e *endpointPicker) Count(code int) {
	e.stages.metrics.requests.WithLabelValues(strconv.Itoa(code)).Inc()
}

// Pick reserves a rank for a request.
func (e *endpointPicker) Pick(ctx context.Context, in *picker.Request) (picker.Exchange, error) {
	record := e.recorder.Begin(ctx, in.Header, in.Method, in.Arrived)
	picked, err := e.pick(ctx, in, record)
	if err != nil {
		e.recorder.End(record, picker.StatusOf(err))
		return nil, err
	}
	return picked, nil
}

func (e *endpointPicker) pick(ctx context.Context, in *picker.Request, record *telemetry.Record) (*pickedRank, error) {
	target, ok := e.routes.In(in.Method, in.Path)
	if !ok {
		return nil, fmt.Errorf("%w: %s %s is not a route of this service", picker.ErrNoRoute, in.Method, in.Path)
	}
	id := in.Header.Get(HeaderRequestID)
	if id == "" {
		id = rand.Text()
	}
	if record != nil {
		record.Identify(id, e.routes.Pattern(&http.Request{Method: in.Method, URL: &url.URL{Path: target}}))
	}
	body := wire.ParseBody(in.Body)
	edited, err := dropRank(in, &body)
	if err != nil {
		return nil, err
	}
	r := e.stages.reader.read(ctx, apiOf(in.Method, target, e.passThrough), id, in.Header, body)
	r.recordBody(record, body)
	r.writable = r.writable && !in.BodyFixed
	if holder := r.eligible; in.Subset != nil {
		r.eligible = func(endpoint string) bool { return in.Subset.Contains(endpoint) && (holder == nil || holder(endpoint)) }
	}
	lease, err := e.take(r, in.ResponseFixed)
	if err != nil {
		return nil, err
	}
	if lease.Rank == discovery.NoRank && lease.Backend.Ranks > 0 && in.BodyFixed && !body.IsObject() {
		lease.Release()
		return nil, errBodyUnseen
	}
	if err := e.stages.reader.checkTokens(lease.Backend, body); err != nil {
		lease.Release()
		return nil, fmt.Errorf("%w: %w", picker.ErrInvalid, err)
	}
	p := &pickedRank{stages: e.stages, request: r, lease: lease, recorder: e.recorder, arrived: in.Arrived}
	// The router does not request experts that it cannot remove from the response.
	if p.changes = !in.BodyFixed && !in.ResponseFixed; p.changes {
		p.capture = e.stages.sampler.requestExperts(r, lease)
	}
	p.decision = picker.Decision{
		Endpoints:     append([]string{lease.endpoint()}, e.stages.pool.fallbacks(lease, r, e.fallbacks)...),
		SetHeaders:    map[string]string{HeaderRequestID: id},
		RemoveHeaders: ownHeaders(in.Header),
		Edited:        edited,
	}
	p.decision.Head, p.decision.Body = e.stages.writer.body(r, lease, p.capture)
	r.body = wire.Body{} // the decision holds it
	if lease.Backend.PinsByHeader(lease.Rank) {
		p.decision.SetHeaders[lease.Backend.Adapter(e.stages.writer.engine).RankHeader] = strconv.Itoa(lease.Rank)
	}
	if name, value := e.stages.writer.routingKey(in.Header, r, lease); name != "" {
		p.decision.SetHeaders[name] = value
	}
	if p.capture.strips || r.asksExperts { // the router cannot read a compressed response
		p.decision.RemoveHeaders = append(p.decision.RemoveHeaders, "Accept-Encoding")
	}
	p.sent = e.stages.observations.now()
	return p, nil
}

// errBodyUnseen is returned if the router does not see the body that chooses the rank.
var errBodyUnseen = fmt.Errorf("%w: processing_mode.request_body_mode of the gateway is invalid for this route: FULL_DUPLEX_STREAMED or BUFFERED is needed", picker.ErrInvalid)

// dropRank removes the rank that a client chose from a request body, in place. edited reports whether there was one. It
// rejects such a body if the gateway forwards the body unchanged.
func dropRank(in *picker.Request, body *wire.Body) (edited bool, err error) {
	err = checkRank(in.Header, *body)
	switch {
	case errors.Is(err, errCompressed):
		return false, fmt.Errorf("%w: %w", picker.ErrCompressed, err)
	case err != nil:
		return false, fmt.Errorf("%w: %w", picker.ErrInvalid, err)
	}
	if edited = body.DropRank(); edited && in.BodyFixed {
		return false, fmt.Errorf("%w: %w", picker.ErrInvalid, errRankChosen)
	}
	return edited, nil
}

// take reserves a rank. untranslated is true if the gateway forwards the response unchanged. Requests for routed
// experts then do not go to pods that report experts by other numbers than logical ids.
func (e *endpointPicker) take(r *request, untranslated bool) (*Lease, error) {
	tried := map[string]bool{}
	for {
		lease, ok := e.stages.pool.acquire(r, tried)
		switch {
		case !ok && errors.Is(r.refused, errLacksRoute):
			return nil, fmt.Errorf("%w: %s", picker.ErrNoRoute, lacksRoute(r.path))
		case !ok && r.refused != nil:
			return nil, fmt.Errorf("%w: %w", picker.ErrAllFull, r.refused)
		case !ok && r.asksExperts:
			return nil, fmt.Errorf("%w: %w", picker.ErrNoEndpoint, errNoRoutedExperts)
		case !ok:
			return nil, fmt.Errorf("%w: %w", picker.ErrNoEndpoint, errNoBackend)
		case !untranslated || !r.asksExperts || !lease.Backend.Permuted:
			return lease, nil
		}
		lease.Release()
		tried[lease.endpoint()] = true
	}
}

// pickedRank is a request with its reserved rank.
type pickedRank struct {
	stages   *stages
	request  *request
	lease    *Lease
	decision picker.Decision
	// changes is true if request and response can be changed; only then is look set.
	changes       bool
	capture       capture
	arrived, sent time.Time
	// recorder gets the record of the request at its end, with the status of the response; 499 if there is none.
	recorder *telemetry.Recorder
	status   int
	ended    bool
	// body is the response body until it has ended; nil before the response.
	body *servedBody
}

func (p *pickedRank) Decision() picker.Decision { return p.decision }

func (p *pickedRank) Release() {
	if p.body != nil {
		p.body.end(nil)
	}
	p.lease.Release()
	if !p.ended {
		p.ended = true
		p.recorder.End(p.request.record, cmp.Or(p.status, statusClientClosed))
	}
}

// statusClientClosed is the status of a request without a response, in logs.
const statusClientClosed = 499

// ModifyResponse records the request for the rank that served it, and processes the response like the proxy.
func (p *pickedRank) ModifyResponse(served string, response *http.Response) error {
	header := time.Since(p.arrived)
	p.stages.metrics.firstByte.Observe(header.Seconds())
	p.status = response.StatusCode
	p.decision.Body = nil // the gateway has received it
	p.capture = p.stages.sampler.limitResponse(response, p.lease, p.capture)
	p.request.answered(p.capture)
	if served != "" && served != p.lease.endpoint() {
		p.stages.metrics.retries.WithLabelValues(retryFallback).Inc()
		p.stages.recorder.recordFailure(p.request, p.lease)
		p.request.record.Retry()
		p.lease.move(served)
	}
	p.request.recordPlace(p.lease, header)
	if response.StatusCode < http.StatusInternalServerError { // the gateway itself may have sent a 5xx
		p.lease.markAnswering()
	}
	// A 503 may come from a pod, or from a gateway that has reached no pod.
	if response.StatusCode != http.StatusServiceUnavailable {
		p.stages.recorder.recordLoad(p.request, p.lease)
	}
	p.lease.mark(response.Header)
	response.Header.Set(HeaderRequestID, p.request.id)
	// If the response breaks off, the gateway does not report whether the pod or the client has disconnected.
	p.body = p.stages.recorder.trackResponse(func() bool { return true }, response, p.request, p.lease, p.sent)
	if p.changes {
		explainNotFound(response, p.request.path)
		p.stages.sampler.countEligible(response, p.request, p.lease, p.capture, p.sent)
	}
	if err := p.stages.rewriter.rewrite(response, p.request, p.lease, p.capture); err != nil {
		p.status = http.StatusBadGateway
		return fmt.Errorf("failed to read the engine's response: %w", err)
	}
	return nil
}
