// SPDX-License-Identifier: Apache-2.0

package router

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/refengine"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/picker/gatewaytest"
	"github.com/semmoe/operator/internal/router/plans/planstest"
	"github.com/semmoe/operator/test/tier"
)

// checkedPool returns a pool that checks its backends until the test ends. It returns when no backend is on hold.
func checkedPool(t *testing.T, backends ...discovery.Backend) *Pool {
	t.Helper()
	pool, checker := runningCheck(t, time.Now)
	pool.Set(backends)
	checker.settle(t.Context())
	return pool
}

func runningCheck(t *testing.T, now func() time.Time) (*Pool, *pinChecker) {
	t.Helper()
	pool := NewPool()
	pool.now = now
	checker := checkPins(pool, ProxyOptions{RankHeader: "X-Other-Engine"}, logr.Discard())
	var running sync.WaitGroup
	running.Go(func() { checker.run(t.Context()) }) //nolint:errcheck // always returns nil
	t.Cleanup(running.Wait)
	return pool, checker
}

// requestBodies contains a request for each route of the reference engine.
var requestBodies = map[string]string{
	"/v1/completions":      `{"prompt":"text %d","max_tokens":2}`,
	"/v1/chat/completions": `{"messages":[{"role":"user","content":"text %d"}],"max_tokens":2}`,
	"/generate":            `{"text":"text %d","sampling_params":{"max_new_tokens":2}}`,
	"/v1/messages":         `{"model":"tiny","messages":[{"role":"user","content":"text %d"}],"max_tokens":2}`,
}

// TestReportsOnlyServingRanks uses an engine that ignores the rank on one route or on none. With the proxy and with a
// gateway, X-Semmoe-Rank is the rank in the engine's own counters, or absent on the route that ignores it. The LAR of
// all other routes equals the engine's, and load on the route counts for no rank.
func TestReportsOnlyServingRanks(t *testing.T) {
	gatewaytest.NoLeaks(t)
	for _, deaf := range append(slices.Sorted(maps.Keys(requestBodies)), "") {
		t.Run("ignored on "+deaf, func(t *testing.T) {
			address := startReferenceEngineWith(t, func(o *refengine.Options) {
				if deaf != "" {
					o.Fault = refengine.FaultIgnoreRank + deaf
				}
			})
			adapter := adapterOf(t, "SGLang")
			options := ProxyOptions{RoutedExperts: adapter.RoutedExperts, SamplePercent: 100, MaxBodyBytes: 1 << 20, EndpointWait: time.Second}
			backend := discovery.Backend{Pod: "p", Address: address, Ranks: 4, Revision: "r", Shape: &planstest.Shape, Engine: "SGLang"}
			proxied, picked := checkedPool(t, backend), checkedPool(t, backend)
			registry := prometheus.NewRegistry()
			url, observed := proxyServerOn(t, registry, proxied, options)
			gateway, observedByPicker, _ := newPicker(t, picked, options)
			var exact lar.Activations
			requests, ranks := 0, map[string]bool{}
			for i := range tier.Choose(4, 12, 12) {
				for route, format := range requestBodies {
					for _, front := range []string{"proxy", "gateway"} {
						before := engineRanks(t, address)
						var header http.Header
						if body := fmt.Sprintf(format, i); front == "proxy" {
							response, text := post(t, url+route, body)
							if header = response.Header; response.StatusCode != http.StatusOK {
								t.Fatalf("%s: %s: %s", route, response.Status, text)
							}
						} else {
							header, _ = throughGateway(t, gateway, route, body, 1<<16)
						}
						served, count := rankBetween(t, before, engineRanks(t, address))
						want := served
						if route == deaf {
							want = ""
						}
						if got := header.Get(HeaderRank); got != want {
							t.Errorf("%s by the %s: rank %q is reported, %s has served", route, front, got, served)
						}
						if route != deaf {
							ranks[served] = true
						}
						if route != deaf && engine.APIOf(route).ReportsExperts {
							requests++
							exact.Local += count.Local
							exact.Total += count.Total
						}
					}
				}
			}
			if len(ranks) != 4 {
				t.Errorf("requests went to ranks %v only", ranks)
			}
			eventually(t, "all requests with a known rank are observed", func() bool { return len(observed.recent())+len(observedByPicker.recent()) == requests })
			var got lar.Activations
			for _, o := range append(observed.recent(), observedByPicker.recent()...) {
				got.Local += o.Local
				got.Total += o.Total
			}
			if got != exact {
				t.Errorf("the routers observe %+v, the engine computed %+v", got, exact)
			}
			if failures := testutil.ToFloat64(observed.failures) + testutil.ToFloat64(observedByPicker.failures); failures != 0 {
				t.Errorf("%v samples failed", failures)
			}
			tokens, err := testutil.GatherAndCount(registry, "semmoe_router_estimated_tokens_total")
			if want := 4; err != nil || deaf == "" && tokens != want || deaf != "" && tokens != want+1 {
				t.Errorf("loads of %d ranks are counted, %v", tokens, err)
			}
			var want []lar.IgnoredRank
			if deaf != "" {
				want = []lar.IgnoredRank{{Revision: "r", Route: deaf, Pods: 1}}
			}
			if diff := cmp.Diff(want, observed.report().IgnoredRanks); diff != "" {
				t.Errorf("ignored ranks (-want +got):\n%s", diff)
			}
			for _, pool := range []*Pool{proxied, picked} {
				if left := outstanding(pool); left != 0 {
					t.Errorf("%d tokens are outstanding", left)
				}
			}
		})
	}
}

