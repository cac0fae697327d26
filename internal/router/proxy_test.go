// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/wire"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/test/load"
)

const rankHeader = "X-Data-Parallel-Rank"

// newRouter serves a router over the given backends.
func newRouter(t *testing.T, wait time.Duration, backends ...discovery.Backend) (*httptest.Server, *Pool, *prometheus.Registry) {
	t.Helper()
	pool := NewPool()
	server, registry := routerOn(t, pool, wait, backends...)
	return server, pool, registry
}

// routerOn serves a router with the given pool.
func routerOn(t *testing.T, pool *Pool, wait time.Duration, backends ...discovery.Backend) (*httptest.Server, *prometheus.Registry) {
	t.Helper()
	pool.Set(backends)
	registry := prometheus.NewRegistry()
	proxy, _ := NewProxy(pool, registry, logr.Discard(), ProxyOptions{RankHeader: rankHeader, MaxBodyBytes: 1 << 16, EndpointWait: wait})
	server := httptest.NewServer(proxy)
	t.Cleanup(server.Close)
	return server, registry
}

func newEngine(t *testing.T, name string, ranks int, handler http.HandlerFunc) discovery.Backend {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return discovery.Backend{Pod: name, Address: strings.TrimPrefix(server.URL, "http://"), Ranks: ranks}
}

func post(t *testing.T, url, body string) (*http.Response, string) {
	t.Helper()
	response, err := http.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response, string(data)
}

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	var clock load.Clock // a busy machine may take any factor longer
	for clock.Elapsed(); !holds(); time.Sleep(5 * time.Millisecond) {
		if clock.Elapsed() > 10*time.Second {
			t.Fatalf("not within 10 s of an idle machine: %s", what)
		}
	}
}

func TestPinsToRanksByOutstandingTokens(t *testing.T) {
	var mu sync.Mutex
	seen := map[string]int{}
	hold := make(chan struct{})
	engine := newEngine(t, "a", 4, func(_ http.ResponseWriter, r *http.Request) {
		mu.Lock()
		seen[r.Header.Get(rankHeader)]++
		mu.Unlock()
		<-hold
	})
	router, pool, registry := newRouter(t, time.Second, engine)
	var clients sync.WaitGroup
	for range 8 {
		clients.Go(func() {
			// The rank that the client asks for is dropped.
			request, _ := http.NewRequest(http.MethodPost, router.URL+"/v1/completions", strings.NewReader(`{"prompt":"x","max_tokens":10}`))
			request.Header.Set(rankHeader, "0")
			if response, err := http.DefaultClient.Do(request); err == nil {
				response.Body.Close()
			}
		})
	}
	eventually(t, "all eight requests run, two on each rank", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return seen["0"] == 2 && seen["1"] == 2 && seen["2"] == 2 && seen["3"] == 2
	})
	close(hold)
	clients.Wait()
	eventually(t, "no token is outstanding", func() bool { return outstanding(pool) == 0 })
	if got := testutil.CollectAndCount(registry, "semmoe_router_estimated_tokens_total"); got != 4 {
		t.Errorf("tokens are counted for %d ranks, want 4", got)
	}
}

func outstanding(p *Pool) int64 {
	total, next := loads(p)
	if total == 0 {
		return next // without outstanding tokens, next must be zero too
	}
	return total
}

// loads returns the outstanding tokens of all ranks, and the prompt tokens that the next steps compute.
func loads(p *Pool) (outstanding, next int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, g := range p.groups {
		for _, b := range g.backends {
			for rank, tokens := range b.outstanding {
				outstanding += tokens
				next += b.next[rank]
			}
		}
	}
	return outstanding, next
}

