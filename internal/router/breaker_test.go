// SPDX-License-Identifier: Apache-2.0

package router

import (
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/semmoe/operator/internal/router/discovery"
)

// TestHalfOpenBackend checks with a pod that answers 500 that a half-open circuit breaker admits one request at a time,
// until the pod serves one, and what the metrics report.
func TestHalfOpenBackend(t *testing.T) {
	var asked, fails atomic.Int32
	fails.Store(1)
	broken := newEngine(t, "broken", 1, func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		if fails.Load() == 1 {
			http.Error(w, "CUDA error", http.StatusInternalServerError)
		}
	})
	works := newEngine(t, "works", 1, func(http.ResponseWriter, *http.Request) {})
	pool := poolWith(t, func(o *PoolOptions) {
		o.Breaker.ConsecutiveFailures, o.Breaker.HalfOpenRequests = 1, 1
		o.Breaker.Ejection, o.Breaker.MaxEjection = 10*time.Second, 10*time.Second
	})
	clock := &testClock{}
	pool.now = clock.now
	pool.Set([]discovery.Backend{broken, works})
	registry := prometheus.NewRegistry()
	url, _ := proxyServerOn(t, registry, pool, ProxyOptions{RankHeader: rankHeader, MaxBodyBytes: 1 << 10, EndpointWait: time.Minute})
	expect := func(ejections, open, halfOpen int) {
		t.Helper()
		if err := testutil.GatherAndCompare(registry, strings.NewReader(fmt.Sprintf(`
# HELP semmoe_router_ejected_backends Engine pods that are ejected, by state: open, or half_open until they serve a request again.
# TYPE semmoe_router_ejected_backends gauge
semmoe_router_ejected_backends{state="half_open"} %d
semmoe_router_ejected_backends{state="open"} %d
# HELP semmoe_router_ejections_total Times that an engine pod was ejected: it gets no request while other pods can take it. By reason: unreachable, unavailable (503), failures (consecutive 5xx) or error_rate.
# TYPE semmoe_router_ejections_total counter
semmoe_router_ejections_total{reason="error_rate"} 0
semmoe_router_ejections_total{reason="failures"} %d
semmoe_router_ejections_total{reason="unavailable"} 0
semmoe_router_ejections_total{reason="unreachable"} 0
`, halfOpen, open, ejections)), "semmoe_router_ejected_backends", "semmoe_router_ejections_total"); err != nil {
			t.Error(err)
		}
	}
	send := func(times int) {
		for range times {
			post(t, url+"/v1/completions", `{"prompt":"x"}`)
		}
	}
	expect(0, 0, 0)
	for asked.Load() == 0 {
		send(1)
	}
	expect(1, 1, 0)
	if send(20); asked.Load() != 1 {
		t.Errorf("an ejected pod was asked %d times", asked.Load())
	}
	clock.pass(10)
	expect(1, 0, 1)
	if send(40); asked.Load() != 2 {
		t.Errorf("a half-open pod that fails was asked %d times, want once", asked.Load()-1)
	}
	expect(2, 1, 0)
	clock.pass(10)
	fails.Store(0)
	lease := leaseOn(t, pool, "broken")
	for range 40 {
		other, ok := pool.acquire(completion("x", "x"), nil)
		if !ok || other.Backend.Pod == "broken" {
			t.Fatalf("a second request is sent to a half-open pod: %+v", other)
		}
		other.Release()
	}
	lease.recordOutcome(true)
	lease.Release()
	expect(2, 0, 0)
	leaseOn(t, pool, "broken").Release()
}

// leaseOn reserves places until one is on a pod.
func leaseOn(t *testing.T, pool *Pool, pod string) *Lease {
	t.Helper()
	for range 1000 {
		lease, ok := pool.acquire(completion("x", "x"), nil)
		if ok && lease.Backend.Pod == pod {
			return lease
		}
		lease.Release()
	}
	t.Fatalf("no request is sent to %s", pod)
	return nil
}

// TestMaxAttempts checks how many pods receive a request that breaks their connections.
func TestMaxAttempts(t *testing.T) {
	for _, attempts := range []int{1, 2, 5} {
		var calls atomic.Int32
		var pods []discovery.Backend
		for i := range 6 {
			pods = append(pods, rawEngine(t, fmt.Sprint(i), func(net.Conn) { calls.Add(1) }))
		}
		router, _ := limitedRouter(t, ProxyOptions{EndpointWait: 10 * time.Second, MaxAttempts: attempts}, pods...)
		if response, _ := post(t, router.URL+"/v1/completions", `{}`); response.StatusCode != http.StatusBadGateway || int(calls.Load()) != attempts {
			t.Errorf("%s after %d attempts, want 502 after %d", response.Status, calls.Load(), attempts)
		}
	}
}
