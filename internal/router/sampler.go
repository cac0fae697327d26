// SPDX-License-Identifier: Apache-2.0

package router

import (
	"net/http"
	"time"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/router/wire"
)

// sampler is the stage that requests the routed experts of sampled requests from the engines, within a memory budget,
// and counts the population that the sample is drawn from.
type sampler struct {
	pool         *Pool
	engine       *engine.Adapter // of pods that do not name their engine
	percent      int
	observations *Observations
}

// capture is the capture state of a request: what the router does to get its routed experts.
type capture struct {
	// sampled is true if the experts are counted. strips is true if the response may contain experts that the client
	// did not request, because the router requested them or the engine always sends them.
	sampled, strips bool
	// field is the member of the body that requests the experts; empty if the router adds none. asks is true if the
	// engine may reject it.
	field string
	asks  bool
	// idsField is the member that requests the ids of the tokens; empty if the router adds none.
	idsField string
	// long is true if the experts would take too much memory. Such a request is not in the population of the sample.
	long bool
}

// refused reports whether a pod may have rejected a request because of the router's change to its body. A pod that was
// started before sampling was enabled cannot report experts and may reject the field.
func (l capture) refused(response *http.Response) bool {
	return l.asks && (response.StatusCode == http.StatusBadRequest || response.StatusCode == http.StatusUnprocessableEntity)
}

// requestExperts requests the routed experts from the engine if the request is sampled on the pod of the lease.
func (s *sampler) requestExperts(r *request, lease *Lease) capture {
	engine := lease.Backend.Adapter(s.engine).RoutedExperts
	if engine.Decode == nil || !r.reportsExperts {
		return capture{}
	}
	size := expertBytes(r, lease)
	long := size > maxExpertBytes
	chosen := r.sampled && !long && !lease.spread && s.observations.samples(s.pool, lease.Backend)
	if !chosen && !engine.Unrequested {
		return capture{long: long}
	}
	addable := r.body.IsObject() && !r.body.Has(engine.RequestField)
	ok := addable || engine.Unrequested && !r.asksExperts // an engine that sends experts unasked sends them to clients that decline them too
	chosen = chosen && ok && s.observations.reserve(lease, size)
	done := capture{sampled: chosen, strips: chosen || ok && engine.Unrequested, asks: chosen && !engine.Unrequested, long: long}
	if chosen && addable {
		done.field = engine.RequestField
		if ids := engine.TokenIDs.RequestField; ids != "" && r.addsTokenIDs && s.observations.live.Keeps() {
			done.idsField, done.asks = ids, true
		}
	}
	return done
}

// limitResponse checks the size of a response that declares its length. A response that does not fit into the memory
// for samples is neither counted nor read. The client gets it unchanged.
func (s *sampler) limitResponse(response *http.Response, lease *Lease, done capture) capture {
	if length := wire.Length(response); done.strips && !wire.IsStream(response) && !s.observations.reserve(lease, length) {
		done.long = done.long || done.sampled
		done.sampled, done.strips = false, false
		s.observations.givenUp.Inc()
	}
	return done
}

// countEligible counts an answered request in the population of the sample. It also records the response time to
// measure the cost of capture.
func (s *sampler) countEligible(response *http.Response, r *request, lease *Lease, capture capture, sent time.Time) {
	engine := lease.Backend.Adapter(s.engine).RoutedExperts
	if engine.Decode == nil || !r.reportsExperts || r.asksExperts || r.shifted || lease.spread || response.StatusCode != http.StatusOK || !s.observations.samples(s.pool, lease.Backend) {
		return
	}
	if engine.NonStreamingOnly && wire.IsStream(response) {
		if capture.sampled {
			lease.releaseReserved()
		}
		s.observations.addStreamed()
		return
	}
	if capture.long {
		s.observations.addLong()
		return
	}
	s.observations.addEligible(capture.sampled)
	if !engine.Unrequested && s.percent > 0 {
		s.observations.timed(response, sent, capture.sampled, lease.tokens)
	}
}

const (
	// maxExpertBytes is the maximum size of the routed experts of a sampled request. A prompt of 128 Ki tokens has
	// hundreds of megabytes of them in base64. The router holds a complete response in memory until it is counted,
	// about 2.5 times its size.
	maxExpertBytes = 64 << 20
	// maxReservedBytes is the maximum size of the routed experts of all sampled requests in flight. With the decoded
	// data they stay below the memory limit of a router.
	maxReservedBytes = 128 << 20
)

// expertBytes estimates the size of the routed experts in a response, in bytes. Each answer repeats the experts of the
// prompt. In base64, each token, layer and expert takes 4 bytes * 4/3.
func expertBytes(r *request, lease *Lease) int64 {
	shape, tokens := lease.Backend.Shape, r.tokens
	if shape == nil { // the response cannot be decoded
		return 0
	}
	if lease.scored {
		tokens = r.forecast.tokens
	}
	rows := (tokens-r.output)*r.copies + min(r.output, r.answers*r.answerTokens)
	// The minimum prevents an overflow: clients control the factors. One byte per token would exceed the limit already.
	return min(rows, maxExpertBytes) * int64(shape.Layers*shape.ExpertsPerToken) * 16 / 3
}

// reserve reserves memory for a sampled request until its lease is released; bytes is the total of the request. It
// reports false and reserves nothing more if the total exceeds the limit of a request or of all requests.
func (o *Observations) reserve(l *Lease, bytes int64) bool {
	more := max(0, bytes-l.reserved)
	if bytes > maxExpertBytes {
		return false
	}
	if o.addReserved(l, more) > maxReservedBytes && more > 0 {
		o.addReserved(l, -more)
		return false
	}
	return true
}

// addReserved adds to the memory reserved for a request without a check. It returns the total of all requests.
func (o *Observations) addReserved(l *Lease, more int64) int64 {
	l.reserved += more
	l.releaseReserved = func() {
		o.reserved.Add(-l.reserved)
		l.reserved = 0
	}
	return o.reserved.Add(more)
}
