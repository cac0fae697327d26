package router

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/lar"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/refengine/locality"
	"github.com/semmoe/operator/internal/reshuffle"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
)

func TestEditMember(t *testing.T) {
	upper := func(value []byte) ([]byte, error) { return []byte(strings.ToUpper(string(value))), nil }
	for name, tc := range map[string]struct{ data, path, want string }{
		"member":              {` { "a" : "x", "b":"x" } `, "a", ` { "a" : "X", "b":"x" } `},
		"deeper":              {`{"m":{"k":1, "a": "x"},"a":"x"}`, "m a", `{"m":{"k":1, "a": "X"},"a":"x"}`},
		"absent":              {`{"b":"x"}`, "a", `{"b":"x"}`},
		"absent below":        {`{"m":{"b":"x"}}`, "m a", `{"m":{"b":"x"}}`},
		"no object below":     {`{"m":"a"}`, "m a", `{"m":"a"}`},
		"a batch":             {` [{"a":"x"} , {"b":"x"},{"a":"y"}]` + "\n", "a", ` [{"a":"X"} , {"b":"x"},{"a":"Y"}]` + "\n"},
		"an array on the way": {`{"c":[{"a":"x"},{"a":"y"}]}`, "c a", `{"c":[{"a":"X"},{"a":"Y"}]}`},
		"empty array":         {`[ ]`, "a", `[ ]`},
		"end of a stream":     {" [DONE]\n", "a", " [DONE]\n"},
		"no JSON":             {`{"a":"x"`, "a", `{"a":"x"`},
		"nothing":             {``, "a", ``},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := editMember([]byte(tc.data), strings.Fields(tc.path), upper)
			if string(got) != tc.want || err != nil {
				t.Errorf("%q, %v; want %q", got, err, tc.want)
			}
		})
	}
	fails := errors.New("fails")
	for _, data := range []string{`{"a":1}`, `[{"a":1}]`} {
		if _, err := editMember([]byte(data), []string{"a"}, func([]byte) ([]byte, error) { return nil, fails }); !errors.Is(err, fails) {
			t.Errorf("%s: error %v", data, err)
		}
	}
}

func TestAsks(t *testing.T) {
	for body, want := range map[string]bool{
		`{"r":true}`: true, `{"r":1}`: true, `{"r":false}`: false, `{"r":null}`: false, `{"R":true}`: false, `{"p":"r"}`: false,
		`{"r":false,"r":true}`: true, `{"\u0072":true}`: true, `{"r":true,"temperature":NaN}`: true, `{"temperature":NaN}`: true, `{`: false, ``: false,
	} {
		if got := asks([]byte(body), "r"); got != want {
			t.Errorf("%s: %v, want %v", body, got, want)
		}
	}
	if asks([]byte("x"), "") {
		t.Error("an engine that cannot be asked was")
	}
}

// permutedLayout is a plan of three layers, of which the first is dense, for four experts on two ranks.
func permutedLayout(slotsPerRank int, slots ...int) *Layout {
	return newLayout("d", &solver.Plan{HiddenLayers: 3, Placement: &placement.Placement{
		Ranks: 2, Experts: 4, SlotsPerRank: slotsPerRank, Layers: []placement.Layer{{Layer: 1, Slots: slots}},
	}}, nil)
}

var permutedShape = lar.Shape{Layers: 3, MoELayers: []int{1}, Experts: 4, ExpertsPerToken: 2}

func TestToLogical(t *testing.T) {
	l := permutedLayout(2, 2, 0, 3, 1)
	got := []int32{0, 1, 0, 1, 2, 3, 3, 3, 2, 3, 0, 0, 0, 0, 4, -1, 1, 1}
	l.toLogical(got, 2)
	// Layer 0 is dense, layer 2 is not listed; 4 is a shared expert.
	if diff := cmp.Diff([]int32{0, 1, 2, 0, 2, 3, 3, 3, 3, 1, 0, 0, 0, 0, 4, -1, 1, 1}, got); diff != "" {
		t.Error(diff)
	}
}

