// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bufio"
	"io"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/router/breaker"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/picker/gatewaytest"
)

// TestBackoffForLoadingPods checks that a request that waits for loading pods retries with increasing pauses, and is
// served when the pods have loaded.
func TestBackoffForLoadingPods(t *testing.T) {
	var calls, until atomic.Int32
	engine := newEngine(t, "a", 2, func(w http.ResponseWriter, _ *http.Request) {
		if calls.Add(1) <= until.Load() {
			http.Error(w, "the engine is shutting down", http.StatusServiceUnavailable)
		}
	})
	router, _ := limitedRouter(t, ProxyOptions{EndpointWait: 1400 * time.Millisecond}, engine)
	until.Store(1000)
	if response, _ := post(t, router.URL+"/v1/completions", `{}`); response.StatusCode != http.StatusServiceUnavailable || calls.Load() > 4 {
		t.Errorf("%s after %d attempts, want 503 after 4", response.Status, calls.Load())
	}
	calls.Store(0)
	until.Store(3)
	if response, _ := post(t, router.URL+"/v1/completions", `{}`); response.StatusCode != http.StatusOK {
		t.Errorf("%s after %d attempts, want the answer of the fourth", response.Status, calls.Load())
	}
}

// TestFullQueues checks that a pod with a full queue gets a request once. Other pods take the request if possible;
// otherwise the client gets an error immediately.
func TestFullQueues(t *testing.T) {
	var calls atomic.Int32
	says := func(name string, code int, text string) discovery.Backend {
		pod := newEngine(t, name, 0, func(w http.ResponseWriter, _ *http.Request) {
			calls.Add(1)
			http.Error(w, text, code)
		})
		pod.Revision = "r"
		return pod
	}
	full := func(name string) discovery.Backend {
		return says(name, http.StatusServiceUnavailable, `{"detail":"The request queue is full."}`)
	}
	ranks := func(pod discovery.Backend) discovery.Backend { pod.Ranks = 4; return pod }
	served, once := lar.Service{Requests: 1}, lar.Service{Requests: 1, Failures: 1}
	for name, tc := range map[string]struct {
		pods  []discovery.Backend
		code  int
		most  int32 // attempts
		total []lar.Service
	}{
		"one":         {[]discovery.Backend{full("a")}, 429, 1, []lar.Service{once}},
		"all":         {[]discovery.Backend{full("a"), full("b"), full("c")}, 429, 3, []lar.Service{once}},
		"one loads":   {[]discovery.Backend{full("a"), says("b", 503, "loading")}, 429, 2, []lar.Service{once}},
		"one is gone": {[]discovery.Backend{full("a"), {Pod: "b", Address: "127.0.0.1:1", Revision: "r"}}, 429, 1, []lar.Service{once}},
		"one rank":    {[]discovery.Backend{ranks(full("a"))}, 429, 2, []lar.Service{once}},
		"one serves":  {[]discovery.Backend{full("a"), says("b", 200, "{}")}, 200, 2, []lar.Service{served, {Requests: 2, Failures: 1}}},
	} {
		t.Run(name, func(t *testing.T) {
			calls.Store(0)
			pool := newPool(tc.pods...)
			url, observations := proxyServer(t, pool, ProxyOptions{MaxBodyBytes: 1 << 10, RankHeader: "X-Rank", EndpointWait: time.Minute})
			response, body := post(t, url+"/v1/completions", `{"prompt":"x"}`)
			if response.StatusCode != tc.code || calls.Load() > tc.most {
				t.Errorf("%s after %d attempts: %s; want status %d after at most %d", response.Status, calls.Load(), body, tc.code, tc.most)
			}
			if tc.code == 429 && (response.Header.Get("Retry-After") == "" || !strings.Contains(body, "queues of the serving pods are full")) {
				t.Errorf("Retry-After %q: %s", response.Header.Get("Retry-After"), body)
			}
			eventually(t, "no token is outstanding", func() bool { return outstanding(pool) == 0 })
			got := servedBy(t, observations)["r"]
			if got.Answer = (lar.Moments{}); !slices.Contains(tc.total, got) {
				t.Errorf("counted as %+v, want one of %+v", got, tc.total)
			}
		})
	}
}

