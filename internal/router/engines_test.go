// SPDX-License-Identifier: Apache-2.0

package router

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/plans/planstest"
	"github.com/semmoe/operator/internal/router/wire"
)

func adapterOf(t *testing.T, engineType string) engine.Adapter {
	t.Helper()
	adapter, err := registry.For(engineType)
	if err != nil {
		t.Fatal(err)
	}
	return adapter
}

// routerFor serves a router with the settings of an engine in front of one backend.
func routerFor(t *testing.T, adapter engine.Adapter, percent int, backend discovery.Backend) (string, *Observations) {
	t.Helper()
	options := Options{ProxyOptions: ProxyOptions{
		RankHeader: adapter.RankHeader, RankRoutes: adapter.RankRoutes, RoutingKeyHeader: adapter.RoutingKeyHeader, RoutedExperts: adapter.RoutedExperts, SamplePercent: percent, MaxBodyBytes: 64 << 20, EndpointWait: time.Second,
	}}
	pool := NewPool()
	pool.Set(options.backends([]discovery.Backend{backend}))
	proxy, observations := NewProxy(pool, prometheus.NewRegistry(), logr.Discard(), options.ProxyOptions)
	server := httptest.NewServer(proxy)
	t.Cleanup(server.Close)
	return server.URL, observations
}

// askForRank sends a request with a rank that the client chose.
func askForRank(t *testing.T, url string) *http.Response {
	t.Helper()
	request, err := http.NewRequest(http.MethodPost, url+"/v1/completions", strings.NewReader(`{"prompt":"x"}`))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set(rankHeader, "17")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	return response
}

// TestPinsByTheHeaderOfTheEngine checks that each engine is pinned with its own header, and that the header of a client
// is dropped.
func TestPinsByTheHeaderOfTheEngine(t *testing.T) {
	for _, adapter := range registry.All() {
		headers := make(chan http.Header, 1)
		backend := newEngine(t, "a", 4, func(_ http.ResponseWriter, r *http.Request) { headers <- r.Header.Clone() })
		url, _ := routerFor(t, adapter, 0, backend)
		response := askForRank(t, url)
		response.Body.Close()
		if response.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s", adapter.Type, response.Status)
		}
		got := <-headers
		rank := got.Get("X-Data-Parallel-Rank")
		if pinned := len(rank) == 1 && rank >= "0" && rank <= "3"; pinned != adapter.CanPinRank() || response.Header.Get(HeaderRank) == "0" && !adapter.CanPinRank() {
			t.Errorf("%s: the engine got rank %q, the client %q", adapter.Type, rank, response.Header.Get(HeaderRank))
		}
	}
}

// TestUsesTheAdapterOfEachPod checks that the router uses the API of the engine of each pod, regardless of the engine
// that the router is configured for, as during a rollout of another engine. An engine that reports experts unasked is
// asked too: vLLM with the plug-in of integrations/vllm reports them only then.
func TestUsesTheAdapterOfEachPod(t *testing.T) {
	for _, configured := range registry.All() {
		for _, own := range []string{"SGLang", "VLLM", "TensorRTLLM"} {
			bodies := make(chan string, 1)
			backend := newEngine(t, "a", 4, func(w http.ResponseWriter, r *http.Request) {
				body, err := io.ReadAll(r.Body)
				if err != nil {
					t.Error(err)
				}
				bodies <- r.Header.Get(rankHeader) + string(body)
				fmt.Fprintf(w, `{"choices":[{"text":"b","routed_experts":%q}]}`, vllmRouting())
			})
			backend.Engine, backend.Shape = own, &planstest.Shape
			url, _ := routerFor(t, configured, 100, backend)
			response := askForRank(t, url)
			body, err := io.ReadAll(response.Body)
			response.Body.Close()
			if err != nil || response.StatusCode != http.StatusOK {
				t.Fatalf("%s behind a router for %s: %s, %v", own, configured.Type, response.Status, err)
			}
			rank, asked, _ := strings.Cut(<-bodies, "{")
			if pinned := len(rank) == 1 && rank >= "0" && rank <= "3"; pinned != (own != "TensorRTLLM") || !pinned && rank != "" {
				t.Errorf("%s behind a router for %s gets rank %q", own, configured.Type, rank)
			}
			if asks := strings.Contains(asked, `"return_routed_experts":true`); asks != (own != "TensorRTLLM") {
				t.Errorf("%s behind a router for %s gets %s", own, configured.Type, asked)
			}
			if returned := strings.Contains(string(body), "routed_experts"); returned && own == "VLLM" {
				t.Errorf("%s behind a router for %s: the client gets %s", own, configured.Type, body)
			}
		}
	}
}

