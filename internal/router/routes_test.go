// SPDX-License-Identifier: Apache-2.0

package router

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/picker/gatewaytest"
)

// TestGatewayReachesOnlyTheRoutes checks that only the routes of the service reach an engine, in any spelling of the
// path.
func TestGatewayReachesOnlyTheRoutes(t *testing.T) {
	gatewaytest.NoLeaks(t)
	gateway, _, registry := newPicker(t, newPool(discovery.Backend{Pod: "a", Address: "a:1", Ranks: 2}), ProxyOptions{RankHeader: rankHeader})
	served := 0
	requests := map[string]bool{
		"GET /v1/models": true, "GET /v1/models/tiny?x=1": true, "GET /v1/models/a/b": true, "POST /v1/completions": true, "POST /v1/%63ompletions": true, "POST /generate": true, "POST /v1/messages": true, "POST /v1/messages/count_tokens": true, "POST /v1/responses": true, "POST /qwen/v1/messages": true,
		"GET /v1/messages": false, "POST /v1/messages/batches": false, "GET /v1/responses": false, "POST /v1/responses/r/x": false,
		"POST /v1/models": false, "GET /generate": false, "PUT /v1/completions": false, "PUT /flush_cache": false, "OPTIONS /flush_cache": false, "GET /metrics": false,
		"PUT /generate": true, "PUT /generate?x=1": true, "OPTIONS /v1/completions": true, "GET /v1/responses/r": true, "DELETE /v1/responses/r": true, "POST /v1/responses/r/cancel": true, "GET /api/tags": true, "POST /flush_cache": false, "POST /v1/completions/../../flush_cache": false, "GET /v1/models/..%2f..%2fflush_cache": false,
		"POST //generate": false, "POST /generate/": true, "POST /generate//": false, "GET /v1/models/": true, "POST http://x/generate": false, "POST *": false, "POST ": false, "GET /v1/models/%zz": false, "GET /": false,
		// Prefixes that the gateway removes later.
		"POST /qwen/v1/chat/completions": true, "POST /a/b/generate": true, "GET /qwen/v1/models/tiny": true,
		"POST /qwen/flush_cache": false, "POST /v1/completions/flush_cache": false, "POST /qwen/generate/": true, "POST /qwen/../generate": false,
		"POST /qwen//generate": false, "GET /qwen/generate": false, "POST /qwengenerate": false, "GET /qwen/v1/models/..%2fflush_cache": false, "POST http://x/qwen/generate": false,
		"POST " + strings.Repeat("/a", 8) + "/generate": true, "POST " + strings.Repeat("/a", 9) + "/generate": false,
		"GET /v1/models/" + strings.Repeat("a", 4000): true, "GET /v1/models/" + strings.Repeat("a", 5000): false,
		// Parts that a server may cut off, and engine routes that end like another route.
		"POST /flush_cache#/generate": false, "POST /generate#x": false, "GET /v1/models/a#b": false, "GET /v1/models/a%23b": true,
		"POST /inference/v1/generate": true, "POST /inference/v1/%67enerate": true, "POST /qwen/inference/v1/generate": true, "POST /inference/v1/completions": true,
		"POST /inference/v1/abort_requests": false, "POST /api/generate": true, "POST /qwen/api/generate": true, "POST /api/v1/chat/completions": true, "GET /v1/models/api/generate": true,
	}
	for request, want := range requests {
		method, path, _ := strings.Cut(request, " ")
		s := gatewaytest.Open(t, gateway, gatewaytest.FullDuplex)
		s.RequestHeaders(method, path, nil, true, nil)
		if !want {
			if code, _, body := s.Refused(); code != 404 || !strings.Contains(body, "is not a route of this service") {
				t.Errorf("%s: code %d, %s", request, code, body)
			}
			continue
		}
		endpoints, change := s.Picked()
		route, _ := newRoutes(nil).In(method, path)
		api := apiOf(method, route, nil)
		if sent := change.Set[strings.ToLower(rankHeader)] != ""; !slices.Equal(endpoints, []string{"a:1"}) || change.Set["x-request-id"] == "" || sent != (!api.Computes || api.Smallest != "") {
			t.Errorf("%s: endpoints %v, header %v", request, endpoints, change)
		}
		s.ResponseHeaders(200, nil, true, "a:1")
		rank := ""
		if api.Computes && api.Smallest != "" {
			rank = change.Set[strings.ToLower(rankHeader)]
		}
		if headers := s.Answered().Set; headers["x-request-id"] != change.Set["x-request-id"] || headers["x-semmoe-rank"] != rank {
			t.Errorf("%s: got %v in %v", request, headers, change)
		}
		served++
	}
	rejected := len(requests) - served
	if err := testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP semmoe_router_requests_total Answered requests, by HTTP status code.
# TYPE semmoe_router_requests_total counter
semmoe_router_requests_total{code="200"} `+strconv.Itoa(served)+`
semmoe_router_requests_total{code="404"} `+strconv.Itoa(rejected)+`
semmoe_router_requests_total{code="429"} 0
semmoe_router_requests_total{code="503"} 0
`), "semmoe_router_requests_total"); err != nil {
		t.Error(err)
	}
}

// TestGatewayThatRewritesPaths checks that a request is handled by the route that its path ends with.
func TestGatewayThatRewritesPaths(t *testing.T) {
	gatewaytest.NoLeaks(t)
	pool := newPool(discovery.Backend{Pod: "a", Address: "a:1", Ranks: 1})
	gateway, _, _ := newPicker(t, pool, ProxyOptions{RankHeader: rankHeader})
	s := gatewaytest.Open(t, gateway, gatewaytest.FullDuplex)
	s.RequestHeaders("POST", "/qwen/v1/chat/completions", nil, false, nil)
	s.RequestBody([]byte(`{"messages":[{"content":"x"}],"max_tokens":1000}`), 1000, true)
	s.Picked()
	if got := outstanding(pool); got < 1000 {
		t.Errorf("%d tokens are outstanding of a request for 1000", got)
	}
}
