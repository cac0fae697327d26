// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"

	"github.com/semmoe/operator/internal/probe/prompts"
	"github.com/semmoe/operator/internal/refengine"
	"github.com/semmoe/operator/test/poll"
)

// scripted is an engine that returns stored answers and fails on request.
type scripted struct {
	mu sync.Mutex
	// unhealthy is the number of the next health checks that fail, refused the number of the next prompts that are
	// refused. healthChecks and asked count health checks and prompts.
	unhealthy, refused, healthChecks, asked int
	answers                                 *Answers
	// pinned lists the ranks to which prompts were pinned, "" for none.
	pinned []string
}

func (s *scripted) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.URL.Path == "/health" {
		s.healthChecks++
		if s.unhealthy > 0 {
			s.unhealthy--
			http.Error(w, "loading", http.StatusServiceUnavailable)
		}
		return
	}
	s.asked++
	if s.refused > 0 {
		s.refused--
		http.Error(w, "busy", http.StatusServiceUnavailable)
		return
	}
	s.pinned = append(s.pinned, r.Header.Get(rankHeader))
	var request completionRequest
	if err := json.NewDecoder(r.Body).Decode(&request); err != nil || r.URL.Path != "/v1/completions" || request.Model != "tiny" {
		http.Error(w, fmt.Sprintf("%s %s %+v: %v", r.Method, r.URL, request, err), http.StatusBadRequest)
		return
	}
	for _, answer := range s.answers.Prompts {
		if answer.Prompt == request.Prompt {
			logprobs := completionLogprobs{Tokens: answer.Tokens}
			for i := range answer.Logprobs {
				logprobs.TokenLogprobs = append(logprobs.TokenLogprobs, &answer.Logprobs[i])
			}
			json.NewEncoder(w).Encode(map[string]any{"choices": []any{map[string]any{"logprobs": logprobs}}}) //nolint:errcheck // the client is this test
			return
		}
	}
	http.Error(w, "no such prompt", http.StatusBadRequest)
}

// change changes the engine between two requests, and look returns its counters.
func (s *scripted) change(do func()) { s.mu.Lock(); defer s.mu.Unlock(); do() }

func (s *scripted) counters() (healthChecks, asked int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.healthChecks, s.asked
}

// run runs a fast probe until the test ends, and returns its result.
func run(t *testing.T, p *Probe) <-chan error {
	t.Helper()
	p.poll, p.retry = time.Millisecond, time.Millisecond
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	var done sync.WaitGroup
	done.Go(func() { ended <- p.Run(ctx) })
	t.Cleanup(func() { stop(); done.Wait() })
	return ended
}

// readiness returns the status code of the probe.
func readiness(p *Probe) int {
	w := httptest.NewRecorder()
	p.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/readyz", nil))
	return w.Code
}

func TestProbeFollowsTheEngine(t *testing.T) {
	engine := &scripted{unhealthy: 5, refused: 3, answers: answers()}
	server := httptest.NewServer(engine)
	defer server.Close()
	probe := NewProbe(&Client{Address: server.URL, Model: "tiny"}, "/health", answers(), 1, rankHeader)
	if readiness(probe) != http.StatusServiceUnavailable {
		t.Error("ready before it ran")
	}
	ended := run(t, probe)

	poll.Until(t, "ready", func() bool { return readiness(probe) == http.StatusOK })
	// Prompts are sent concurrently, so several of them may be refused in each attempt.
	healthChecks, before := engine.counters()
	if healthChecks < 6 || before < 3+2 {
		t.Errorf("ready after %d health checks and %d prompts, want at least 6 and 5", healthChecks, before)
	}
	// An engine that misses two health checks counts as busy, not as down.
	first := 0
	engine.change(func() { engine.unhealthy, first = 2, engine.healthChecks })
	poll.Until(t, "looked at", func() bool { healthChecks, _ := engine.counters(); return healthChecks >= first+5 })
	if _, asked := engine.counters(); asked != before || readiness(probe) != http.StatusOK {
		t.Errorf("after two failures: status %d, %d prompts", readiness(probe), asked)
	}
	// An engine that misses three health checks counts as down, and is checked again.
	engine.change(func() { engine.unhealthy = downTries })
	poll.Until(t, "asked again", func() bool { _, asked := engine.counters(); return asked == before+2 })
	poll.Until(t, "ready again", func() bool { return readiness(probe) == http.StatusOK })
	// The engine returns with different outputs.
	engine.change(func() {
		changed := answers()
		shift(&changed.Prompts[0], 5)
		engine.unhealthy, engine.answers = downTries, changed
	})
	var difference *DifferenceError
	if err := <-ended; !errors.As(err, &difference) || !strings.Contains(err.Error(), `the engine: 4 log-probabilities differ`) {
		t.Errorf("the probe returned %v", err)
	}
	if readiness(probe) != http.StatusServiceUnavailable {
		t.Error("ready with other outputs")
	}
}