// rankBetween returns the rank that has computed something between two readings, and its count.
func rankBetween(t *testing.T, before, after map[string]lar.Activations) (served string, count lar.Activations) {
	t.Helper()
	for rank, now := range after {
		if now != before[rank] {
			if served != "" {
				t.Fatalf("ranks %s and %s have served one request", served, rank)
			}
			served, count = rank, lar.Activations{Local: now.Local - before[rank].Local, Total: now.Total - before[rank].Total}
		}
	}
	if served == "" {
		t.Fatal("no rank has served a request")
	}
	return served, count
}

// double is an engine with four ranks that answers like SGLang's native route.
type double struct {
	// refuses lists the routes on which a rank out of range is rejected.
	refuses []string
	// serve returns the rank that serves a request for rank asked. If it is nil, the engine reports no rank.
	serve func(asked int) int
	mu    sync.Mutex
	// ranks and bodies are the rank headers and the bodies of the received requests.
	ranks, bodies []string
}

func (d *double) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	d.mu.Lock()
	d.ranks, d.bodies = append(d.ranks, r.Header.Get(rankHeader)), append(d.bodies, string(body))
	d.mu.Unlock()
	asked, err := strconv.Atoi(r.Header.Get(rankHeader))
	if r.URL.Path == "/generate" { // this route does not read the header
		asked, err = 0, nil
		if _, after, found := strings.Cut(string(body), `"routed_dp_rank":`); found {
			_, err = fmt.Sscanf(after, "%d", &asked)
		}
	}
	switch {
	case err != nil || asked >= 4 && slices.Contains(d.refuses, r.URL.Path):
		http.Error(w, fmt.Sprintf(`{"error":{"message":"routed_dp_rank=%d out of range [0, 4)"}}`, asked), http.StatusBadRequest)
	case d.serve == nil:
		fmt.Fprint(w, `{"choices":[{"text":"x"}],"usage":{"prompt_tokens":1,"completion_tokens":1},"sglext":{"routed_experts":"AAAA"}}`)
	case strings.Contains(string(body), `"stream":true`):
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, "data: {\"text\":\"\\\"dp_rank\\\":7\",\"meta_info\":{\"dp_rank\":%d,\"prompt_tokens\":1}}\n\ndata: [DONE]\n\n", d.serve(asked))
	default:
		fmt.Fprintf(w, `{"text":"\"dp_rank\":7","meta_info":{"prompt_tokens":1,"completion_tokens":1,"dp_rank" : %d,"routed_experts":"AAAA"}}`, d.serve(asked))
	}
}

