// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/profile/counts"
	"github.com/semmoe/operator/internal/refengine"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/test/ports"
)

const model = "../refengine/testdata/tiny-qwen3moe"

// startEngine serves the small model and returns its URL.
func startEngine(t *testing.T, routedExperts bool) string {
	t.Helper()
	options := refengine.DefaultOptions()
	options.ModelPath, options.ServedModelName = model, "tiny"
	options.EnableReturnRoutedExperts = routedExperts
	options.Port = ports.Reserve(t)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- refengine.Run(ctx, options) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("the engine returned %v", err)
		}
	})
	return fmt.Sprintf("http://127.0.0.1:%d", options.Port)
}

// golden contains the results of an independent implementation for some prompts.
type golden struct {
	Cases []struct {
		Text           string      `json:"text"`
		PromptIDs      []int32     `json:"prompt_ids"`
		ExpertsByLayer [][][]int32 `json:"experts_by_layer"` // [layer][token][top]
	} `json:"cases"`
}

func readGolden(t *testing.T) golden {
	t.Helper()
	data, err := os.ReadFile(model + "/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var g golden
	if err := json.Unmarshal(data, &g); err != nil {
		t.Fatal(err)
	}
	return g
}

func options(t *testing.T, endpoint string, items []Item) Options {
	t.Helper()
	adapter, err := registry.For("SGLang")
	if err != nil {
		t.Fatal(err)
	}
	report, err := checkpoint.Inspect(model)
	if err != nil {
		t.Fatal(err)
	}
	config, err := os.ReadFile(model + "/config.json")
	if err != nil {
		t.Fatal(err)
	}
	return Options{
		Endpoint: endpoint, Adapter: adapter, Report: report, Config: string(config), Items: items,
		Tokens: 1 << 20, TraceTokens: 1 << 20, RequestTokens: 512, NewTokens: 1, Concurrency: 4, Wait: time.Minute,
	}
}

// TestRecordsGoldenPrompts checks that the trace contains the expected token IDs and experts of every prompt, and does
// not depend on the number of concurrent requests.
func TestRecordsGoldenPrompts(t *testing.T) {
	endpoint := startEngine(t, true)
	g := readGolden(t)
	var items []Item
	for i, c := range g.Cases {
		items = append(items, Item{Line: i + 1, Prompt: c.Text, Domain: []string{"even", "odd"}[i%2]})
	}
	o := options(t, endpoint, items)
	var last Progress
	o.Progress = func(p Progress) { last = p }
	run, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	recorded, summary := run.Trace, run.Summary
	if recorded.Requests() != len(g.Cases) || last.Done != len(g.Cases) || last.Tokens != len(recorded.Tokens) {
		t.Fatalf("%d requests of %d, progress %+v", recorded.Requests(), len(g.Cases), last)
	}
	for r, c := range g.Cases {
		if diff := cmp.Diff(c.PromptIDs, recorded.Request(r)); diff != "" {
			t.Fatalf("request %d: tokens (-want +got):\n%s", r, diff)
		}
		for position := range c.PromptIDs {
			for layer := range c.ExpertsByLayer {
				row := recorded.Row(int(recorded.Offsets[r])+position, layer)
				for i, expert := range c.ExpertsByLayer[layer][position] {
					if int32(row[i]) != expert {
						t.Fatalf("request %d, token %d, layer %d: experts %v, want %v", r, position, layer, row, c.ExpertsByLayer[layer][position])
					}
				}
			}
		}
	}
	if summary.Tokens != len(recorded.Tokens) || summary.DistinctTokens == 0 || summary.CoverageMilli == 0 || summary.SkewMilli <= 1000 {
		t.Errorf("summary %+v", summary)
	}
	o.Concurrency, o.Progress = 1, nil
	again, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(recorded, again.Trace); diff != "" {
		t.Errorf("sequential requests give another trace:\n%s", diff)
	}

	// The trace can be written and read.
	path := t.TempDir() + "/t.safetensors.zst"
	if err := trace.Create(path, recorded); err != nil {
		t.Fatal(err)
	}
	read, err := trace.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(recorded.Experts, read.Experts); diff != "" || !cmp.Equal(read.Model.Domains, []string{"even", "odd"}) {
		t.Errorf("domains %v, (-want +got):\n%s", read.Model.Domains, diff)
	}

	// Limits: tokens of a prompt, total tokens, and generated tokens, which are recorded, too.
	o.RequestTokens, o.Tokens, o.NewTokens, o.Concurrency = 5, 20, 3, 4
	run, err = Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	short := run.Trace
	if short.Length(0) != 5+3-1 || short.Requests() != 3 {
		t.Errorf("%d requests, the first of %d tokens; want 3 of 7", short.Requests(), short.Length(0))
	}
}

func TestRecordsConversations(t *testing.T) {
	o := options(t, startEngine(t, true), []Item{{Line: 1, Messages: []Message{{"user", "hello"}, {"assistant", "world"}}}})
	run, err := Run(t.Context(), o)
	if err != nil || run.Trace.Requests() != 1 || len(run.Trace.Tokens) < 2 {
		t.Errorf("%v: %+v", err, run)
	}
}

// TestOwnText records text that the model writes itself. The recorded experts are those of the same tokens as a prompt.
func TestOwnText(t *testing.T) {
	endpoint := startEngine(t, true)
	words, err := os.ReadFile(model + "/tokenizer.json")
	if err != nil {
		t.Fatal(err)
	}
	o := options(t, endpoint, nil)
	items, report := OwnText(12, words, o.Report.Vocab, 1)
	if again, same := OwnText(12, words, o.Report.Vocab, 1); !cmp.Equal(items, again) || report != same || report != OwnTextReport(12) {
		t.Errorf("the same seed gives other requests: %v and %v, reports %v and %v", items, again, report, same)
	}
	o.Items, o.RequestTokens = items, 40
	run, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if run.Summary.Requests != 12 || run.Summary.Refused != 0 || run.Summary.Tokens > 12*40 || run.Summary.Tokens < 12*10 || run.Summary.DistinctTokens < 60 {
		t.Errorf("summary %+v", run.Summary)
	}
	c := &client{base: endpoint, http: http.DefaultClient, adapter: o.Adapter, layers: o.Report.Layers, top: o.Report.ExpertsPerToken}
	width, differing := len(o.Report.MoELayers)*o.Report.ExpertsPerToken, 0
	for r := range run.Trace.Requests() {
		begin, end := run.Trace.Offsets[r], run.Trace.Offsets[r+1]
		tokens := run.Trace.Tokens[begin:end]
		if item := items[run.Trace.Documents[r]-1]; tokens[0] != item.Start {
			t.Errorf("request %d starts with token %d, want %d", r, tokens[0], item.Start)
		}
		same, experts, err := c.record(t.Context(), tokens, 1, 0, 0)
		if err != nil || !slices.Equal(same, tokens) {
			t.Fatalf("tokens %v as a prompt: %v, %v", tokens, same, err)
		}
		want, err := moeOnly(experts, o.Report)
		if err != nil {
			t.Fatal(err)
		}
		for at := range tokens {
			if row := at * width; !slices.Equal(run.Trace.Experts[int(begin)*width+row:][:width], want[row:][:width]) {
				differing++ // a different order of additions can exchange two experts of nearly equal weight
			}
		}
	}
	if differing > run.Summary.Tokens/50 {
		t.Errorf("%d of %d tokens have other experts as a prompt", differing, run.Summary.Tokens)
	}
	// Each request has a seed: the same requests write the same text.
	again, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(again.Trace.Tokens, run.Trace.Tokens) {
		t.Error("the text differs in a second run")
	}
}

// TestOwnTextWithoutTokenizer checks that all tokens of the model can be the first one if its tokenizer is unknown.
func TestOwnTextWithoutTokenizer(t *testing.T) {
	for _, words := range []string{"", "{", `{"added_tokens": [{"id": 0}, {"id": 1}, {"id": 2}], "model": {"vocab": {"a": 0, "b": 1, "c": 2}}}`} {
		items, _ := OwnText(200, []byte(words), 3, 7)
		seen := map[int32]bool{}
		for _, item := range items {
			seen[item.Start] = true
		}
		if len(seen) != 3 || !seen[0] || !seen[2] {
			t.Errorf("tokenizer %q: first tokens %v", words, seen)
		}
	}
}

// TestCountsAllAndTracesSome checks that the counts include tokens that do not fit into the trace. The trace is a
// sample of complete requests that does not depend on the number of concurrent requests.
func TestCountsAllAndTracesSome(t *testing.T) {
	endpoint := startEngine(t, true)
	g := readGolden(t)
	var items []Item
	for i, c := range g.Cases {
		items = append(items, Item{Line: i + 1, Prompt: c.Text})
	}
	all, err := Run(t.Context(), options(t, endpoint, items))
	if err != nil {
		t.Fatal(err)
	}
	o := options(t, endpoint, items)
	o.RequestTokens, o.TraceTokens = 40, 100
	some, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(some.Trace.Tokens); n > 100 || n < 60 || some.Summary.TracedTokens != n || some.Summary.Requests != some.Trace.Requests() {
		t.Errorf("%d traced tokens, want at most 100; summary %+v", n, some.Summary)
	}
	if some.Summary.Tokens <= 100 || some.Summary.Tokens > all.Summary.Tokens {
		t.Errorf("%d counted tokens, %d without a limit", some.Summary.Tokens, all.Summary.Tokens)
	}
	o.Concurrency = 1
	if again, err := Run(t.Context(), o); err != nil || !cmp.Equal(again.Trace, some.Trace) {
		t.Errorf("sequential requests give another sample: %v", err)
	}
	ofTrace := counts.New(all.counts.Model)
	ofTrace.Add(all.Trace.Tokens, all.Trace.Experts)
	var got, want bytes.Buffer
	if err := errors.Join(all.counts.Write(&got), ofTrace.Write(&want)); err != nil || !bytes.Equal(got.Bytes(), want.Bytes()) {
		t.Errorf("the counts differ from those of the tokens: %v", err)
	}
}

func TestFailures(t *testing.T) {
	items := []Item{{Line: 7, Prompt: "hello"}}
	broken := func(t *testing.T, err error, parts ...string) {
		t.Helper()
		var engine *EngineError
		if !errors.As(err, &engine) {
			t.Errorf("error %v is not an *EngineError", err)
			return
		}
		for _, part := range parts {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("error %v does not contain %q", err, part)
			}
		}
	}
	t.Run("engine without routed experts", func(t *testing.T) {
		_, err := Run(t.Context(), options(t, startEngine(t, false), items))
		broken(t, err, "--enable-return-routed-experts", "line 7")
	})
	t.Run("engine unreachable", func(t *testing.T) {
		o := options(t, "http://127.0.0.1:1", items)
		o.Wait = 100 * time.Millisecond
		_, err := Run(t.Context(), o)
		var engine *EngineError
		if err == nil || !strings.Contains(err.Error(), "does not serve within 100ms") || errors.As(err, &engine) {
			t.Errorf("error %v, want one that is not an *EngineError: a deployment may recover", err)
		}
		o.Dedicated = true
		_, err = Run(t.Context(), o)
		broken(t, err, "does not serve within 100ms")
	})
	t.Run("engine dies", func(t *testing.T) {
		endpoint := startEngine(t, true)
		var server *httptest.Server
		died := make(chan struct{})
		server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/generate" {
				server.Listener.Close()
				if connection, _, err := http.NewResponseController(w).Hijack(); err == nil {
					connection.Close()
				}
				close(died)
				return
			}
			w.Header().Set("Connection", "close")
			http.Redirect(w, r, endpoint+r.URL.Path, http.StatusTemporaryRedirect)
		}))
		defer server.Close()
		o := options(t, server.URL, items)
		o.Dedicated = true
		_, err := Run(t.Context(), o)
		<-died
		broken(t, err, "died: it accepts no more connections", "line 7")
	})
	t.Run("engine serves another model", func(t *testing.T) {
		endpoint := startEngine(t, true)
		o := options(t, endpoint, items)
		o.Report.Experts = 8
		_, err := Run(t.Context(), o)
		broken(t, err, "the model has experts 0 to 7")
		o = options(t, endpoint, items)
		o.Report.Vocab = 2
		_, err = Run(t.Context(), o)
		broken(t, err, "the vocabulary of the model has IDs 0 to 1")
	})
	t.Run("engine returns duplicate experts", func(t *testing.T) {
		report := options(t, "", items).Report
		report.Layers, report.MoELayers, report.Experts, report.ExpertsPerToken = 2, []int{1}, 4, 2
		_, err := moeOnly([]int32{0, 0, 0, 1, 0, 0, 3, 3}, report)
		broken(t, err, "expert 3 twice for token 1 in layer 1")
	})
	t.Run("engine fails temporarily", func(t *testing.T) {
		endpoint := startEngine(t, true)
		calls := 0
		flaky := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/generate" {
				if calls++; calls == 1 {
					http.Error(w, "out of memory", http.StatusInternalServerError)
					return
				}
			}
			http.Redirect(w, r, endpoint+r.URL.Path, http.StatusTemporaryRedirect)
		}))
		defer flaky.Close()
		run, err := Run(t.Context(), options(t, flaky.URL, items))
		if err != nil || run.Trace.Requests() != 1 {
			t.Errorf("%v", err)
		}
	})
	t.Run("some requests are rejected", func(t *testing.T) {
		endpoint := startEngine(t, true)
		many := append([]Item{{Line: 1, Messages: []Message{{"nobody", ""}}}}, items...)
		refusing := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err != nil || strings.Contains(string(body), "nobody") {
				http.Error(w, "unknown role", http.StatusBadRequest)
				return
			}
			http.Redirect(w, r, endpoint+r.URL.Path, http.StatusTemporaryRedirect)
		}))
		defer refusing.Close()
		run, err := Run(t.Context(), options(t, refusing.URL, many))
		if err != nil || run.Trace.Requests() != 1 || run.Summary.Refused != 1 || run.Trace.Documents[0] != 7 {
			t.Errorf("%v: %+v", err, run)
		}
	})
	t.Run("deployment changes to an engine without routed experts", func(t *testing.T) {
		endpoint := startEngine(t, true)
		calls := 0
		changing := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/generate" {
				http.Redirect(w, r, endpoint+r.URL.Path, http.StatusTemporaryRedirect)
				return
			}
			body, err := io.ReadAll(r.Body)
			if err != nil {
				t.Error(err)
			}
			if calls++; calls > 1 {
				body = bytes.Replace(body, []byte(`"return_routed_experts":true`), []byte(`"return_routed_experts":false`), 1)
			}
			response, err := http.Post(endpoint+r.URL.Path, "application/json", bytes.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			defer response.Body.Close()
			io.Copy(w, response.Body) //nolint:errcheck // the client reports it
		}))
		defer changing.Close()
		o := options(t, changing.URL, append([]Item{{Line: 1, Prompt: "world"}}, items...))
		o.Concurrency = 1
		_, err := Run(t.Context(), o)
		var engine *EngineError
		if err == nil || !strings.Contains(err.Error(), "another model or engine serves now") || errors.As(err, &engine) {
			t.Errorf("error %v, want one that is not an *EngineError: the next attempt uses one engine only", err)
		}
		// A dedicated engine is not replaced: a response without experts only rejects its request.
		calls, o.Dedicated = 0, true
		if run, err := Run(t.Context(), o); err != nil || run.Summary.Refused != 1 {
			t.Errorf("%v: %+v", err, run)
		}
	})
	t.Run("cancelled context", func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		hanging := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/health" {
				return
			}
			io.Copy(io.Discard, r.Body) // the server detects a disconnected client only after reading the body
			stop()
			<-r.Context().Done()
		}))
		defer hanging.Close()
		o := options(t, hanging.URL, items)
		o.Dedicated = true
		_, err := Run(ctx, o)
		var engine *EngineError
		if !errors.Is(err, context.Canceled) || errors.As(err, &engine) {
			t.Errorf("error %v, want context.Canceled: an eviction is not an engine error", err)
		}
	})
	t.Run("trace smaller than a request", func(t *testing.T) {
		o := options(t, "http://127.0.0.1:1", items)
		o.TraceTokens = 100
		if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "trace tokens 100 must be at least request tokens plus new tokens, 513") {
			t.Errorf("error %v", err)
		}
	})
}
