// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/httpserver"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/wire"
)

// limitedRouter serves a router with the given options.
func limitedRouter(t *testing.T, options ProxyOptions, backends ...discovery.Backend) (*httptest.Server, *Pool) {
	t.Helper()
	pool := NewPool()
	pool.Set(backends)
	options.RankHeader, options.MaxBodyBytes = rankHeader, 1<<16
	proxy, _ := NewProxy(pool, prometheus.NewRegistry(), logr.Discard(), options)
	server := httptest.NewServer(proxy)
	t.Cleanup(server.Close)
	return server, pool
}

// rawEngine answers each complete request with the bytes that a function writes to the connection, and then closes it.
func rawEngine(t *testing.T, name string, answer func(net.Conn)) discovery.Backend {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer connection.Close()
				request, err := http.ReadRequest(bufio.NewReader(connection))
				if err != nil {
					return
				}
				io.Copy(io.Discard, request.Body) //nolint:errcheck // the test checks the outcome
				answer(connection)
			}()
		}
	}()
	return discovery.Backend{Pod: name, Address: listener.Addr().String(), Ranks: 1}
}

// dial opens a connection to a server and sends text.
func dial(t *testing.T, server *httptest.Server, text string) (net.Conn, *bufio.Reader) {
	t.Helper()
	connection, err := net.Dial("tcp", server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { connection.Close() })
	if err := connection.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(connection, text); err != nil {
		t.Fatal(err)
	}
	return connection, bufio.NewReader(connection)
}

func readResponse(t *testing.T, from *bufio.Reader) *http.Response {
	t.Helper()
	response, err := http.ReadResponse(from, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { response.Body.Close() })
	return response
}

// TestSlowBody checks that a client that sends its body endlessly, byte by byte, is disconnected, and that no engine
// gets the request.
func TestSlowBody(t *testing.T) {
	var calls atomic.Int32
	engine := newEngine(t, "a", 1, func(http.ResponseWriter, *http.Request) { calls.Add(1) })
	router, pool := limitedRouter(t, ProxyOptions{EndpointWait: time.Second, ClientTimeout: 100 * time.Millisecond}, engine)
	connection, answer := dial(t, router, "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
	go func() {
		for range 1000 {
			if _, err := connection.Write([]byte(" ")); err != nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	}()
	response := readResponse(t, answer)
	body, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusRequestTimeout || !strings.Contains(string(body), "must arrive within 100ms") || !response.Close {
		t.Errorf("%s, closing %v: %s, %v", response.Status, response.Close, body, err)
	}
	if calls.Load() != 0 || outstanding(pool) != 0 {
		t.Errorf("%d calls of the engine, %d tokens outstanding", calls.Load(), outstanding(pool))
	}
}

// TestBrokenBodies checks that a body that ends early, or that is not chunked although its header says so, is reported
// as an error of the client.
func TestBrokenBodies(t *testing.T) {
	router, _ := limitedRouter(t, ProxyOptions{EndpointWait: time.Second})
	_, answer := dial(t, router, "POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n")
	if response := readResponse(t, answer); response.StatusCode != http.StatusBadRequest {
		t.Errorf("a broken chunk: %s", response.Status)
	}
}

// TestChunkedBodies checks that bodies of unknown length arrive complete, with their length, and are bounded.
func TestChunkedBodies(t *testing.T) {
	engine := newEngine(t, "a", 1, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body) // the client verifies the body
		w.Header().Set("X-Got-Length", strconv.FormatInt(r.ContentLength, 10))
		w.Write(body) //nolint:errcheck // the client verifies the body
	})
	router, _ := limitedRouter(t, ProxyOptions{EndpointWait: time.Second, ClientTimeout: time.Minute}, engine)
	for _, size := range []int{1, 511, 512, 513, 5000, 1 << 16, 1<<16 + 1, 1 << 20} {
		sent := strings.Repeat("x", size)
		response, err := http.Post(router.URL+"/generate", "application/json", io.MultiReader(strings.NewReader(sent)))
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(response.Body)
		response.Body.Close()
		switch {
		case err != nil:
			t.Error(err)
		case size > 1<<16:
			if response.StatusCode != http.StatusRequestEntityTooLarge {
				t.Errorf("%d bytes: %s", size, response.Status)
			}
		case response.StatusCode != http.StatusOK || string(got) != sent || response.Header.Get("X-Got-Length") != strconv.Itoa(size):
			t.Errorf("%d bytes: %s, %d bytes came back, length %s", size, response.Status, len(got), response.Header.Get("X-Got-Length"))
		}
	}
}