func TestTriesAnotherPodWhileNothingWasSent(t *testing.T) {
	var served, refused atomic.Int32
	draining := newEngine(t, "draining", 2, func(w http.ResponseWriter, r *http.Request) {
		refused.Add(1)
		http.Error(w, "draining", http.StatusServiceUnavailable)
	})
	hangsUp := newEngine(t, "hangs-up", 2, func(w http.ResponseWriter, r *http.Request) {
		refused.Add(1)
		panic(http.ErrAbortHandler)
	})
	good := newEngine(t, "good", 2, func(w http.ResponseWriter, r *http.Request) {
		served.Add(1)
		body, _ := io.ReadAll(r.Body)
		w.Write(body) //nolint:errcheck // the client verifies the body
	})
	gone := discovery.Backend{Pod: "gone", Address: "127.0.0.1:1", Ranks: 2}
	router, pool, _ := newRouter(t, time.Second, draining, hangsUp, gone, good)
	for i := range 50 {
		body := fmt.Sprintf(`{"prompt":"request %d"}`, i)
		response, got := post(t, router.URL+"/v1/completions", body)
		if response.StatusCode != http.StatusOK || got != body || response.Header.Get(HeaderPod) != "good" {
			t.Fatalf("request %d: status %d from pod %q, body %q", i, response.StatusCode, response.Header.Get(HeaderPod), got)
		}
	}
	if served.Load() != 50 {
		t.Errorf("the good pod served %d requests, want 50", served.Load())
	}
	if refused.Load() == 0 {
		t.Error("no bad pod was ever tried: the test shows nothing")
	}
	eventually(t, "no token is outstanding", func() bool { return outstanding(pool) == 0 })
}

func TestAResponseThatBeganIsNotRepeated(t *testing.T) {
	var calls atomic.Int32
	breaks := func(w http.ResponseWriter, r *http.Request) {
		calls.Add(1)
		fmt.Fprint(w, "data: one\n\n")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
	router, _, _ := newRouter(t, time.Second, newEngine(t, "a", 1, breaks), newEngine(t, "b", 1, breaks))
	response, err := http.Post(router.URL+"/generate", "application/json", strings.NewReader(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err == nil {
		t.Error("the client does not learn that the stream broke")
	}
	if string(data) != "data: one\n\n" || calls.Load() != 1 {
		t.Errorf("got %q after %d calls", data, calls.Load())
	}
}

func TestStreamsWithoutBuffering(t *testing.T) {
	next := make(chan struct{})
	engine := newEngine(t, "a", 1, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			fmt.Fprintf(w, "data: %d\n\n", i)
			w.(http.Flusher).Flush()
			<-next
		}
	})
	for _, percent := range []int{0, 100} { // unchanged, and searched for routed experts
		router, _ := routerFor(t, adapterOf(t, "SGLang"), percent, engine)
		response, err := http.Post(router+"/v1/chat/completions", "application/json", strings.NewReader(`{"stream":true}`))
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		reader := bufio.NewReader(response.Body)
		for i := range 3 {
			// The engine sends event i+1 only after event i has arrived here.
			line, err := reader.ReadString('\n')
			if err != nil || line != fmt.Sprintf("data: %d\n", i) {
				t.Fatalf("%d%% sampled, event %d: %q, %v", percent, i, line, err)
			}
			if _, err := reader.ReadString('\n'); err != nil {
				t.Fatal(err)
			}
			next <- struct{}{}
		}
	}
}

// TestPromptsOfTheNextStep checks that a prompt counts for the next step until a response of its pod begins or ends.
func TestPromptsOfTheNextStep(t *testing.T) {
	next := make(chan struct{})
	engine := newEngine(t, "a", 1, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		w.(http.Flusher).Flush() // engines send the header before the first token
		<-next
		io.WriteString(w, "data: 1\n\n") //nolint:errcheck // the client verifies the body
		w.(http.Flusher).Flush()
		<-next
	})
	router, pool, _ := newRouter(t, time.Second, engine)
	response, err := http.Post(router.URL+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"x","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if all, prompts := loads(pool); prompts == 0 || prompts >= all {
		t.Errorf("before the first event %d tokens of %d are the next step's", prompts, all)
	}
	next <- struct{}{}
	if _, err := bufio.NewReader(response.Body).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	if all, prompts := loads(pool); all == 0 || prompts != 0 {
		t.Errorf("after the first event %d tokens of %d are the next step's", prompts, all)
	}
	next <- struct{}{}
	eventually(t, "no token is outstanding", func() bool { return outstanding(pool) == 0 })
}