// TestAnswersThatReportAnotherRank uses an engine that rejects ranks out of range but serves on another rank than
// requested. The first response that reports another rank makes the route unpinned, and counts once.
func TestAnswersThatReportAnotherRank(t *testing.T) {
	for _, body := range []string{`{"text":"x"}`, `{"text":"x","stream":true}`} {
		for _, percent := range []int{0, 100} {
			engine := &double{refuses: pinnedRoutes, serve: func(asked int) int { return (asked + 1) % 4 }}
			backend := newEngine(t, "a", 4, engine.ServeHTTP)
			backend.Engine, backend.Shape, backend.Revision = "SGLang", &planstest.Shape, "r"
			pool := checkedPool(t, backend)
			registry := prometheus.NewRegistry()
			url, observed := proxyServerOn(t, registry, pool, ProxyOptions{RoutedExperts: adapterOf(t, "SGLang").RoutedExperts, SamplePercent: percent, MaxBodyBytes: 1 << 20, EndpointWait: time.Second})
			post(t, url+"/generate", body)
			for range 3 {
				if response, _ := post(t, url+"/generate", body); response.Header.Get(HeaderRank) != "" {
					t.Errorf("%s: rank %s is reported", body, response.Header.Get(HeaderRank))
				}
			}
			if last := engine.bodies[len(engine.bodies)-1]; strings.Contains(last, "rank") {
				t.Errorf("the engine is still asked for a rank: %s", last)
			}
			want := "# HELP semmoe_router_rank_mismatches_total Responses that report another rank than the one the request was sent to, by route.\n" +
				"# TYPE semmoe_router_rank_mismatches_total counter\n"
			for _, route := range pinnedRoutes {
				count := 0
				if route == "/generate" {
					count = 1
				}
				want += fmt.Sprintf("semmoe_router_rank_mismatches_total{route=%q} %d\n", route, count)
			}
			if err := testutil.GatherAndCompare(registry, strings.NewReader(want), "semmoe_router_rank_mismatches_total"); err != nil {
				t.Error(err)
			}
			if seen := observed.recent(); len(seen) != 0 {
				t.Errorf("%s: observed %+v", body, seen)
			}
			if diff := cmp.Diff([]lar.IgnoredRank{{Revision: "r", Route: "/generate", Pods: 1}}, observed.report().IgnoredRanks); diff != "" {
				t.Errorf("ignored ranks (-want +got):\n%s", diff)
			}
			var service lar.Service
			for _, bucket := range observed.report().Service {
				service.Merge(bucket.Revisions["r"])
			}
			if service.Requests != 4 || service.Answer.N+service.FirstToken.N != 0 {
				t.Errorf("the times of requests on unknown ranks count: %+v", service)
			}
		}
	}
	// Generated text is not a report.
	engine := &double{refuses: pinnedRoutes, serve: func(asked int) int { return asked }}
	backend := newEngine(t, "a", 4, engine.ServeHTTP)
	backend.Engine = "SGLang"
	url, _ := proxyServer(t, checkedPool(t, backend), ProxyOptions{MaxBodyBytes: 1 << 20, EndpointWait: time.Second})
	for range 3 {
		if response, _ := post(t, url+"/generate", `{"text":"x"}`); response.Header.Get(HeaderRank) == "" {
			t.Error("an answer with the right rank ends the trust in the route")
		}
	}
}