// TestBodiesThatTakeAllMemory checks that bodies are kept until a response begins, and that clients are asked to retry
// while all request memory is in use.
func TestBodiesThatTakeAllMemory(t *testing.T) {
	arrived, answer := make(chan struct{}, 1), make(chan struct{})
	engine := newEngine(t, "a", 1, func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			t.Error(err)
		}
		arrived <- struct{}{}
		<-answer
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "data: 1\n\n")
		w.(http.Flusher).Flush()
		<-answer
	})
	bodies := &httpserver.Memory{Max: 150_000}
	router, _ := limitedRouter(t, ProxyOptions{EndpointWait: time.Second, Memory: bodies}, engine)
	body := `{"prompt":"` + strings.Repeat("x", 40_000) + `"}`
	began := make(chan *http.Response)
	go func() {
		response, err := http.Post(router.URL+"/generate", "application/json", strings.NewReader(body))
		if err != nil {
			t.Error(err)
		}
		began <- response
	}()
	<-arrived
	response, text := post(t, router.URL+"/generate", body)
	if response.StatusCode != http.StatusTooManyRequests || response.Header.Get("Retry-After") != "1" || !strings.Contains(text, "no memory left") || !response.Close {
		t.Errorf("%s, %v: %s", response.Status, response.Header, text)
	}
	answer <- struct{}{}
	first := <-began
	if held := bodies.Held(); held != 0 {
		t.Errorf("%d bytes are still counted although the response has begun", held)
	}
	answer <- struct{}{}
	first.Body.Close()
	go func() { <-arrived; answer <- struct{}{}; answer <- struct{}{} }()
	if response, text := post(t, router.URL+"/generate", body); response.StatusCode != http.StatusOK {
		t.Errorf("%s: %s", response.Status, text)
	}
	// The body is always released, regardless of the result of the request.
	for _, path := range []string{"/generate", "/v1/models"} {
		post(t, router.URL+path, strings.Repeat("x", 1<<16+1))
	}
	if held := bodies.Held(); held != 0 {
		t.Errorf("%d bytes are counted at the end", held)
	}
}

// TestExpectContinue checks that the router answers "Expect: 100-continue" once, and rejects too large a body without
// it being sent.
func TestExpectContinue(t *testing.T) {
	expected := make(chan string, 1)
	engine := newEngine(t, "a", 1, func(w http.ResponseWriter, r *http.Request) {
		expected <- r.Header.Get("Expect")
		io.Copy(w, r.Body) //nolint:errcheck // the client verifies the body
	})
	router, _ := limitedRouter(t, ProxyOptions{EndpointWait: time.Second}, engine)
	connection, answer := dial(t, router, "POST /generate HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
	if line, err := answer.ReadString('\n'); err != nil || line != "HTTP/1.1 100 Continue\r\n" {
		t.Fatalf("%q, %v", line, err)
	}
	if _, err := answer.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(connection, "{}"); err != nil {
		t.Fatal(err)
	}
	response := readResponse(t, answer)
	if body, err := io.ReadAll(response.Body); err != nil || response.StatusCode != http.StatusOK || string(body) != "{}" {
		t.Errorf("%s: %q, %v", response.Status, body, err)
	}
	if got := <-expected; got != "" {
		t.Errorf("the engine is asked to expect %q", got)
	}
	_, answer = dial(t, router, "POST /generate HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 65537\r\n\r\n")
	if response := readResponse(t, answer); response.StatusCode != http.StatusRequestEntityTooLarge {
		t.Errorf("too large a body: %s", response.Status)
	}
}

// TestClientThatStopsReading checks that the engine does not keep generating for a client that stops reading.
func TestClientThatStopsReading(t *testing.T) {
	ended := make(chan struct{})
	engine := newEngine(t, "a", 1, func(w http.ResponseWriter, r *http.Request) {
		defer close(ended)
		w.Header().Set("Content-Type", "text/event-stream")
		event := []byte("data: " + strings.Repeat("x", 64<<10) + "\n\n")
		for {
			if _, err := w.Write(event); err != nil {
				return
			}
		}
	})
	router, pool := limitedRouter(t, ProxyOptions{EndpointWait: time.Second, ClientTimeout: 200 * time.Millisecond}, engine)
	_, answer := dial(t, router, "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
	if response := readResponse(t, answer); response.StatusCode != http.StatusOK {
		t.Fatal(response.Status)
	}
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Fatal("the engine goes on for a client that reads nothing")
	}
	eventually(t, "no token is outstanding", func() bool { return outstanding(pool) == 0 })
}

// TestSilentEngine checks that an engine may be silent for longer than a client may, before and during its response,
// and that the connection can then be reused.
func TestSilentEngine(t *testing.T) {
	const timeout = 50 * time.Millisecond
	engine := newEngine(t, "a", 1, func(w http.ResponseWriter, r *http.Request) {
		for i := range 3 {
			<-time.After(3 * timeout)
			fmt.Fprintf(w, "%d", i)
			w.(http.Flusher).Flush()
		}
	})
	router, _ := limitedRouter(t, ProxyOptions{EndpointWait: time.Second, ClientTimeout: timeout}, engine)
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	for i := range 2 {
		var reused bool
		ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) { reused = info.Reused }})
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, router.URL+"/generate", strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		response, err := client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil || string(body) != "012" || reused != (i == 1) {
			t.Errorf("request %d, on an old connection %v: %q, %v", i, reused, body, err)
		}
	}
}

