// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/picker/gatewaytest"
	"github.com/semmoe/operator/internal/router/telemetry"
)

// TestAccessLogOfProxy checks what the stages record of a request with a plan, of a retry and of a rejected request.
func TestAccessLogOfProxy(t *testing.T) {
	p, _ := solved(t)
	busy := newEngine(t, "busy", 4, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusServiceUnavailable) })
	engine := newEngine(t, "engine", 4, func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `{"choices":[],"usage":{"completion_tokens":5}}`) //nolint:errcheck // the client notices
	})
	busy.PlanDigest, engine.PlanDigest = p.Artifact.Digest, p.Artifact.Digest
	var text bytes.Buffer
	registry := prometheus.NewRegistry()
	recorder, err := telemetry.New(t.Context(), telemetry.Options{AccessLogPercent: 100, AccessLog: &text}, registry)
	if err != nil {
		t.Fatal(err)
	}
	pool := NewPool()
	handler, _ := NewProxy(pool, registry, logr.Discard(), ProxyOptions{
		MaxBodyBytes: 1 << 20, EndpointWait: time.Second, RankHeader: rankHeader, Recorder: recorder,
	})
	pool.AddLayout(p.layout)
	if err := pool.UseTables(p.Artifact.Digest, p.Artifact.Digest); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	pool.Set([]discovery.Backend{busy})
	retried := make(chan struct{})
	go func() {
		defer close(retried)
		response, err := http.Post(server.URL+"/v1/completions", "application/json", strings.NewReader(`{"model":"qwen","prompt":"a confidential question","max_tokens":5}`))
		if err != nil {
			t.Error(err)
			return
		}
		response.Body.Close()
	}()
	eventually(t, "a retry", func() bool { return retriesOf(t, registry) > 0 })
	pool.Set([]discovery.Backend{busy, engine})
	<-retried
	if response, _ := post(t, server.URL+"/flush_cache", "{}"); response.StatusCode != http.StatusNotFound {
		t.Errorf("status %d", response.StatusCode)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	recorder.Run(ended)
	var lines []map[string]any
	for decoder := json.NewDecoder(&text); ; {
		var line map[string]any
		if decoder.Decode(&line) != nil {
			break
		}
		lines = append(lines, line)
	}
	if len(lines) != 2 {
		t.Fatalf("%d lines, want 2", len(lines))
	}
	first := lines[0]
	if first["model"] != "qwen" || first["pod"] != "engine" || first["plan"] != p.Short() || first["outputTokens"] != 5.0 || first["predictedLocality"] == nil || first["retries"] == 0.0 {
		t.Errorf("line %v", first)
	}
	if second := lines[1]; second["status"] != 404.0 || second["route"] != "" {
		t.Errorf("line %v", second)
	}
	if strings.Contains(fmt.Sprint(lines), "confidential") {
		t.Errorf("a line contains the prompt: %v", lines)
	}
}

// TestAccessLogOfPicks checks the lines of an endpoint picker: a served request, one that a fallback served, one without a
// response, and one that is rejected.
func TestAccessLogOfPicks(t *testing.T) {
	var text bytes.Buffer
	recorder, err := telemetry.New(t.Context(), telemetry.Options{AccessLogPercent: 100, AccessLog: &text}, prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	pool := newPool(backendsOf("", 2, 2, "p")...)
	gateway, _, registry := newPicker(t, pool, ProxyOptions{RankHeader: rankHeader, Recorder: recorder})
	const body = `{"model":"qwen","prompt":"a confidential question","max_tokens":5}`
	for i, id := range []string{"served", "fallback", "lost"} {
		s, endpoints, _ := begin(t, gateway, body, map[string]string{"x-request-id": id}, nil)
		if id != "lost" {
			s.ResponseHeaders(http.StatusOK, map[string]string{"content-type": "application/json"}, false, endpoints[i])
			s.ResponseBody([]byte(`{"choices":[],"usage":{"completion_tokens":5}}`), 1000, true)
			s.Answered()
			s.Body(-1)
		}
		if err := s.End(); err != io.EOF {
			t.Errorf("%s: the stream ended with %v", id, err)
		}
	}
	pool.Set(nil)
	s := gatewaytest.Open(t, gateway, gatewaytest.FullDuplex)
	s.RequestHeaders("POST", "/v1/completions", map[string]string{"x-request-id": "rejected"}, false, nil)
	s.RequestBody([]byte(body), 1000, true)
	if code, _, _ := s.Refused(); code != http.StatusServiceUnavailable {
		t.Errorf("without pods: status %d", code)
	}
	eventually(t, "all requests end", func() bool {
		n := 0.
		for _, code := range []string{"200", "499", "503"} {
			n += requestsOf(t, registry, code)
		}
		return n == 4
	})
	ended, end := context.WithCancel(t.Context())
	end()
	recorder.Run(ended)
	if strings.Contains(text.String(), "confidential") {
		t.Errorf("a line contains the prompt: %s", text.String())
	}
	lines := map[any]map[string]any{}
	for decoder := json.NewDecoder(&text); ; {
		var line map[string]any
		if decoder.Decode(&line) != nil {
			break
		}
		lines[line["requestId"]] = line
	}
	for id, want := range map[string]string{
		"served": "200 /v1/completions qwen 0 true 5", "fallback": "200 /v1/completions qwen 1 true 5",
		"lost": "499 /v1/completions qwen 0 false <nil>", "rejected": "503 /v1/completions qwen 0 false <nil>",
	} {
		line := lines[id]
		if got := fmt.Sprint(line["status"], " ", line["route"], " ", line["model"], " ", line["retries"], " ", line["pod"] != nil, " ", line["outputTokens"]); got != want {
			t.Errorf("%s: %s, want %s; line %v", id, got, want, line)
		}
	}
}

// requestsOf returns the number of answered requests with a status code.
func requestsOf(t *testing.T, registry *prometheus.Registry, code string) (n float64) {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		for _, metric := range family.Metric {
			if family.GetName() == "semmoe_router_requests_total" && metric.Label[0].GetValue() == code {
				n = metric.Counter.GetValue()
			}
		}
	}
	return n
}

// retriesOf returns the number of retries after a 503.
func retriesOf(t *testing.T, registry *prometheus.Registry) float64 {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() != "semmoe_router_retries_total" {
			continue
		}
		for _, metric := range family.Metric {
			if metric.Label[0].GetValue() == retryUnavailable {
				return metric.Counter.GetValue()
			}
		}
	}
	return 0
}

// TestPprofOnItsOwnPort checks that profiles are served on their own port only.
func TestPprofOnItsOwnPort(t *testing.T) {
	server, listener, err := listenForPprof("", logr.Discard())
	if server != nil || listener != nil || err != nil {
		t.Fatal("profiles are served by default")
	}
	if server, listener, err = listenForPprof("127.0.0.1:0", logr.Discard()); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	response, err := http.Get("http://" + listener.Addr().String() + "/debug/pprof/goroutine?debug=1")
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusOK {
		t.Errorf("status %d", response.StatusCode)
	}
	server.Close()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	front := newTestServer(t, NewPool(), ProxyOptions{MaxBodyBytes: 1 << 20})
	if response, _ := post(t, front+"/debug/pprof/", ""); response.StatusCode != http.StatusNotFound {
		t.Errorf("the port of clients answers %d", response.StatusCode)
	}
}

// newTestServer serves a proxy, and returns its URL.
func newTestServer(t *testing.T, pool *Pool, options ProxyOptions) string {
	t.Helper()
	handler, _ := NewProxy(pool, prometheus.NewRegistry(), logr.Discard(), options)
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server.URL
}
