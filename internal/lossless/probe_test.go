package lossless

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/refengine"
)

// scripted is an engine that gives stored answers, and is ill when told to.
type scripted struct {
	mu sync.Mutex
	// unhealthy is how many of the next looks at its health fail, refused how many of the next prompts; looks and asked
	// count both.
	unhealthy, refused, looks, asked int
	answers                          *Answers
	// pinned are the ranks that prompts were sent to, "" for none.
	pinned []string
}

func (s *scripted) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.URL.Path == "/health" {
		s.looks++
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

// change does something to the engine between two requests, and look reads what it has counted.
func (s *scripted) change(do func()) { s.mu.Lock(); defer s.mu.Unlock(); do() }

func (s *scripted) look() (looks, asked int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.looks, s.asked
}

func until(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not %s within 30 s", what)
		}
	}
}

// run runs a fast probe until the test ends, and returns how it ended.
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

// readiness is the status that the probe answers.
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

	until(t, "ready", func() bool { return readiness(probe) == http.StatusOK })
	// Prompts are sent together, so that more of them may be refused than one in each try.
	looks, before := engine.look()
	if looks < 6 || before < 3+2 {
		t.Errorf("ready after %d looks at the health and %d prompts, want at least 6 and 5", looks, before)
	}
	// A busy engine that misses two looks is none that was away.
	first := 0
	engine.change(func() { engine.unhealthy, first = 2, engine.looks })
	until(t, "looked at", func() bool { looks, _ := engine.look(); return looks >= first+5 })
	if _, asked := engine.look(); asked != before || readiness(probe) != http.StatusOK {
		t.Errorf("after two failures: status %d, %d prompts", readiness(probe), asked)
	}
	// One that misses three is, and is asked again.
	engine.change(func() { engine.unhealthy = downTries })
	until(t, "asked again", func() bool { _, asked := engine.look(); return asked == before+2 })
	until(t, "ready again", func() bool { return readiness(probe) == http.StatusOK })
	// It comes back with other outputs.
	engine.change(func() {
		changed := answers()
		shift(&changed.Prompts[0], 5)
		engine.unhealthy, engine.answers = downTries, changed
	})
	var difference *DifferenceError
	if err := <-ended; !errors.As(err, &difference) || !strings.Contains(err.Error(), `the engine: 4 log-probabilities differ`) {
		t.Errorf("ended with %v", err)
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

// An engine whose process ends is away at once, and when it comes back with a map that it ignores it is not ready again.
func TestProbeSeesARestart(t *testing.T) {
	recorded := record(t)
	client, stop := startStoppable(t, func(*refengine.Options) {})
	probe := NewProbe(client, "/health", recorded, ranks, rankHeader)
	ended := run(t, probe)
	until(t, "ready", func() bool { return readiness(probe) == http.StatusOK })
	stop()
	until(t, "unready", func() bool { return readiness(probe) == http.StatusServiceUnavailable })
	_, port, _ := strings.Cut(strings.TrimPrefix(client.Address, "http://"), ":")
	startEngine(t, func(o *refengine.Options) {
		if _, err := fmt.Sscan(port, &o.Port); err != nil {
			t.Fatal(err)
		}
		o.Fault, o.InitExpertLocation = refengine.FaultIgnoreMapAtDispatch, expertMap(t, 0, 1, 2, 3)
	})
	var difference *DifferenceError
	if err := <-ended; !errors.As(err, &difference) {
		t.Errorf("ended with %v", err)
	}
}

// Every prompt is asked, and every rank is.
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
			slices.Sort(engine.pinned) // prompts are sent together
			if !slices.Equal(engine.pinned, test.want) {
				t.Errorf("ranks %q, want %q", engine.pinned, test.want)
			}
		})
	}
}

// An engine that refuses to echo prompts is asked without, and its answers without those of prompts are stored and compared.
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
	if _, asked := engine.look(); asked != len(Prompts) || recorded.Prompts[0].PromptLogprobs != nil {
		t.Errorf("%d of %d prompts answered, with %v", asked, len(Prompts), recorded.Prompts[0])
	}
	if err := Check(t.Context(), client, recorded, 1, rankHeader); err != nil {
		t.Error(err)
	}
	if err := Check(t.Context(), client, answers(), 1, rankHeader); err == nil {
		t.Error("other answers are accepted")
	}
}

// An engine is asked a few prompts at a time, and none after one that it does not answer.
func TestRequestsAreBounded(t *testing.T) {
	var mu sync.Mutex
	running, highest, asked := 0, 0, 0
	err := together(t.Context(), 1000, func(ctx context.Context, i int) error {
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

// What is no answer is no difference.
func TestCheckTellsFailuresFromDifferences(t *testing.T) {
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

// Answers that nothing can be compared with are not recorded.
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