// TestRequestThatCrashesEngines checks that a request that crashes engines is sent to a few of them, never to all.
func TestRequestThatCrashesEngines(t *testing.T) {
	var calls atomic.Int32
	breaks := map[string]func(net.Conn){
		"closes": func(net.Conn) { calls.Add(1) },
		"resets": func(c net.Conn) {
			calls.Add(1)
			c.(*net.TCPConn).SetLinger(0) //nolint:errcheck // optional
		},
		"dies in its header": func(c net.Conn) {
			calls.Add(1)
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Ty") //nolint:errcheck // optional
		},
		"talks nonsense": func(c net.Conn) {
			calls.Add(1)
			io.WriteString(c, "Segmentation fault\r\n\r\n") //nolint:errcheck // optional
		},
	}
	for name, answer := range breaks {
		t.Run(name, func(t *testing.T) {
			calls.Store(0)
			var pods []discovery.Backend
			for i := range 6 {
				pods = append(pods, rawEngine(t, fmt.Sprint(i), answer))
			}
			router, pool := limitedRouter(t, ProxyOptions{EndpointWait: 10 * time.Second}, pods...)
			response, body := post(t, router.URL+"/v1/completions", `{"prompt":"x"}`)
			if response.StatusCode != http.StatusBadGateway || !strings.Contains(body, "could not be forwarded") || calls.Load() != DefaultMaxAttempts {
				t.Errorf("%s after %d attempts: %s", response.Status, calls.Load(), body)
			}
			eventually(t, "no token is outstanding", func() bool { return outstanding(pool) == 0 })
			// A working engine is found.
			good := newEngine(t, "good", 1, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") })
			pool.Set([]discovery.Backend{pods[0], pods[1], good})
			for range 10 {
				if response, body := post(t, router.URL+"/v1/completions", `{"prompt":"x"}`); response.StatusCode != http.StatusOK || body != "ok" {
					t.Fatalf("%s: %s", response.Status, body)
				}
			}
			// If it is the only engine, it gets the request again, but not more often.
			pool.Set(pods[:1])
			calls.Store(0)
			if response, _ := post(t, router.URL+"/v1/completions", `{}`); response.StatusCode != http.StatusBadGateway || calls.Load() != DefaultMaxAttempts {
				t.Errorf("%s after %d attempts", response.Status, calls.Load())
			}
		})
	}
}

// TestWaitsForPods checks that requests wait for loading or unreachable pods as long as the options allow. The client
// then gets the response of a loading pod, or the reason if no pod has responded.
func TestWaitsForPods(t *testing.T) {
	loading := func(name string) discovery.Backend {
		return newEngine(t, name, 2, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "loading", http.StatusServiceUnavailable) })
	}
	for name, pods := range map[string][]discovery.Backend{
		"loading": {loading("a"), loading("b")}, "unreachable": {{Pod: "gone", Address: "127.0.0.1:1", Ranks: 1}},
		"both": {loading("c"), {Pod: "gone", Address: "127.0.0.1:1", Ranks: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			want := map[bool]string{true: "no serving pod is ready", false: "loading"}[name == "unreachable"]
			router, pool := limitedRouter(t, ProxyOptions{EndpointWait: 300 * time.Millisecond}, pods...)
			response, body := post(t, router.URL+"/v1/completions", `{}`)
			if response.StatusCode != http.StatusServiceUnavailable || response.Header.Get("Retry-After") == "" || !strings.Contains(body, want) {
				t.Errorf("%s: %s", response.Status, body)
			}
			eventually(t, "no token is outstanding", func() bool { return outstanding(pool) == 0 })
		})
	}
}

