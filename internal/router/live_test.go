package router

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/semmoe/operator/internal/counts"
	"github.com/semmoe/operator/internal/lar"
	"github.com/semmoe/operator/internal/tokenizer"
	"github.com/semmoe/operator/solver/trace"
)

// countedShape is the small checkpoint's, with what counting tokens needs.
func countedShape() lar.Shape {
	shape := tinyShape
	shape.Vocabulary, shape.Hidden = 4096, 128
	return shape
}

// askFor asks a handler of the metrics port.
func askFor(t *testing.T, observations *Observations, path string) (int, []byte) {
	t.Helper()
	recorder := httptest.NewRecorder()
	probeRoutes(&atomic.Bool{}, prometheus.NewRegistry(), observations).ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, path, nil))
	return recorder.Code, recorder.Body.Bytes()
}

// Live counts are those of the tokens that the engine computed, as far as their ids are known; sequences are kept on demand
// alone.
func TestLiveSamplesOfTheEngine(t *testing.T) {
	p, _ := plans(t)
	address := startReferenceEngine(t, string(p.artifact.Files["engine/sglang.json"]))
	adapter := adapterOf(t, "SGLang")
	shape := countedShape()
	tokens, err := tokenizer.Load(filepath.Join(tinyCheckpoint, "tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	serve := func(kind LiveSamples) (string, *Observations) {
		pool := NewPool()
		pool.Set([]Backend{{Pod: "p", Address: address, Ranks: 4, Revision: "r", PlanDigest: p.artifact.Digest, ModelDigest: "sha256:m", Shape: &shape}})
		pool.AddLayout(p.layout)
		url, observations := proxyServer(t, pool, ProxyOptions{
			RankHeader: adapter.RankHeader, RoutedExperts: adapter.RoutedExperts, SamplePercent: 100, LiveSamples: kind, MaxBodyBytes: 1 << 20, EndpointWait: time.Second,
		})
		observations.live.share = 0
		return url, observations
	}
	const text = "der Hund und die Katze sind nicht im Haus"
	ids := tokens.Encode(text)
	list, err := json.Marshal(ids)
	if err != nil {
		t.Fatal(err)
	}
	// What the engine itself tells of the prompt and four more tokens, the last of which it does not run.
	asked, err := json.Marshal(adapter.Generation.Body(ids, 4))
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
	whole, _ := routedRows(shape, append(append([]int32{}, ids...), generated[:3]...), experts)
	prompt, _ := routedRows(shape, ids, experts)
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
			url, observations := serve(LiveSequences)
			fetch(t, url+tc.path, tc.body)
			l := observations.live
			eventually(t, "the tokens are counted or not", func() bool { return testutil.ToFloat64(l.counted)+testutil.ToFloat64(l.uncounted) > 0 })
			if got := testutil.ToFloat64(l.counted); got != float64(len(tc.want.tokens)) {
				t.Fatalf("%v tokens are counted, want %d", got, len(tc.want.tokens))
			}
			code, data := askFor(t, observations, "/v1/live-counts")
			samplesCode, samples := askFor(t, observations, "/v1/live-samples")
			if len(tc.want.tokens) == 0 {
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
			want.Add(tc.want.tokens, tc.want.experts)
			want.AddBigrams(tc.want.tokens)
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
			if diff := cmp.Diff(tc.want, sequence{tokens: recorded.Tokens, experts: recorded.Experts}, cmp.AllowUnexported(sequence{})); diff != "" || recorded.Requests() != 1 || recorded.Model.Digest != "sha256:m" {
				t.Errorf("the trace's sequence (-want +got):\n%s", diff)
			}
		})
	}

	for kind, want := range map[LiveSamples][2]int{LiveCounts: {http.StatusOK, http.StatusNotFound}, LiveNone: {http.StatusNotFound, http.StatusNotFound}, "": {http.StatusNotFound, http.StatusNotFound}} {
		url, observations := serve(kind)
		fetch(t, url+"/generate", fmt.Sprintf(`{"text":%q,"sampling_params":{"max_new_tokens":2}}`, text))
		if kind == LiveCounts {
			eventually(t, "the tokens are counted", func() bool { return testutil.ToFloat64(observations.live.counted) > 0 })
		}
		code, _ := askFor(t, observations, "/v1/live-counts")
		samplesCode, _ := askFor(t, observations, "/v1/live-samples")
		if got := [2]int{code, samplesCode}; got != want {
			t.Errorf("kind %q: the answers are %v, want %v", kind, got, want)
		}
	}
}

