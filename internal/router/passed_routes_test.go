// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/router/discovery"
)

// sendTo sends a request with headers, given as pairs.
func sendTo(t *testing.T, method, url, body string, header ...string) (*http.Response, string) {
	t.Helper()
	request, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for pair := range slices.Chunk(header, 2) {
		request.Header.Add(pair[0], pair[1])
	}
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	response, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response, string(text)
}

// TestPassesEveryRouteOn checks that every route of every engine reaches the engine as it was sent, with a rank only
// where the engine's table has one, and that no administrative route of any engine does.
func TestPassesEveryRouteOn(t *testing.T) {
	var got atomic.Pointer[string]
	backend := newEngine(t, "a", 4, func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		text := fmt.Sprintf("%s %s %s rank=%s", r.Method, r.RequestURI, body, r.Header.Get(rankHeader))
		got.Store(&text)
	})
	for _, adapter := range registry.All() {
		backend.Engine = adapter.Type
		backends := discovery.Pinnable([]discovery.Backend{backend}, &adapter)
		url, _ := proxyServer(t, newPool(backends...), ProxyOptions{MaxBodyBytes: 1 << 20, EndpointWait: time.Second, PassThrough: []string{"/v1/custom"}})
		asks := func(method, target, body string) string {
			t.Helper()
			got.Store(nil)
			response, text := sendTo(t, method, url+target, body)
			if at := got.Load(); at != nil {
				return *at
			}
			if response.StatusCode != http.StatusNotFound || !strings.Contains(text, `"error"`) {
				t.Errorf("%s: %s %s: %s: %s", adapter.Type, method, target, response.Status, text)
			}
			return ""
		}
		for _, api := range engine.APIs() {
			const query = "?a=1;b=%zz&c=2"
			rank, body := "", `{"prompt":"x"}`
			if header, field := adapter.OnRoute(api.Path); api.Computes && adapter.CanPinRank() && (header != "" || field != "") {
				rank = "0"
			} else if !api.Computes && adapter.CanPinRank() {
				rank = "0" // without meaning
			}
			methods := []string{http.MethodPost}
			if api.Put {
				methods = append(methods, http.MethodPut)
			}
			for _, method := range methods {
				for _, end := range []string{"", query, "/", "/" + query} {
					text := asks(method, api.Path+end, body)
					if !adapter.HasRoute(api.Path) {
						if text != "" {
							t.Errorf("%s lacks %s, and gets %s", adapter.Type, api.Path, text)
						}
						continue
					}
					before, after, _ := strings.Cut(text, " rank=")
					sent := strings.Contains(before, `prompt":"x"}`) && strings.HasPrefix(before, method+" "+api.Path+end+" ")
					if !sent || (after != "") != (rank != "") || rank == "" && strings.Contains(before, "dp_rank") {
						t.Errorf("%s: %s %s%s: the engine gets %s; want rank %q", adapter.Type, method, api.Path, end, text, rank)
					}
				}
			}
		}
		for _, path := range adapter.Administrative {
			for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete, http.MethodOptions, http.MethodPatch} {
				for _, end := range []string{"", "/", "/x", "?x=/v1/completions"} {
					if text := asks(method, path+end, ""); text != "" {
						t.Errorf("a client reaches %s", text)
					}
				}
			}
		}
		for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete, http.MethodOptions} {
			if text := asks(method, "/v1/custom", ""); !strings.HasPrefix(text, method+" /v1/custom ") {
				t.Errorf("%s of a further route: the engine gets %q", method, text)
			}
		}
		if text := asks(http.MethodPost, "/v1/custom/more", "{}"); text != "" {
			t.Errorf("a client reaches %s", text)
		}
	}
}

// TestRedirectsHideTheAddressOfPods checks that the redirect of an engine from a path with a trailing slash leads to the
// router.
func TestRedirectsHideTheAddressOfPods(t *testing.T) {
	backend := newEngine(t, "a", 0, func(w http.ResponseWriter, r *http.Request) {
		location := "http://" + r.Host + strings.TrimSuffix(r.URL.Path, "/")
		if r.URL.RawQuery == "other" {
			location = "http://other/x"
		}
		w.Header().Set("Location", location)
		w.WriteHeader(http.StatusTemporaryRedirect)
	})
	url, _ := proxyServer(t, newPool(backend), ProxyOptions{MaxBodyBytes: 1 << 10, EndpointWait: time.Second})
	for target, want := range map[string]string{"/v1/completions/": "/v1/completions", "/v1/completions/?other": "http://other/x"} {
		if response, _ := sendTo(t, http.MethodPost, url+target, "{}"); response.StatusCode != http.StatusTemporaryRedirect || response.Header.Get("Location") != want {
			t.Errorf("%s: %s to %q, want %q", target, response.Status, response.Header.Get("Location"), want)
		}
	}
}