// TestUnderstandsTheFieldsOfAllEngines checks that a client may use the field names of any engine, regardless of the
// engine that the router is configured for.
func TestUnderstandsTheFieldsOfAllEngines(t *testing.T) {
	for _, configured := range registry.All() {
		s := newStages(NewPool(), prometheus.NewRegistry(), ProxyOptions{RankHeader: configured.RankHeader, RoutedExperts: configured.RoutedExperts, SamplePercent: 100})
		for body, want := range map[string]struct{ shifted, asks bool }{
			`{"prompt":"x"}`: {},
			`{"prompt":"x","return_routed_experts":true}`:       {asks: true},
			`{"prompt":"x","routed_experts_start_len":1}`:       {shifted: true},
			`{"prompt":"x","routed_experts_prompt_start":1}`:    {shifted: true},
			`{"prompt":NaN,"routed_experts_prompt_start":1}`:    {shifted: true},
			`{"prompt":"x","routed_experts_prompt_start":null}`: {},
		} {
			r := s.reader.read(t.Context(), engine.APIOf("/v1/completions"), "id", nil, wire.ParseBody([]byte(body)))
			if r.shifted != want.shifted || r.sampled == want.shifted || r.asksExperts != want.asks {
				t.Errorf("a router for %s reads %s: shifted %v, sampled %v, asks %v", configured.Type, body, r.shifted, r.sampled, r.asksExperts)
			}
		}
	}
}

// TestRespectsDeclinedExperts checks that a client that declines the experts gets none, regardless of what its engine
// reports.
func TestRespectsDeclinedExperts(t *testing.T) {
	for _, value := range []string{"false", "null"} {
		backend := newEngine(t, "p", 4, func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintf(w, `{"choices":[{"text":"b","routed_experts":%q}]}`, vllmRouting())
		})
		url, observations := routerFor(t, adapterOf(t, "VLLM"), 100, backend)
		got := fetch(t, url+"/v1/completions", `{"prompt":"x","return_routed_experts":`+value+`}`)
		if want := `{"choices":[{"text":"b"}]}`; got != want {
			t.Errorf("%s: got %s, want %s", value, got, want)
		}
		if p := observations.report().Population; p.Eligible != 1 || p.Sampled != 1 {
			t.Errorf("%s: of %d requests %d are sampled", value, p.Eligible, p.Sampled)
		}
	}
}

// vllmRouting returns vLLM's routed experts of two tokens: an array of two tokens, four layers and four experts, 8 to
// 11, which are on one of four ranks.
func vllmRouting() string {
	header := "{'descr': '|u1', 'fortran_order': False, 'shape': (2, 4, 4), }"
	header += strings.Repeat(" ", 128-10-len(header)-1) + "\n"
	file := append([]byte("\x93NUMPY\x01\x00"), binary.LittleEndian.AppendUint16(nil, uint16(len(header)))...)
	file = append(file, header...)
	for range 2 * 4 {
		file = append(file, 8, 9, 10, 11)
	}
	return base64.StdEncoding.EncodeToString(file)
}

// TestObservesVLLM checks the handling of vLLM, which returns the experts of every unstreamed request, and with the
// plug-in of integrations/vllm only if asked. No client gets experts that it did not request, the experts of sampled
// requests are counted, and a stream, which has none, is not a failure.
func TestObservesVLLM(t *testing.T) {
	for name, onlyAsked := range map[string]bool{"vLLM's own": false, "the plug-in's": true} {
		t.Run(name, func(t *testing.T) { observeVLLM(t, onlyAsked) })
	}
}

