// SPDX-License-Identifier: Apache-2.0

package refengine

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/refengine/server"
)

type loads struct {
	Loads []struct {
		DPRank         int `json:"dp_rank"`
		Running        int `json:"num_running_reqs"`
		Waiting        int `json:"num_waiting_reqs"`
		UsedTokens     int `json:"num_used_tokens"`
		TotalTokens    int `json:"num_total_tokens"`
		MaxTotalTokens int `json:"max_total_num_tokens"`
	} `json:"loads"`
}

// A client that disconnects frees its slot, whether its request runs or waits.
func TestCancellationFreesTheSlot(t *testing.T) {
	e := start(t, func(o *Options) {
		fourRanks(o)
		o.MaxRunning = 1
	})
	load := func(rank int) (running, waiting int) {
		var l loads
		e.get(t, fmt.Sprintf("/v1/loads?dp_rank=%d", rank)).into(t, &l)
		if len(l.Loads) != 1 || l.Loads[0].DPRank != rank {
			t.Fatalf("loads %+v", l)
		}
		return l.Loads[0].Running, l.Loads[0].Waiting
	}
	open := func(rank string) context.CancelFunc {
		t.Helper()
		ctx, cancel := context.WithCancel(context.Background())
		t.Cleanup(cancel)
		body := map[string]any{"prompt": "a", "max_tokens": 2000, "ignore_eos": true, "stream": true}
		response, err := e.send(ctx, "/v1/completions", body, "X-Data-Parallel-Rank", rank)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { response.Body.Close() })
		return cancel
	}
	// Several sequential requests for rank 1 delay the request for rank 2 by seconds.
	var cancelOthers []context.CancelFunc
	for range 5 {
		cancelOthers = append(cancelOthers, open("1"))
	}
	cancelLast := open("2")
	if running, waiting := load(2); running != 0 || waiting != 1 {
		t.Fatalf("rank 2 has %d running and %d waiting requests", running, waiting)
	}
	e.until(t, "running on rank 1", func() bool { running, waiting := load(1); return running == 1 && waiting > 0 })
	cancelLast()
	e.until(t, "taken from the queue", func() bool { _, waiting := load(2); return waiting == 0 })
	for _, cancel := range cancelOthers {
		cancel()
	}
	e.until(t, "freed", func() bool { running, waiting := load(1); return running+waiting == 0 })
	if got := e.metric(t, `sglang:num_aborted_requests_total{model_name="tiny"}`); got < 2 {
		t.Errorf("%v aborted requests, want at least the two that ran and waited", got)
	}
	var l loads
	e.get(t, "/v1/loads").into(t, &l)
	for _, rank := range l.Loads {
		if rank.UsedTokens != 0 || rank.TotalTokens != 0 || rank.MaxTotalTokens != 2048 {
			t.Errorf("idle rank: %+v", rank)
		}
	}
}

// A full queue rejects requests immediately, and accepts requests again after one has ended.
func TestFullQueueIsUnavailable(t *testing.T) {
	e := start(t, func(o *Options) { o.MaxRunning, o.MaxQueued = 1, 1 })
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	accepted := 0
	e.until(t, "refused", func() bool {
		response, err := e.send(ctx, "/v1/completions", map[string]any{"prompt": "a", "max_tokens": 2000, "ignore_eos": true, "stream": true})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { response.Body.Close() })
		if response.StatusCode == http.StatusOK {
			accepted++
			return false
		}
		text, err := io.ReadAll(response.Body)
		if err != nil || response.StatusCode != http.StatusServiceUnavailable || !strings.Contains(string(text), "queue is full") {
			t.Fatalf("%v, status %d: %s", err, response.StatusCode, text)
		}
		return true
	})
	if accepted == 0 {
		t.Error("no request was accepted")
	}
	cancel()
	e.until(t, "serving again", func() bool {
		return e.post(t, "/v1/completions", `{"prompt":"a","max_tokens":1}`).status == http.StatusOK
	})
}

