// SPDX-License-Identifier: Apache-2.0

package router

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/plans"
	"github.com/semmoe/operator/internal/router/tokenize"
)

// TestEngineTokenizes checks that without a usable tokenizer, a text is scored by the ids that its engine returns, and
// balanced by load if it returns none.
func TestEngineTokenizes(t *testing.T) {
	p, _ := solved(t)
	layout := *p.layout
	layout.Tokenizer = nil
	const text = "SELECT name FROM users"
	ids, err := json.Marshal(p.layout.Tokenizer.Encode(text))
	if err != nil {
		t.Fatal(err)
	}
	tokenized := fmt.Sprintf(`{"count":4,"tokens":%s}`, ids)
	for name, tc := range map[string]struct {
		code   int
		answer string
		body   string
		asked  int32 // in two requests
		scored bool
	}{
		"ids":           {http.StatusOK, tokenized, `{"prompt":"` + text + `"}`, 2, true},
		"several texts": {http.StatusOK, tokenized, `{"prompt":["SELECT name","FROM users"]}`, 2, true},
		"ids at hand":   {http.StatusOK, tokenized, `{"prompt":[1,2]}`, 0, true},
		"no ids":        {http.StatusOK, `{"tokens":[]}`, `{"prompt":"x"}`, 2, false},
		"not ids":       {http.StatusOK, `{"tokens":["a"]}`, `{"prompt":"x"}`, 2, false},
		"not JSON":      {http.StatusOK, `tokens`, `{"prompt":"x"}`, 1, false},
		"refused":       {http.StatusNotFound, `{}`, `{"prompt":"x"}`, 1, false},
		"too long":      {http.StatusOK, tokenized, `{"prompt":"` + strings.Repeat("x", tokenize.MaxBytes+1) + `"}`, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			var asked atomic.Int32
			engine := newEngine(t, "a", 4, func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/tokens" {
					asked.Add(1)
					w.WriteHeader(tc.code)
					fmt.Fprint(w, tc.answer)
				}
			})
			send := tokenizingRouter(t, engine, &layout)
			for range 2 {
				if got := send(tc.body) != ""; got != tc.scored {
					t.Errorf("scored is %v", got)
				}
			}
			if got := asked.Load(); got != tc.asked {
				t.Errorf("the engine was asked %d times in two requests, want %d", got, tc.asked)
			}
		})
	}
}

// tokenizingRouter returns a function that sends a completion and returns the plan that scored its rank.
func tokenizingRouter(t *testing.T, engine discovery.Backend, layout *plans.Layout) func(body string) (plan string) {
	t.Helper()
	engine.PlanDigest = layout.Digest
	options := Options{ProxyOptions: ProxyOptions{RankHeader: rankHeader, MaxBodyBytes: 1 << 20, EndpointWait: time.Second, TokenizePath: "/tokens"}}
	pool := NewPool()
	pool.Set(options.backends([]discovery.Backend{engine}))
	pool.AddLayout(layout)
	proxy, _ := NewProxy(pool, prometheus.NewRegistry(), logr.Discard(), options.ProxyOptions)
	server := httptest.NewServer(proxy)
	t.Cleanup(server.Close)
	return func(body string) string {
		response, answer := post(t, server.URL+"/v1/completions", body)
		if response.StatusCode != http.StatusOK {
			t.Errorf("%s: %s", response.Status, answer)
		}
		return response.Header.Get(HeaderPlan)
	}
}

// TestEngineTokenizesOnItsOwnRoute checks that each engine is asked on its own tokenize route, regardless of the route
// that the router is configured with.
func TestEngineTokenizesOnItsOwnRoute(t *testing.T) {
	p, _ := solved(t)
	layout := *p.layout
	layout.Tokenizer = nil
	for own, route := range map[string]string{"SGLang": "/v1/tokenize", "VLLM": "/tokenize", "TensorRTLLM": "", "": "/tokens"} {
		var asked atomic.Value
		asked.Store("")
		engine := newEngine(t, "a", 4, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/v1/completions" {
				asked.Store(r.URL.Path)
				fmt.Fprint(w, `{"tokens":[1,2]}`)
			}
		})
		engine.Engine = own
		if scored := tokenizingRouter(t, engine, &layout)(`{"prompt":"x"}`) != ""; asked.Load() != route || scored != (route != "") {
			t.Errorf("engine %q is asked on %q, scored is %v", own, asked.Load(), scored)
		}
	}
}

// TestUnresponsiveTokenizer checks that an engine that does not respond delays a request briefly, and does not delay
// the following ones.
func TestUnresponsiveTokenizer(t *testing.T) {
	p, _ := solved(t)
	layout := *p.layout
	layout.Tokenizer = nil
	var asked atomic.Int32
	engine := newEngine(t, "a", 4, func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/tokens" {
			asked.Add(1)
			_, _ = io.Copy(io.Discard, r.Body) // without this, the server does not detect the disconnect
			<-r.Context().Done()
		}
	})
	send := tokenizingRouter(t, engine, &layout)
	for range 5 {
		if plan := send(`{"prompt":"x"}`); plan != "" {
			t.Errorf("scored by plan %s", plan)
		}
	}
	if got := asked.Load(); got > 2 { // a second attempt if five requests take longer than a second
		t.Errorf("the engine was asked %d times", got)
	}
}