// TestReleasesBodyWhenResponseBegins checks that a body is kept only until its response begins, because responses take
// much longer than requests.
func TestReleasesBodyWhenResponseBegins(t *testing.T) {
	const size = 32 << 20
	next := make(chan struct{})
	defer close(next)
	engine := newEngine(t, "a", 0, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body) //nolint:errcheck // the test checks the outcome
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: 1\n\n") //nolint:errcheck // the test checks the outcome
		w.(http.Flusher).Flush()
		<-next
	})
	for _, percent := range []int{0, 100} { // unchanged, and with requested routed experts
		router, _ := routerFor(t, adapterOf(t, "SGLang"), percent, engine)
		heap := func() int64 {
			var memory runtime.MemStats
			runtime.GC()
			runtime.GC() // a sync.Pool keeps its items for one more collection
			runtime.ReadMemStats(&memory)
			return int64(memory.HeapAlloc)
		}
		before := heap()
		body := io.MultiReader(strings.NewReader(`{"stream":true,"prompt":"`), io.LimitReader(letters{}, size), strings.NewReader(`"}`))
		response, err := http.Post(router+"/v1/completions", "application/json", body)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		if _, err := bufio.NewReader(response.Body).ReadString('\n'); err != nil || response.StatusCode != http.StatusOK {
			t.Fatalf("%s, %v", response.Status, err)
		}
		if kept := heap() - before; kept > size/4 {
			t.Errorf("%d%% sampled: %d bytes are kept for a body of %d while its answer streams", percent, kept, size)
		}
	}
}

// letters is an endless text.
type letters struct{}

func (letters) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'a'
	}
	return len(p), nil
}

// TestFailingPodAttractsNoRequests checks that a pod that fails every request immediately, and therefore has no load
// and caches nothing, does not attract the requests of other pods.
func TestFailingPodAttractsNoRequests(t *testing.T) {
	gatewaytest.NoLeaks(t)
	const requests = 40
	const body = `{"prompt":"too short to be cached"}`
	serves := func(name string, code int) discovery.Backend {
		return newEngine(t, name, 1, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) })
	}
	pods := []discovery.Backend{serves("fails", http.StatusInternalServerError), serves("serves", http.StatusOK)}
	for way, send := range map[string]func(*Pool) func() bool{
		"by the proxy": func(pool *Pool) func() bool {
			url, _ := proxyServer(t, pool, ProxyOptions{RankHeader: rankHeader, MaxBodyBytes: 1 << 20, EndpointWait: time.Second})
			return func() bool {
				response, _ := post(t, url+"/v1/completions", body)
				return response.StatusCode == http.StatusInternalServerError
			}
		},
		"by a gateway that reports the serving endpoint": func(pool *Pool) func() bool {
			return sendByGateway(t, pool, pods[0].Address, body, func(endpoint string) string { return endpoint })
		},
		"by a gateway that does not": func(pool *Pool) func() bool {
			return sendByGateway(t, pool, pods[0].Address, body, func(string) string { return "" })
		},
	} {
		t.Run(way, func(t *testing.T) {
			pool := newPool(pods...)
			now := time.Now()
			pool.now = func() time.Time { return now }
			fails, failed := send(pool), 0
			for range requests {
				if fails() {
					failed++
				}
			}
			if most := breaker.Default().ConsecutiveFailures; failed > most {
				t.Errorf("%d of %d requests failed, want %d at most", failed, requests, most)
			}
			// A failing pod gets the requests if it is the only one.
			pool.Set(pods[:1])
			if !fails() {
				t.Error("the only pod gets no request")
			}
		})
	}
}

// sendByGateway returns a function that sends a request through a gateway and reports whether it failed. Requests to
// the failing endpoint fail.
func sendByGateway(t *testing.T, pool *Pool, failing, body string, served func(endpoint string) string) func() bool {
	t.Helper()
	gateway, _, _ := newPicker(t, pool, ProxyOptions{RankHeader: rankHeader})
	return func() bool {
		s, endpoints, _ := begin(t, gateway, body, nil, nil)
		code := http.StatusOK
		if endpoints[0] == failing {
			code = http.StatusInternalServerError
		}
		s.ResponseHeaders(code, nil, true, served(endpoints[0]))
		s.Answered()
		s.End() //nolint:errcheck // the next request shows the result
		return code != http.StatusOK
	}
}

// TestFailedRequestIsNotCached checks that a pod is not recorded as caching a request that it has failed to serve in
// any way.
func TestFailedRequestIsNotCached(t *testing.T) {
	text := strings.Repeat("0123456789abcdef", 640)
	for name, tc := range map[string]struct {
		handler http.HandlerFunc
		want    int
	}{
		"serves": {func(http.ResponseWriter, *http.Request) {}, 40},
		"fails":  {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) }, 0},
		"loads":  {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }, 0},
		"breaks": {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, 0},
	} {
		pool := newPool(newEngine(t, "a", 1, tc.handler))
		url, _ := proxyServer(t, pool, ProxyOptions{RankHeader: rankHeader, MaxBodyBytes: 1 << 20, EndpointWait: time.Millisecond})
		post(t, url+"/v1/completions", `{"prompt":"`+text+`"}`)
		if got := cachedBlocks(pool, 0, text); got != tc.want {
			t.Errorf("%s: %d blocks are thought to be cached, want %d", name, got, tc.want)
		}
	}
}
