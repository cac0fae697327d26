// SPDX-License-Identifier: Apache-2.0

package picker

import (
	"context"
	"errors"
	"net/http"
	"time"
)

// Picker chooses endpoints. It is safe for concurrent use.
type Picker interface {
	// Pick chooses the endpoints of a request. Errors that wrap one of the errors below are answered with their status,
	// all others with 502. The context ends with the request.
	Pick(ctx context.Context, r *Request) (Exchange, error)
	// Count is called once per request, with the status code of its response, or 499 if the client disconnected before.
	Count(code int)
}

// Reasons why a request gets no endpoint.
var (
	// ErrNoEndpoint is answered with 503: no endpoint serves, or the gateway allows none of them.
	ErrNoEndpoint = errors.New("no endpoint")
	// ErrAllFull is answered with 429: all serving endpoints are at their limit.
	ErrAllFull = errors.New("all endpoints are full")
	// ErrNoRoute is answered with 404.
	ErrNoRoute = errors.New("not found")
	// ErrInvalid is answered with 400, ErrCompressed with 415.
	ErrInvalid    = errors.New("invalid request")
	ErrCompressed = errors.New("unsupported content encoding")

	errBodyTooLarge   = errors.New("request body too large")   // 413
	errHeaderTooLarge = errors.New("request header too large") // 431
)

// Request is a client request.
type Request struct {
	// Method and Path are from the request line. Path has no query and is still escaped.
	Method, Path string
	Header       http.Header
	// Body is the complete body; nil if there is none or the gateway does not send it.
	Body []byte
	// BodyFixed is true if the endpoint gets the body unchanged and Decision.Body is ignored.
	BodyFixed bool
	// ResponseFixed is true if the client gets the response body unchanged: Exchange.ModifyResponse then sees an empty
	// body.
	ResponseFixed bool
	// Subset contains the allowed endpoints; nil allows all.
	Subset *Subset
	// Arrived is the arrival time of the request header.
	Arrived time.Time
}

// Decision is the answer to the gateway.
type Decision struct {
	// Endpoints is host:port of the chosen endpoint, followed by its fallbacks in order; at least one.
	Endpoints []string
	// SetHeaders and RemoveHeaders change the request's header.
	SetHeaders    map[string]string
	RemoveHeaders []string
	// Head and Body form the body for the endpoint. Edited is true if Request.Body was changed in place.
	Head   string
	Body   []byte
	Edited bool
}

// Exchange is a request with its endpoint. It belongs to one goroutine.
type Exchange interface {
	Decision() Decision
	// ModifyResponse is called once, after the response header of the endpoint that served the request. served is empty
	// if the gateway does not report that endpoint. It may change the header and replace the body, like ModifyResponse
	// of httputil.ReverseProxy. Reading the body waits for the engine. An error is answered with 502.
	ModifyResponse(served string, response *http.Response) error
	// Release releases the resources of the exchange. It is called at the end of the response or of the stream; further
	// calls do nothing.
	Release()
}