func observeVLLM(t *testing.T, onlyAsked bool) {
	if planstest.Shape.Layers != 4 || planstest.Shape.ExpertsPerToken != 4 || len(planstest.Shape.MoELayers) != 4 {
		t.Fatalf("the fixture is not made for %+v", planstest.Shape)
	}
	backend := newEngine(t, "a", 4, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		if r.URL.Path != "/v1/completions" {
			fmt.Fprintf(w, `{"tokens":[1],"choices":[{"routed_experts":"not touched"}]}`)
			return
		}
		if strings.Contains(string(body), `"stream":true`) {
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: [DONE]\n\n")
			return
		}
		w.Header().Set("X-Got", string(body))
		if onlyAsked && !strings.Contains(string(body), `"return_routed_experts":true`) {
			fmt.Fprint(w, `{"id":"c","choices":[{"index":0,"text":"a"},{"index":1,"text":"b"}],"usage":{}}`)
			return
		}
		fmt.Fprintf(w, `{"id":"c","choices":[{"index":0,"text":"a","routed_experts":%q},{"index":1,"text":"b","routed_experts":%q}],"usage":{}}`, vllmRouting(), vllmRouting())
	})
	backend.Shape, backend.Revision = &planstest.Shape, "r"
	const want = `{"id":"c","choices":[{"index":0,"text":"a"},{"index":1,"text":"b"}],"usage":{}}`
	for _, percent := range []int{0, 100} {
		url, observations := routerFor(t, adapterOf(t, "VLLM"), percent, backend)
		response, got := post(t, url+"/v1/completions", `{"prompt":"x"}`)
		sent := map[int]string{0: `{"prompt":"x"}`, 100: `{"return_routed_experts":true,"prompt":"x"}`}[percent]
		if got != want || response.Header.Get("X-Got") != sent {
			t.Errorf("%d%%: the client gets %s, the engine %s", percent, got, response.Header.Get("X-Got"))
		}
		if _, got := post(t, url+"/v1/completions", `{"prompt":"x","stream":true}`); !strings.HasPrefix(got, `data: {"choices":[{"text":"a"}]}`) {
			t.Errorf("%d%%: the stream is %s", percent, got)
		}
		if _, got := post(t, url+"/v1/completions", `{"prompt":"x","return_routed_experts":true}`); !strings.Contains(got, "routed_experts") {
			t.Errorf("%d%%: requested by the client was stripped: %s", percent, got)
		}
		if _, got := post(t, url+"/tokenize", `{"prompt":"x"}`); !strings.Contains(got, "not touched") {
			t.Errorf("%d%%: %s", percent, got)
		}
		recent := observations.recent()
		if failures := testutil.ToFloat64(observations.failures); len(recent) != percent/100 || failures != 0 {
			t.Fatalf("%d%%: %d observations, %v failures", percent, len(recent), failures)
		}
		if percent == 0 {
			continue
		}
		if recent[0].Tokens != 2 || recent[0].Total != 32 || recent[0].Local != 0 && recent[0].Local != 32 {
			t.Errorf("%+v", recent[0])
		}
	}
}

// TestObservesABatch checks a batch on SGLang's native route, which has an array as response: experts are removed from
// each element, and those of the first are counted.
func TestObservesABatch(t *testing.T) {
	var raw []byte
	for i := range uint32(4 * 4) {
		raw = binary.LittleEndian.AppendUint32(raw, i%4)
	}
	routing := base64.StdEncoding.EncodeToString(raw)
	backend := newEngine(t, "a", 4, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, `[{"text":"a","meta_info":{"routed_experts":%q,"id":1}},{"text":"b","meta_info":{"id":2,"routed_experts":%q}}]`, routing, routing)
	})
	backend.Shape, backend.Revision = &planstest.Shape, "r"
	url, observations := routerFor(t, adapterOf(t, "SGLang"), 100, backend)
	_, got := post(t, url+"/generate", `{"text":["x","y"]}`)
	if want := `[{"text":"a","meta_info":{"id":1}},{"text":"b","meta_info":{"id":2}}]`; got != want || !json.Valid([]byte(got)) {
		t.Errorf("the client gets %s", got)
	}
	if recent := observations.recent(); len(recent) != 1 || recent[0].Tokens != 1 {
		t.Errorf("%+v", recent)
	}
}

