// SPDX-License-Identifier: Apache-2.0

package router

import (
	"fmt"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/router/breaker"
	"github.com/semmoe/operator/internal/router/discovery"
)

// TestUnavailablePodIsPassedOver checks that a pod that answers 503 gets few requests while another pod serves, with
// growing pauses, and that it serves again once it answers.
func TestUnavailablePodIsPassedOver(t *testing.T) {
	var asked atomic.Int32
	var unavailable atomic.Bool
	unavailable.Store(true)
	loads := newEngine(t, "loads", 2, func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		if unavailable.Load() {
			http.Error(w, "loading", http.StatusServiceUnavailable)
		}
	})
	serves := newEngine(t, "serves", 2, func(http.ResponseWriter, *http.Request) {})
	pool := newPool(loads, serves)
	clock := &testClock{}
	pool.now = clock.now
	url, _ := proxyServer(t, pool, ProxyOptions{RankHeader: rankHeader, MaxBodyBytes: 1 << 10, EndpointWait: time.Minute})
	for range 400 { // in eight seconds
		clock.pass(0.02)
		if response, text := post(t, url+"/v1/completions", `{"prompt":"x"}`); response.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s", response.Status, text)
		}
	}
	if got := asked.Load(); got < 1 || got > 5 {
		t.Errorf("the pod was asked %d times by 400 requests, want 5 at most", got)
	}
	unavailable.Store(false)
	clock.pass(breaker.Default().MaxEjection.Seconds())
	asked.Store(0)
	for range 40 {
		post(t, url+"/v1/completions", `{"prompt":"x"}`)
	}
	if asked.Load() == 0 {
		t.Error("a pod that answers again gets no requests")
	}
}

// TestRefusalReachesTheClient checks that the client gets the response of an engine if all pods answer 503, soon and with
// the engine's Retry-After, and that a pod without a response does not hide it.
func TestRefusalReachesTheClient(t *testing.T) {
	refuses := func(after string) discovery.Backend {
		return newEngine(t, "refuses"+after, 0, func(w http.ResponseWriter, _ *http.Request) {
			if after != "" {
				w.Header().Set("Retry-After", after)
			}
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusServiceUnavailable)
			fmt.Fprint(w, `{"error":{"message":"the engine is paused"}}`)
		})
	}
	gone := discovery.Backend{Pod: "gone", Address: "127.0.0.1:1"}
	for name, tc := range map[string]struct {
		pods  []discovery.Backend
		wait  time.Duration
		after string
	}{
		"with a hint":                {[]discovery.Backend{refuses("17")}, 50 * time.Millisecond, "17"},
		"without a hint":             {[]discovery.Backend{refuses("")}, 50 * time.Millisecond, "1"},
		"of several":                 {[]discovery.Backend{refuses("17"), refuses("17")}, 50 * time.Millisecond, "17"},
		"next to an unreachable pod": {[]discovery.Backend{refuses("17"), gone}, 50 * time.Millisecond, "17"},
		"long before the wait ends":  {[]discovery.Backend{refuses("17")}, time.Hour, "17"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(tc.pods...)
			url, _ := proxyServer(t, pool, ProxyOptions{MaxBodyBytes: 1 << 10, EndpointWait: tc.wait})
			response, text := post(t, url+"/v1/completions", `{"prompt":"x"}`)
			if response.StatusCode != http.StatusServiceUnavailable || text != `{"error":{"message":"the engine is paused"}}` || response.Header.Get("Retry-After") != tc.after || response.Header.Get(HeaderPod) == "" {
				t.Errorf("%s, %v: %s", response.Status, response.Header, text)
			}
			if left := outstanding(pool); left != 0 {
				t.Errorf("%d tokens are outstanding", left)
			}
		})
	}
}
