// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

const idHeader = "X-Request-Id"

func route(r *http.Request) string { return r.URL.Path }

// serve sends a request to a handler that fills its record, and returns the headers that the handler gets.
func serve(t *testing.T, r *Recorder, header http.Header, code int) http.Header {
	t.Helper()
	var got http.Header
	handler := r.Handler(http.HandlerFunc(func(w http.ResponseWriter, in *http.Request) {
		got = in.Header.Clone()
		record := Of(in.Context())
		record.Authenticate("team-a")
		record.Retry()
		record.Observe(3, 4)
		record.Generated(7)
		if record != nil {
			predicted := 0.5
			record.Model, record.Pod, record.Engine, record.Rank, record.Plan, record.Predicted = "qwen", "pod-1", "SGLang", 2, "abc", &predicted
		}
		w.WriteHeader(code)
		io.WriteString(w, "answer") //nolint:errcheck // a recorder cannot fail
	}), route, idHeader)
	request := httptest.NewRequest(http.MethodPost, "/v1/chat/completions", strings.NewReader("a confidential question"))
	for name, values := range header {
		request.Header[name] = values
	}
	request.Header.Set(idHeader, "id-1"+strings.Repeat("x", 200))
	handler.ServeHTTP(httptest.NewRecorder(), request)
	return got
}

const (
	parent  = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	ignored = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
)

// TestSpans checks names and attributes, and that the trace of the client continues on the engine.
func TestSpans(t *testing.T) {
	exporter := tracetest.NewInMemoryExporter()
	r := &Recorder{tracing: traceTo(exporter, 0)}
	got := serve(t, r, http.Header{"Traceparent": {parent}}, http.StatusBadGateway)
	serve(t, r, http.Header{"Traceparent": {ignored}}, http.StatusOK)
	serve(t, r, nil, http.StatusOK) // not in the sample of 0%
	if err := r.tracing.provider.ForceFlush(t.Context()); err != nil {
		t.Fatal(err)
	}
	spans := exporter.GetSpans()
	if len(spans) != 1 {
		t.Fatalf("%d spans, want 1", len(spans))
	}
	span := spans[0]
	if span.Name != "chat qwen" || span.Parent.SpanID().String() != "00f067aa0ba902b7" || span.SpanContext.TraceID().String() != "4bf92f3577b34da6a3ce929d0e0e4736" {
		t.Errorf("span %q of trace %s, parent %s", span.Name, span.SpanContext.TraceID(), span.Parent.SpanID())
	}
	if want := "00-4bf92f3577b34da6a3ce929d0e0e4736-" + span.SpanContext.SpanID().String() + "-01"; got.Get("Traceparent") != want {
		t.Errorf("the engine gets %q, want %q", got.Get("Traceparent"), want)
	}
	attributes := map[string]any{}
	for _, a := range span.Attributes {
		attributes[string(a.Key)] = a.Value.AsInterface()
		if text, isText := a.Value.AsInterface().(string); isText && strings.Contains(text, "confidential") {
			t.Errorf("%s contains the prompt", a.Key)
		}
	}
	for key, want := range map[string]any{
		"gen_ai.operation.name": "chat", "gen_ai.provider.name": "sglang", "gen_ai.request.model": "qwen", "gen_ai.usage.output_tokens": int64(7),
		"http.request.method": "POST", "http.route": "/v1/chat/completions", "http.response.status_code": int64(502), "error.type": "502",
		"semmoe.rank": int64(2), "semmoe.plan": "abc", "semmoe.pod": "pod-1", "semmoe.client": "team-a", "semmoe.retries": int64(1),
		"semmoe.locality.predicted": 0.5, "semmoe.locality.observed": 0.75,
	} {
		if attributes[key] != want {
			t.Errorf("%s is %v, want %v", key, attributes[key], want)
		}
	}
	if id := attributes["semmoe.request.id"].(string); len(id) != maxIDBytes {
		t.Errorf("the ID has %d bytes", len(id))
	}
}

func TestNothingIsRecordedByDefault(t *testing.T) {
	r, err := New(t.Context(), Options{TracePercent: 100}, prometheus.NewRegistry())
	if err != nil || r != nil {
		t.Fatalf("recorder %v, error %v", r, err)
	}
	next := http.NewServeMux()
	if got := r.Handler(next, route, idHeader); got != http.Handler(next) {
		t.Error("the handler is wrapped")
	}
	r.Run(t.Context())
	r.Close(t.Context())
	if got := serve(t, r, http.Header{"Traceparent": {parent}}, http.StatusOK); got.Get("Traceparent") != parent {
		t.Errorf("traceparent is changed to %q", got.Get("Traceparent"))
	}
}