// TestDoesNotAskEnginesWithoutRoutedExperts checks that an engine that cannot report experts is not asked, regardless
// of the percentage.
func TestDoesNotAskEnginesWithoutRoutedExperts(t *testing.T) {
	backend := newEngine(t, "a", 0, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Write(body) //nolint:errcheck // the test checks the outcome
	})
	url, observations := routerFor(t, adapterOf(t, "TensorRTLLM"), 100, backend)
	if _, got := post(t, url+"/v1/completions", `{"prompt":"x"}`); got != `{"prompt":"x"}` {
		t.Errorf("the engine got %s", got)
	}
	if failures := testutil.ToFloat64(observations.failures); failures != 0 {
		t.Errorf("%v failures", failures)
	}
}

// TestRetriesWithoutCapture checks that a request that an engine rejects with the router's change is sent once more
// unchanged. Such a request is not sampled and counts once. A request that the router has not changed is sent once.
func TestRetriesWithoutCapture(t *testing.T) {
	const mine = `"return_routed_experts":true`
	for name, tc := range map[string]struct {
		percent    int
		body       string
		refuses    func(body string) bool
		code       int
		sent, want int // number of requests at the engine, and the status code of the client
	}{
		"unsupported":             {100, `{"prompt":"x"}`, func(body string) bool { return strings.Contains(body, mine) }, 400, 2, 200},
		"unsupported, 422":        {100, `{"prompt":"x"}`, func(body string) bool { return strings.Contains(body, mine) }, 422, 2, 200},
		"a bad request":           {100, `{"prompt":7}`, func(string) bool { return true }, 400, 2, 400},
		"not sampled":             {0, `{"prompt":7}`, func(string) bool { return true }, 400, 1, 400},
		"requested by the client": {100, `{` + mine + `}`, func(string) bool { return true }, 400, 1, 400},
		"another refusal":         {100, `{"prompt":"x"}`, func(string) bool { return true }, 401, 1, 401},
	} {
		t.Run(name, func(t *testing.T) {
			var sent atomic.Int32
			var observations *Observations
			backend := newEngine(t, "a", 4, func(w http.ResponseWriter, r *http.Request) {
				if held := observations.reserved.Load(); sent.Add(1) == 2 && held != 0 {
					t.Errorf("%d bytes are reserved for a request that is not sampled", held)
				}
				body, err := io.ReadAll(r.Body)
				if err != nil || int64(len(body)) != r.ContentLength {
					t.Error(len(body), r.ContentLength, err)
				}
				if tc.refuses(string(body)) {
					w.WriteHeader(tc.code)
				}
				w.Write(body) //nolint:errcheck // the client verifies the body
			})
			backend.Shape, backend.Revision = &planstest.Shape, "r"
			pool := NewPool()
			pool.Set([]discovery.Backend{backend})
			adapter, registry := adapterOf(t, "SGLang"), prometheus.NewRegistry()
			url, o := proxyServerOn(t, registry, pool, ProxyOptions{
				RankHeader: adapter.RankHeader, RankRoutes: adapter.RankRoutes, RoutedExperts: adapter.RoutedExperts, SamplePercent: tc.percent, MaxBodyBytes: 1 << 20, EndpointWait: time.Second,
			})
			observations = o
			response, got := post(t, url+"/v1/completions", tc.body)
			if response.StatusCode != tc.want || got != tc.body && sent.Load() == 2 || int(sent.Load()) != tc.sent || response.Header.Get(HeaderPod) != "a" {
				t.Errorf("sent %d times; the client gets %s: %s", sent.Load(), response.Status, got)
			}
			eventually(t, "no token is outstanding", func() bool { return outstanding(pool) == 0 })
			report := observations.report()
			eligible := int64(0)
			if tc.want == http.StatusOK {
				eligible = 1
			}
			if p := report.Population; p.Eligible != eligible || p.Sampled != 0 || len(report.Observations) != 0 || testutil.ToFloat64(observations.failures) != 0 {
				t.Errorf("%+v, %d observations", p, len(report.Observations))
			}
			if served := servedBy(t, observations)["r"].Requests; served != 1 {
				t.Errorf("%d requests were served", served)
			}
			if tokens := requestOf("/v1/completions", "", []byte(tc.body)).tokens; countedTokens(t, registry) != float64(tokens) {
				t.Errorf("%v tokens are counted, want %d", countedTokens(t, registry), tokens)
			}
		})
	}
}