func TestKnownIDs(t *testing.T) {
	p, _ := plans(t)
	prompt := []int32{5, 6, 7}
	ids := request{prompt: promptOfIDs([]byte(`[5,6,7]`))}
	for name, tc := range map[string]struct {
		request request
		told    toldTokens
		rows    int
		want    []int32
	}{
		"prompt alone":              {ids, toldTokens{prompt: 3, completion: 4}, 6, prompt},
		"with the answer":           {ids, toldTokens{3, 4, []int32{8, 9, 10, 11}}, 6, []int32{5, 6, 7, 8, 9, 10}},
		"all of the answer":         {ids, toldTokens{3, 2, []int32{8, 9}}, 5, []int32{5, 6, 7, 8, 9}},
		"part of the answer's ids":  {ids, toldTokens{3, 4, []int32{11}}, 6, prompt},
		"more rows than tokens":     {ids, toldTokens{3, 2, []int32{8, 9}}, 6, prompt},
		"another number of tokens":  {ids, toldTokens{prompt: 4, completion: 4}, 6, nil},
		"not told":                  {ids, toldTokens{}, 6, nil},
		"part of the prompt's rows": {ids, toldTokens{prompt: 3, completion: 4}, 2, nil},
		"a batch of ids":            {request{prompt: promptOfIDs([]byte(`[[5,6],[7]]`))}, toldTokens{prompt: 3}, 6, nil},
		"a batch of texts":          {request{prompt: promptOfTexts([]string{"a", "b"})}, toldTokens{prompt: 2}, 6, nil},
		"a long prompt":             {request{prompt: prompt1(prompt, 1)}, toldTokens{prompt: 3}, 6, nil},
		"text":                      {request{prompt: promptOfTexts([]string{"func main"})}, toldTokens{prompt: len(p.layout.tokenizer.Encode("func main"))}, 9, p.layout.tokenizer.Encode("func main")},
	} {
		m := meter{lease: &Lease{layout: p.layout}, request: &tc.request, tokens: tc.told}
		if diff := cmp.Diff(tc.want, m.knownIDs(tc.rows)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	m := meter{lease: &Lease{}, request: &request{prompt: promptOfTexts([]string{"x"})}, tokens: toldTokens{prompt: 1}}
	if got := m.knownIDs(5); got != nil {
		t.Errorf("without a tokenizer a text has the ids %v", got)
	}
}

// prompt1 are ids of which more were left out.
func prompt1(ids []int32, more int) prompt { return prompt{ids: ids, more: more} }

// What a response tells of its tokens is read wherever the engine puts it; the last event counts.
func TestToldTokens(t *testing.T) {
	var told toldTokens
	for _, tc := range []struct {
		data string
		want toldTokens
	}{
		{`{"choices":[],"usage":null}`, toldTokens{}},
		{`[{"meta_info":{"prompt_tokens":3}}]`, toldTokens{}},
		{`{"output_ids":[1],"meta_info":{"prompt_tokens":3,"completion_tokens":1}}`, toldTokens{3, 1, []int32{1}}},
		{`{"output_ids":[1,2],"meta_info":{"prompt_tokens":3,"completion_tokens":2}}`, toldTokens{3, 2, []int32{1, 2}}},
		{`[DONE]`, toldTokens{3, 2, []int32{1, 2}}},
		{`{"usage":{"prompt_tokens":7,"completion_tokens":2}}`, toldTokens{7, 2, nil}},
	} {
		told.read([]byte(tc.data))
		if diff := cmp.Diff(tc.want, told, cmp.AllowUnexported(toldTokens{})); diff != "" {
			t.Errorf("after %s (-want +got):\n%s", tc.data, diff)
		}
	}
}

// Rows that have an expert that is no routed one are left out: those of a shared expert, of ids beyond the vocabulary.
func TestRoutedRows(t *testing.T) {
	shape := lar.Shape{Layers: 2, MoELayers: []int{1}, Experts: 4, ExpertsPerToken: 2, Vocabulary: 10}
	experts := []int32{9, 9, 0, 1, 9, 9, 2, 4, 9, 9, 3, 0, 9, 9, 1, -1, 0, 0, 1, 2}
	rows, whole := routedRows(shape, []int32{1, 2, 3, 4, 10}, experts)
	if diff := cmp.Diff(sequence{tokens: []int32{1, 3}, experts: []uint16{0, 1, 3, 0}}, rows, cmp.AllowUnexported(sequence{})); diff != "" || whole {
		t.Errorf("whole is %v, (-want +got):\n%s", whole, diff)
	}
	if rows, whole := routedRows(shape, []int32{1}, experts); !whole || len(rows.tokens) != 1 {
		t.Errorf("%+v, whole is %v", rows, whole)
	}
}

// Counts are of one model at a time and of the last generations; sequences and the time that counting takes are bounded.
func TestLiveBounds(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	l := newLive(prometheus.NewRegistry(), LiveSequences)
	l.now = func() time.Time { return now }
	shape := lar.Shape{Layers: 1, MoELayers: []int{0}, Experts: 4, ExpertsPerToken: 2, Vocabulary: 10}
	add := func(digest string, tokens ...int32) {
		t.Helper()
		l.add(digest, shape, tokens, make([]int32, 2*len(tokens)))
	}
	tokens := func() int64 {
		sum, _, err := l.told(time.Time{})
		if err != nil {
			t.Fatal(err)
		}
		return sum.Tokens()
	}
	add("a", 1, 2)
	add("b", 3) // another model serves at the same time
	if got := tokens(); got != 2 || testutil.ToFloat64(l.uncounted) != 1 {
		t.Errorf("%d tokens of the first model are counted", got)
	}
	now = now.Add(liveLongest)
	add("a", 1)
	now = now.Add(liveLongest - time.Minute)
	add("a", 1)
	if got := tokens(); got != 4 {
		t.Errorf("%d tokens of two generations are counted", got)
	}
	now = now.Add(time.Minute)
	add("a", 1)
	if got := tokens(); got != 3 {
		t.Errorf("%d tokens are counted once the first generation is over", got)
	}
	if _, since, _ := l.told(time.Time{}); !since.Equal(time.Unix(1_700_000_000, 0).Add(liveLongest)) {
		t.Errorf("counts since %v", since)
	}
	now = now.Add(liveSilence)
	add("b", 3)
	if got := tokens(); got != 1 || l.trace(time.Time{}).Requests() != 1 || l.trace(time.Time{}).Model.Digest != "b" {
		t.Errorf("%d tokens of the second model are counted", got)
	}
	// While counting has taken its share of the time, requests go uncounted.
	clock := now
	l.now = func() time.Time { clock = clock.Add(time.Second); return clock }
	add("b", 3, 4)
	l.now = func() time.Time { return clock.Add(liveShare*time.Second - 1) }
	add("b", 5)
	if got := tokens(); got != 3 {
		t.Errorf("%d tokens are counted", got)
	}
	l.now = func() time.Time { return clock.Add(liveShare * time.Second) }
	add("b", 5)
	if got := tokens(); got != 4 {
		t.Errorf("%d tokens are counted after a pause", got)
	}
	// Of sequences the last ones are kept.
	l.sequences, l.ids = nil, 0
	for range 5 {
		l.keepSequence(sequence{tokens: make([]int32, liveIDs/8), experts: make([]uint16, liveIDs/4)})
	}
	if len(l.sequences) != 4 || l.ids != liveIDs {
		t.Errorf("%d sequences of %d ids are kept", len(l.sequences), l.ids)
	}
	for _, name := range []string{"none", "counts", "sequences"} {
		if kind, err := ParseLiveSamples(name); err != nil || string(kind) != name {
			t.Errorf("%s: %v, %v", name, kind, err)
		}
	}
	if _, err := ParseLiveSamples("Counts"); err == nil {
		t.Error("Counts is accepted")
	}
}

// Who asks for what was sampled from a time on gets nothing from before it: of counts, the generations that began later; a question
// for the sizes alone is answered alike.
func TestLiveSamplesSinceATime(t *testing.T) {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	now := start
	p, _ := plans(t)
	pool := NewPool()
	pool.AddLayout(p.layout)
	_, observations := proxyServer(t, pool, ProxyOptions{LiveSamples: LiveSequences, MaxBodyBytes: 1 << 20, EndpointWait: time.Second})
	l := observations.live
	l.share, l.now = 0, func() time.Time { return now }
	shape := lar.Shape{Layers: 1, MoELayers: []int{0}, Experts: 4, ExpertsPerToken: 2, Vocabulary: 10}
	add := func(tokens int) { l.add("a", shape, make([]int32, tokens), slices.Repeat([]int32{0, 1}, tokens)) }

	add(liveGenerationTokens - 1)
	now = start.Add(liveGeneration)
	add(2) // too few tokens for the end of a generation
	now = now.Add(time.Minute)
	add(5) // the next one begins
	second := now
	for _, tc := range []struct {
		since                  time.Time
		counted, requests, ids int
	}{
		{time.Time{}, liveGenerationTokens + 6, 3, liveGenerationTokens + 6},
		{start, liveGenerationTokens + 6, 3, liveGenerationTokens + 6},
		{start.Add(time.Second), 5, 2, 7},
		{second, 5, 1, 5},
		{second.Add(time.Second), 0, 0, 0},
	} {
		query := ""
		if !tc.since.IsZero() {
			query = "?" + QuerySince + "=" + tc.since.Format(time.RFC3339)
		}
		head := func(path string) http.Header {
			recorder := httptest.NewRecorder()
			probeRoutes(&atomic.Bool{}, prometheus.NewRegistry(), observations).ServeHTTP(recorder, httptest.NewRequest(http.MethodHead, path, nil))
			if recorder.Code != http.StatusOK || recorder.Body.Len() > 0 {
				t.Fatalf("HEAD %s: %d, %d bytes", path, recorder.Code, recorder.Body.Len())
			}
			return recorder.Header()
		}
		if got := head(LiveCountsPath + query).Get(HeaderTokens); got != fmt.Sprint(tc.counted) {
			t.Errorf("since %v: %s tokens are counted, want %d", tc.since, got, tc.counted)
		}
		sizes := head(LiveSequencesPath + query)
		if got, want := sizes.Get(HeaderRequests)+"/"+sizes.Get(HeaderTokens), fmt.Sprintf("%d/%d", tc.requests, tc.ids); got != want {
			t.Errorf("since %v: %s requests/tokens, want %s", tc.since, got, want)
		}
		code, data := askFor(t, observations, LiveCountsPath+query)
		if tc.counted == 0 {
			if code != http.StatusNoContent {
				t.Errorf("since %v: the answer is %d", tc.since, code)
			}
		} else if sum, err := counts.ReadCompressed(bytes.NewReader(data), 1<<24); err != nil || sum.Tokens() != int64(tc.counted) {
			t.Errorf("since %v: %v", tc.since, err)
		}
		code, data = askFor(t, observations, LiveSequencesPath+query)
		if tc.requests == 0 {
			if code != http.StatusNoContent {
				t.Errorf("since %v: the answer is %d", tc.since, code)
			}
		} else if recorded, err := trace.Read(bytes.NewReader(data), 1<<24); err != nil || len(recorded.Tokens) != tc.ids {
			t.Errorf("since %v: %v", tc.since, err)
		}
	}
	for _, path := range []string{LiveCountsPath, LiveSequencesPath} {
		if code, data := askFor(t, observations, path+"?since=yesterday"); code != http.StatusBadRequest || !bytes.Contains(data, []byte("yesterday")) {
			t.Errorf("%s with a malformed time: %d %s", path, code, data)
		}
	}
}
