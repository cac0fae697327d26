package router

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/semmoe/operator/internal/router/client"
	"github.com/semmoe/operator/internal/router/telemetry"
	"github.com/semmoe/operator/internal/router/wire"
)

var errUnanswered = errors.New("the request was sent to serving pods, and none of them answered")

// attemptsOnceSent is the maximum number of pods that receive a request if each of them breaks the connection. The
// request itself may crash the pods, and must not crash all of them.
const attemptsOnceSent = 3

// forwarder passes the requests of the proxy through the stages.
type forwarder struct {
	*stages
	// wait is the maximum time that a request waits for a ready pod.
	wait time.Duration
}

// RoundTrip tries pods until a response begins. It sends a request again even if a pod may have processed it:
// generation has no side effects, so only the compute time is lost.
func (f *forwarder) RoundTrip(in *http.Request) (*http.Response, error) {
	start, body := time.Now(), client.BodyOf(in)
	parsed := wire.ParseBody(body.Bytes())
	if err := checkRank(in.Header, parsed); err != nil {
		return nil, err
	}
	if err := checkState(in.URL.Path, parsed); err != nil {
		return nil, err
	}
	parsed.DropRank()
	r := f.reader.read(in.Context(), in.URL.Path, in.Header.Get(HeaderRequestID), parsed)
	r.recordBody(telemetry.Of(in.Context()), parsed)
	tries := newTries()
	for sent := 0; ; {
		lease, err := f.pool.reserve(in.Context(), start.Add(f.wait), r, tries)
		if err != nil {
			return nil, err
		}
		response, capture, began, err := f.attempt(in, r, lease)
		if err == nil && response.StatusCode != http.StatusServiceUnavailable {
			body.Drop() // no further attempt follows, and the response may take minutes
			header := time.Since(start)
			f.metrics.firstByte.Observe(header.Seconds())
			r.recordPlace(lease, header)
			return f.accept(in, response, r, lease, capture, began)
		}
		full := false
		if response != nil {
			full = wire.IsQueueFull(response.Body)
			response.Body.Close()
		}
		if in.Context().Err() != nil {
			return nil, in.Context().Err()
		}
		f.recorder.recordFailure(r, lease)
		r.record.Retry()
		tries.add(lease, full)
		if err == nil { // 503: the pod is loading, draining or overloaded
			f.metrics.retries.WithLabelValues(retryUnavailable).Inc()
			continue
		}
		lease.Eject()
		if !isDial(err) {
			if sent++; sent == attemptsOnceSent {
				return nil, fmt.Errorf("%w: %w", errUnanswered, err)
			}
		}
		f.metrics.retries.WithLabelValues(retryUnreachable).Inc()
	}
}

// attempt sends a request to the place of its lease. It returns the capture state and the time of sending. A request
// that may have been rejected because of the capture is sent once more with the client's body, and counts as if it had
// been sent unchanged.
func (f *forwarder) attempt(in *http.Request, r *request, lease *Lease) (_ *http.Response, _ capture, sent time.Time, _ error) {
	done := f.sampler.requestExperts(r, lease)
	sent = f.observations.now()
	response, err := f.writer.send(in, r, lease, done)
	if err == nil && done.refused(response) {
		response.Body.Close()
		lease.releaseReserved()
		done, sent = capture{}, f.observations.now()
		response, err = f.writer.send(in, r, lease, done)
	}
	if err != nil {
		lease.Release()
		return nil, capture{}, sent, err
	}
	lease.mark(response.Header)
	response.Body = &leasedBody{ReadCloser: response.Body, lease: lease}
	return response, done, sent, nil
}

// accept passes a response that has begun through the remaining stages.
func (f *forwarder) accept(in *http.Request, response *http.Response, r *request, lease *Lease, capture capture, sent time.Time) (*http.Response, error) {
	explainNotFound(response, r.path)
	capture = f.sampler.limitResponse(response, lease, capture)
	r.answered(capture)
	f.recorder.recordLoad(r, lease)
	f.recorder.trackResponse(func() bool { return in.Context().Err() != nil }, response, r, lease, sent)
	f.sampler.countEligible(response, r, lease, capture, sent)
	if err := f.rewriter.rewrite(response, r, lease, capture); err != nil {
		response.Body.Close()
		return nil, fmt.Errorf("read the engine's response: %w", err)
	}
	lease.markRank(response.Header) // a buffered response may report another rank
	return response, nil
}
