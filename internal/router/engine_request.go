// SPDX-License-Identifier: Apache-2.0

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
	"github.com/semmoe/operator/internal/router/exchange"
	"github.com/semmoe/operator/internal/router/wire"
)

// requestWriter is the stage that writes a request for the rank of its lease, and sends it to the engine.
type requestWriter struct {
	engine    *engine.Adapter // of pods that do not name their engine
	transport http.RoundTripper
}

// send sends a request to the place of its lease.
func (w *requestWriter) send(in *http.Request, r *request, lease *Lease, capture capture) (*http.Response, error) {
	out := in.Clone(in.Context())
	out.URL.Scheme, out.URL.Host = lease.Backend.Scheme(), lease.endpoint()
	for _, name := range ownHeaders(out.Header) {
		delete(out.Header, name)
	}
	out.Header.Del("Accept-Encoding") // the router cannot read a compressed response, and the network path is short
	out.Host = out.URL.Host
	if lease.Backend.PinsByHeader(lease.Rank) {
		out.Header.Set(lease.Backend.Adapter(w.engine).RankHeader, strconv.Itoa(lease.Rank))
	}
	if name, key := w.routingKey(out.Header, r, lease); name != "" {
		out.Header.Set(name, key)
	}
	head, rest := w.body(r, lease, capture)
	out.Body, out.ContentLength, out.TransferEncoding = http.NoBody, int64(len(head)+len(rest)), nil
	if len(rest) > 0 {
		kept := client.NewBody(rest)
		defer kept.Drop() // the response references its request
		// The server may have closed a reused connection before anything was sent. The transport then uses another
		// connection.
		out.GetBody = func() (io.ReadCloser, error) { return newMemoryBody(head, kept), nil }
		out.Body = newMemoryBody(head, kept)
	}
	return w.transport.RoundTrip(out)
}

// body returns the body of a request in two parts, the second of which is a part of the client's body. The first part
// contains the rank of the lease if the engine reads it from the body, and requests the routed experts and the token ids
// of a sampled request.
func (w *requestWriter) body(r *request, lease *Lease, capture capture) (head string, rest []byte) {
	var additions []wire.Addition
	if field := lease.Backend.Adapter(w.engine).RankRoutes.FieldOn(r.path); field != "" && lease.Backend.PinsByHeader(lease.Rank) {
		additions = append(additions, wire.Addition{Name: field, Value: strconv.Itoa(lease.Rank)})
	}
	for _, field := range []string{capture.field, capture.idsField} {
		if field != "" {
			additions = append(additions, wire.Addition{Name: field, Value: "true"})
		}
	}
	return r.body.With(additions...)
}

// memoryBody is a request body of a head and the body of a client.
type memoryBody struct {
	io.ReadCloser
	head string
	rest *client.Body
}

var _ exchange.Body = (*memoryBody)(nil)

func newMemoryBody(head string, rest *client.Body) *memoryBody {
	b := &memoryBody{rest.Reader(), head, rest}
	if from := b.ReadCloser; head != "" {
		b.ReadCloser = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(strings.NewReader(head), from), from}
	}
	return b
}

// Parts returns the body without copying it.
func (b *memoryBody) Parts() (head string, rest []byte) { return b.head, b.rest.Bytes() }

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

// ownHeaders lists the request headers that no engine gets from a client: those that choose a rank, and those of the
// router.
func ownHeaders(header http.Header) []string {
	var names []string
	for name := range header {
		if engine.NamesRank(name) || isOwnHeader(name) {
			names = append(names, name)
		}
	}
	return names
}

// ownPrefix begins the names of the router's headers.
const ownPrefix = "x-semmoe-"

// isOwnHeader reports whether a header is one of the router's. Case and the choice between - and _ are ignored.
func isOwnHeader(name string) bool {
	return len(name) >= len(ownPrefix) && strings.EqualFold(strings.ReplaceAll(name[:len(ownPrefix)], "_", "-"), ownPrefix)
}

// isDial reports whether the connection failed, so that the request was not sent.
func isDial(err error) bool {
	var operation *net.OpError
	return errors.As(err, &operation) && operation.Op == "dial"
}