// TestAccessLog checks a line, and that no line contains a prompt.
func TestAccessLog(t *testing.T) {
	var text bytes.Buffer
	r, err := New(t.Context(), Options{AccessLogPercent: 100, AccessLog: &text}, prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	serve(t, r, nil, http.StatusOK)
	ended, end := context.WithCancel(t.Context())
	end()
	r.Run(ended)
	var got map[string]any
	if err := json.Unmarshal(text.Bytes(), &got); err != nil {
		t.Fatalf("%v: %s", err, text.String())
	}
	for key, want := range map[string]any{
		"client": "team-a", "method": "POST", "route": "/v1/chat/completions", "model": "qwen", "status": 200.0, "pod": "pod-1", "rank": 2.0,
		"plan": "abc", "retries": 1.0, "predictedLocality": 0.5, "observedLocality": 0.75, "outputTokens": 7.0, "stream": false,
	} {
		if got[key] != want {
			t.Errorf("%s is %v, want %v", key, got[key], want)
		}
	}
	if strings.Contains(text.String(), "confidential") || strings.Contains(text.String(), "answer") {
		t.Errorf("the line contains text: %s", text.String())
	}
}

// TestAccessLogDropsLines checks that requests do not wait for the reader of the log.
func TestAccessLogDropsLines(t *testing.T) {
	log := newAccessLog(100, prometheus.NewRegistry())
	for range maxQueued + 3 {
		log.add(&Record{})
	}
	if got := testutil.ToFloat64(log.dropped); got != 3 {
		t.Errorf("%v lines are dropped, want 3", got)
	}
}

func TestAccessLogSample(t *testing.T) {
	log, n := newAccessLog(25, prometheus.NewRegistry()), 0
	for range 40000 {
		if log.sampled() {
			n++
		}
	}
	if n < 9000 || n > 11000 { // 11 standard deviations
		t.Errorf("%d of 40000 requests are sampled, want 25%%", n)
	}
}

// TestCollector checks that spans reach a collector over HTTP, and that an unavailable collector is logged once per
// outage and does not affect requests.
func TestCollector(t *testing.T) {
	var received atomic.Int64
	var fails atomic.Bool
	collector := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil || r.URL.Path != "/v1/traces" || bytes.Contains(body, []byte("confidential")) {
			t.Errorf("%s, error %v", r.URL.Path, err)
		}
		if fails.Load() {
			http.Error(w, "no", http.StatusServiceUnavailable)
			return
		}
		received.Add(1)
	}))
	t.Cleanup(collector.Close)
	var mu sync.Mutex
	var lines []string
	log := funcr.New(func(_, args string) {
		mu.Lock()
		defer mu.Unlock()
		lines = append(lines, args)
	}, funcr.Options{})
	r, err := New(logr.NewContext(t.Context(), log), Options{Endpoint: collector.URL, TracePercent: 100}, prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	for _, failing := range []bool{false, true, true, false} {
		fails.Store(failing)
		serve(t, r, nil, http.StatusOK)
		if err := r.tracing.provider.ForceFlush(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if received.Load() != 2 || len(lines) != 2 || !strings.Contains(lines[0], "Failed to send spans") || !strings.Contains(lines[0], collector.URL) || !strings.Contains(lines[1], "accepts spans again") {
		t.Errorf("%d exports, log %q", received.Load(), lines)
	}
	collector.Close()
	serve(t, r, nil, http.StatusOK)
	start := time.Now()
	r.Close(t.Context())
	if took := time.Since(start); took > 30*time.Second { // flushTimeout is 1 s; the margin is for a busy machine
		t.Errorf("the end takes %v", took)
	}
}

func TestParseEndpoint(t *testing.T) {
	for text, want := range map[string]string{
		"http://collector:4318": "http://collector:4318/v1/traces", "https://c/otlp/traces": "https://c/otlp/traces", "http://c/": "http://c/v1/traces",
		"collector:4318": "", "grpc://c": "", "http://": "", "http://u:p@c": "", "": "", "http://a b": "",
	} {
		if got, err := ParseEndpoint(text); got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
}
