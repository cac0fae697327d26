// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"io"
	"net/http"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/propagation"
)

// Options configures the records. The zero value records nothing.
type Options struct {
	// Endpoint is the URL of an OTLP collector (HTTP); empty creates no spans. TracePercent is the percentage of the
	// requests without a traceparent that are traced.
	Endpoint     string
	TracePercent int
	// AccessLogPercent is the percentage of logged requests. AccessLog receives the lines.
	AccessLogPercent int
	AccessLog        io.Writer
}

// Recorder records requests.
type Recorder struct {
	tracing *tracing
	log     *AccessLog
	to      io.Writer
}

// New returns a recorder, or nil if nothing is recorded.
func New(ctx context.Context, options Options, registry prometheus.Registerer) (*Recorder, error) {
	if options.Endpoint == "" && options.AccessLogPercent == 0 {
		return nil, nil
	}
	r := &Recorder{to: options.AccessLog}
	if options.AccessLogPercent > 0 {
		r.log = newAccessLog(options.AccessLogPercent, registry)
	}
	if options.Endpoint != "" {
		var err error
		if r.tracing, err = newTracing(ctx, options.Endpoint, options.TracePercent, logr.FromContextOrDiscard(ctx)); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// Run writes the access log until the context ends. Close then sends the remaining spans. A nil Recorder does nothing.
func (r *Recorder) Run(ctx context.Context) {
	if r != nil && r.log != nil {
		r.log.run(ctx, r.to)
	}
}

// Close sends the remaining spans.
func (r *Recorder) Close(ctx context.Context) {
	if r != nil && r.tracing != nil {
		r.tracing.end(ctx)
	}
}

// maxIDBytes bounds the ID of a request, which a client can choose.
const maxIDBytes = 128

// Begin returns the record of a request that a gateway sends, or nil if it is not recorded. The header may continue a
// trace; it is not changed, because the gateway creates the spans around the engine's. End ends the record.
func (r *Recorder) Begin(ctx context.Context, header http.Header, method string, start time.Time) *Record {
	if r == nil {
		return nil
	}
	_, record := r.begin(ctx, header, method, start)
	return record
}

// begin is Begin, and returns the context with the span.
func (r *Recorder) begin(ctx context.Context, header http.Header, method string, start time.Time) (context.Context, *Record) {
	record := &Record{Method: method, Started: start, Rank: noRank, logged: r.log != nil && r.log.sampled()}
	if r.tracing != nil {
		ctx, record.span = r.tracing.start(ctx, header, method, start)
	}
	if !record.logged && (record.span == nil || !record.span.IsRecording()) {
		return ctx, nil
	}
	return ctx, record
}

// Identify sets the ID and the route of a request.
func (r *Record) Identify(id, route string) {
	if r != nil {
		r.ID, r.Route = id[:min(len(id), maxIDBytes)], route
	}
}

// End ends a record with the status code of the response.
func (r *Recorder) End(record *Record, status int) {
	if record == nil {
		return
	}
	record.Duration, record.Status = time.Since(record.Started), status
	if record.span != nil {
		finish(record.span, record)
	}
	if record.logged {
		r.log.add(record)
	}
}

// Handler records the requests of a handler. route returns the pattern of a request's route, idHeader contains its ID.
func (r *Recorder) Handler(next http.Handler, route func(*http.Request) string, idHeader string) http.Handler {
	if r == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, in *http.Request) {
		ctx, record := r.begin(in.Context(), in.Header, in.Method, time.Now())
		if r.tracing != nil {
			propagator.Inject(ctx, propagation.HeaderCarrier(in.Header))
			in = in.WithContext(ctx)
		}
		if record == nil {
			next.ServeHTTP(w, in)
			return
		}
		record.Identify(in.Header.Get(idHeader), route(in))
		writer := &statusWriter{ResponseWriter: w, status: http.StatusOK}
		defer func() { r.End(record, writer.status) }() // also after the panic with which a proxy aborts a broken response
		next.ServeHTTP(writer, in.WithContext(with(in.Context(), record)))
	})
}

// statusWriter keeps the status code of a response.
type statusWriter struct {
	http.ResponseWriter
	status int
}

// WriteHeader writes the header.
func (w *statusWriter) WriteHeader(code int) {
	if code >= http.StatusOK { // others precede the response
		w.status = code
	}
	w.ResponseWriter.WriteHeader(code)
}

// Unwrap gives http.ResponseController access to the connection.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
