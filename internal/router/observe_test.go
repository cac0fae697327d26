// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/refengine"
	"github.com/semmoe/operator/internal/refengine/locality"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/plans"
	"github.com/semmoe/operator/internal/router/plans/planstest"
	"github.com/semmoe/operator/test/ports"
)

// startReferenceEngine serves the small model on four ranks with an expert map, and returns its address.
func startReferenceEngine(t *testing.T, expertMap string) string {
	t.Helper()
	return startReferenceEngineOn(t, planstest.Checkpoint, expertMap)
}

// startReferenceEngineOn serves a checkpoint with the shape of the small model.
func startReferenceEngineOn(t *testing.T, checkpoint, expertMap string) string {
	t.Helper()
	return startReferenceEngineWith(t, func(o *refengine.Options) { o.ModelPath, o.InitExpertLocation = checkpoint, expertMap })
}

// startReferenceEngineWith serves the small model on four ranks with changed options.
func startReferenceEngineWith(t *testing.T, change func(*refengine.Options)) string {
	t.Helper()
	options := refengine.DefaultOptions()
	options.ModelPath = planstest.Checkpoint
	options.ServedModelName = "tiny"
	options.TPSize, options.EPSize, options.DPSize, options.EnableDPAttention = 4, 4, 4, true
	options.EnableReturnRoutedExperts = true
	options.Port = ports.Reserve(t)
	change(&options)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- refengine.Run(ctx, options) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("the engine ended with %v", err)
		}
	})
	address := fmt.Sprintf("127.0.0.1:%d", options.Port)
	eventually(t, "the engine serves", func() bool {
		response, err := http.Get("http://" + address + "/health")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	return address
}

// TestObservesWhatTheEngineComputes checks that the router's count of every request equals the engine's own counters,
// and that clients get the same bytes as without capture.
func TestObservesWhatTheEngineComputes(t *testing.T) {
	address := startReferenceEngine(t, locality.Trivial)
	adapter, err := registry.For("SGLang")
	if err != nil {
		t.Fatal(err)
	}
	newProxy := func(percent int) (string, *Observations) {
		pool := NewPool()
		pool.Set([]discovery.Backend{{Pod: "p", Address: address, Ranks: 4, Revision: "r", Shape: &planstest.Shape}})
		proxy, observations := NewProxy(pool, prometheus.NewRegistry(), logr.Discard(), ProxyOptions{
			RankHeader: adapter.RankHeader, RankRoutes: adapter.RankRoutes, RoutedExperts: adapter.RoutedExperts, SamplePercent: percent, MaxBodyBytes: 1 << 20, EndpointWait: time.Second,
		})
		server := httptest.NewServer(proxy)
		t.Cleanup(server.Close)
		return server.URL, observations
	}
	sampling, observations := newProxy(100)
	plain, none := newProxy(0)

	requests := map[string]string{}
	for _, prompt := range []string{"func main() {", "SELECT name FROM", "der Hund und die"} {
		requests["/v1/completions "+prompt] = fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":6}`, prompt)
		requests["/v1/completions stream "+prompt] = fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":6,"stream":true,"stream_options":{"include_usage":true}}`, prompt)
		requests["/v1/chat/completions "+prompt] = fmt.Sprintf(`{"model":"tiny","messages":[{"role":"user","content":%q}],"max_tokens":5}`, prompt)
		requests["/v1/chat/completions stream "+prompt] = fmt.Sprintf(`{"model":"tiny","messages":[{"role":"user","content":%q}],"max_tokens":5,"stream":true}`, prompt)
		requests["/generate "+prompt] = fmt.Sprintf(`{"text":%q,"sampling_params":{"max_new_tokens":4}}`, prompt)
		requests["/generate stream "+prompt] = fmt.Sprintf(`{"text":%q,"sampling_params":{"max_new_tokens":4},"stream":true}`, prompt)
	}
	before := engineActivations(t, address)
	for name, body := range requests {
		path, _, _ := strings.Cut(name, " ")
		if got := steady(fetch(t, sampling+path, body)); strings.Contains(got, "routed_experts") || strings.Contains(got, "sglext") {
			t.Errorf("%s: the client got the routed experts: %s", name, got)
		}
	}
	after := engineActivations(t, address)
	sum := total(observations)
	if len(observations.recent()) != len(requests) {
		t.Errorf("%d observations of %d requests", len(observations.recent()), len(requests))
	}
	want := lar.Activations{Local: after.Local - before.Local, Total: after.Total - before.Total}
	if sum != want || want.Total == 0 {
		t.Errorf("observed %+v, the engine computed %+v", sum, want)
	}
	if rate := rateOf(observations); rate <= 0 || rate >= 1 {
		t.Errorf("the local activation rate is %v", rate)
	}

	for name, body := range requests {
		path, _, _ := strings.Cut(name, " ")
		if got, want := steady(fetch(t, sampling+path, body)), steady(fetch(t, plain+path, body)); got != want {
			t.Errorf("%s: a sampled answer differs:\n%s\n%s", name, got, want)
		}
	}
	if len(none.recent()) != 0 {
		t.Error("a router that samples nothing observed something")
	}
	// A client that requests the routed experts gets them.
	if got := fetch(t, sampling+"/generate", `{"text":"x","return_routed_experts":true,"sampling_params":{"max_new_tokens":2}}`); !strings.Contains(got, "routed_experts") {
		t.Errorf("the client's own wish was stripped: %s", got)
	}

	// /v1/observations contains the individual observations of the sums.
	recorder := httptest.NewRecorder()
	observations.ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/v1/observations", nil))
	var reported struct{ Observations []lar.Observation }
	if err := json.Unmarshal(recorder.Body.Bytes(), &reported); err != nil || len(reported.Observations) != 2*len(requests) || reported.Observations[0].Revision != "r" {
		t.Errorf("/v1/observations: %v, %d observations", err, len(reported.Observations))
	}
}

// TestObservesUnderAPlan checks that under a plan, the router's count by the plan's placement equals the engine's
// counters and is close to the forecast. The rate exceeds the rate of the same requests spread evenly over the ranks of
// an engine without a plan.
func TestObservesUnderAPlan(t *testing.T) {
	p, _ := solved(t)
	adapter, err := registry.For("SGLang")
	if err != nil {
		t.Fatal(err)
	}
	serve := func(address, planDigest string, layouts ...*plans.Layout) (string, *Observations, *prometheus.Registry) {
		pool := NewPool()
		pool.Set([]discovery.Backend{{Pod: "p", Address: address, Ranks: 4, Engine: "SGLang", Revision: "r", PlanDigest: planDigest, Shape: &planstest.Shape}})
		for _, l := range layouts {
			pool.AddLayout(l)
		}
		registry := prometheus.NewRegistry()
		proxy, observations := NewProxy(pool, registry, logr.Discard(), ProxyOptions{
			RankHeader: adapter.RankHeader, RankRoutes: adapter.RankRoutes, RoutedExperts: adapter.RoutedExperts, SamplePercent: 100, MaxBodyBytes: 1 << 20, EndpointWait: time.Second,
		})
		server := httptest.NewServer(proxy)
		t.Cleanup(server.Close)
		return server.URL, observations, registry
	}
	planned := startReferenceEngine(t, string(p.Artifact.Files["engine/sglang.json"]))
	url, observations, registry := serve(planned, p.Artifact.Digest, p.layout)
	pendingURL, pending, _ := serve(planned, p.Artifact.Digest)
	plainURL, plain, _ := serve(startReferenceEngine(t, locality.Trivial), "")

	prompts := []string{
		"func main() {\n\tfmt.Println(err)\n}", "SELECT name, id FROM users WHERE id = 1;", "der Hund und die Katze sind nicht im Haus",
		"if err != nil {\n\treturn err\n}", "INSERT INTO orders VALUES (1, 2, 3);", "the history of the city and of its people",
		"apiVersion: v1\nkind: Pod\nmetadata:\n  name: x", "for i := range 10 {\n\tsum += i\n}",
	}
	const requests = 48
	before := engineActivations(t, planned)
	observations.engines.Poll(t.Context())
	for i := range requests {
		body := fmt.Sprintf(`{"text":%q,"sampling_params":{"temperature":0,"max_new_tokens":4}}`, prompts[i%len(prompts)])
		if got, want := steady(fetch(t, url+"/generate", body)), steady(fetch(t, plainURL+"/generate", body)); got != want {
			t.Fatalf("the answer under the plan differs:\n%s\n%s", got, want)
		}
	}
	after := engineActivations(t, planned)
	sum := total(observations)
	want := lar.Activations{Local: after.Local - before.Local, Total: after.Total - before.Total}
	if sum != want || want.Total == 0 {
		t.Errorf("observed %+v, the engine computed %+v", sum, want)
	}
	observations.engines.Poll(t.Context())
	if engines := observations.report().Engines; len(engines) != 1 || engines[0].Activations != want {
		t.Errorf("the report has %+v of the engines, want %+v of one", engines, want)
	}
	tokens := int64(0)
	for _, observation := range observations.recent() {
		if observation.Plan != p.Artifact.Digest || observation.Forecast == nil {
			t.Fatalf("%+v is not of the plan, or was not scored", observation)
		}
		if f := observation.Forecast; f.Tables != p.Artifact.Digest || f.Highest < f.Predicted || f.Best == observation.Rank && f.Highest != f.Predicted {
			t.Errorf("rank %d has forecast %+v", observation.Rank, f)
		}
		tokens += int64(observation.Tokens)
	}
	if got := tokens * int64(len(planstest.Shape.MoELayers)*planstest.Shape.ExpertsPerToken); got != sum.Total {
		t.Errorf("%d tokens make %d activations, counted are %d", tokens, got, sum.Total)
	}
	t.Logf("LAR %.3f, predicted %.3f, without a plan %.3f, imbalance %.3f", rateOf(observations), observations.report().Last.All().Forecast.Predicted(), rateOf(plain), observations.window.Imbalance())
	if rateOf(observations) < 1.15*rateOf(plain) {
		t.Errorf("the local activation rate is %.3f, %.3f without a plan", rateOf(observations), rateOf(plain))
	}
	if off := rateOf(observations) / observations.report().Last.All().Forecast.Predicted(); off < 0.8 || off > 1.25 {
		t.Errorf("the local activation rate is %.3f, forecast was %.3f", rateOf(observations), observations.report().Last.All().Forecast.Predicted())
	}
	for _, observation := range plain.recent() {
		if observation.Plan != "" || observation.Forecast != nil {
			t.Fatalf("%+v is of no plan", observation)
		}
	}
	for _, name := range []string{"semmoe_predicted_local_activation_rate", "semmoe_router_window_imbalance"} {
		if n, err := testutil.GatherAndCount(registry, name); n != 1 || err != nil {
			t.Errorf("%s: %d series, %v", name, n, err)
		}
	}

	// Requests with an unknown placement are not counted.
	fetch(t, pendingURL+"/generate", `{"text":"x","sampling_params":{"max_new_tokens":2}}`)
	if got := testutil.ToFloat64(pending.failures); len(pending.recent()) != 0 || got != 1 {
		t.Errorf("without the plan at hand %d requests were counted, %v failed", len(pending.recent()), got)
	}

	recorder := httptest.NewRecorder()
	observations.ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/v1/observations", nil))
	var reported struct {
		Imbalance    *float64
		Observations []lar.Observation
	}
	if err := json.Unmarshal(recorder.Body.Bytes(), &reported); err != nil || reported.Imbalance == nil || *reported.Imbalance < 1 || len(reported.Observations) != requests {
		t.Errorf("/v1/observations: %v: %.300s", err, recorder.Body)
	}
	for i, observation := range reported.Observations {
		if diff := cmp.Diff(observations.recent()[i], observation, cmpopts.EquateApproxTime(0)); diff != "" {
			t.Errorf("observation %d changes on its way (-want +got):\n%s", i, diff)
		}
	}
}

func rateOf(o *Observations) float64 { return o.report().Last.All().Overall.Value() }

func total(o *Observations) lar.Activations {
	var sum lar.Activations
	for _, observation := range o.recent() {
		sum.Local += observation.Local
		sum.Total += observation.Total
	}
	return sum
}

// fetch posts a body and returns the response, which must be successful.
func fetch(t *testing.T, url, body string) string {
	t.Helper()
	response, err := http.Post(url, "application/json", bytes.NewReader([]byte(body)))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s: %v: %s", url, response.Status, err, data)
	}
	return string(data)
}