// TestRouteThatSomeReleasesPin uses releases before and after they read the rank of a response. A release that ignores
// it is balanced by load, as its table says, and reported as no error.
func TestRouteThatSomeReleasesPin(t *testing.T) {
	for dialect, test := range map[string]struct {
		engine string
		pin    pin
	}{
		"sglang-0.5.17": {"SGLang", pinByLoad}, "sglang-0.5.23": {"SGLang", pinObeyed},
		"vllm-0.32.0": {"VLLM", pinByLoad}, "vllm-0.33.0": {"VLLM", pinObeyed},
	} {
		t.Run(dialect, func(t *testing.T) {
			address := startReferenceEngineWith(t, func(o *refengine.Options) { o.Dialect, o.EnableMetrics = dialect, true })
			backend := discovery.Backend{Pod: "p", Address: address, Ranks: 4, Revision: "r", Shape: &planstest.Shape, Engine: test.engine}
			pool := checkedPool(t, backend)
			registry := prometheus.NewRegistry()
			url, observed := proxyServerOn(t, registry, pool, ProxyOptions{MaxBodyBytes: 1 << 20, EndpointWait: time.Second})
			ranks := map[string]bool{}
			for i := range 8 {
				before := engineRanks(t, address)
				response, text := post(t, url+"/v1/responses", fmt.Sprintf(`{"model":"tiny","input":"text %d","max_output_tokens":2}`, i))
				if response.StatusCode != http.StatusOK {
					t.Fatalf("%s: %s", response.Status, text)
				}
				want := ""
				if test.pin == pinObeyed {
					want, _ = rankBetween(t, before, engineRanks(t, address))
				}
				if got := response.Header.Get(HeaderRank); got != want {
					t.Errorf("rank %q is reported, want %q", got, want)
				}
				ranks[want] = true
			}
			if len(ranks) != map[pin]int{pinObeyed: 4, pinByLoad: 1}[test.pin] {
				t.Errorf("requests went to ranks %v", ranks)
			}
			if got := pool.countPins()[pinCount{"r", "/v1/responses", test.pin}]; got != 1 {
				t.Errorf("%d pods are %s: %v", got, test.pin, pool.countPins())
			}
			if ignored := observed.report().IgnoredRanks; len(ignored) != 0 {
				t.Errorf("ignored ranks are reported: %v", ignored)
			}
		})
	}
}

// TestEngineThatRejectsNoRank uses an engine that rejects no rank: it may read no rank, or not validate it. Requests
// are pinned, but no rank is reported or observed. It gets no rank out of range in a body, because old releases exit on
// such a rank.
func TestEngineThatRejectsNoRank(t *testing.T) {
	engine := &double{}
	backend := newEngine(t, "a", 4, engine.ServeHTTP)
	backend.Engine, backend.Revision, backend.Shape = "SGLang", "r", &planstest.Shape
	pool := checkedPool(t, backend)
	engine.mu.Lock()
	for _, body := range engine.bodies {
		if strings.Contains(body, "rank") {
			t.Errorf("a check sends a rank in a body: %s", body)
		}
	}
	engine.mu.Unlock()
	registry := prometheus.NewRegistry()
	url, observed := proxyServerOn(t, registry, pool, ProxyOptions{RoutedExperts: adapterOf(t, "SGLang").RoutedExperts, SamplePercent: 100, MaxBodyBytes: 1 << 20, EndpointWait: time.Second})
	for range 3 {
		if response, _ := post(t, url+"/v1/completions", `{"prompt":"x"}`); response.Header.Get(HeaderRank) != "" {
			t.Errorf("rank %s is reported", response.Header.Get(HeaderRank))
		}
	}
	if last := engine.ranks[len(engine.ranks)-1]; last == "" {
		t.Error("the engine is not asked for a rank")
	}
	if failed := testutil.ToFloat64(observed.failures); failed != 3 || len(observed.recent()) != 0 {
		t.Errorf("observed %+v, %v failed", observed.recent(), failed)
	}
	want := []lar.IgnoredRank{{Revision: "r", Route: "/invocations", Pods: 1}, {Revision: "r", Route: "/v1/chat/completions", Pods: 1}, {Revision: "r", Route: "/v1/completions", Pods: 1}, {Revision: "r", Route: "/v1/messages", Pods: 1}}
	if diff := cmp.Diff(want, observed.report().IgnoredRanks); diff != "" {
		t.Errorf("ignored ranks (-want +got):\n%s", diff)
	}
}

