package picker

import (
	"context"
	"errors"
	"net/http"
	"time"
)

// Picker chooses endpoints. It is safe for concurrent use.
type Picker interface {
	// Pick chooses the endpoints of a request. An error that wraps one of those below is answered as they say, any other
	// with 502. The context ends with the request.
	Pick(ctx context.Context, r *Request) (Exchange, error)
	// Count is called once for each request, with the status code of its answer, or 499 where the client left before one.
	Count(code int)
}

// Why there is no endpoint for a request.
var (
	// ErrNoEndpoint is answered with 503: no endpoint serves, or none that the gateway allows.
	ErrNoEndpoint = errors.New("no endpoint")
	// ErrAllFull is answered with 429: endpoints serve, and none of them takes another request now.
	ErrAllFull = errors.New("all endpoints are full")
	// ErrNoRoute is answered with 404.
	ErrNoRoute = errors.New("not found")
	// ErrInvalid is answered with 400, ErrCompressed with 415.
	ErrInvalid    = errors.New("invalid request")
	ErrCompressed = errors.New("unsupported content encoding")
	// ErrNotImplemented is answered with 501.
	ErrNotImplemented = errors.New("not implemented")

	errBodyTooLarge   = errors.New("request body too large")   // 413
	errHeaderTooLarge = errors.New("request header too large") // 431
)

// Request is what a client sends.
type Request struct {
	// Method and Path are of the request line; Path has no query, and is not unescaped.
	Method, Path string
	Header       http.Header
	// Body is the whole body; nil where there is none, or the gateway does not tell it.
	Body []byte
	// BodyFixed tells that the endpoint gets the body as it is, whatever Decision.Body says.
	BodyFixed bool
	// ResponseFixed tells that the client gets the body of the response as it is: Exchange.ModifyResponse sees an empty one.
	ResponseFixed bool
	// Subset are the endpoints to choose from; nil for all.
	Subset *Subset
	// Arrived is when the request's header came.
	Arrived time.Time
}

// Decision is what the gateway is told.
type Decision struct {
	// Endpoints are host:port of the endpoint to take, and of those to try after it, in this order; at least one.
	Endpoints []string
	// SetHeaders and RemoveHeaders change the request's header.
	SetHeaders    map[string]string
	RemoveHeaders []string
	// Head and Body are the body that the endpoint gets. Edited reports that Request.Body was changed in place.
	Head   string
	Body   []byte
	Edited bool
}

// Exchange is a request with an endpoint. It belongs to one goroutine.
type Exchange interface {
	Decision() Decision
	// ModifyResponse is called once, when the response's header has come, from the endpoint that has really served; served
	// is empty where the gateway does not say. It may change the header and replace the body, as a ModifyResponse of
	// httputil.ReverseProxy. Reading the body waits for the engine. An error is answered with 502.
	ModifyResponse(served string, response *http.Response) error
	// Release gives back what the exchange holds. It is called when the response has ended, or the stream of the exchange
	// has; further calls do nothing.
	Release()
}
