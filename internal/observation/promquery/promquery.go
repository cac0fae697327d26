// SPDX-License-Identifier: Apache-2.0

package promquery

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/api"
	prometheus "github.com/prometheus/client_golang/api/prometheus/v1"
	"github.com/prometheus/common/model"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/semmoe/operator/internal/observation/lar"
)

const (
	// timeout limits a query, from the connection to the end of the response.
	timeout = 5 * time.Second
	// backoff is the time after which a server that did not respond is queried again.
	backoff = 50 * time.Second
	// maxResponse limits the size of a response, in bytes. A series of a hundred values has a few thousand bytes.
	maxResponse = 1 << 20
)

// Query is a range query to one server.
type Query struct {
	// Address is the base URL of the server, and Namespace the namespace of the object that refers to it.
	Address, Namespace string
	// Token is the bearer token, or empty.
	Token string
	// Expression is in PromQL.
	Expression string
	// Start and End are the first and the last time at which the expression is evaluated. Step is the time between two
	// evaluations.
	Start, End time.Time
	Step       time.Duration
}

// The reasons of errors, which are also condition reasons.
const (
	NotAllowed    = "PrometheusNotAllowed"
	Unavailable   = "PrometheusUnavailable"
	Refused       = "PrometheusRefused"
	Warned        = "PrometheusWarned"
	NoSeries      = "PrometheusNoSeries"
	SeveralSeries = "PrometheusSeveralSeries"
)

// Error reports why a query returned no series.
type Error struct {
	Reason, Message string
	// Cause is the underlying error, or nil. It is for logs only, because its text may contain addresses or text of the
	// server.
	Cause error

	// noResponse is true if the server did not respond at all.
	noResponse bool
}

func (e *Error) Error() string { return e.Message }

func (e *Error) Unwrap() error { return e.Cause }

// Client queries servers. It is safe for concurrent use. The zero value allows no server.
type Client struct {
	// Hosts are the hosts that objects of all namespaces may refer to.
	Hosts Hosts
	// Services lists the Services of an object's namespace, without a cache. If it is nil, no Services are allowed.
	Services client.Reader
	// Transport sends requests to allowed servers. If it is nil, the servers are dialed directly.
	Transport http.RoundTripper
	// Now is the clock. If it is nil, time.Now is used.
	Now func() time.Time

	mu sync.Mutex
	// unresponsive holds the servers that did not respond, by address.
	unresponsive map[string]failure
}

// failure is the error of a server that did not respond, and the time of the next query.
type failure struct {
	until time.Time
	err   *Error
}

// Range returns the values of the single series that the query returns, oldest first. The error is an *Error.
func (c *Client) Range(ctx context.Context, q Query) ([]lar.Point, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	route, err := c.route(ctx, q)
	if err != nil {
		return nil, errorOf(err)
	}
	if err := c.recentFailure(q.Address); err != nil {
		return nil, err
	}
	value, warnings, err := send(ctx, route, q)
	if err != nil {
		classified := errorOf(err)
		if classified.noResponse {
			c.remember(q.Address, classified)
		}
		return nil, classified
	}
	if len(warnings) > 0 {
		return nil, &Error{Reason: Warned, Message: "Prometheus returned warnings for the query. Evaluate spec.drift.prometheus.query in Prometheus", Cause: errors.New(warnings[0])}
	}
	return seriesOf(value)
}

// send sends a query.
func send(ctx context.Context, route http.RoundTripper, q Query) (model.Value, prometheus.Warnings, error) {
	server, err := api.NewClient(api.Config{Address: q.Address, Client: &http.Client{
		Transport: &transport{route, q.Token},
		CheckRedirect: func(*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse // a redirect would send the token, and the manager's requests, to a server that is not allowed
		},
	}})
	if err != nil {
		return nil, nil, &Error{Reason: NotAllowed, Message: notAllowed, Cause: err}
	}
	// Infos are remarks on the expression. They do not question the values.
	value, warnings, _, err := prometheus.NewAPI(server).QueryRange(ctx, q.Expression, prometheus.Range{Start: q.Start, End: q.End, Step: q.Step})
	return value, warnings, err
}