// TestNewBackendsAreCheckedFirst checks that a new backend gets no request until its check ends or takes too long.
func TestNewBackendsAreCheckedFirst(t *testing.T) {
	release := make(chan struct{})
	engine := &double{refuses: pinnedRoutes, serve: func(asked int) int { return asked }}
	backend := newEngine(t, "a", 4, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get(rankHeader) == strconv.Itoa(noSuchRank) {
			<-release
		}
		engine.ServeHTTP(w, r)
	})
	backend.Engine = "SGLang"
	now := time.Now()
	var mu sync.Mutex
	pool, checker := runningCheck(t, func() time.Time { mu.Lock(); defer mu.Unlock(); return now })
	url, _ := proxyServer(t, pool, ProxyOptions{MaxBodyBytes: 1 << 20, EndpointWait: 10 * time.Second})
	pool.Set([]discovery.Backend{backend})
	if held, _ := pool.pinsOnHold(); !held {
		t.Fatal("the backend is not on hold")
	}
	answered := make(chan string)
	go func() {
		response, _ := post(t, url+"/v1/completions", `{"prompt":"x"}`)
		answered <- response.Header.Get(HeaderRank)
	}()
	close(release)
	if rank := <-answered; rank == "" {
		t.Error("the first answer has no rank")
	}
	checker.settle(t.Context())

	// The check of the next backend does not end in time.
	hung := make(chan struct{})
	slow := newEngine(t, "b", 4, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get(rankHeader) == strconv.Itoa(noSuchRank) {
			<-hung
		}
		fmt.Fprint(w, "{}")
	})
	defer close(hung)
	slow.Engine = "SGLang"
	pool.Set([]discovery.Backend{slow})
	mu.Lock()
	now = now.Add(pinHold)
	mu.Unlock()
	if response, _ := post(t, url+"/v1/completions", `{"prompt":"x"}`); response.StatusCode != http.StatusOK || response.Header.Get(HeaderRank) != "" {
		t.Errorf("%s, rank %q", response.Status, response.Header.Get(HeaderRank))
	}
}

// TestUnpinnedLoadIsSpread checks that the load of a request to an unpinned rank is spread over the ranks of
// its pod, and is removed completely.
func TestUnpinnedLoadIsSpread(t *testing.T) {
	pool := newPool(discovery.Backend{Pod: "a", Address: "a:1", Ranks: 4}, discovery.Backend{Pod: "b", Address: "b:1", Ranks: 4})
	for _, g := range pool.groups {
		for _, b := range g.backends {
			if b.Pod == "a" {
				b.pins["/generate"] = pinIgnored
			}
		}
	}
	var leases []*Lease
	spread := 0
	for range 8 {
		r := requestOf("/generate", "r", []byte(`{"text":"x","sampling_params":{"max_new_tokens":399}}`))
		lease, ok := pool.acquire(r, nil)
		if !ok {
			t.Fatal("no place")
		}
		if lease.spread != (lease.Backend.Pod == "a") || lease.spread != (lease.Rank == discovery.NoRank) {
			t.Errorf("pod %s, rank %d, spread %v", lease.Backend.Pod, lease.Rank, lease.spread)
		}
		if lease.spread {
			spread++
		}
		leases = append(leases, lease)
	}
	if spread == 0 || spread == len(leases) {
		t.Errorf("%d of %d requests went to the pod that ignores ranks", spread, len(leases))
	}
	for _, b := range pool.groups[0].backends {
		if b.Pod == "a" && slices.Max(b.outstanding) != slices.Min(b.outstanding) {
			t.Errorf("loads of the ranks of pod a: %v", b.outstanding)
		}
	}
	for _, lease := range leases {
		lease.Release()
	}
	if left := outstanding(pool); left != 0 {
		t.Errorf("%d tokens are outstanding", left)
	}
}

