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

	"github.com/semmoe/operator/internal/lar"
	"github.com/semmoe/operator/internal/router/discovery"
)

// A request that waits for pods that load asks them ever more seldom, and finds them when they have loaded.
func TestAsksLoadingPodsSeldom(t *testing.T) {
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

// A pod whose queue is full is asked once. Where others can take the request they get it; else the client is told at once.
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

// A body is kept until its answer begins, and no longer: answers take much longer than requests.
func TestKeepsNoBodyOfAnAnsweredRequest(t *testing.T) {
	const size = 32 << 20
	next := make(chan struct{})
	defer close(next)
	engine := newEngine(t, "a", 0, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body) //nolint:errcheck // the test sees what comes of it
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: 1\n\n") //nolint:errcheck // as above
		w.(http.Flusher).Flush()
		<-next
	})
	for _, percent := range []int{0, 100} { // as it is, and asked for routed experts
		router, _ := routerFor(t, adapterOf(t, "SGLang"), percent, engine)
		heap := func() int64 {
			var memory runtime.MemStats
			runtime.GC()
			runtime.GC() // pools keep theirs for one
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

// letters is a text without an end.
type letters struct{}

func (letters) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'a'
	}
	return len(p), nil
}