// On shutdown health fails immediately, new requests are rejected, running requests finish, and then the engine stops.
func TestDrain(t *testing.T) {
	e := start(t, nil)
	response, err := e.send(context.Background(), "/v1/completions", map[string]any{"prompt": "a", "max_tokens": 1500, "ignore_eos": true, "stream": true})
	if err != nil {
		t.Fatal(err)
	}
	body := bufio.NewReader(response.Body)
	if _, err := body.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	e.stop()
	e.until(t, "unhealthy", func() bool { return e.get(t, "/health").status == http.StatusServiceUnavailable })
	if got := e.post(t, "/v1/completions", `{"prompt":"a"}`); got.status != http.StatusServiceUnavailable || !strings.Contains(string(got.body), "shutting down") {
		t.Errorf("a new request gets %d %s", got.status, got.body)
	}
	rest, err := io.ReadAll(body)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasSuffix(string(rest), "data: [DONE]\n\n") || strings.Count(string(rest), `"length"`) != 1 {
		t.Errorf("the running request ends with %q", rest[max(0, len(rest)-200):])
	}
	e.awaitEnd(t)
	if _, err := http.Get(e.url + "/health"); err == nil {
		t.Error("the engine still listens")
	}
}

// An engine without requests stops although clients have open connections: an idle one, and one with an incomplete
// request.
func TestStopWithSilentClients(t *testing.T) {
	e := start(t, nil)
	address := strings.TrimPrefix(e.url, "http://")
	for _, sent := range []string{"", "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"} {
		connection, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer connection.Close()
		if _, err := io.WriteString(connection, sent); err != nil {
			t.Fatal(err)
		}
	}
	e.get(t, "/health") // on a connection that is accepted after the others
	e.stop()
	e.awaitEnd(t)
}

// An engine stops while its model is loaded, regardless of the load time.
func TestStopWhileTheModelIsLoaded(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	e := &running{url: "http://" + listener.Addr().String(), stop: stop, done: make(chan error, 1)}
	loading, end := make(chan struct{}), make(chan struct{})
	defer close(end)
	go func() {
		e.done <- serveModel(ctx, listener, DefaultOptions(), func(Options) (*server.Engine, error) {
			close(loading)
			<-end
			return nil, errors.New("the test has ended")
		})
	}()
	<-loading
	if status := e.get(t, "/health").status; status != http.StatusServiceUnavailable {
		t.Errorf("health has status %d while the model is loaded", status)
	}
	e.stop()
	e.awaitEnd(t)
}

// awaitEnd waits for the end of the engine, which must not be an error.
func (e *running) awaitEnd(t *testing.T) {
	t.Helper()
	begin := time.Now()
	select {
	case err := <-e.done:
		e.done <- err
		if err != nil {
			t.Error(err)
		}
		t.Logf("the engine ended after %v", time.Since(begin).Round(time.Millisecond))
	case <-time.After(30 * time.Second):
		t.Fatal("the engine does not stop")
	}
}

// BenchmarkServe measures the throughput of 16 concurrent HTTP clients: generated tokens of streams, and prompt tokens
// of requests for a single token.
func BenchmarkServe(b *testing.B) {
	e := start(b, func(o *Options) { o.Threads = DefaultOptions().Threads })
	prompt := golden(b)[0].PromptIDs
	for _, shape := range []struct {
		name               string
		prompt, tokens, of int
	}{
		{"decode", 32, 200, 200},
		{"prefill", 512, 1, 512},
	} {
		b.Run(shape.name, func(b *testing.B) {
			const clients = 16
			for b.Loop() {
				var all sync.WaitGroup
				for range clients {
					all.Go(func() {
						ids := slices.Repeat(prompt, 1+shape.prompt/len(prompt))[:shape.prompt]
						body := map[string]any{"prompt": ids, "max_tokens": shape.tokens, "ignore_eos": true, "stream": true}
						response, err := e.send(context.Background(), "/v1/completions", body)
						if err != nil {
							b.Error(err)
							return
						}
						defer response.Body.Close()
						if text, err := io.ReadAll(response.Body); err != nil || !bytes.HasSuffix(text, []byte("[DONE]\n\n")) {
							b.Errorf("%v: %s", err, text)
						}
					})
				}
				all.Wait()
			}
			b.ReportMetric(float64(clients*shape.of*b.N)/b.Elapsed().Seconds(), "tokens/s")
		})
	}
}