func TestProbeEndsWithItsContext(t *testing.T) {
	engine := &scripted{unhealthy: 1 << 30, answers: answers()}
	server := httptest.NewServer(engine)
	defer server.Close()
	probe := NewProbe(&Client{Address: server.URL, Model: "tiny"}, "/health", answers(), 1, rankHeader)
	ctx, stop := context.WithCancel(t.Context())
	time.AfterFunc(20*time.Millisecond, stop)
	if err := probe.Run(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// movable dials the running engine, and refuses connections while there is none, as a port without a listener does. An
// engine that restarts at the same port could find it taken: by another process, or by the probe, whose connection to a
// free local port may connect to itself.
type movable struct{ address atomic.Pointer[string] }

func (m *movable) client() *http.Client {
	dial := func(ctx context.Context, network, _ string) (net.Conn, error) {
		address := m.address.Load()
		if address == nil {
			return nil, &net.OpError{Op: "dial", Net: network, Err: syscall.ECONNREFUSED}
		}
		return new(net.Dialer).DialContext(ctx, network, *address)
	}
	return &http.Client{Transport: &http.Transport{DialContext: dial}}
}

func (m *movable) moveTo(engine *Client) {
	address := strings.TrimPrefix(engine.Address, "http://")
	m.address.Store(&address)
}

// TestProbeDetectsRestart checks that the engine counts as down immediately when its process ends, and that it does not
// become ready again if it returns with a map that it ignores.
func TestProbeDetectsRestart(t *testing.T) {
	recorded := record(t)
	engine, stop := startStoppable(t, func(*refengine.Options) {})
	var place movable
	place.moveTo(engine)
	probe := NewProbe(&Client{Address: "http://engine", Model: engine.Model, HTTP: place.client()}, "/health", recorded, ranks, rankHeader)
	ended := run(t, probe)
	poll.Until(t, "ready", func() bool { return readiness(probe) == http.StatusOK })
	place.address.Store(nil)
	stop()
	poll.Until(t, "unready", func() bool { return readiness(probe) == http.StatusServiceUnavailable })
	place.moveTo(startEngine(t, func(o *refengine.Options) {
		o.Fault, o.InitExpertLocation = refengine.FaultIgnoreMapAtDispatch, expertMap(t, 0, 1, 2, 3)
	}))
	var difference *DifferenceError
	if err := <-ended; !errors.As(err, &difference) {
		t.Errorf("the probe returned %v", err)
	}
}

// TestProbeNamesUnverifiedCertificate checks that the reason is logged once while an engine cannot be verified.
func TestProbeNamesUnverifiedCertificate(t *testing.T) {
	server := httptest.NewUnstartedServer(&scripted{answers: answers()})
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	defer server.Close()
	var lines atomic.Int64
	logger := funcr.New(func(_, line string) {
		if strings.Contains(line, "unknown authority") {
			lines.Add(1)
		}
	}, funcr.Options{})
	attempts := make(chan struct{}, 4)
	client := NewTLSClient(func() (*tls.Config, error) {
		attempts <- struct{}{}
		return &tls.Config{RootCAs: x509.NewCertPool()}, nil
	})
	probe := NewProbe(&Client{Address: server.URL, Model: "tiny", HTTP: client}, "/health", answers(), 1, rankHeader)
	probe.poll = time.Millisecond
	ctx, stop := context.WithCancel(logr.NewContext(t.Context(), logger))
	ended := make(chan error, 1)
	go func() { ended <- probe.Run(ctx) }()
	for range 3 {
		<-attempts
	}
	stop()
	for running := true; running; {
		select {
		case <-attempts:
		case err := <-ended:
			if running = false; !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		}
	}
	if lines.Load() != 1 {
		t.Errorf("%d lines, want 1", lines.Load())
	}
}

// TestCheckReachesAllRanks checks that every prompt is sent, and that every rank gets a prompt.
func TestCheckReachesAllRanks(t *testing.T) {
	for name, test := range map[string]struct {
		ranks  int
		header string
		want   []string
	}{
		"one rank":        {1, rankHeader, []string{"", ""}},
		"no header":       {3, "", []string{"", "", ""}},
		"as many":         {2, rankHeader, []string{"0", "1"}},
		"more than there": {5, rankHeader, []string{"0", "1", "2", "3", "4"}},
	} {
		t.Run(name, func(t *testing.T) {
			engine := &scripted{answers: answers()}
			server := httptest.NewServer(engine)
			defer server.Close()
			if err := Check(t.Context(), &Client{Address: server.URL, Model: "tiny"}, answers(), test.ranks, test.header); err != nil {
				t.Fatal(err)
			}
			slices.Sort(engine.pinned) // prompts are sent concurrently
			if !slices.Equal(engine.pinned, test.want) {
				t.Errorf("ranks %q, want %q", engine.pinned, test.want)
			}
		})
	}
}

// TestEngineWithoutPromptLogprobs checks that prompts are sent without echo to an engine that refuses it, and that
// answers without prompt log-probabilities are stored and compared.
func TestEngineWithoutPromptLogprobs(t *testing.T) {
	engine := &scripted{answers: answers()}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		if bytes.Contains(body, []byte(`"echo":true`)) {
			http.Error(w, "echo is not supported", http.StatusBadRequest)
			return
		}
		var request completionRequest
		if err := json.Unmarshal(body, &request); err != nil {
			t.Error(err)
		}
		fmt.Fprint(w, `{"choices":[{"logprobs":{"tokens":["a"],"token_logprobs":[-0.5]}}],"usage":{"prompt_tokens":9}}`)
		engine.change(func() { engine.asked++ })
	}))
	defer server.Close()
	client := &Client{Address: server.URL, Model: "tiny"}
	recorded, err := Record(t.Context(), client, answers().ModelDigest)
	if err != nil {
		t.Fatal(err)
	}
	if _, asked := engine.counters(); asked != len(prompts.All) || recorded.Prompts[0].PromptLogprobs != nil {
		t.Errorf("%d of %d prompts answered, with %v", asked, len(prompts.All), recorded.Prompts[0])
	}
	if err := Check(t.Context(), client, recorded, 1, rankHeader); err != nil {
		t.Error(err)
	}
	if err := Check(t.Context(), client, answers(), 1, rankHeader); err == nil {
		t.Error("other answers are accepted")
	}
}