// TestLoadOfRoutes checks the load by which requests are balanced: by the length of the body, and by generated tokens
// only on routes that generate some.
func TestLoadOfRoutes(t *testing.T) {
	body := `{"input":"` + strings.Repeat("x", 400) + `"}`
	for path, want := range map[string]int64{"/v1/embeddings": 104, "/v1/responses": 104 + 256, "/v1/custom": 104 + 256, "/tokenize": 1, "/v1/models": 1} {
		r := newRequest(apiOf(http.MethodPost, path, []string{"/v1/custom"}), "id", parsed(body), true)
		if r.tokens != want || r.inference != (want > 1) {
			t.Errorf("%s: %d tokens, inference %t; want %d", path, r.tokens, r.inference, want)
		}
	}
	if r := newRequest(apiOf(http.MethodOptions, "/v1/completions", nil), "id", parsed(""), true); r.inference {
		t.Error("OPTIONS counts as inference")
	}
}

// TestBrowsers checks that preflight requests reach the engine, and that errors of the router have the CORS headers of
// the engine for the same origin only.
func TestBrowsers(t *testing.T) {
	var allowsAll atomic.Bool
	backend := newEngine(t, "a", 0, func(w http.ResponseWriter, r *http.Request) {
		if origin := r.Header.Get("Origin"); origin != "" {
			w.Header().Set("Access-Control-Allow-Origin", map[bool]string{true: "*", false: origin}[allowsAll.Load()])
			w.Header().Set("Access-Control-Allow-Credentials", "true")
		}
		if r.Method == http.MethodOptions {
			w.Header().Set("Access-Control-Allow-Methods", "POST")
		}
	})
	for _, tc := range []struct {
		allowed string
		other   string // the header that another origin gets
	}{{"*", "*"}, {"", ""}} {
		allowsAll.Store(tc.allowed == "*")
		url, _ := proxyServer(t, newPool(backend), ProxyOptions{MaxBodyBytes: 1 << 10, EndpointWait: time.Second})
		fails := func(origin string) (string, string) {
			response, text := sendTo(t, http.MethodPost, url+"/v1/completions", `{"prompt":"`+strings.Repeat("x", 2<<10)+`"}`, "Origin", origin)
			if response.StatusCode != http.StatusRequestEntityTooLarge || !strings.Contains(text, `"param":null`) {
				t.Errorf("%s: %s", response.Status, text)
			}
			if !slices.Contains(response.Header.Values("Vary"), "Origin") {
				t.Errorf("Vary is %v", response.Header.Values("Vary"))
			}
			return response.Header.Get("Access-Control-Allow-Origin"), response.Header.Get("Access-Control-Allow-Credentials")
		}
		if got, _ := fails("http://a"); got != "" {
			t.Errorf("an origin that no engine has seen is allowed: %s", got)
		}
		response, _ := sendTo(t, http.MethodOptions, url+"/v1/completions", "", "Origin", "http://a", "Access-Control-Request-Method", "POST")
		if response.StatusCode != http.StatusOK || response.Header.Get("Access-Control-Allow-Methods") != "POST" {
			t.Errorf("preflight: %s, %v", response.Status, response.Header)
		}
		if got, credentials := fails("http://a"); got != cmp.Or(tc.allowed, "http://a") || credentials != "true" {
			t.Errorf("allowed origin %q, credentials %q", got, credentials)
		}
		if got, _ := fails("http://b"); got != tc.other {
			t.Errorf("another origin gets %q, want %q", got, tc.other)
		}
		if response, _ := sendTo(t, http.MethodPost, url+"/flush_cache", "", "Origin", "http://a"); response.StatusCode != http.StatusNotFound || response.Header.Get("Access-Control-Allow-Origin") == "" {
			t.Errorf("an unknown route: %s, %v", response.Status, response.Header)
		}
	}
}

// TestCORSIsBounded checks that many origins take a bounded amount of memory.
func TestCORSIsBounded(t *testing.T) {
	var c cors
	for i := range 1000 {
		origin := fmt.Sprintf("http://%d", i)
		c.learn(http.Header{"Origin": {origin}}, http.Header{"Access-Control-Allow-Origin": {origin}})
		if len(c.origins) > maxCORSOrigins || c.origins[origin] == nil {
			t.Fatalf("%d origins are known, the last %v", len(c.origins), c.origins[origin])
		}
	}
}

