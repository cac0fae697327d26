// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"io"
	"net/http"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
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

// Handler records the requests of a handler. route returns the pattern of a request's route, idHeader contains its ID.
func (r *Recorder) Handler(next http.Handler, route func(*http.Request) string, idHeader string) http.Handler {
	if r == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, in *http.Request) {
		start := time.Now()
		logged := r.log != nil && r.log.sampled()
		var span trace.Span
		if r.tracing != nil {
			in, span = r.tracing.start(in, start)
		}
		if !logged && (span == nil || !span.IsRecording()) {
			next.ServeHTTP(w, in)
			return
		}
		id := in.Header.Get(idHeader)
		record := &Record{ID: id[:min(len(id), maxIDBytes)], Method: in.Method, Route: route(in), Started: start, Rank: noRank}
		writer := &statusWriter{ResponseWriter: w, status: http.StatusOK}
		defer func() { // also after the panic with which a proxy aborts a broken response
			record.Duration, record.Status = time.Since(start), writer.status
			if span != nil {
				finish(span, record)
			}
			if logged {
				r.log.add(record)
			}
		}()
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