// countedTokens returns the estimated tokens of a router, summed over the ranks.
func countedTokens(t *testing.T, registry *prometheus.Registry) (sum float64) {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() == "semmoe_router_estimated_tokens_total" {
			for _, metric := range family.Metric {
				sum += metric.GetCounter().GetValue()
			}
		}
	}
	return sum
}

// TestSamplesNoShiftedRows checks that a request that excludes the experts of the first tokens is neither
// sampled nor eligible, and is not changed.
func TestSamplesNoShiftedRows(t *testing.T) {
	for engineType, body := range map[string]string{
		"SGLang": `{"prompt":"x","routed_experts_start_len":1}`,
		"VLLM":   `{"prompt":"x","routed_experts_prompt_start":1}`, "VLLMAscend": `{"prompt":"x","routed_experts_prompt_start":1}`,
	} {
		backend := newEngine(t, "a", 4, func(w http.ResponseWriter, r *http.Request) {
			got, _ := io.ReadAll(r.Body)
			fmt.Fprintf(w, `{"got":%q,"choices":[{"routed_experts":%q}],"usage":{}}`, got, vllmRouting())
		})
		backend.Shape, backend.Revision = &planstest.Shape, "r"
		url, observations := routerFor(t, adapterOf(t, engineType), 100, backend)
		if _, got := post(t, url+"/v1/completions", body); !strings.Contains(got, fmt.Sprintf("%q", body)) {
			t.Errorf("%s: the answer is %s", engineType, got)
		}
		report := observations.report()
		if len(report.Observations) != 0 || report.Population.Eligible != 0 || testutil.ToFloat64(observations.failures) != 0 {
			t.Errorf("%s: %+v", engineType, report)
		}
		if engineType != "SGLang" {
			if _, got := post(t, url+"/v1/completions", body); strings.Contains(got, "routed_experts\":\"") {
				t.Errorf("%s: the client gets what it has not asked for: %s", engineType, got)
			}
		}
	}
}

// TestSamplesNoLongRequests checks that experts that would take too much memory are not requested and that the request
// is not eligible. Experts that the engine reports unasked are removed.
func TestSamplesNoLongRequests(t *testing.T) {
	long := `{"prompt":"` + strings.Repeat("abc ", 800_000) + `"}`
	for _, engineType := range []string{"SGLang", "VLLM"} {
		backend := newEngine(t, "a", 4, func(w http.ResponseWriter, r *http.Request) {
			got, _ := io.ReadAll(r.Body)
			fmt.Fprintf(w, `{"got":%q,"choices":[{"routed_experts":%q}],"usage":{}}`, got, vllmRouting())
		})
		backend.Shape, backend.Revision = &planstest.Shape, "r"
		adapter := adapterOf(t, engineType)
		url, observations := routerFor(t, adapter, 100, backend)
		_, got := post(t, url+"/v1/completions", long)
		if !strings.Contains(got, fmt.Sprintf("%q", long)) || adapter.RoutedExperts.Unrequested && strings.Contains(got, "routed_experts") {
			t.Errorf("%s: the answer is %.99s", engineType, got)
		}
		report := observations.report()
		if p := report.Population; len(report.Observations) != 0 || p.Eligible != 0 || p.Long != 1 || testutil.ToFloat64(observations.failures) != 0 {
			t.Errorf("%s: %d observations, %+v", engineType, len(report.Observations), p)
		}
	}
}

