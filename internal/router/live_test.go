// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/model/tokenizer"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/profile/counts"
	"github.com/semmoe/operator/internal/refengine"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/livesamples"
	"github.com/semmoe/operator/internal/router/plans/planstest"
	"github.com/semmoe/operator/internal/router/wire"
	"github.com/semmoe/operator/solver/trace"
)

// countedShape returns the shape of the small checkpoint with the fields for counting tokens.
func countedShape() lar.Shape {
	shape := planstest.Shape
	shape.Vocabulary, shape.Hidden = 4096, 128
	return shape
}

// askFor sends a request to the handlers of the port for managers.
func askFor(t *testing.T, observations *Observations, path string) (int, []byte) {
	t.Helper()
	recorder := httptest.NewRecorder()
	privateRoutes(observations).ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, path, nil))
	return recorder.Code, recorder.Body.Bytes()
}

// sequence contains the sampled tokens of a request and the experts of each token.
type sequence struct {
	Tokens  []int32
	Experts []uint16
}

// TestLiveSamplesOfTheEngine checks that live counts match the tokens that the engine computed and that have known ids,
// and that sequences are kept only if configured.
func TestLiveSamplesOfTheEngine(t *testing.T) {
	p, _ := solved(t)
	address := startReferenceEngine(t, string(p.Artifact.Files["engine/sglang.json"]))
	adapter := adapterOf(t, "SGLang")
	shape := countedShape()
	tokens, err := tokenizer.Load(filepath.Join(planstest.Checkpoint, "tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	serve := func(kind livesamples.Kind) (string, *Observations, *prometheus.Registry) {
		pool := NewPool()
		pool.Set([]discovery.Backend{{Pod: "p", Address: address, Ranks: 4, Revision: "r", PlanDigest: p.Artifact.Digest, ModelDigest: "sha256:m", Shape: &shape}})
		pool.AddLayout(p.layout)
		registry := prometheus.NewRegistry()
		proxy, observations := NewProxy(pool, registry, logr.Discard(), ProxyOptions{
			RankHeader: adapter.RankHeader, RankRoutes: adapter.RankRoutes, RoutedExperts: adapter.RoutedExperts, SamplePercent: 100, LiveSamples: kind, MaxBodyBytes: 1 << 20, EndpointWait: time.Second,
		})
		server := httptest.NewServer(proxy)
		t.Cleanup(server.Close)
		return server.URL, observations, registry
	}
	const text = "der Hund und die Katze sind nicht im Haus"
	ids := tokens.Encode(text)
	list, err := json.Marshal(ids)
	if err != nil {
		t.Fatal(err)
	}
	// The engine's own report for the prompt and four more tokens, the last of which it does not run.
	asked, err := json.Marshal(adapter.Generation.Body(ids, 4, 0, 0))
	if err != nil {
		t.Fatal(err)
	}
	generated, raw, err := adapter.Generation.Answer([]byte(fetch(t, "http://"+address+"/generate", string(asked))))
	if err != nil || len(generated) != 4 {
		t.Fatal(generated, err)
	}
	experts, err := adapter.RoutedExperts.Decode(raw, shape.Layers, shape.ExpertsPerToken)
	if err != nil {
		t.Fatal(err)
	}
	// All layers are MoE layers, so the reported experts of the first tokens are exactly the activated ones.
	first := func(tokens []int32) (s sequence) {
		s.Tokens = tokens
		for _, expert := range experts[:len(tokens)*shape.Layers*shape.ExpertsPerToken] {
			s.Experts = append(s.Experts, uint16(expert))
		}
		return s
	}
	whole, prompt := first(append(append([]int32{}, ids...), generated[:3]...)), first(ids)
	model := counts.Model{Digest: "sha256:m", MoELayers: shape.MoELayers, Experts: 32, ExpertsPerToken: 4, Vocabulary: 4096}

	for _, tc := range []struct {
		name, path, body string
		want             sequence
	}{
		{"ids", "/generate", fmt.Sprintf(`{"input_ids":%s,"sampling_params":{"temperature":0,"max_new_tokens":4}}`, list), whole},
		{"text", "/generate", fmt.Sprintf(`{"text":%q,"sampling_params":{"temperature":0,"max_new_tokens":4}}`, text), whole},
		{"a stream of events with all so far", "/generate", fmt.Sprintf(`{"text":%q,"sampling_params":{"temperature":0,"max_new_tokens":4},"stream":true}`, text), whole},
		{"completion", "/v1/completions", fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":4,"temperature":0}`, text), prompt},
		{"stream with usage", "/v1/completions", fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":4,"temperature":0,"stream":true,"stream_options":{"include_usage":true}}`, text), prompt},
		{"stream without usage", "/v1/completions", fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":4,"stream":true}`, text), sequence{}},
		{"chat", "/v1/chat/completions", fmt.Sprintf(`{"model":"tiny","messages":[{"role":"user","content":%q}],"max_tokens":4}`, text), sequence{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			url, observations, registry := serve(livesamples.Sequences)
			fetch(t, url+tc.path, tc.body)
			const counted, uncounted = "semmoe_live_counted_tokens_total", "semmoe_live_uncounted_tokens_total"
			eventually(t, "the tokens are counted or not", func() bool { return gauges(t, registry)[counted]+gauges(t, registry)[uncounted] > 0 })
			if got := gauges(t, registry)[counted]; got != float64(len(tc.want.Tokens)) {
				t.Fatalf("%v tokens are counted, want %d", got, len(tc.want.Tokens))
			}
			code, data := askFor(t, observations, "/v1/live-counts")
			samplesCode, samples := askFor(t, observations, "/v1/live-samples")
			if len(tc.want.Tokens) == 0 {
				if code != http.StatusNoContent || samplesCode != http.StatusNoContent {
					t.Fatalf("nothing is counted, and the answers are %d and %d", code, samplesCode)
				}
				return
			}
			got, err := counts.ReadCompressed(bytes.NewReader(data), 1<<24)
			if err != nil || code != http.StatusOK {
				t.Fatal(code, err)
			}
			want := counts.NewBounded(model, 1<<20)
			want.Add(tc.want.Tokens, tc.want.Experts)
			want.AddBigrams(tc.want.Tokens)
			var gotFile, wantFile bytes.Buffer
			if got.Write(&gotFile) != nil || want.Write(&wantFile) != nil || !bytes.Equal(gotFile.Bytes(), wantFile.Bytes()) {
				t.Error("the counts are not those of the tokens")
			}
			decoder, err := zstd.NewReader(bytes.NewReader(samples))
			if err != nil {
				t.Fatal(err)
			}
			defer decoder.Close()
			recorded, err := trace.Read(decoder, 1<<24)
			if err != nil || samplesCode != http.StatusOK {
				t.Fatal(samplesCode, err)
			}
			if diff := cmp.Diff(tc.want, sequence{recorded.Tokens, recorded.Experts}); diff != "" || recorded.Requests() != 1 || recorded.Model.Digest != "sha256:m" {
				t.Errorf("the trace's sequence (-want +got):\n%s", diff)
			}
		})
	}

	for kind, want := range map[livesamples.Kind][2]int{livesamples.Counts: {http.StatusOK, http.StatusNotFound}, livesamples.None: {http.StatusNotFound, http.StatusNotFound}, "": {http.StatusNotFound, http.StatusNotFound}} {
		url, observations, registry := serve(kind)
		fetch(t, url+"/generate", fmt.Sprintf(`{"text":%q,"sampling_params":{"max_new_tokens":2}}`, text))
		if kind == livesamples.Counts {
			eventually(t, "the tokens are counted", func() bool { return gauges(t, registry)["semmoe_live_counted_tokens_total"] > 0 })
		}
		code, _ := askFor(t, observations, "/v1/live-counts")
		samplesCode, _ := askFor(t, observations, "/v1/live-samples")
		if got := [2]int{code, samplesCode}; got != want {
			t.Errorf("kind %q: the answers are %v, want %v", kind, got, want)
		}
	}
}

// TestLiveSamplesOfChats checks that the tokens of a sampled chat are counted with those of its chat template, by the ids
// that the engine reports, and that the client gets the response to its own request.
func TestLiveSamplesOfChats(t *testing.T) {
	shape := countedShape()
	const chat, completion = "/v1/chat/completions", "/v1/completions"
	const messages = `{"model":"tiny","messages":[{"role":"system","content":"be brief"},{"role":"user","content":"der Hund"}],"max_tokens":4,"temperature":0%s}`
	for dialect, of := range map[string]struct {
		kind    string
		returns bool // whether the release returns ids
	}{
		"sglang-0.5.12": {"SGLang", false}, "sglang-0.5.17": {"SGLang", true}, "sglang-0.5.23": {"SGLang", true}, "vllm-0.32.0": {"VLLM", true},
	} {
		address := startReferenceEngineWith(t, func(o *refengine.Options) { o.Dialect = dialect })
		adapter := adapterOf(t, of.kind)
		for name, tc := range map[string]struct {
			path, body string
			counted    bool
		}{
			"chat":            {chat, fmt.Sprintf(messages, ""), true},
			"chat with false": {chat, fmt.Sprintf(messages, `,"return_token_ids":false`), false},
			"chat that asks":  {chat, fmt.Sprintf(messages, `,"return_token_ids":true`), false},
			"streamed chat":   {chat, fmt.Sprintf(messages, `,"stream":true`), false},
			"echo":            {completion, `{"model":"tiny","prompt":"der Hund","max_tokens":4,"temperature":0,"echo":true}`, false},
		} {
			t.Run(dialect+"/"+name, func(t *testing.T) {
				pool := NewPool()
				pool.Set([]discovery.Backend{{Pod: "p", Address: address, Engine: of.kind, Ranks: 4, Revision: "r", ModelDigest: "sha256:m", Shape: &shape}})
				registry := prometheus.NewRegistry()
				proxy, _ := NewProxy(pool, registry, logr.Discard(), ProxyOptions{
					RankHeader: adapter.RankHeader, RankRoutes: adapter.RankRoutes, RoutedExperts: adapter.RoutedExperts, SamplePercent: 100, LiveSamples: livesamples.Counts,
					MaxBodyBytes: 1 << 20, EndpointWait: time.Second,
				})
				server := httptest.NewServer(proxy)
				defer server.Close()
				got := withoutIdentity(fetch(t, server.URL+tc.path, tc.body))
				want := withoutIdentity(fetch(t, "http://"+address+tc.path, tc.body))
				if of.kind == "VLLM" { // experts that are not requested are removed
					want = regexp.MustCompile(`"routed_experts":("[^"]*"|null),?`).ReplaceAllString(want, "")
				}
				if got != want {
					t.Errorf("the client gets\n%s\nwant\n%s", got, want)
				}
				if strings.Contains(tc.body, "stream") && of.kind == "VLLM" {
					return // its streams contain no experts, so their tokens are neither counted nor uncounted
				}
				const counted, uncounted = "semmoe_live_counted_tokens_total", "semmoe_live_uncounted_tokens_total"
				eventually(t, "the tokens are counted or not", func() bool { return gauges(t, registry)[counted]+gauges(t, registry)[uncounted] > 0 })
				if !tc.counted || !of.returns {
					if n := gauges(t, registry)[counted]; n != 0 {
						t.Errorf("%v tokens without known ids are counted", n)
					}
					return
				}
				var engine struct {
					Usage struct {
						Prompt     int `json:"prompt_tokens"`
						Completion int `json:"completion_tokens"`
					}
				}
				if err := json.Unmarshal([]byte(got), &engine); err != nil {
					t.Fatal(err)
				}
				all := float64(engine.Usage.Prompt + engine.Usage.Completion - 1) // the last token is not run
				if n := gauges(t, registry)[counted]; n != all {
					t.Errorf("%v tokens are counted, want the %v of the prompt and the answer", n, all)
				}
			})
		}
	}
}

// withoutIdentity removes what differs between responses to the same request.
func withoutIdentity(response string) string {
	return regexp.MustCompile(`"(id|created)":("[^"]*"|[0-9]+)`).ReplaceAllString(response, `"$1":0`)
}

func TestKnownIDs(t *testing.T) {
	p, _ := solved(t)
	prompt := []int32{5, 6, 7}
	ids := request{prompt: wire.PromptOfIDs([]byte(`[5,6,7]`))}
	for name, tc := range map[string]struct {
		request request
		usage   wire.Usage
		rows    int
		want    []int32
	}{
		"prompt only":               {ids, wire.Usage{Prompt: 3, Completion: 4}, 6, prompt},
		"with the answer":           {ids, wire.Usage{Prompt: 3, Completion: 4, Output: []int32{8, 9, 10, 11}}, 6, []int32{5, 6, 7, 8, 9, 10}},
		"all of the answer":         {ids, wire.Usage{Prompt: 3, Completion: 2, Output: []int32{8, 9}}, 5, []int32{5, 6, 7, 8, 9}},
		"part of the answer's ids":  {ids, wire.Usage{Prompt: 3, Completion: 4, Output: []int32{11}}, 6, prompt},
		"more rows than tokens":     {ids, wire.Usage{Prompt: 3, Completion: 2, Output: []int32{8, 9}}, 6, nil},
		"fewer rows than tokens":    {ids, wire.Usage{Prompt: 3, Completion: 4, Output: []int32{8, 9, 10, 11}}, 5, nil},
		"another number of tokens":  {ids, wire.Usage{Prompt: 4, Completion: 4}, 6, nil},
		"not reported":              {ids, wire.Usage{}, 6, nil},
		"by the engine":             {request{prompt: wire.Prompt{Texts: []string{"x"}}}, wire.Usage{Prompt: 3, Completion: 2, PromptIDs: prompt, Output: []int32{8, 9}}, 4, []int32{5, 6, 7, 8}},
		"by the engine, other":      {ids, wire.Usage{Prompt: 3, Completion: 2, PromptIDs: []int32{5, 6}}, 4, nil},
		"part of the prompt's rows": {ids, wire.Usage{Prompt: 3, Completion: 4}, 2, nil},
		"a batch of ids":            {request{prompt: wire.PromptOfIDs([]byte(`[[5,6],[7]]`))}, wire.Usage{Prompt: 3}, 6, nil},
		"a batch of texts":          {request{prompt: wire.Prompt{Texts: []string{"a", "b"}}}, wire.Usage{Prompt: 2}, 6, nil},
		"a long prompt":             {request{prompt: wire.Prompt{IDs: prompt, More: 1}}, wire.Usage{Prompt: 3}, 6, nil},
		"text":                      {request{prompt: wire.Prompt{Texts: []string{"func main"}}}, wire.Usage{Prompt: len(p.layout.Tokenizer.Encode("func main"))}, 9, p.layout.Tokenizer.Encode("func main")},
	} {
		m := responseCapture{lease: &Lease{layout: p.layout}, request: &tc.request, tokens: tc.usage}
		if diff := cmp.Diff(tc.want, m.knownIDs(tc.rows)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	m := responseCapture{lease: &Lease{}, request: &request{prompt: wire.Prompt{Texts: []string{"x"}}}, tokens: wire.Usage{Prompt: 1}}
	if got := m.knownIDs(5); got != nil {
		t.Errorf("without a tokenizer a text has the ids %v", got)
	}
}

// TestCountsConcurrently checks that counting tokens does not delay a client until too many counts run at the same time and
// their memory must be bounded.
func TestCountsConcurrently(t *testing.T) {
	observations := newObservations(prometheus.NewRegistry(), ProxyOptions{}, NewPool())
	release := make(chan struct{})
	var counted atomic.Int32
	slots := cap(observations.counting)
	for range slots {
		observations.countAsync(func() { <-release; counted.Add(1) })
	}
	done := false
	observations.countAsync(func() { done = true })
	if !done || counted.Load() != 0 {
		t.Errorf("with %d counts being made, the next one is made: %t; %d have ended", slots, done, counted.Load())
	}
	close(release)
	eventually(t, "all is counted, and there is room again", func() bool { return int(counted.Load()) == slots && len(observations.counting) == 0 })
}