// TestRequestsAreBounded checks that few prompts are sent concurrently, and none after a failed request.
func TestRequestsAreBounded(t *testing.T) {
	var mu sync.Mutex
	running, highest, asked := 0, 0, 0
	err := concurrently(t.Context(), 1000, func(ctx context.Context, i int) error {
		mu.Lock()
		running, asked = running+1, asked+1
		highest = max(highest, running)
		mu.Unlock()
		runtime.Gosched()
		mu.Lock()
		defer mu.Unlock()
		running--
		if i >= 100 {
			return errors.New("no answer")
		}
		return nil
	})
	if err == nil || highest > inFlight || asked > 100+inFlight {
		t.Errorf("%v after %d requests, %d at a time", err, asked, highest)
	}
}

// TestCheckDistinguishesFailures checks that a failed request is not reported as a difference.
func TestCheckDistinguishesFailures(t *testing.T) {
	for name, handler := range map[string]http.HandlerFunc{
		"server error": func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "out of memory", http.StatusInternalServerError)
		},
		"refused":    func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no such model", http.StatusNotFound) },
		"redirected": func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/elsewhere", http.StatusFound) },
		"no JSON":    func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") },
		"endless":    func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, strings.Repeat(" ", 2*maxResponseBytes)) },
		"cut off": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "100")
			fmt.Fprint(w, "{")
		},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(handler)
			defer server.Close()
			client := &Client{Address: server.URL, Model: "tiny"}
			var difference *DifferenceError
			if err := Check(t.Context(), client, answers(), 1, rankHeader); err == nil || errors.As(err, &difference) {
				t.Errorf("check: %v", err)
			}
			if _, err := Record(t.Context(), client, answers().ModelDigest); err == nil {
				t.Error("recorded")
			}
		})
	}
}

// TestRecordRefuses checks that answers that cannot be compared are not recorded.
func TestRecordRefuses(t *testing.T) {
	for name, test := range map[string]struct{ logprobs, want string }{
		"no log-probabilities": {`null`, "no log-probabilities"},
		"not a number":         {`{"tokens":["a"],"token_logprobs":[null]}`, "logprobs[0] is NaN"},
		"nothing":              {`{"tokens":[],"token_logprobs":[]}`, "no prompt has a log-probability"},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				fmt.Fprintf(w, `{"choices":[{"logprobs":%s}]}`, test.logprobs)
			}))
			defer server.Close()
			_, err := Record(t.Context(), &Client{Address: server.URL, Model: "tiny"}, answers().ModelDigest)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want %q", err, test.want)
			}
		})
	}
}
