// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.41.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/semmoe/operator/internal/httpserver/buildinfo"
)

const (
	// exportTimeout bounds one export. flushTimeout bounds the last export, when the router ends.
	exportTimeout = 10 * time.Second
	flushTimeout  = time.Second
)

// tracing creates spans and sends them to a collector.
type tracing struct {
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
}

// tracesPath is the route of collectors for spans.
const tracesPath = "/v1/traces"

// ParseEndpoint checks the URL of an OTLP collector, and completes it by the usual path.
func ParseEndpoint(text string) (string, error) {
	endpoint, err := url.Parse(text)
	if err != nil || endpoint.Scheme != "http" && endpoint.Scheme != "https" || endpoint.Host == "" || endpoint.User != nil {
		return "", fmt.Errorf("%q is invalid: http://host:port or https://host:port, with an optional path, is allowed", text)
	}
	if strings.Trim(endpoint.Path, "/") == "" {
		endpoint.Path = tracesPath
	}
	return endpoint.String(), nil
}

// newTracing returns the tracing of this percentage of the requests without a traceparent. Requests with one keep its
// decision. It does not connect.
func newTracing(ctx context.Context, endpoint string, percent int, log logr.Logger) (*tracing, error) {
	endpoint, err := ParseEndpoint(endpoint)
	if err != nil {
		return nil, err
	}
	exporter, err := otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(endpoint), otlptracehttp.WithTimeout(exportTimeout),
		otlptracehttp.WithRetry(otlptracehttp.RetryConfig{Enabled: false}))
	if err != nil {
		return nil, err
	}
	return traceTo(&reportingExporter{SpanExporter: exporter, endpoint: endpoint, log: log}, percent), nil
}

func traceTo(exporter sdktrace.SpanExporter, percent int) *tracing {
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithBatcher(exporter, sdktrace.WithExportTimeout(exportTimeout)),
		sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.TraceIDRatioBased(float64(percent)/100))),
		sdktrace.WithResource(resource.NewSchemaless(semconv.ServiceName("semmoe-router"), semconv.ServiceVersion(buildinfo.Read().String()))),
	)
	return &tracing{provider, provider.Tracer("github.com/semmoe/operator/internal/router")}
}

// end sends the remaining spans.
func (t *tracing) end(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
	defer cancel()
	t.provider.Shutdown(ctx) //nolint:errcheck // the exporter has logged the error
}

// reportingExporter logs the first of successive errors, and the end of them.
type reportingExporter struct {
	sdktrace.SpanExporter
	endpoint string
	log      logr.Logger

	mu     sync.Mutex
	failed bool
}

// ExportSpans sends spans. An error is logged here instead of by the global handler of the SDK.
func (e *reportingExporter) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	err := e.SpanExporter.ExportSpans(ctx, spans)
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case err != nil && !e.failed:
		e.log.Info("Failed to send spans; spans are dropped until the collector accepts them", "endpoint", e.endpoint, "reason", err.Error())
	case err == nil && e.failed:
		e.log.Info("The collector accepts spans again", "endpoint", e.endpoint)
	}
	e.failed = err != nil
	return nil
}

// propagator reads and writes the headers of W3C Trace Context.
var propagator = propagation.TraceContext{}

// operations maps routes to the names of the GenAI semantic conventions.
var operations = map[string]attribute.KeyValue{
	"/v1/completions": semconv.GenAIOperationNameTextCompletion, "/v1/chat/completions": semconv.GenAIOperationNameChat,
	"/v1/messages": semconv.GenAIOperationNameChat, "/v1/responses": semconv.GenAIOperationNameChat,
	"/generate": semconv.GenAIOperationNameTextCompletion, "/v1/embeddings": semconv.GenAIOperationNameEmbeddings,
}

// start starts the span of a request. The header may continue a trace.
func (t *tracing) start(ctx context.Context, header http.Header, method string, at time.Time) (context.Context, trace.Span) {
	ctx = propagator.Extract(ctx, propagation.HeaderCarrier(header))
	return t.tracer.Start(ctx, method, trace.WithSpanKind(trace.SpanKindServer), trace.WithTimestamp(at))
}

// finish sets the attributes of a span, and ends it.
func finish(span trace.Span, r *Record) {
	if span.IsRecording() {
		span.SetName(spanName(r))
		span.SetAttributes(attributes(r)...)
		if r.Status >= http.StatusInternalServerError {
			span.SetStatus(codes.Error, http.StatusText(r.Status))
		}
	}
	span.End(trace.WithTimestamp(r.Started.Add(r.Duration)))
}

// spanName returns the operation and the model, or the method and the route of a request that generates nothing.
func spanName(r *Record) string {
	operation, generates := operations[r.Route]
	if !generates {
		return r.Method + " " + r.Route
	}
	return strings.TrimSpace(operation.Value.AsString() + " " + r.Model)
}

func attributes(r *Record) []attribute.KeyValue {
	all := []attribute.KeyValue{
		semconv.HTTPRequestMethodKey.String(r.Method), semconv.HTTPRoute(r.Route), semconv.HTTPResponseStatusCode(r.Status),
		attribute.String("semmoe.request.id", r.ID), attribute.Int("semmoe.retries", r.Retries),
	}
	add := func(has bool, value attribute.KeyValue) {
		if has {
			all = append(all, value)
		}
	}
	operation, generates := operations[r.Route]
	add(generates, operation)
	add(generates && r.Engine != "", semconv.GenAIProviderNameKey.String(strings.ToLower(r.Engine)))
	add(r.Model != "", semconv.GenAIRequestModel(r.Model))
	add(generates, semconv.GenAIRequestStreamKey.Bool(r.Stream))
	add(r.OutputTokens > 0, semconv.GenAIUsageOutputTokens(int(r.OutputTokens)))
	add(r.Status >= http.StatusBadRequest, semconv.ErrorTypeKey.String(fmt.Sprint(r.Status)))
	add(r.Client != "", attribute.String("semmoe.client", r.Client))
	add(r.Queued > 0, attribute.Float64("semmoe.queue.seconds", r.Queued.Seconds()))
	add(r.Pod != "", attribute.String("semmoe.pod", r.Pod))
	add(r.Rank != noRank, attribute.Int("semmoe.rank", r.Rank))
	add(r.Plan != "", attribute.String("semmoe.plan", r.Plan))
	add(r.PromptTokens > 0, attribute.Int64("semmoe.prompt.estimated_tokens", r.PromptTokens))
	add(r.Header > 0, attribute.Float64("semmoe.header.seconds", r.Header.Seconds()))
	if r.Predicted != nil {
		all = append(all, attribute.Float64("semmoe.locality.predicted", *r.Predicted))
	}
	if r.Observed != nil {
		all = append(all, attribute.Float64("semmoe.locality.observed", *r.Observed))
	}
	return all
}