func TestTellsLogical(t *testing.T) {
	l, other := permutedLayout(2, 2, 0, 3, 1), permutedShape
	other.Experts = 8
	for name, tc := range map[string]struct {
		backend Backend
		layout  *Layout
		want    bool
	}{
		"not permuted":     {Backend{}, nil, true},
		"permuted":         {Backend{Permuted: true, Shape: &permutedShape}, l, true},
		"plan not loaded":  {Backend{Permuted: true, Shape: &permutedShape}, nil, false},
		"no shape":         {Backend{Permuted: true}, l, false},
		"another shape":    {Backend{Permuted: true, Shape: &other}, l, false},
		"redundant copies": {Backend{Permuted: true, Shape: &permutedShape}, permutedLayout(3, 0, 1, 2, 0, 3, 1), false},
	} {
		if got := tc.backend.tellsLogical(tc.layout); got != tc.want {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}

// A translation changes what stands at the engine's places and nothing else; what cannot be read is not passed on.
func TestTranslate(t *testing.T) {
	tr := &translator{
		engine: engine.RoutedExperts{
			ResponsePaths: [][]string{{"m", "e"}, {"choices", "e"}},
			Decode: func(text string, layers, top int) (ids []int32, err error) {
				return ids, json.Unmarshal([]byte(text), &ids)
			},
			Encode: func(ids []int32, layers, top int) string { return strings.ReplaceAll(fmt.Sprint(ids), " ", ",") },
		},
		lease: &Lease{Backend: Backend{Permuted: true, Shape: &permutedShape}, layout: permutedLayout(2, 2, 0, 3, 1)},
	}
	for data, want := range map[string]string{
		`{"m": {"e": "[0,1,0,1,0,1]", "x":[0,1]}}`:             `{"m": {"e": "[0,1,2,0,0,1]", "x":[0,1]}}`,
		`[{"m":{"e":"[0,0,0,0,0,0]"}},{"m":{"e":null}}]`:       `[{"m":{"e":"[0,0,2,2,0,0]"}},{"m":{"e":null}}]`,
		`{"choices":[{"e":"[1,1,1,1,1,1]"},{"e":"[]"}],"e":1}`: `{"choices":[{"e":"[1,1,0,0,1,1]"},{"e":"[]"}],"e":1}`,
		`{"text":"no experts"}`:                                `{"text":"no experts"}`,
	} {
		if got, err := tr.translate([]byte(data)); string(got) != want || err != nil {
			t.Errorf("%s became %s, %v; want %s", data, got, err, want)
		}
	}
	for _, data := range []string{`{"m":{"e":1}}`, `{"m":{"e":"x"}}`, `{"m":{"e":[[0,1]]}}`} {
		if got, err := tr.translate([]byte(data)); err == nil {
			t.Errorf("%s became %s", data, got)
		}
	}
}

// Experts that cannot be read end the answer: nothing of them reaches the client, whole or in a stream.
func TestUnreadableExpertsAreNotPassedOn(t *testing.T) {
	permuted := newEngine(t, "permuted", 2, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/generate" {
			fmt.Fprint(w, `{"meta_info":{"routed_experts":"secret"}}`)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "data: {\"text\":\"first\"}\n\ndata: {\"sglext\":{\"routed_experts\":\"secret\"}}\n\n")
	})
	permuted.PlanDigest, permuted.Permuted, permuted.Shape = "d", true, &permutedShape
	adapter, err := registry.For("SGLang")
	if err != nil {
		t.Fatal(err)
	}
	pool := NewPool()
	pool.Set([]Backend{permuted})
	pool.AddLayout(permutedLayout(2, 2, 0, 3, 1))
	url, _ := proxyServer(t, pool, ProxyOptions{RankHeader: rankHeader, MaxBodyBytes: 1 << 16, EndpointWait: time.Second, RoutedExperts: adapter.RoutedExperts})
	if response, body := post(t, url+"/generate", `{"return_routed_experts":true}`); response.StatusCode != http.StatusBadGateway || strings.Contains(body, "secret") {
		t.Errorf("%s: %s", response.Status, body)
	}
	response, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(`{"return_routed_experts":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err == nil || !strings.Contains(string(body), "first") || strings.Contains(string(body), "secret") {
		t.Errorf("the stream is %q and ends with %v", body, err)
	}
}

// What the router has asked for is taken out of every element of a batch's answer; the first one's is counted.
func TestTakeOfABatch(t *testing.T) {
	m := &meter{engine: engine.RoutedExperts{ResponsePaths: [][]string{{"m", "e"}}}}
	found, rest := m.take([]byte(`[{"m":{"e":"a","x":1}}, {"m":{"e":"b"}},{}]`))
	if found != "a" || string(rest) != `[{"m":{"x":1}}, {},{}]` {
		t.Errorf("found %q, left %s", found, rest)
	}
}

// While the plan of a permuted pod is not loaded, clients that ask for routed experts are answered by another pod, or told
// to try again; the answer that they wait for comes with the plan.
func TestAsksWhileThePlanIsPending(t *testing.T) {
	handler := func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) }
	permuted, plain := newEngine(t, "permuted", 2, handler), newEngine(t, "plain", 2, handler)
	permuted.PlanDigest, permuted.Permuted, permuted.Shape = strings.Repeat("d", 64), true, &permutedShape
	layout := permutedLayout(2, 2, 0, 3, 1)
	layout.digest = permuted.PlanDigest
	adapter, err := registry.For("SGLang")
	if err != nil {
		t.Fatal(err)
	}
	serve := func(wait time.Duration, backends ...Backend) (string, *Pool) {
		pool := NewPool()
		pool.Set(backends)
		url, _ := proxyServer(t, pool, ProxyOptions{RankHeader: rankHeader, MaxBodyBytes: 1 << 16, EndpointWait: wait, RoutedExperts: adapter.RoutedExperts})
		return url, pool
	}
	const asking, other = `{"prompt":"x","return_routed_experts":true}`, `{"prompt":"x"}`
	url, _ := serve(time.Millisecond, permuted)
	if response, body := post(t, url+"/v1/completions", asking); response.StatusCode != http.StatusServiceUnavailable || response.Header.Get("Retry-After") == "" || !strings.Contains(body, "logical ids") {
		t.Errorf("%s: %s", response.Status, body)
	}
	if response, _ := post(t, url+"/v1/completions", other); response.StatusCode != http.StatusOK {
		t.Errorf("a client that does not ask gets %s", response.Status)
	}
	url, pool := serve(time.Millisecond, permuted, plain)
	used := func(body string) map[string]bool {
		pods := map[string]bool{}
		for range 60 {
			response, _ := post(t, url+"/v1/completions", body)
			pods[response.Header.Get(HeaderPod)] = true
		}
		return pods
	}
	if diff := cmp.Diff(map[string]bool{"plain": true}, used(asking)); diff != "" {
		t.Error(diff)
	}
	both := map[string]bool{"plain": true, "permuted": true}
	if diff := cmp.Diff(both, used(other)); diff != "" {
		t.Error(diff)
	}
	pool.AddLayout(layout)
	if diff := cmp.Diff(both, used(asking)); diff != "" {
		t.Error(diff)
	}
	url, pool = serve(time.Minute, permuted)
	answered := make(chan int, 1)
	go func() {
		response, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(asking))
		if err != nil {
			t.Error(err)
			answered <- 0
			return
		}
		response.Body.Close()
		answered <- response.StatusCode
	}()
	pool.AddLayout(layout)
	if code := <-answered; code != http.StatusOK {
		t.Errorf("a client that waited got %d", code)
	}
}

var routedExperts = regexp.MustCompile(`"routed_experts":\s*"([^"]+)"`)