// varying matches values that differ between any two responses: ids, ranks and times.
var varying = regexp.MustCompile(`"(id|created|dp_rank|e2e_latency)":\s*("[^"]*"|[0-9.e+-]+)`)

func steady(answer string) string { return varying.ReplaceAllString(answer, `"$1":0`) }

var activationsLine = regexp.MustCompile(`(?m)^semmoe_engine_activations_total\{layer="\d+",locality="(\w+)",rank="(\d+)"\} (\S+)$`)

// requestsLine matches the counter of the dialects without a counter of activations.
var requestsLine = regexp.MustCompile(`(?m)^vllm:request_success_total\{engine="(\d+)",[^}]*\} (\S+)$`)

// engineActivations returns the engine's counters, summed over all ranks.
func engineActivations(t *testing.T, address string) lar.Activations {
	t.Helper()
	var sum lar.Activations
	for _, count := range engineRanks(t, address) {
		sum.Local += count.Local
		sum.Total += count.Total
	}
	return sum
}

// engineRanks returns the engine's counters by rank.
func engineRanks(t *testing.T, address string) map[string]lar.Activations {
	t.Helper()
	response, err := http.Get("http://" + address + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	counts := map[string]lar.Activations{}
	for _, match := range activationsLine.FindAllStringSubmatch(string(data), -1) {
		value, err := strconv.ParseFloat(match[3], 64)
		if err != nil {
			t.Fatal(err)
		}
		count := counts[match[2]]
		count.Total += int64(value)
		if match[1] == "local" {
			count.Local += int64(value)
		}
		counts[match[2]] = count
	}
	for _, match := range requestsLine.FindAllStringSubmatch(string(data), -1) {
		value, err := strconv.ParseFloat(match[2], 64)
		if err != nil {
			t.Fatal(err)
		}
		counts[match[1]] = lar.Activations{Total: counts[match[1]].Total + int64(value)}
	}
	return counts
}
