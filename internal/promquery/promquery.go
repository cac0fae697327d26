package promquery

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/api"
	prometheus "github.com/prometheus/client_golang/api/prometheus/v1"
	"github.com/prometheus/common/model"
)

const (
	// timeout bounds a query, from the connection to the end of the answer.
	timeout = 5 * time.Second
	// rest is how long a server that did not answer is left alone.
	rest = 50 * time.Second
	// maxAnswer bounds an answer, in bytes: a series of a hundred values has a few thousand.
	maxAnswer = 1 << 20
	// maxRemote bounds what of a server's own text is repeated.
	maxRemote = 300
)

// Query is what is asked, and of whom.
type Query struct {
	// Address is the base URL of the server.
	Address string
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
	Unavailable   = "PrometheusUnavailable"
	Refused       = "PrometheusRefused"
	NoPrometheus  = "PrometheusUnreadable"
	Warned        = "PrometheusWarned"
	NoSeries      = "PrometheusNoSeries"
	SeveralSeries = "PrometheusSeveralSeries"
)

// Error is why there is no series.
type Error struct {
	Reason, Message string
	// Cause is what lies behind it, for logs: its text may change from time to time. Nil where there is nothing more to say.
	Cause error
}

func (e *Error) Error() string { return e.Message }

func (e *Error) Unwrap() error { return e.Cause }

// Client asks servers. It is safe for concurrent use; the zero value asks directly.
type Client struct {
	// Transport sends the requests; nil for http.DefaultTransport.
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
	if err := c.known(q.Address); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	value, warnings, err := c.ask(ctx, q)
	if err != nil {
		told := errorOf(err)
		if told.Reason == Unavailable && !errors.Is(err, context.Canceled) {
			c.remember(q.Address, told)
		}
		return nil, told
	}
	if len(warnings) > 0 {
		return nil, &Error{Reason: Warned, Message: "Prometheus warns that its answer may be wrong: " + shorten(warnings[0])}
	}
	return seriesOf(value)
}

// ask sends a query.
func (c *Client) ask(ctx context.Context, q Query) (model.Value, prometheus.Warnings, error) {
	next := c.Transport
	if next == nil {
		next = http.DefaultTransport
	}
	client, err := api.NewClient(api.Config{Address: q.Address, Client: &http.Client{
		Transport: &transport{next, q.Token},
		CheckRedirect: func(*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse // a token is for the named server alone, and so is the operator's place in the network
		},
	}})
	if err != nil {
		return nil, nil, &Error{Reason: Refused, Message: "The address of Prometheus is no URL", Cause: err}
	}
	return prometheus.NewAPI(client).QueryRange(ctx, q.Expression, prometheus.Range{Start: q.Start, End: q.End, Step: q.Step})
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

// errorOf tells what an error of the API's client means. Only Prometheus' own words about the query are repeated: an address may
// lead to anything.
func errorOf(err error) *Error {
	var told *Error
	var answered *prometheus.Error
	switch {
	case errors.As(err, &told):
		return told
	case errors.Is(err, errTooLong):
		return &Error{NoPrometheus, fmt.Sprintf("Prometheus' answer has more than %d bytes: make the query yield one series", maxAnswer), err}
	case errors.Is(err, context.DeadlineExceeded):
		return &Error{Unavailable, fmt.Sprintf("Prometheus has not answered within %s", timeout), err}
	case errors.As(err, new(*tls.CertificateVerificationError)):
		return &Error{Unavailable, "The certificate of Prometheus is not valid for its address, or of no authority that the operator knows: the chart's caBundle tells it others", err}
	case errors.As(err, new(net.Error)), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, context.Canceled):
		return &Error{Unavailable, "Prometheus cannot be reached", err}
	case !errors.As(err, &answered):
		return &Error{NoPrometheus, notPrometheus, err}
	}
	switch answered.Type {
	case prometheus.ErrBadData, prometheus.ErrExec, prometheus.ErrTimeout, prometheus.ErrCanceled:
		return &Error{Refused, "Prometheus does not evaluate the query: " + shorten(answered.Msg), err}
	case prometheus.ErrClient:
		return &Error{Refused, fmt.Sprintf("Prometheus refuses the query (%s): the token, or the address, is not right", answered.Msg), err}
	case prometheus.ErrServer:
		return &Error{Unavailable, fmt.Sprintf("Prometheus fails (%s)", answered.Msg), err}
	}
	return &Error{NoPrometheus, notPrometheus, err}
}

const notPrometheus = "The address does not answer as Prometheus does"

// seriesOf is the one series of an answer.
func seriesOf(value model.Value) ([]Point, error) {
	matrix, ok := value.(model.Matrix)
	switch {
	case !ok:
		return nil, &Error{Reason: NoPrometheus, Message: notPrometheus}
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

// shorten bounds a server's text, and keeps it on one line.
func shorten(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > maxRemote {
		return strings.ToValidUTF8(text[:maxRemote], "") + " ..."
	}
	return text
}