// TestMissingRoutesAreNotChecked checks that a pod with an engine that lacks a route is not checked again because of
// it, and is not counted for it.
func TestMissingRoutesAreNotChecked(t *testing.T) {
	engine := &double{refuses: pinnedRoutes, serve: func(asked int) int { return asked }}
	var asked sync.Map
	backend := newEngine(t, "a", 4, func(w http.ResponseWriter, r *http.Request) {
		asked.Store(r.URL.Path, true)
		if r.URL.Path == "/v1/models" {
			fmt.Fprint(w, `{"data":[{"id":"a \"model\""}]}`)
			return
		}
		engine.ServeHTTP(w, r)
	})
	backend.Engine = "VLLM"
	pool := checkedPool(t, backend)
	if _, found := asked.Load("/generate"); found {
		t.Error("vLLM is asked for /generate")
	}
	if due, _, _ := pool.duePinChecks(); len(due) != 0 || pool.isUnchecked(pool.groups[0].backends[0]) {
		t.Errorf("%d checks are due", len(due))
	}
	for at, pods := range pool.countPins() {
		if at.pin != pinObeyed || pods != 1 || at.route == "/generate" {
			t.Errorf("%+v: %d pods", at, pods)
		}
	}
	engine.mu.Lock()
	defer engine.mu.Unlock()
	if !slices.ContainsFunc(engine.bodies, func(body string) bool { return strings.HasPrefix(body, `{"model":"a \"model\"","messages":`) }) {
		t.Errorf("no check names the model: %q", engine.bodies)
	}
}

// TestPinsOfAnEngineThatClosesConnections checks vLLM 0.22.1, which rejects a rank on /v1/chat/completions and closes
// the connection without announcement. The other routes are still checked.
func TestPinsOfAnEngineThatClosesConnections(t *testing.T) {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text := fmt.Sprintf("data_parallel_rank %d is out of range", noSuchRank)
		if r.URL.Path != "/v1/chat/completions" {
			http.Error(w, text, http.StatusBadRequest)
			return
		}
		io.Copy(io.Discard, r.Body) //nolint:errcheck // the body is in memory
		connection, buffered, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer connection.Close()
		fmt.Fprintf(buffered, "HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%s", len(text), text)
		if err := buffered.Flush(); err != nil {
			t.Error(err)
		}
		buffered.ReadByte() //nolint:errcheck // the next request on the connection, or its end
	}))
	t.Cleanup(engine.Close)
	checker := pinChecker{transport: newTransport(EngineConnections{}), log: logr.Discard()}
	backend := discovery.Backend{Pod: "p", Address: strings.TrimPrefix(engine.URL, "http://"), Ranks: 2, Engine: "VLLM"}
	found := checker.check(t.Context(), backend, nil)
	for _, route := range []string{"/v1/chat/completions", "/v1/completions"} {
		if found[route] != pinObeyed {
			t.Errorf("%s: %v, want %v", route, found[route], pinObeyed)
		}
	}
}

// TestRepeatedChecksAskOnlyOpenRoutes checks that a repeated check leaves out the routes with a known result: a route that
// ignores the rank generates a token for each check.
func TestRepeatedChecksAskOnlyOpenRoutes(t *testing.T) {
	var mu sync.Mutex
	asked := map[string]int{}
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		asked[r.URL.Path]++
		mu.Unlock()
		switch r.URL.Path {
		case "/v1/completions":
			http.Error(w, fmt.Sprintf("data_parallel_rank %d is out of range", noSuchRank), http.StatusBadRequest)
		case "/v1/chat/completions":
			fmt.Fprint(w, "{}")
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(engine.Close)
	checker := pinChecker{transport: newTransport(EngineConnections{}), log: logr.Discard()}
	backend := discovery.Backend{Pod: "p", Address: strings.TrimPrefix(engine.URL, "http://"), Ranks: 2, Engine: "VLLM"}
	found := checker.check(t.Context(), backend, nil)
	if found["/v1/completions"] != pinObeyed || found["/v1/chat/completions"] != pinIgnored {
		t.Errorf("found %v", found)
	}
	checker.check(t.Context(), backend, found)
	mu.Lock()
	defer mu.Unlock()
	for route, want := range map[string]int{"/v1/completions": 1, "/v1/chat/completions": 1, "/invocations": 2} {
		if asked[route] != want {
			t.Errorf("%s was asked %d times, want %d", route, asked[route], want)
		}
	}
}
