// SPDX-License-Identifier: Apache-2.0

package router

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/semmoe/operator/internal/router/client"
	"github.com/semmoe/operator/internal/router/clientauth"
	"github.com/semmoe/operator/internal/router/telemetry"
	"github.com/semmoe/operator/internal/router/wire"
)

var errUnanswered = errors.New("the request was sent to serving pods, and none of them answered")

// DefaultMaxAttempts is the default of ProxyOptions.MaxAttempts.
const DefaultMaxAttempts = 3

// forwarder passes the requests of the proxy through the stages.
type forwarder struct {
	*stages
	// wait is the maximum time that a request waits for a ready pod.
	wait time.Duration
	// maxAttempts is the maximum number of pods that receive a request if each of them breaks the connection.
	maxAttempts int
	// passThrough lists further routes.
	passThrough []string
	cors        *cors
}

// RoundTrip tries pods until a response begins. It sends a request again even if a pod may have processed it:
// generation has no side effects, so only the compute time is lost.
func (f *forwarder) RoundTrip(in *http.Request) (*http.Response, error) {
	start, body := time.Now(), client.BodyOf(in)
	parsed := wire.ParseBody(body.Bytes())
	if err := checkRank(in.Header, parsed); err != nil {
		return nil, err
	}
	priority, err := f.pool.options.Queue.priority(in.Header)
	if err != nil {
		return nil, err
	}
	parsed.DropRank()
	api := apiOf(in.Method, client.RouteOf(in.URL.Path), f.passThrough)
	r := f.reader.read(in.Context(), api, in.Header.Get(HeaderRequestID), in.Header, parsed)
	r.priority, r.client = priority, clientauth.ClientOf(in.Context())
	r.recordBody(telemetry.Of(in.Context()), parsed)
	tries := newTries()
	for sent := 0; ; {
		lease, err := f.pool.reserve(in.Context(), start.Add(f.wait), r, tries)
		if err != nil {
			return tries.refusalOr(err)
		}
		if err := f.reader.checkTokens(lease.Backend, parsed); err != nil {
			lease.Release()
			return nil, err
		}
		answer, err := f.attempt(in, r, lease)
		if err == nil && answer.response.StatusCode != http.StatusServiceUnavailable {
			body.Drop() // no further attempt follows, and the response may take minutes
			header := answer.header.Sub(start)
			f.metrics.firstByte.Observe(header.Seconds())
			r.recordPlace(lease, header)
			return f.accept(in, r, lease, answer)
		}
		full := false
		if err == nil {
			full = tries.refuse(answer.response)
		}
		if in.Context().Err() != nil {
			return nil, in.Context().Err()
		}
		f.recorder.recordFailure(r, lease)
		r.record.Retry()
		tries.add(lease, full)
		if err == nil { // 503: the pod is loading, draining or overloaded
			if !full {
				lease.recordUnavailable()
			}
			f.metrics.retries.WithLabelValues(retryUnavailable).Inc()
			continue
		}
		lease.Eject()
		if !isDial(err) {
			if sent++; sent >= f.maxAttempts {
				return nil, fmt.Errorf("%w: %w", errUnanswered, err)
			}
		}
		f.metrics.retries.WithLabelValues(retryUnreachable).Inc()
	}
}

// answer is a response that has begun.
type answer struct {
	response *http.Response
	capture  capture
	// sent is the time at which the request was sent, header the time at which the header of the response arrived.
	sent, header time.Time
}

// attempt sends a request to the place of its lease. A request that may have been rejected because of the capture is
// sent once more with the client's body, and counts as if it had been sent unchanged. A pod that breaks the connection
// before the first byte of its response, or before the header of a stream, has not answered.
func (f *forwarder) attempt(in *http.Request, r *request, lease *Lease) (answer, error) {
	a := answer{capture: f.sampler.requestExperts(r, lease), sent: f.observations.now()}
	var err error
	a.response, err = f.writer.send(in, r, lease, a.capture)
	if err == nil && a.capture.refused(a.response) {
		a.response.Body.Close()
		lease.releaseReserved()
		a.capture, a.sent = capture{}, f.observations.now()
		a.response, err = f.writer.send(in, r, lease, a.capture)
	}
	a.header = time.Now()
	if err == nil {
		err = readBegin(a.response)
	}
	if err != nil {
		lease.Release()
		return answer{}, err
	}
	f.reader.stored.learn(r.path, a.response, lease.endpoint())
	hideAddress(a.response, lease.Backend.Scheme(), lease.endpoint())
	lease.mark(a.response.Header)
	removeOwn(a.response.Trailer) // the announced names
	a.response.Body = &leasedBody{ReadCloser: a.response.Body, response: a.response, lease: lease}
	return a, nil
}

// accept passes a response that has begun through the remaining stages.
func (f *forwarder) accept(in *http.Request, r *request, lease *Lease, a answer) (*http.Response, error) {
	response := a.response
	explainNotFound(response, r.path)
	f.cors.learn(in.Header, response.Header)
	capture := f.sampler.limitResponse(response, lease, a.capture)
	r.answered(capture)
	f.recorder.recordLoad(r, lease)
	f.recorder.trackResponse(func() bool { return in.Context().Err() != nil }, response, r, lease, a.sent)
	f.sampler.countEligible(response, r, lease, capture, a.sent)
	if err := f.rewriter.rewrite(response, r, lease, capture); err != nil {
		response.Body.Close()
		return nil, fmt.Errorf("read the engine's response: %w", err)
	}
	lease.markRank(response.Header) // a buffered response may report another rank
	return response, nil
}