// TestSamplesLongAnswersWithinMemory checks that a response that is far longer than expected is counted if the memory
// suffices, and is not sampled if not.
func TestSamplesLongAnswersWithinMemory(t *testing.T) {
	for _, engineType := range []string{"SGLang", "VLLM"} {
		for _, free := range []int64{1 << 20, 2 << 10} {
			var observations *Observations
			backend := newEngine(t, "a", 4, func(w http.ResponseWriter, _ *http.Request) {
				observations.reserved.Add(maxReservedBytes - free) // reserved by other requests
				answer := fmt.Sprintf(`{"text":%q,"choices":[{"routed_experts":%[2]q}],"sglext":{"routed_experts":%[2]q},"usage":{}}`, strings.Repeat("a", 100<<10), vllmRouting())
				w.Header().Set("Content-Length", strconv.Itoa(len(answer)))
				io.WriteString(w, answer) //nolint:errcheck // the client verifies the body
			})
			backend.Shape, backend.Revision = &planstest.Shape, "r"
			url, o := routerFor(t, adapterOf(t, engineType), 100, backend)
			observations = o
			_, got := post(t, url+"/v1/completions", `{"prompt":"x","max_tokens":1}`)
			p, fits := o.report().Population, free > 100<<10
			// The experts of the other engine are kept, and all experts in a response that exceeds the memory.
			if left := strings.Count(got, "routed_experts"); fits != (left == 1) || fits == (left == 2) || fits != (testutil.ToFloat64(o.givenUp) == 0) {
				t.Errorf("%s, %d bytes are free: experts are left at %d places", engineType, free, left)
			}
			if fits != (p.Sampled == 1 && p.Long == 0) || fits == (p.Sampled == 0 && p.Eligible == 0 && p.Long == 1) {
				t.Errorf("%s, %d bytes are free: %+v", engineType, free, p)
			}
			eventually(t, "nothing is reserved", func() bool { return o.reserved.Load() == maxReservedBytes-free })
		}
	}
}

// TestExpertBytes checks the estimate: each answer repeats the experts of the prompt, and an answer is usually shorter
// than its limit.
func TestExpertBytes(t *testing.T) {
	text := strings.Repeat("abc ", 1000)
	for name, tc := range map[string]struct {
		path, body string
		rows       int64 // excluding the few other bytes of the body
	}{
		"one":                  {"/v1/completions", `{"prompt":"` + text + `","max_tokens":500}`, 1500},
		"a generous limit":     {"/v1/completions", `{"prompt":"` + text + `","max_tokens":32768}`, 1000 + 4096},
		"a generous stream":    {"/v1/completions", `{"prompt":"` + text + `","max_tokens":32768,"stream":true}`, 1000 + 16384},
		"three answers":        {"/v1/completions", `{"prompt":"` + text + `","max_tokens":500,"n":3}`, 3 * 1500},
		"three of SGLang's":    {"/generate", `{"text":"` + text + `","sampling_params":{"max_new_tokens":500,"n":3}}`, 3 * 1500},
		"two prompts":          {"/generate", `{"text":["` + text + `","` + text + `"],"sampling_params":{"max_new_tokens":9000,"n":2}}`, 4 * (1000 + 4096)},
		"more than is counted": {"/v1/completions", `{"prompt":"` + text + `","n":1000000}`, maxExpertBytes - 1},
	} {
		shape := planstest.Shape
		got := expertBytes(requestOf(tc.path, "", []byte(tc.body)), &Lease{Backend: discovery.Backend{Shape: &shape}}) * 3 / 16 / int64(shape.Layers*shape.ExpertsPerToken)
		if got < tc.rows || got > tc.rows+tc.rows/20 {
			t.Errorf("%s: %d rows, want %d", name, got, tc.rows)
		}
	}
}