// transport adds the token to requests and limits the size of responses.
type transport struct {
	next  http.RoundTripper
	token string
}

func (t *transport) RoundTrip(request *http.Request) (*http.Response, error) {
	if t.token != "" {
		request = request.Clone(request.Context())
		request.Header.Set("Authorization", "Bearer "+t.token)
	}
	response, err := t.next.RoundTrip(request)
	if err != nil {
		return nil, err
	}
	response.Body = &limitedBody{response.Body, maxResponse}
	return response, nil
}

// errTooLong reports a response above the limit.
var errTooLong = fmt.Errorf("the response has more than %d bytes", maxResponse)

// limitedBody returns an error if the body is longer than the limit. io.LimitReader would truncate the body silently.
type limitedBody struct {
	io.ReadCloser
	left int
}

func (b *limitedBody) Read(into []byte) (int, error) {
	if b.left < 0 {
		return 0, errTooLong
	}
	n, err := b.ReadCloser.Read(into[:min(len(into), b.left+1)])
	if b.left -= n; b.left < 0 {
		return 0, errTooLong
	}
	return n, err
}

// recentFailure returns the error of a server that did not respond recently, or nil if the server may be queried.
func (c *Client) recentFailure(address string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if failed, known := c.unresponsive[address]; known && c.now().Before(failed.until) {
		return failed.err
	}
	return nil
}

// remember records a server that did not respond, and removes expired records.
func (c *Client) remember(address string, err *Error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	kept := map[string]failure{address: {now.Add(backoff), err}}
	for other, failed := range c.unresponsive {
		if other != address && now.Before(failed.until) {
			kept[other] = failed
		}
	}
	c.unresponsive = kept
}

func (c *Client) now() time.Time {
	if c.Now == nil {
		return time.Now()
	}
	return c.Now()
}

// unavailable is the message for all failures to get a series. It must not disclose to users which addresses in the
// manager's network respond, nor the content of responses.
const unavailable = "Prometheus returned no usable response. Check the address, its certificate, the token, and that the query returns one series; the log of the manager contains the cause"

// errorOf classifies an error of the API client. A message never contains text of the server.
func errorOf(err error) *Error {
	var classified *Error
	var response *prometheus.Error
	switch {
	case errors.As(err, &classified):
		return classified
	case !errors.As(err, &response):
		noResponse := errors.As(err, new(net.Error)) || errors.Is(err, context.DeadlineExceeded)
		return &Error{Unavailable, unavailable, err, noResponse && !errors.Is(err, context.Canceled)}
	}
	switch response.Type {
	case prometheus.ErrBadData, prometheus.ErrExec, prometheus.ErrTimeout, prometheus.ErrCanceled:
		return &Error{Reason: Refused, Message: "Prometheus rejected the query. Evaluate spec.drift.prometheus.query in Prometheus", Cause: err}
	}
	return &Error{Reason: Unavailable, Message: unavailable, Cause: err, noResponse: response.Type == prometheus.ErrServer}
}

// seriesOf returns the single series of a response.
func seriesOf(value model.Value) ([]lar.Point, error) {
	matrix, ok := value.(model.Matrix)
	switch {
	case !ok:
		return nil, &Error{Reason: Unavailable, Message: unavailable, Cause: fmt.Errorf("the response is a %T", value)}
	case len(matrix) == 0:
		return nil, &Error{Reason: NoSeries, Message: "The query returns no series"}
	case len(matrix) > 1:
		return nil, &Error{Reason: SeveralSeries, Message: "The query returns several series. Aggregate them into one"}
	}
	points := make([]lar.Point, len(matrix[0].Values))
	for i, pair := range matrix[0].Values {
		points[i] = lar.Point{Time: pair.Timestamp.Time(), Value: float64(pair.Value)}
	}
	return points, nil
}
