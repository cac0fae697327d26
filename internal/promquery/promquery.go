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
)

const (
	// timeout bounds a query, from the connection to the end of the answer.
	timeout = 5 * time.Second
	// rest is how long a server that did not answer is left alone.
	rest = 50 * time.Second
	// maxAnswer bounds an answer, in bytes: a series of a hundred values has a few thousand.
	maxAnswer = 1 << 20
)

// Query is what is asked, and of whom.
type Query struct {
	// Address is the base URL of the server, and Namespace the namespace of the object that names it.
	Address, Namespace string
	// Token is sent as a bearer token; empty for none.
	Token string
	// Expression is in PromQL.
	Expression string
	// Start and End are the first and last times at which the expression is evaluated, Step the time between two.
	Start, End time.Time
	Step       time.Duration
}

// Point is a value of the series. Prometheus has values that are no numbers.
type Point struct {
	Time  time.Time
	Value float64
}

// Why there is no series, in the form of a condition's reason.
const (
	NotAllowed    = "PrometheusNotAllowed"
	Unavailable   = "PrometheusUnavailable"
	Refused       = "PrometheusRefused"
	Warned        = "PrometheusWarned"
	NoSeries      = "PrometheusNoSeries"
	SeveralSeries = "PrometheusSeveralSeries"
)

// Error is why there is no series.
type Error struct {
	Reason, Message string
	// Cause is the underlying error, for logs only: its text may name addresses or contain text of the server. Nil where there is none.
	Cause error

	// away reports that the server did not answer at all.
	away bool
}

func (e *Error) Error() string { return e.Message }

func (e *Error) Unwrap() error { return e.Cause }

// Client queries servers. It is safe for concurrent use. The zero value allows no server.
type Client struct {
	// Hosts are the hosts that objects of every namespace may name.
	Hosts Hosts
	// Services lists the Services of an object's own namespace, past any cache; nil allows none of them.
	Services client.Reader
	// Transport sends the requests to allowed servers; nil dials them directly.
	Transport http.RoundTripper
	// Now is the clock; nil for time.Now.
	Now func() time.Time

	mu sync.Mutex
	// away has, by address, the servers that did not answer.
	away map[string]absence
}

// absence is that a server did not answer.
type absence struct {
	until time.Time
	err   *Error
}

// Range is the values of the one series that the query yields, the oldest first. The error is an *Error.
func (c *Client) Range(ctx context.Context, q Query) ([]Point, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	route, err := c.route(ctx, q)
	if err != nil {
		return nil, errorOf(err)
	}
	if err := c.known(q.Address); err != nil {
		return nil, err
	}
	value, warnings, err := ask(ctx, route, q)
	if err != nil {
		told := errorOf(err)
		if told.away {
			c.remember(q.Address, told)
		}
		return nil, told
	}
	if len(warnings) > 0 {
		return nil, &Error{Reason: Warned, Message: "Prometheus warns that its answer may be wrong: evaluate spec.drift.prometheus.query there", Cause: errors.New(warnings[0])}
	}
	return seriesOf(value)
}

// ask sends a query.
func ask(ctx context.Context, route http.RoundTripper, q Query) (model.Value, prometheus.Warnings, error) {
	server, err := api.NewClient(api.Config{Address: q.Address, Client: &http.Client{
		Transport: &transport{route, q.Token},
		CheckRedirect: func(*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse // the token, and the manager's place in the network, are for the allowed server only
		},
	}})
	if err != nil {
		return nil, nil, &Error{Reason: NotAllowed, Message: notAllowed, Cause: err}
	}
	return prometheus.NewAPI(server).QueryRange(ctx, q.Expression, prometheus.Range{Start: q.Start, End: q.End, Step: q.Step})
}

// transport adds the token to requests and bounds the answers.
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
	response.Body = &bounded{response.Body, maxAnswer}
	return response, nil
}

// errTooLong is an answer beyond the bound.
var errTooLong = fmt.Errorf("the answer has more than %d bytes", maxAnswer)

// bounded fails, unlike io.LimitReader, where there is more to read.
type bounded struct {
	io.ReadCloser
	left int
}

func (b *bounded) Read(into []byte) (int, error) {
	if b.left < 0 {
		return 0, errTooLong
	}
	n, err := b.ReadCloser.Read(into[:min(len(into), b.left+1)])
	if b.left -= n; b.left < 0 {
		return 0, errTooLong
	}
	return n, err
}

// known is the error of a server that is left alone; nil where it may be asked.
func (c *Client) known(address string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if absent, known := c.away[address]; known && c.now().Before(absent.until) {
		return absent.err
	}
	return nil
}

// remember leaves a server alone for a while, and forgets those whose time is over.
func (c *Client) remember(address string, err *Error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	kept := map[string]absence{address: {now.Add(rest), err}}
	for other, absent := range c.away {
		if other != address && now.Before(absent.until) {
			kept[other] = absent
		}
	}
	c.away = kept
}

func (c *Client) now() time.Time {
	if c.Now == nil {
		return time.Now()
	}
	return c.Now()
}

// unavailable is the message for every failure to get a series: an object's author must not learn from it which addresses of the manager's
// network answer, nor what they answer.
const unavailable = "Prometheus returns no usable answer. Check the address, its certificate, the token, and that the query yields one series; the log of the manager has the cause"

// errorOf classifies an error of the API's client. No text of the server is part of a message.
func errorOf(err error) *Error {
	var told *Error
	var answered *prometheus.Error
	switch {
	case errors.As(err, &told):
		return told
	case !errors.As(err, &answered):
		noAnswer := errors.As(err, new(net.Error)) || errors.Is(err, context.DeadlineExceeded)
		return &Error{Unavailable, unavailable, err, noAnswer && !errors.Is(err, context.Canceled)}
	}
	switch answered.Type {
	case prometheus.ErrBadData, prometheus.ErrExec, prometheus.ErrTimeout, prometheus.ErrCanceled:
		return &Error{Reason: Refused, Message: "Prometheus does not evaluate the query: evaluate spec.drift.prometheus.query there", Cause: err}
	}
	return &Error{Reason: Unavailable, Message: unavailable, Cause: err, away: answered.Type == prometheus.ErrServer}
}

// seriesOf is the one series of an answer.
func seriesOf(value model.Value) ([]Point, error) {
	matrix, ok := value.(model.Matrix)
	switch {
	case !ok:
		return nil, &Error{Reason: Unavailable, Message: unavailable, Cause: fmt.Errorf("the answer is a %T", value)}
	case len(matrix) == 0:
		return nil, &Error{Reason: NoSeries, Message: "The query yields no series"}
	case len(matrix) > 1:
		return nil, &Error{Reason: SeveralSeries, Message: "The query yields several series: aggregate them into one"}
	}
	points := make([]Point, len(matrix[0].Values))
	for i, pair := range matrix[0].Values {
		points[i] = Point{pair.Timestamp.Time(), float64(pair.Value)}
	}
	return points, nil
}
