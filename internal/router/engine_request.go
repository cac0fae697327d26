package router

import (
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/router/client"
	"github.com/semmoe/operator/internal/router/wire"
)

// requestWriter is the stage that writes a request for the rank of its lease, and sends it to the engine.
type requestWriter struct {
	engine    *engine.Adapter // of pods that do not name their engine
	transport http.RoundTripper
}

// send sends a request with a body to the place of its lease.
func (w *requestWriter) send(in *http.Request, body []byte, r *request, lease *Lease) (*http.Response, error) {
	out := in.Clone(in.Context())
	out.URL.Host = lease.endpoint()
	out.Header.Del("Accept-Encoding") // the router cannot read a compressed response, and the network path is short
	out.Host = out.URL.Host
	if lease.Backend.PinsByHeader(lease.Rank) {
		out.Header.Set(lease.Backend.Adapter(w.engine).RankHeader, strconv.Itoa(lease.Rank))
	}
	if name, key := w.routingKey(out.Header, r, lease); name != "" {
		out.Header.Set(name, key)
	}
	head, rest := w.withRank(in.URL.Path, body, lease)
	out.Body, out.ContentLength, out.TransferEncoding = http.NoBody, int64(len(head)+len(rest)), nil
	if len(body) > 0 {
		kept := client.NewBody(rest)
		defer kept.Drop() // the response references its request
		// The server may have closed a reused connection before anything was sent. The transport then uses another
		// connection.
		out.GetBody = func() (io.ReadCloser, error) { return prefixed(head, kept.Reader()), nil }
		out.Body = prefixed(head, kept.Reader())
	}
	return w.transport.RoundTrip(out)
}

// withRank returns the body of a request to the rank of a lease in two parts. The first part contains the rank if the
// engine reads it from the body. On the responses route, the first part disables storage of the response.
func (w *requestWriter) withRank(path string, body []byte, lease *Lease) (head string, rest []byte) {
	if path == wire.ResponsesPath {
		return wire.WithoutStore(body)
	}
	field := lease.Backend.Adapter(w.engine).RankRoutes.FieldOn(path)
	if field == "" || !lease.Backend.PinsByHeader(lease.Rank) {
		return "", body
	}
	head, rest, _ = wire.With(body, field, strconv.Itoa(lease.Rank))
	return head, rest
}

// prefixed returns a reader of head followed by body.
func prefixed(head string, body io.ReadCloser) io.ReadCloser {
	if head == "" {
		return body
	}
	return struct {
		io.Reader
		io.Closer
	}{io.MultiReader(strings.NewReader(head), body), body}
}

// routingKey returns the header that names the rank with most of the request's experts. Load may have moved the request
// to another rank. The engine batches waiting requests with the same key. A key that the client has set is kept: it
// chooses no rank, and the client knows more about its requests than a forecast.
func (w *requestWriter) routingKey(header http.Header, r *request, lease *Lease) (name, key string) {
	name = lease.Backend.Adapter(w.engine).RoutingKeyHeader
	if name == "" || !lease.scored || header.Get(name) != "" {
		return "", ""
	}
	return name, strconv.Itoa(r.forecast.best)
}

// rankHeaders lists the request headers that choose a rank.
func rankHeaders(header http.Header) []string {
	var names []string
	for name := range header {
		if engine.NamesRank(name) {
			names = append(names, name)
		}
	}
	return names
}

// isDial reports whether the connection failed, so that the request was not sent.
func isDial(err error) bool {
	var operation *net.OpError
	return errors.As(err, &operation) && operation.Op == "dial"
}