// TestHealthForClients checks the routes that report the readiness of the router itself.
func TestHealthForClients(t *testing.T) {
	var ready atomic.Bool
	server := httptest.NewServer(health(&ready, http.NotFoundHandler()))
	t.Cleanup(server.Close)
	for _, is := range []bool{false, true} {
		ready.Store(is)
		want := map[bool]int{false: http.StatusServiceUnavailable, true: http.StatusOK}[is]
		for _, request := range []string{"GET /health", "HEAD /health", "GET /ping", "POST /ping"} {
			method, path, _ := strings.Cut(request, " ")
			if response, text := sendTo(t, method, server.URL+path, ""); response.StatusCode != want || is != (response.Header.Get("Retry-After") == "") {
				t.Errorf("ready %t: %s: %s %s", is, request, response.Status, text)
			}
		}
		if response, text := sendTo(t, http.MethodGet, server.URL+"/version", ""); response.StatusCode != http.StatusOK || !strings.Contains(text, `"version"`) {
			t.Errorf("version: %s: %s", response.Status, text)
		}
		for _, request := range []string{"POST /health", "GET /health/", "GET //health", "POST /version", "GET /healthz"} {
			method, path, _ := strings.Cut(request, " ")
			if response, _ := sendTo(t, method, server.URL+path, ""); response.StatusCode != http.StatusNotFound {
				t.Errorf("%s: %s", request, response.Status)
			}
		}
	}
}

// TestForwardedHeaders checks that the headers of proxies in front of the router are kept, and that the client's address
// is appended.
func TestForwardedHeaders(t *testing.T) {
	seen := make(chan http.Header, 1)
	backend := newEngine(t, "a", 0, func(_ http.ResponseWriter, r *http.Request) { seen <- r.Header })
	url, _ := proxyServer(t, newPool(backend), ProxyOptions{MaxBodyBytes: 1 << 10, EndpointWait: time.Second})
	for _, tc := range []struct{ sent, want []string }{
		{nil, []string{"X-Forwarded-For", "127.0.0.1", "X-Forwarded-Proto", "http", "X-Forwarded-Host", strings.TrimPrefix(url, "http://"), "Forwarded", ""}},
		{
			[]string{"X-Forwarded-For", "10.0.0.1", "X-Forwarded-Proto", "https", "X-Forwarded-Host", "api.example.com", "Forwarded", "for=10.0.0.1;proto=https"},
			[]string{"X-Forwarded-For", "10.0.0.1, 127.0.0.1", "X-Forwarded-Proto", "https", "X-Forwarded-Host", "api.example.com", "Forwarded", "for=10.0.0.1;proto=https"},
		},
		{[]string{"X-Forwarded-For", "a", "X-Forwarded-For", "b"}, []string{"X-Forwarded-For", "a, b, 127.0.0.1"}},
	} {
		sendTo(t, http.MethodPost, url+"/v1/completions", "{}", tc.sent...)
		header := <-seen
		for pair := range slices.Chunk(tc.want, 2) {
			if got := strings.Join(header.Values(pair[0]), "|"); got != pair[1] {
				t.Errorf("%v: the engine gets %s %q, want %q", tc.sent, pair[0], got, pair[1])
			}
		}
	}
}

// TestBreaksBeforeTheFirstByte checks that a pod that breaks the connection after the header of a response, and before
// its first byte, counts as one that has not answered: another pod gets the request, or the client gets 502. The header
// of a stream is passed on at once, and the client sees the stream break.
func TestBreaksBeforeTheFirstByte(t *testing.T) {
	breaks := func(kind, begin string) discovery.Backend {
		return rawEngine(t, "breaks", func(c net.Conn) {
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n", kind)
			if begin != "" {
				fmt.Fprintf(c, "%x\r\n%s\r\n", len(begin), begin)
			}
		})
	}
	serves := newEngine(t, "serves", 0, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "served") })
	empty := newEngine(t, "empty", 0, func(http.ResponseWriter, *http.Request) {})
	const document, stream = "application/json", "text/event-stream"
	for name, tc := range map[string]struct {
		pods []discovery.Backend
		code int
		text string
	}{
		"the only pod":      {[]discovery.Backend{breaks(document, "")}, http.StatusBadGateway, `"bad_gateway"`},
		"one of two":        {[]discovery.Backend{breaks(document, ""), serves}, http.StatusOK, "served"},
		"an empty response": {[]discovery.Backend{empty}, http.StatusOK, ""},
	} {
		url, _ := proxyServer(t, newPool(tc.pods...), ProxyOptions{RankHeader: rankHeader, MaxBodyBytes: 1 << 10, EndpointWait: 10 * time.Second})
		for range 2 {
			if response, text := sendTo(t, http.MethodPost, url+"/v1/completions", "{}"); response.StatusCode != tc.code || !strings.Contains(text, tc.text) {
				t.Errorf("%s: %s: %s", name, response.Status, text)
			}
		}
	}
	for kind, begin := range map[string]string{document: "{", stream: "data: 1\n\n"} {
		url, _ := proxyServer(t, newPool(breaks(kind, begin)), ProxyOptions{RankHeader: rankHeader, MaxBodyBytes: 1 << 10, EndpointWait: 10 * time.Second})
		response, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(bufio.NewReader(response.Body))
		response.Body.Close()
		if err == nil || response.StatusCode != http.StatusOK || string(text) != begin {
			t.Errorf("%s: a response that breaks off later: %s: %q, %v", kind, response.Status, text, err)
		}
	}
}