// On the real engine a permuted checkpoint cannot be told from the original: the same answers, the same routed experts for
// clients that ask, and the local activation rate of the engine with an expert map.
func TestPermutedCheckpoint(t *testing.T) {
	p, _ := plans(t)
	permutation, err := reshuffle.ParsePermutation(p.artifact.Files[plan.GatePermutationFile])
	if err != nil {
		t.Fatal(err)
	}
	checkpoint := filepath.Join(t.TempDir(), "permuted")
	if _, err := reshuffle.Run(context.Background(), reshuffle.Options{Model: tinyCheckpoint, Permutation: permutation, Out: checkpoint}); err != nil {
		t.Fatal(err)
	}
	adapter, err := registry.For("SGLang")
	if err != nil {
		t.Fatal(err)
	}
	serve := func(address string, permuted bool) (string, *Observations) {
		pool := NewPool()
		pool.Set([]Backend{{Pod: "p", Address: address, Ranks: 4, Revision: "r", PlanDigest: p.artifact.Digest, Permuted: permuted, Shape: &tinyShape}})
		pool.AddLayout(p.layout)
		return proxyServer(t, pool, ProxyOptions{
			RankHeader: adapter.RankHeader, RoutedExperts: adapter.RoutedExperts, SamplePercent: 100, MaxBodyBytes: 1 << 20, EndpointWait: time.Second,
		})
	}
	permutedEngine := startReferenceEngineOn(t, checkpoint, locality.Trivial)
	permutedURL, permuted := serve(permutedEngine, true)
	mappedURL, mapped := serve(startReferenceEngine(t, string(p.artifact.Files[plan.MapFile(adapter)])), false)

	prompts := []string{"func main() {", "SELECT name FROM users", "der Hund und die Katze", "if err != nil {"}
	before := engineActivations(t, permutedEngine)
	for i := range 24 {
		body := fmt.Sprintf(`{"text":%q,"sampling_params":{"temperature":0,"max_new_tokens":4}}`, prompts[i%len(prompts)])
		if got, want := steady(fetch(t, permutedURL+"/generate", body)), steady(fetch(t, mappedURL+"/generate", body)); got != want {
			t.Fatalf("the answer differs:\n%s\n%s", got, want)
		}
	}
	after := engineActivations(t, permutedEngine)
	if got, want := total(permuted), (lar.Activations{Local: after.Local - before.Local, Total: after.Total - before.Total}); got != want || want.Total == 0 {
		t.Errorf("observed %+v, the engine computed %+v", got, want)
	}
	if got, want := total(permuted), total(mapped); got.Total != want.Total || math.Abs(rateOf(permuted)-rateOf(mapped)) > 0.01 {
		t.Errorf("observed %+v, with an expert map %+v", got, want)
	}
	t.Logf("LAR %.4f, with an expert map %.4f", rateOf(permuted), rateOf(mapped))

	for name, request := range map[string]struct{ path, body string }{
		"native":              {"/generate", `{"text":%q,"sampling_params":{"temperature":0,"max_new_tokens":4},"return_routed_experts":true}`},
		"native, stream":      {"/generate", `{"text":%q,"sampling_params":{"temperature":0,"max_new_tokens":4},"return_routed_experts":true,"stream":true}`},
		"completions":         {"/v1/completions", `{"model":"tiny","prompt":%q,"temperature":0,"max_tokens":4,"return_routed_experts":true}`},
		"completions, stream": {"/v1/completions", `{"model":"tiny","prompt":%q,"temperature":0,"max_tokens":4,"return_routed_experts":true,"stream":true}`},
		"chat":                {"/v1/chat/completions", `{"model":"tiny","messages":[{"role":"user","content":%q}],"temperature":0,"max_tokens":4,"return_routed_experts":true}`},
		"chat, stream":        {"/v1/chat/completions", `{"model":"tiny","messages":[{"role":"user","content":%q}],"temperature":0,"max_tokens":4,"return_routed_experts":true,"stream":true}`},
	} {
		for _, prompt := range prompts {
			body := fmt.Sprintf(request.body, prompt)
			got, want := steady(fetch(t, permutedURL+request.path, body)), steady(fetch(t, mappedURL+request.path, body))
			if got != want {
				t.Errorf("%s: the answer differs:\n%s\n%s", name, got, want)
			}
			told := routedExperts.FindAllString(got, -1)
			raw := routedExperts.FindAllString(fetch(t, "http://"+permutedEngine+request.path, body), -1)
			if len(told) == 0 || len(told) != len(raw) || slices.Equal(told, raw) {
				t.Errorf("%s: the engine tells %d times, the router %d: the test shows nothing", name, len(raw), len(told))
			}
		}
	}
}

// proxyServer serves a router.
func proxyServer(t *testing.T, pool *Pool, options ProxyOptions) (string, *Observations) {
	t.Helper()
	proxy, observations := NewProxy(pool, prometheus.NewRegistry(), logr.Discard(), options)
	server := httptest.NewServer(proxy)
	t.Cleanup(server.Close)
	return server.URL, observations
}
