// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/model/reshuffle"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/refengine/locality"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/plans"
	"github.com/semmoe/operator/internal/router/plans/planstest"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
)

// permutedLayout returns a plan of three layers, the first of which is dense, for four experts on two ranks.
func permutedLayout(slotsPerRank int, slots ...int) *plans.Layout {
	return plans.New("d", &solver.Plan{HiddenLayers: 3, Placement: &placement.Placement{
		Ranks: 2, Experts: 4, SlotsPerRank: slotsPerRank, Layers: []placement.Layer{{Layer: 1, Slots: slots}},
	}}, nil)
}

var permutedShape = lar.Shape{Layers: 3, MoELayers: []int{1}, Experts: 4, ExpertsPerToken: 2}

func TestReportsLogicalExperts(t *testing.T) {
	l, other := permutedLayout(2, 2, 0, 3, 1), permutedShape
	other.Experts = 8
	for name, tc := range map[string]struct {
		backend discovery.Backend
		layout  *plans.Layout
		want    bool
	}{
		"not permuted":     {discovery.Backend{}, nil, true},
		"permuted":         {discovery.Backend{Permuted: true, Shape: &permutedShape}, l, true},
		"plan not loaded":  {discovery.Backend{Permuted: true, Shape: &permutedShape}, nil, false},
		"no shape":         {discovery.Backend{Permuted: true}, l, false},
		"another shape":    {discovery.Backend{Permuted: true, Shape: &other}, l, false},
		"redundant copies": {discovery.Backend{Permuted: true, Shape: &permutedShape}, permutedLayout(3, 0, 1, 2, 0, 3, 1), false},
	} {
		if got := reportsLogicalExperts(tc.backend, tc.layout); got != tc.want {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}

// encodedExperts encodes expert ids like SGLang.
func encodedExperts(ids ...int32) string {
	var data []byte
	for _, id := range ids {
		data = binary.LittleEndian.AppendUint32(data, uint32(id))
	}
	return base64.StdEncoding.EncodeToString(data)
}

// TestTranslate checks that a translation changes only the values at the engine's paths, and that unreadable values are
// not forwarded.
func TestTranslate(t *testing.T) {
	reported, logical := encodedExperts(0, 1, 0, 1, 0, 1), encodedExperts(0, 1, 2, 0, 0, 1)
	translate := func(data string) (string, error) {
		response := &http.Response{Header: http.Header{}, Body: io.NopCloser(strings.NewReader(data)), ContentLength: int64(len(data))}
		err := (&translator{
			engine: adapterOf(t, "SGLang").RoutedExperts,
			lease:  &Lease{Backend: discovery.Backend{Permuted: true, Shape: &permutedShape}, layout: permutedLayout(2, 2, 0, 3, 1)},
		}).wrap(response)
		if err != nil {
			return "", err
		}
		got, err := io.ReadAll(response.Body)
		return string(got), err
	}
	for _, data := range []string{
		`{"meta_info": {"routed_experts": "X", "x":[0,1]}}`, `[{"meta_info":{"routed_experts":"X"}},{"meta_info":{"routed_experts":null}}]`,
		`{"choices":[{"sglext":{"routed_experts":"X"}},{"sgl_ext":{"routed_experts":"X"}}],"e":1}`, `{"text":"no experts"}`,
		`{"sglext":{"routed_experts":""}}`,
	} {
		want := strings.ReplaceAll(data, "X", logical)
		if got, err := translate(strings.ReplaceAll(data, "X", reported)); got != want || err != nil {
			t.Errorf("%s became %s, %v; want %s", data, got, err, want)
		}
	}
	for _, data := range []string{`{"meta_info":{"routed_experts":1}}`, `{"meta_info":{"routed_experts":"x"}}`, `{"meta_info":{"routed_experts":[[0,1]]}}`} {
		if got, err := translate(data); err == nil {
			t.Errorf("%s became %s", data, got)
		}
	}
}

// TestTranslatesLongAnswers checks that translating the experts of a long prompt takes no additional memory, with and
// without streaming.
func TestTranslatesLongAnswers(t *testing.T) {
	const rows, chunks = 1000, 800
	reported := encodedExperts(slices.Repeat([]int32{0, 1, 0, 1, 0, 1}, rows)...)
	logical := encodedExperts(slices.Repeat([]int32{0, 1, 2, 0, 0, 1}, rows)...)
	permuted := newEngine(t, "permuted", 2, func(w http.ResponseWriter, r *http.Request) {
		before, after := `{"meta_info":{"routed_experts":"`, `"}}`
		if r.Header.Get("X-Stream") != "" {
			w.Header().Set("Content-Type", "text/event-stream")
			before, after = "data: "+before, after+"\n\n"
		} else {
			w.Header().Set("Content-Length", strconv.Itoa(len(before)+chunks*len(reported)+len(after)))
		}
		io.WriteString(w, before) //nolint:errcheck // the client verifies the body
		for range chunks {
			io.WriteString(w, reported) //nolint:errcheck // the client verifies the body
		}
		io.WriteString(w, after) //nolint:errcheck // the client verifies the body
	})
	permuted.PlanDigest, permuted.Permuted, permuted.Shape = "d", true, &permutedShape
	pool := newPool(permuted)
	pool.AddLayout(permutedLayout(2, 2, 0, 3, 1))
	url, _ := proxyServer(t, pool, ProxyOptions{RankHeader: rankHeader, MaxBodyBytes: 1 << 16, EndpointWait: time.Second, RoutedExperts: adapterOf(t, "SGLang").RoutedExperts})
	for _, stream := range []string{"", "yes"} {
		request, err := http.NewRequest(http.MethodPost, url+"/generate", strings.NewReader(`{"return_routed_experts":true}`))
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("X-Stream", stream)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		from := bufio.NewReader(response.Body)
		for lead := `{"meta_info":{"routed_experts":"`; lead != ""; { // after the prefix of an event
			if c, err := from.ReadByte(); err != nil {
				t.Fatal(err)
			} else if c == lead[0] {
				lead = lead[1:]
			}
		}
		got := make([]byte, len(logical))
		for i := range chunks {
			if _, err := io.ReadFull(from, got); err != nil || string(got) != logical {
				t.Fatalf("chunk %d: %v, %.60s; want %.60s", i, err, got, logical)
			}
		}
		response.Body.Close()
		runtime.ReadMemStats(&after)
		if took := after.TotalAlloc - before.TotalAlloc; took > 8<<20 {
			t.Errorf("%d bytes were allocated for an answer of %d", took, chunks*len(reported))
		}
	}
}

// TestUnreadableExpertsAreNotForwarded checks that unreadable experts end the response before any of them reach the
// client, with and without streaming.
func TestUnreadableExpertsAreNotForwarded(t *testing.T) {
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
	pool.Set([]discovery.Backend{permuted})
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

// TestRemovesExpertsOfABatch checks that requested experts are removed from every element of a batch response, and that those of
// the first element are counted.
func TestRemovesExpertsOfABatch(t *testing.T) {
	m := &responseCapture{engine: engine.RoutedExperts{ResponsePaths: [][]string{{"m", "e"}}}}
	found, rest := m.take([]byte(`[{"m":{"e":"a","x":1}}, {"m":{"e":"b"}},{}]`))
	if string(found) != `"a"` || string(rest) != `[{"m":{"x":1}}, {},{}]` {
		t.Errorf("found %q, left %s", found, rest)
	}
}

// TestExpertRequestsWhileThePlanIsPending checks that while the plan of a permuted pod is not loaded, clients that
// request routed experts are served by another pod or asked to retry. A waiting request is served when the plan is
// loaded.
func TestExpertRequestsWhileThePlanIsPending(t *testing.T) {
	handler := func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) }
	permuted, plain := newEngine(t, "permuted", 2, handler), newEngine(t, "plain", 2, handler)
	permuted.PlanDigest, permuted.Permuted, permuted.Shape = strings.Repeat("d", 64), true, &permutedShape
	layout := permutedLayout(2, 2, 0, 3, 1)
	layout.Digest = permuted.PlanDigest
	adapter, err := registry.For("SGLang")
	if err != nil {
		t.Fatal(err)
	}
	serve := func(wait time.Duration, backends ...discovery.Backend) (string, *Pool) {
		pool := NewPool()
		pool.Set(backends)
		url, _ := proxyServer(t, pool, ProxyOptions{RankHeader: rankHeader, MaxBodyBytes: 1 << 16, EndpointWait: wait, RoutedExperts: adapter.RoutedExperts})
		return url, pool
	}
	const asking, other = `{"prompt":"x","return_routed_experts":true}`, `{"prompt":"x"}`
	url, _ := serve(time.Millisecond, permuted)
	if response, body := post(t, url+"/v1/completions", asking); response.StatusCode != http.StatusServiceUnavailable || response.Header.Get("Retry-After") == "" || !strings.Contains(body, "logical expert IDs") {
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

// TestPermutedCheckpoint checks with a real engine that a permuted checkpoint is indistinguishable from the original:
// the same answers, the same routed experts for clients, and the local activation rate of the engine with an expert
// map.
func TestPermutedCheckpoint(t *testing.T) {
	p, _ := solved(t)
	permutation, err := reshuffle.ParsePermutation(p.Artifact.Files[plan.GatePermutationFile])
	if err != nil {
		t.Fatal(err)
	}
	checkpoint := filepath.Join(t.TempDir(), "permuted")
	if _, err := reshuffle.Run(context.Background(), reshuffle.Options{Model: planstest.Checkpoint, Permutation: permutation, Out: checkpoint}); err != nil {
		t.Fatal(err)
	}
	adapter, err := registry.For("SGLang")
	if err != nil {
		t.Fatal(err)
	}
	serve := func(address string, permuted bool) (string, *Observations) {
		pool := NewPool()
		pool.Set([]discovery.Backend{{Pod: "p", Address: address, Ranks: 4, Revision: "r", PlanDigest: p.Artifact.Digest, Permuted: permuted, Shape: &planstest.Shape}})
		pool.AddLayout(p.layout)
		return proxyServer(t, pool, ProxyOptions{
			RankHeader: adapter.RankHeader, RankRoutes: adapter.RankRoutes, RoutedExperts: adapter.RoutedExperts, SamplePercent: 100, MaxBodyBytes: 1 << 20, EndpointWait: time.Second,
		})
	}
	permutedEngine := startReferenceEngineOn(t, checkpoint, locality.Trivial)
	permutedURL, permuted := serve(permutedEngine, true)
	mappedURL, mapped := serve(startReferenceEngine(t, string(p.Artifact.Files[plan.MapFile(adapter)])), false)

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
			reported := routedExperts.FindAllString(got, -1)
			raw := routedExperts.FindAllString(fetch(t, "http://"+permutedEngine+request.path, body), -1)
			if len(reported) == 0 || len(reported) != len(raw) || slices.Equal(reported, raw) {
				t.Errorf("%s: the engine reports experts %d times, the router %d: the test is not significant", name, len(raw), len(reported))
			}
		}
	}
}

// proxyServer serves a router.
func proxyServer(t *testing.T, pool *Pool, options ProxyOptions) (string, *Observations) {
	t.Helper()
	return proxyServerOn(t, prometheus.NewRegistry(), pool, options)
}

// proxyServerOn is proxyServer with a metrics registry.
func proxyServerOn(t *testing.T, registry *prometheus.Registry, pool *Pool, options ProxyOptions) (string, *Observations) {
	t.Helper()
	proxy, observations := NewProxy(pool, registry, logr.Discard(), options)
	server := httptest.NewServer(proxy)
	t.Cleanup(server.Close)
	return server.URL, observations
}
