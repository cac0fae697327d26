// SPDX-License-Identifier: Apache-2.0

package refengine

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/semmoe/operator/test/ports"
)

// An engine with two processes serves after both have joined, drains if one of them is asked to stop, and stops if one
// is lost.
func TestNodes(t *testing.T) {
	address := ports.Address(t)
	node := func(rank int) *running {
		o := DefaultOptions()
		o.ModelPath, o.ServedModelName, o.Threads = tinyModel, "tiny", 2
		fourRanks(&o)
		o.Nodes, o.NodeRank, o.DistInitAddr = 2, rank, address
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(context.Background())
		t.Cleanup(stop)
		e := &running{url: "http://" + listener.Addr().String(), stop: stop, done: make(chan error, 1)}
		go func() { e.done <- serve(ctx, listener, o) }()
		return e
	}
	healthy := func(e *running) bool { return e.get(t, "/health").status == http.StatusOK }
	ended := func(what string, e *running) error {
		select {
		case err := <-e.done:
			return err
		case <-time.After(30 * time.Second):
			t.Fatalf("%s does not end", what)
			return nil
		}
	}

	ask := func(e *running) io.ReadCloser {
		response, err := e.send(t.Context(), "/v1/completions", map[string]any{"prompt": "a", "max_tokens": 500, "ignore_eos": true, "stream": true})
		if err != nil {
			t.Fatal(err)
		}
		return response.Body
	}
	answered := func(answer io.ReadCloser) {
		defer answer.Close()
		if text, err := io.ReadAll(answer); err != nil || !strings.Contains(string(text), "[DONE]") {
			t.Errorf("a request that runs when a node is asked to stop ends with %v, after %d bytes", err, len(text))
		}
	}

	worker := node(1)
	worker.until(t, "listening", func() bool { return worker.get(t, "/health").status == http.StatusServiceUnavailable })
	leader := node(0)
	leader.until(t, "healthy", func() bool { return healthy(leader) })
	worker.until(t, "healthy", func() bool { return healthy(worker) })
	if status := worker.post(t, "/v1/completions", map[string]any{"prompt": "a", "max_tokens": 1}).status; status != http.StatusServiceUnavailable {
		t.Errorf("the second node answers a request with %d", status)
	}
	if status := leader.post(t, "/v1/completions", map[string]any{"prompt": "a", "max_tokens": 1}).status; status != http.StatusOK {
		t.Errorf("the first node answers a request with %d", status)
	}
	answer := ask(leader)
	worker.stop()
	answered(answer)
	if err := ended("the leader", leader); err == nil || !strings.Contains(err.Error(), "node 1 of the group was asked to stop") {
		t.Errorf("the leader ended with %v", err)
	}
	if err := ended("the worker", worker); err != nil {
		t.Errorf("the worker ended with %v", err)
	}

	leader, worker = node(0), node(1)
	leader.until(t, "healthy, anew", func() bool { return healthy(leader) })
	worker.until(t, "healthy, anew", func() bool { return healthy(worker) })
	answer = ask(leader)
	leader.stop()
	worker.stop()
	answered(answer)
	for what, e := range map[string]*running{"the leader": leader, "the worker": worker} {
		if err := ended(what, e); err != nil {
			t.Errorf("%s ended with %v", what, err)
		}
	}

	leader, worker = node(0), node(1)
	leader.until(t, "healthy again", func() bool { return healthy(leader) })
	leader.stop()
	if err := ended("the leader", leader); err != nil {
		t.Error(err)
	}
	if err := ended("the worker", worker); err == nil || !strings.Contains(err.Error(), "node 0 at "+address+" is lost") {
		t.Errorf("the worker ended with %v", err)
	}
}