// TestSamplesWithinBoundedMemory checks that the memory of all sampled requests is bounded. Requests beyond the bound
// are not sampled until others have ended or turn out to need no memory.
func TestSamplesWithinBoundedMemory(t *testing.T) {
	for _, engineType := range []string{"SGLang", "VLLM"} {
		pool := newPool(discovery.Backend{Pod: "a", Address: "a:1", Ranks: 4, Shape: &planstest.Shape})
		s := newStages(pool, prometheus.NewRegistry(), ProxyOptions{RankHeader: rankHeader, RoutedExperts: adapterOf(t, engineType).RoutedExperts, SamplePercent: 100})
		body := []byte(`{"prompt":"` + strings.Repeat("abc ", 600_000) + `"}`) // 51 MB
		begin := func() (*request, *Lease, capture) {
			r := s.reader.read(t.Context(), engine.APIOf("/v1/completions"), "id", nil, wire.ParseBody(body))
			lease, ok := pool.acquire(r, nil)
			if !ok {
				t.Fatal("no rank is left")
			}
			return r, lease, s.sampler.requestExperts(r, lease)
		}
		var leases []*Lease
		for i := range 6 {
			_, lease, capture := begin()
			if leases = append(leases, lease); capture.sampled != (i < 2) || capture.long {
				t.Errorf("%s: request %d: %+v", engineType, i, capture)
			}
		}
		leases[0].Release()
		leases[0].Release()
		for i := range 2 {
			_, lease, capture := begin()
			if leases = append(leases, lease); capture.sampled != (i == 0) {
				t.Errorf("%s: request %d after one has ended: %+v", engineType, i, capture)
			}
		}
		for _, lease := range leases {
			lease.Release()
		}
		if held := s.observations.reserved.Load(); held != 0 {
			t.Errorf("%s: %d bytes are still reserved", engineType, held)
		}
		// A response that declares its length reserves that much.
		_, lease, capture := begin()
		for size, sampled := range map[string]bool{"": true, "1000": true, fmt.Sprint(60 << 20): true, fmt.Sprint(65 << 20): false} {
			if got := s.sampler.limitResponse(&http.Response{Header: http.Header{"Content-Length": {size}}}, lease, capture); got.sampled != sampled || got.long == sampled {
				t.Errorf("%s: an answer of %s bytes: %+v", engineType, size, got)
			}
		}
		if held := s.observations.reserved.Load(); held != 60<<20 { // nothing is reserved for a response that does not fit
			t.Errorf("%s: %d bytes are reserved, want %d", engineType, held, 60<<20)
		}
		lease.Release()
		body = []byte(`{"prompt":"x","` + adapterOf(t, engineType).RoutedExperts.RequestField + `":true}`)
		_, lease, capture = begin()
		if held := s.observations.reserved.Load(); capture.sampled || held != 0 {
			t.Errorf("%s: %d bytes are reserved for experts that the client requests: %+v", engineType, held, capture)
		}
		lease.Release()
		body = []byte(`{"prompt":"x"}`)
		r, lease, capture := begin()
		stream := &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"text/event-stream"}}, Body: http.NoBody}
		s.sampler.countEligible(stream, r, lease, capture, time.Now())
		if held := s.observations.reserved.Load(); (held == 0) != (engineType == "VLLM") {
			t.Errorf("%s: %d bytes are reserved for a stream", engineType, held)
		}
		lease.Release()
		if held := s.observations.reserved.Load(); held != 0 {
			t.Errorf("%s: %d bytes are reserved after a stream", engineType, held)
		}
	}
}

// TestUncountedExpertsAreBufferedOnce checks that a response with experts that are not counted is buffered once,
// regardless of their number.
func TestUncountedExpertsAreBufferedOnce(t *testing.T) {
	routing := strings.Repeat("A", 8<<20)
	answer := fmt.Sprintf(`{"choices":[{"index":0,"routed_experts":%q},{"index":1,"routed_experts":%q}]}`, routing, routing)
	response := &http.Response{
		Header: http.Header{"Content-Type": {"application/json"}, "Content-Length": {fmt.Sprint(len(answer))}},
		Body:   io.NopCloser(strings.NewReader(answer)),
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if err := (&responseCapture{engine: adapterOf(t, "VLLM").RoutedExperts, observations: &Observations{}, lease: &Lease{}}).wrap(response); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if taken := after.TotalAlloc - before.TotalAlloc; taken > uint64(len(answer)+len(answer)/4) {
		t.Errorf("an answer of %d bytes takes %d", len(answer), taken)
	}
	if rest, err := io.ReadAll(response.Body); err != nil || string(rest) != `{"choices":[{"index":0},{"index":1}]}` {
		t.Errorf("%v: the client gets %.99s", err, rest)
	}
}