func TestClientThatLeavesCancelsTheEngine(t *testing.T) {
	started, cancelled := make(chan struct{}), make(chan struct{})
	engine := newEngine(t, "a", 1, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body) //nolint:errcheck // the server detects a disconnected client only after the body is read
		close(started)
		<-r.Context().Done()
		close(cancelled)
	})
	router, pool, registry := newRouter(t, time.Second, engine)
	ctx, cancel := context.WithCancel(t.Context())
	request, _ := http.NewRequestWithContext(ctx, http.MethodPost, router.URL+"/generate", strings.NewReader(`{}`))
	go func() {
		<-started
		cancel()
	}()
	if response, err := http.DefaultClient.Do(request); err == nil {
		response.Body.Close()
		t.Fatal("the request did not end with its context")
	}
	select {
	case <-cancelled:
	case <-time.After(10 * time.Second):
		t.Fatal("the engine goes on for a client that has gone")
	}
	eventually(t, "no token is outstanding", func() bool { return outstanding(pool) == 0 })
	eventually(t, "the request is counted as 499", func() bool {
		return testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP semmoe_router_requests_total Answered requests, by HTTP status code.
# TYPE semmoe_router_requests_total counter
semmoe_router_requests_total{code="429"} 0
semmoe_router_requests_total{code="499"} 1
semmoe_router_requests_total{code="503"} 0
`), "semmoe_router_requests_total") == nil
	})
}

func TestWaitsForAPod(t *testing.T) {
	router, pool, _ := newRouter(t, 10*time.Second)
	engine := newEngine(t, "late", 1, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "ok") })
	time.AfterFunc(50*time.Millisecond, func() { pool.Set([]discovery.Backend{engine}) })
	if response, body := post(t, router.URL+"/v1/completions", `{}`); response.StatusCode != http.StatusOK || body != "ok" {
		t.Errorf("status %d, body %q", response.StatusCode, body)
	}
}

func TestAnswersForItself(t *testing.T) {
	engine := newEngine(t, "a", 1, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "from the engine") })
	cases := map[string]struct {
		method, path, body string
		backends           []discovery.Backend
		code               int
		message            string
	}{
		"no pod":               {http.MethodPost, "/v1/completions", "{}", nil, 503, "no serving pod is ready"},
		"administrative route": {http.MethodPost, "/flush_cache", "{}", []discovery.Backend{engine}, 404, "POST /flush_cache is not a route of this service"},
		"wrong method":         {http.MethodDelete, "/v1/models", "", []discovery.Backend{engine}, 404, "DELETE /v1/models is not a route"},
		"dot segments":         {http.MethodGet, "/v1/models/..%2f..%2fflush_cache", "", []discovery.Backend{engine}, 404, "is not a route of this service"},
		"unclean path":         {http.MethodPost, "//generate", "{}", []discovery.Backend{engine}, 404, "POST //generate is not a route of this service"},
		"body too large":       {http.MethodPost, "/v1/completions", strings.Repeat("x", 1<<16+1), []discovery.Backend{engine}, 413, "at most 65536 bytes"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			router, _, _ := newRouter(t, 50*time.Millisecond, tc.backends...)
			request, _ := http.NewRequest(tc.method, router.URL+tc.path, strings.NewReader(tc.body))
			response, err := http.DefaultClient.Do(request)
			if err != nil {
				t.Fatal(err)
			}
			defer response.Body.Close()
			var answer struct{ Error struct{ Message string } }
			if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
				t.Fatal(err)
			}
			if response.StatusCode != tc.code || !strings.Contains(answer.Error.Message, tc.message) {
				t.Errorf("status %d, message %q; want %d and %q", response.StatusCode, answer.Error.Message, tc.code, tc.message)
			}
			if tc.code == 503 && response.Header.Get("Retry-After") == "" {
				t.Error("503 without Retry-After")
			}
		})
	}
}

func TestEstimateTokens(t *testing.T) {
	cases := map[string]struct {
		body string
		want int64
	}{
		"completion":  {`{"max_tokens":7}`, 16/4 + 7 + 1},
		"chat":        {`{"max_completion_tokens":7}`, 27/4 + 7 + 1},
		"response":    {`{"max_output_tokens":7}`, 23/4 + 7 + 1},
		"native":      {`{"sampling_params":{"max_new_tokens":7}}`, 40/4 + 7 + 1},
		"no limit":    {`{}`, 0 + 256 + 1},
		"not JSON":    {`12345678`, 2 + 256 + 1},
		"wrong types": {`{"max_tokens":"7"}`, 18/4 + 256 + 1},
		"negative":    {`{"max_tokens":-7}`, 17/4 + 256 + 1},
		"huge":        {`{"max_tokens":9000000000}`, 25/4 + 1<<20 + 1},
		"empty":       {``, 256 + 1},
		"answers":     {`{"n":3,"max_tokens":7}`, 22/4 + 3*7 + 1},
		"no answers":  {`{"n":0,"max_tokens":7}`, 22/4 + 7 + 1},
		"n of floats": {`{"n":2.5,"max_tokens":7}`, 24/4 + 7 + 1},
		"many":        {`{"n":9000000000,"max_tokens":9000000000}`, 40/4 + 1<<20 + 1},
		"prompts":     {`{"prompt":[ "a","b"],"n":2,"max_tokens":7}`, 42/4 + 4*7 + 1},
		"id lists":    {`{"prompt":[[1],[2],[3]],"max_tokens":7}`, 39/4 + 3*7 + 1},
		"ids":         {`{"prompt":[1,2,3],"max_tokens":7}`, 33/4 + 7 + 1},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if got := requestOf("/v1/completions", "", []byte(tc.body)).tokens; got != tc.want {
				t.Errorf("%d tokens, want %d", got, tc.want)
			}
		})
	}
}

// TestLoadOfImages checks that an image counts with a fixed number of tokens, regardless of its size in bytes, with and
// without text.
func TestLoadOfImages(t *testing.T) {
	const text = `{"messages":[{"content":[{"type":"text","text":"what is this"}%s]}],"max_tokens":0}`
	image := `,{"type":"image_url","image_url":{"url":"data:image/png;base64,` + strings.Repeat("A", 3<<20) + `"}}`
	p, _ := solved(t)
	load := func(parts string) (estimated, scored int64) {
		r := requestOf("/v1/chat/completions", "", fmt.Appendf(nil, text, parts))
		if r.score(p.layout); r.forecast.scores == nil {
			t.Fatalf("the text is not scored: %s", r.forecast.unscored)
		}
		return r.tokens, r.forecast.tokens
	}
	bare, bareScored := load("")
	for images := range 3 {
		estimated, scored := load(strings.Repeat(image, images))
		if want := int64(images) * wire.MediaTokens; estimated != bare+want || scored != bareScored+want {
			t.Errorf("%d images: a load of %d, scored %d; want %d, %d", images, estimated, scored, bare+want, bareScored+want)
		}
	}
}

// TestLoadOfTools checks that tools count as load: definitions by their length, calls by their tokens.
func TestLoadOfTools(t *testing.T) {
	p, _ := solved(t)
	load := func(body string) int64 {
		r := requestOf("/v1/chat/completions", "", []byte(body))
		if r.score(p.layout); r.forecast.scores == nil {
			t.Fatalf("the text is not scored: %s", r.forecast.unscored)
		}
		return r.forecast.tokens
	}
	const said = `{"content":"what is the time"}`
	bare := load(`{"messages":[` + said + `],"max_tokens":0}`)
	tools := `[{"type":"function","function":{"name":"clock","description":"` + strings.Repeat("tells the time ", 99) + `"}}]`
	for name, member := range map[string]string{"tools": `"tools":` + tools, "functions": `"functions":` + tools} {
		if got, want := load(`{"messages":[`+said+`],"max_tokens":0,`+member+`}`), bare+int64(len(tools)/wire.BytesPerToken); got != want {
			t.Errorf("%s: a load of %d, want %d", name, got, want)
		}
	}
	arguments := strings.Repeat("SELECT name FROM users ", 9)
	called := int64(len(p.layout.Tokenizer.Encode("clock")) + len(p.layout.Tokenizer.Encode(arguments)))
	if got := load(`{"messages":[` + said + `,{"tool_calls":[{"function":{"name":"clock","arguments":"` + arguments + `"}}]}],"max_tokens":0}`); got != bare+called {
		t.Errorf("calls: a load of %d, want %d", got, bare+called)
	}
}

// TestPrefixesOfTools checks that requests with different tools share no prefix.
func TestPrefixesOfTools(t *testing.T) {
	prefixes := func(tools string) []uint64 {
		body := fmt.Appendf(nil, `{"messages":[{"content":%q}],"tools":[%q]}`, strings.Repeat("what is the time ", 99), tools)
		r := requestOf("/v1/chat/completions", "", body)
		r.hash()
		return r.prefixes
	}
	one, same, other := prefixes("clock"), prefixes("clock"), prefixes("scale")
	if len(one) == 0 || !slices.Equal(one, same) || len(one) != len(other) || one[0] == other[0] {
		t.Errorf("prefixes %x of some tools, %x of the same, %x of others", one, same, other)
	}
	long := strings.Repeat("clock", 200)
	if got := prefixes(long); len(got) < len(one)+len(long)/wire.BytesPerToken/dispatch.PrefixBlock {
		t.Errorf("%d prefixes with long tools, %d with short ones", len(got), len(one))
	}
}

// TestLoadOfALongPrompt checks that all tokens of a long prompt count as load, although only a part is scored.
func TestLoadOfALongPrompt(t *testing.T) {
	const more = 100
	list := strings.Repeat("7,", wire.ReadTokens+more-1) + "7"
	r := requestOf("/generate", "", []byte(`{"input_ids":[`+list+`],"sampling_params":{"max_new_tokens":0}}`))
	p, _ := solved(t)
	if r.score(p.layout); r.forecast.tokens != wire.ReadTokens+more+1 {
		t.Errorf("a load of %d tokens, want %d", r.forecast.tokens, wire.ReadTokens+more+1)
	}
}

// TestSendsToThePortOfTheRank checks that a rank with its own port is reached there, without a header, and that the
// next one is tried if a port is unreachable.
func TestSendsToThePortOfTheRank(t *testing.T) {
	var ports []string
	for rank := range 8 {
		ports = append(ports, newEngine(t, "", 1, func(w http.ResponseWriter, r *http.Request) {
			if got := r.Header.Get(rankHeader); got != "" {
				t.Errorf("rank %q is named although rank %d has a port", got, rank)
			}
			fmt.Fprint(w, rank)
		}).Address)
	}
	ports[5] = "127.0.0.1:1" // no listener
	router, pool, _ := newRouter(t, time.Second, discovery.Backend{Pod: "a", Address: ports[0], Ranks: 8, RankAddresses: ports})
	served := map[string]bool{}
	for range 200 {
		response, body := post(t, router.URL+"/v1/completions", `{"prompt":"x"}`)
		if response.StatusCode != http.StatusOK || response.Header.Get(HeaderRank) != body {
			t.Fatalf("status %d, rank %q served, %q is reported", response.StatusCode, body, response.Header.Get(HeaderRank))
		}
		served[body] = true
	}
	if len(served) < 5 {
		t.Errorf("ranks %v served, want most of those that can be reached", served)
	}
	eventually(t, "no token is outstanding", func() bool { return outstanding(pool) == 0 })
}

// TestAllFull checks that clients are asked to retry immediately while all ranks are at their limit of pending
// requests, and are served when one has ended.
func TestAllFull(t *testing.T) {
	release := make(chan struct{})
	serving := make(chan struct{}, 2)
	engine := newEngine(t, "a", 2, func(w http.ResponseWriter, r *http.Request) {
		serving <- struct{}{}
		<-release
		io.Copy(w, r.Body) //nolint:errcheck // the client verifies the body
	})
	pool := poolWith(t, func(o *PoolOptions) { o.PendingLimitPerRank = 1 })
	pool.Set([]discovery.Backend{engine})
	proxy, _ := NewProxy(pool, prometheus.NewRegistry(), logr.Discard(), ProxyOptions{RankHeader: rankHeader, MaxBodyBytes: 1 << 16, EndpointWait: time.Minute})
	server := httptest.NewServer(proxy)
	defer server.Close()
	var clients sync.WaitGroup
	for range 2 {
		clients.Go(func() {
			if response, err := http.Post(server.URL+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"x"}`)); err != nil || response.StatusCode != http.StatusOK {
				t.Errorf("a request below the limit: %v, %v", response, err)
			}
		})
	}
	<-serving
	<-serving
	response, body := post(t, server.URL+"/v1/completions", `{"prompt":"y"}`)
	if response.StatusCode != http.StatusTooManyRequests || response.Header.Get("Retry-After") == "" || !strings.Contains(body, "rate_limit") {
		t.Errorf("a request above the limit: %s, Retry-After %q, %s", response.Status, response.Header.Get("Retry-After"), body)
	}
	close(release)
	clients.Wait()
	eventually(t, "a rank has room again", func() bool {
		response, _ := post(t, server.URL+"/v1/completions", `{"prompt":"z"}`)
		return response.StatusCode == http.StatusOK
	})
}