// TestRequestIDIsReturnedOnce checks that the client gets the request id once, also if the engine repeats it.
func TestRequestIDIsReturnedOnce(t *testing.T) {
	engine := newEngine(t, "a", 1, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(HeaderRequestID, r.Header.Get(HeaderRequestID))
	})
	router, _ := limitedRouter(t, ProxyOptions{EndpointWait: time.Second}, engine)
	for _, id := range []string{"", "mine"} {
		request, _ := http.NewRequest(http.MethodPost, router.URL+"/v1/completions", strings.NewReader(`{}`))
		if id != "" {
			request.Header.Set(HeaderRequestID, id)
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if got := response.Header.Values(HeaderRequestID); len(got) != 1 || id != "" && got[0] != id {
			t.Errorf("a request with id %q is answered with %q", id, got)
		}
	}
}

// TestForwardsTraceHeaders checks that tracing headers arrive unchanged and hop-by-hop headers are removed.
func TestForwardsTraceHeaders(t *testing.T) {
	headers := make(chan http.Header, 1)
	engine := newEngine(t, "a", 1, func(_ http.ResponseWriter, r *http.Request) { headers <- r.Header.Clone() })
	router, _ := limitedRouter(t, ProxyOptions{EndpointWait: time.Second}, engine)
	request, err := http.NewRequest(http.MethodGet, router.URL+"/v1/models/m?x=1", nil)
	if err != nil {
		t.Fatal(err)
	}
	passed := map[string]string{
		"Traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "Tracestate": "a=1,b=2", "Baggage": "k=v",
		HeaderRequestID: "mine", "Authorization": "Bearer x",
	}
	for name, value := range passed {
		request.Header.Set(name, value)
	}
	request.Header.Set("Connection", "X-Hop")
	request.Header.Set("X-Hop", "1")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	got := <-headers
	for name, value := range passed {
		if got.Get(name) != value {
			t.Errorf("%s is %q, want %q", name, got.Get(name), value)
		}
	}
	if got.Get("X-Hop") != "" || response.Header.Get(HeaderRequestID) != "mine" {
		t.Errorf("X-Hop is %q, the answer's id %q", got.Get("X-Hop"), response.Header.Get(HeaderRequestID))
	}
}

