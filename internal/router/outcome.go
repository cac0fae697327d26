// SPDX-License-Identifier: Apache-2.0

package router

import (
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/router/balance"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/telemetry"
	"github.com/semmoe/operator/internal/router/wire"
)

// outcomeRecorder is the stage that records the load, the failures and the times of requests.
type outcomeRecorder struct {
	engine       *engine.Adapter // of pods that do not name their engine
	metrics      *metrics
	observations *Observations
}

// recordLoad records the load of a request that an engine answers.
func (o *outcomeRecorder) recordLoad(r *request, lease *Lease) {
	if !r.inference {
		return
	}
	rank := lease.knownRank()
	o.metrics.tokens.WithLabelValues(rankLabel(rank)).Add(float64(lease.tokens))
	o.observations.window.Add(balance.Arrival{Rank: rank, Ranks: lease.Backend.Ranks, Tokens: lease.tokens})
	if lease.unscored != "" {
		o.metrics.unscored.WithLabelValues(lease.unscored).Inc()
	}
}

// trackResponse records how a pod serves an inference request: immediately if the pod rejects it, or at the end of the
// response body. It returns the body, which the caller must end if it is not closed; nil if nothing must be ended. A
// response that breaks off counts as a failure of the pod, unless gone reports that the client may have disconnected.
func (o *outcomeRecorder) trackResponse(gone func() bool, response *http.Response, r *request, lease *Lease, sent time.Time) *servedBody {
	serves := response.StatusCode < http.StatusInternalServerError
	if r.inference {
		lease.recordOutcome(serves)
	}
	switch {
	case !r.inference:
		return nil
	case !serves:
		o.recordFailure(r, lease)
		return nil
	case response.StatusCode != http.StatusOK: // the time of a rejection is not meaningful
		o.observations.served(lease.Backend.Revision, lar.Service{Requests: 1})
		return nil
	}
	body := &servedBody{
		ReadCloser: response.Body, observations: o.observations, lease: lease, gone: gone, sent: sent, streamed: wire.IsStream(response),
		prompt: r.promptEstimate(), inFlight: lease.inFlight, generated: r.output, record: r.record,
	}
	if !body.streamed {
		body.usage = wire.NewIntegerReader(wire.GeneratedTokensMember(r.path))
	}
	if name := lease.Backend.Adapter(o.engine).RankRoutes.Reported; name != "" && lease.Backend.PinsByHeader(lease.Rank) {
		body.ranks = wire.NewIntegerReader(name)
		body.reported = func(rank int) {
			if rank != lease.Rank && lease.contradict() {
				o.metrics.otherRanks.WithLabelValues(lease.route).Inc()
			}
		}
	}
	response.Body = body
	return body
}

// recordFailure records that a pod has failed to serve an inference request, and therefore does not cache it. A request
// counts once per revision, however often it is sent to its pods, because revisions are compared by their share of
// failed requests.
func (o *outcomeRecorder) recordFailure(r *request, lease *Lease) {
	lease.Unserved()
	revision := lease.Backend.Revision
	if !r.inference || slices.Contains(r.failedBy, revision) {
		return
	}
	r.failedBy = append(r.failedBy, revision)
	o.observations.served(revision, lar.Service{Requests: 1, Failures: 1})
}

// served records an ended request to a revision.
func (o *Observations) served(revision string, ended lar.Service) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.service.Add(o.now(), revision, ended)
}

// servedBody is the response body as the pod sends it. It measures the times of the response.
type servedBody struct {
	io.ReadCloser
	observations *Observations
	lease        *Lease
	gone         func() bool
	sent         time.Time
	streamed     bool
	events       wire.Events
	// ranks finds the ranks that the response reports and passes them to reported; nil if the engine reports none.
	ranks    *wire.IntegerReader
	reported func(rank int)
	// prompt is the estimated length of the prompt. inFlight is the number of other requests on the pod when this one
	// was sent.
	prompt   int64
	inFlight int
	// usage finds the number of generated tokens in a response that is not streamed; nil for a stream. generated is
	// that number; until it is known, the maximum that the request may generate.
	usage     *wire.IntegerReader
	generated int64
	record    *telemetry.Record
	// first and last are the arrival times of the first and the last event of a stream.
	first, last time.Time
	ended       bool
}

func (b *servedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.ranks != nil {
		b.ranks.Add(p[:n], b.reported)
	}
	if b.usage != nil {
		b.usage.Add(p[:n], func(tokens int) {
			b.generated = int64(tokens)
			b.record.Generated(b.generated)
		})
	}
	if b.streamed && b.events.Add(p[:n]) {
		b.last = b.observations.now()
		if b.first.IsZero() {
			b.first = b.last
			b.lease.Answered()
		}
	}
	if err != nil {
		b.end(err)
	}
	return n, err
}

func (b *servedBody) Close() error {
	b.end(nil)
	return b.ReadCloser.Close()
}

// end counts the request once. err is the error that ended the body; nil if its reader closed it. Times are ignored if
// the request was pinned to a rank but another rank may have served it: they do not measure the plan.
func (b *servedBody) end(err error) {
	if b.ended {
		return
	}
	b.ended = true
	one := lar.Service{Requests: 1}
	if b.streamed {
		b.generated = int64(b.events.N) // one token per event, unless the engine is configured to send fewer events
	}
	covariates := lar.Covariates{float64(b.prompt), float64(b.generated), float64(b.inFlight)}
	switch {
	case err == io.EOF && !b.streamed:
		one.Answer.AddWith(b.observations.now().Sub(b.sent).Seconds(), covariates)
	case err != nil && err != io.EOF && !b.gone():
		one.Failures = 1
	}
	if b.events.N > 0 {
		one.FirstToken.AddWith(b.first.Sub(b.sent).Seconds(), covariates)
	}
	if b.events.N > 1 {
		one.InterToken.AddWith(b.last.Sub(b.first).Seconds()/float64(b.events.N-1), covariates)
	}
	if b.lease.Backend.Ranks > 0 && b.lease.knownRank() == discovery.NoRank {
		one = lar.Service{Requests: one.Requests, Failures: one.Failures}
	}
	b.observations.served(b.lease.Backend.Revision, one)
}