// TestNoUpgrade checks that the engine gets requests without a client's offer to upgrade to HTTP/2.
func TestNoUpgrade(t *testing.T) {
	type got struct {
		header http.Header
		body   string
	}
	requests := make(chan got, 1)
	engine := newEngine(t, "a", 1, func(_ http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		requests <- got{r.Header.Clone(), string(body)}
	})
	router, _ := limitedRouter(t, ProxyOptions{EndpointWait: time.Second}, engine)
	const body = `{"prompt":"x"}`
	for _, offer := range []string{
		"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n",
		"Connection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n",
		"Connection: Upgrade\r\nUpgrade: websocket\r\n",
	} {
		_, answer := dial(t, router, fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%s", offer, len(body), body))
		if response := readResponse(t, answer); response.StatusCode != http.StatusOK {
			t.Fatalf("%q: %s", offer, response.Status)
		}
		arrived := <-requests
		for _, name := range []string{"Connection", "Upgrade", "Http2-Settings"} {
			if value := arrived.header.Get(name); value != "" {
				t.Errorf("%q: %s is %q at the engine", offer, name, value)
			}
		}
		if arrived.body != body {
			t.Errorf("%q: the engine gets the body %q", offer, arrived.body)
		}
	}
}

// TestRoutingKey checks that the routing key is the rank with the best forecast, whichever rank serves, and that a
// client's own key is kept.
func TestRoutingKey(t *testing.T) {
	const header = "X-Smg-Routing-Key"
	p, _ := solved(t)
	engine := newEngine(t, "a", 4, func(w http.ResponseWriter, r *http.Request) { w.Header().Set("X-Got", r.Header.Get(header)) })
	engine.PlanDigest = p.Artifact.Digest
	for _, known := range []string{header, ""} {
		router, pool := limitedRouter(t, ProxyOptions{EndpointWait: time.Second, RoutingKeyHeader: known}, engine)
		pool.AddLayout(p.layout)
		send := func(body, own string) *http.Response {
			request, _ := http.NewRequest(http.MethodPost, router.URL+"/v1/completions", strings.NewReader(body))
			if own != "" {
				request.Header.Set(header, own)
			}
			response, err := http.DefaultClient.Do(request)
			if err != nil {
				t.Fatal(err)
			}
			response.Body.Close()
			return response
		}
		elsewhere := 0
		for i := range 40 {
			prompt := fmt.Sprintf("request %d: func main() {", i%2)
			scores, _, _, _ := p.layout.Score(&wire.Prompt{Texts: []string{prompt}}, nil)
			best := 0
			for rank, score := range scores {
				if score > scores[best] {
					best = rank
				}
			}
			response := send(fmt.Sprintf(`{"prompt":%q}`, prompt), "")
			want := strconv.Itoa(best)
			if known == "" {
				want = ""
			}
			if got := response.Header.Get("X-Got"); got != want {
				t.Fatalf("the engine gets key %q, want %q", got, want)
			}
			if response.Header.Get(HeaderRank) != strconv.Itoa(best) {
				elsewhere++
			}
		}
		if elsewhere == 0 {
			t.Error("every request went to its best rank: the test shows nothing")
		}
		if got := send(`{"prompt":"x"}`, "mine").Header.Get("X-Got"); got != "mine" {
			t.Errorf("a client's key becomes %q", got)
		}
		if got := send(`{}`, "").Header.Get("X-Got"); got != "" {
			t.Errorf("a request without a forecast has key %q", got)
		}
	}
}

// TestLeaksNothing checks that requests leave no resources behind, regardless of their outcome.
func TestLeaksNothing(t *testing.T) {
	good := newEngine(t, "good", 2, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for range 3 {
			fmt.Fprintf(w, "data: %s\n\n", strings.Repeat("x", 100))
			w.(http.Flusher).Flush()
		}
		if strings.HasSuffix(r.URL.Path, "chat/completions") { // until the client disconnects
			io.Copy(io.Discard, r.Body) //nolint:errcheck // the server detects a disconnected client only after the body is read
			<-r.Context().Done()
		}
	})
	breaks := newEngine(t, "breaks", 2, func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "data: ")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	loading := newEngine(t, "loading", 2, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
	hangsUp := rawEngine(t, "hangs-up", func(net.Conn) {})
	router, pool := limitedRouter(t, ProxyOptions{EndpointWait: time.Second, ClientTimeout: 100 * time.Millisecond}, good, breaks, loading, hangsUp)
	transport := &http.Transport{}
	client := &http.Client{Transport: transport}
	round := func(n int) {
		var clients sync.WaitGroup
		for i := range n {
			clients.Go(func() {
				path, body := "/v1/completions", io.Reader(strings.NewReader(fmt.Sprintf(`{"prompt":"request %d"}`, i)))
				// If the router closes the connection during an endless body, the client's transport waits for the body
				// before it reports an error.
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				defer cancel()
				switch i % 5 {
				case 1:
					path = "/v1/chat/completions"
				case 2:
					body = bytes.NewReader(make([]byte, 1<<16+1))
				case 3:
					body = io.MultiReader(strings.NewReader("{"), neverEnds{ctx})
				case 4:
					path = "/flush_cache"
				}
				request, _ := http.NewRequestWithContext(ctx, http.MethodPost, router.URL+path, body)
				response, err := client.Do(request)
				if err != nil {
					return
				}
				defer response.Body.Close()
				io.CopyN(io.Discard, response.Body, 50) //nolint:errcheck // some streams break, and endless ones are abandoned
			})
		}
		clients.Wait()
		transport.CloseIdleConnections()
	}
	settled := func() (int, uint64) {
		eventually(t, "no token is outstanding", func() bool { return outstanding(pool) == 0 })
		http.DefaultTransport.(*http.Transport).CloseIdleConnections()
		var memory runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&memory)
		return runtime.NumGoroutine(), memory.HeapAlloc
	}
	round(50) // fills pools and caches
	goroutines, heap := settled()
	for range 4 {
		round(100)
	}
	// Idle connections to engines close after some seconds. As many goroutines as before may remain.
	eventually(t, fmt.Sprintf("no more than the %d goroutines from before", goroutines), func() bool { return runtime.NumGoroutine() <= goroutines })
	if _, now := settled(); now > heap+4<<20 {
		t.Errorf("the heap has grown from %d to %d bytes", heap, now)
	}
}

// neverEnds blocks a reader until its context ends.
type neverEnds struct{ ctx context.Context }

func (n neverEnds) Read([]byte) (int, error) {
	<-n.ctx.Done()
	return 0, n.ctx.Err()
}
