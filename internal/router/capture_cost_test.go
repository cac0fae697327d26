// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/picker"
	"github.com/semmoe/operator/internal/router/plans/planstest"
)

// reported returns the response of a router at /v1/observations.
func reported(t *testing.T, o *Observations) lar.Report {
	t.Helper()
	recorder := httptest.NewRecorder()
	o.ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/v1/observations", nil))
	var report lar.Report
	if err := json.Unmarshal(recorder.Body.Bytes(), &report); err != nil {
		t.Fatalf("/v1/observations: %v: %.300s", err, recorder.Body)
	}
	if err := report.Validate(); err != nil {
		t.Fatal(err)
	}
	return report
}

// fill records requests. Requests with capture take ratio times as long as the others.
func fill(c *captureWatch, now time.Time, ratio float64) {
	for range 150 {
		c.add(now, true, time.Duration(ratio*float64(time.Second)), 100)
		c.add(now, false, time.Second, 100)
	}
}

// TestNarrowsSample checks that too high a cost of capture limits the sample for an hour after the last evaluation.
// A cost that is uncertain or below the bound does not.
func TestNarrowsSample(t *testing.T) {
	start := time.Unix(1_700_000_000, 0)
	for name, tc := range map[string]struct {
		ratio  float64
		narrow bool
	}{"no cost": {1, false}, "four percent": {1.04, false}, "six percent": {1.06, true}, "double": {2, true}} {
		var c captureWatch
		fill(&c, start, tc.ratio)
		if c.narrowed(start) {
			t.Errorf("%s: narrowed by the first request", name)
		}
		fill(&c, start.Add(costCheckPeriod), tc.ratio)
		if c.narrowed(start.Add(costCheckPeriod)) != tc.narrow {
			t.Errorf("%s: narrowed is %v", name, !tc.narrow)
		}
	}
	var c captureWatch
	fill(&c, start, 2)
	last := start.Add(costCheckPeriod)
	c.add(last, false, time.Second, 100)
	for at := last; at.Before(last.Add(narrowPeriod)); at = at.Add(time.Minute) {
		if !c.narrowed(at) {
			t.Fatalf("widened after %v", at.Sub(last))
		}
	}
	if c.narrowed(last.Add(narrowPeriod)) {
		t.Error("still narrowed after narrowPeriod")
	}
	// Measurements older than an hour are dropped.
	if cost := c.cost(start.Add(2 * time.Hour)); cost != (lar.CaptureCost{}) {
		t.Errorf("after two hours the cost is %+v", cost)
	}
}

// TestSamplesOnePodWhileNarrowed checks that with a limited sample, only requests to one pod per plan are sampled, to
// the same pod on every router, and only these count as eligible. The distribution of requests does not change.
func TestSamplesOnePodWhileNarrowed(t *testing.T) {
	var mu sync.Mutex
	asked, served := map[string]int{}, map[string]int{}
	engineOf := func(name, plan string) discovery.Backend {
		b := newEngine(t, name, 4, func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			served[name]++
			if strings.Contains(string(body), "return_routed_experts") {
				asked[name]++
			}
			fmt.Fprint(w, `{"choices":[{"text":"x"}]}`)
		})
		b.PlanDigest = plan
		return b
	}
	backends := []discovery.Backend{engineOf("a-0", "a"), engineOf("a-1", "a"), engineOf("a-2", "a"), engineOf("b-0", "b"), engineOf("b-1", "b")}
	pool := NewPool()
	pool.Set(backends)
	adapter := adapterOf(t, "SGLang")
	url, observations := proxyServer(t, pool, ProxyOptions{
		RankHeader: adapter.RankHeader, RankRoutes: adapter.RankRoutes, RoutedExperts: adapter.RoutedExperts, SamplePercent: 100, MaxBodyBytes: 1 << 20, EndpointWait: time.Second,
	})
	observations.capture.narrowUntil = time.Now().Add(time.Hour)
	const requests = 120
	for range requests {
		if response, body := post(t, url+"/v1/completions", `{"prompt":"x"}`); response.StatusCode != http.StatusOK {
			t.Fatal(body)
		}
	}
	other := NewPool()
	other.Set([]discovery.Backend{backends[4], backends[2], backends[0], backends[3], backends[1]})
	want := map[string]int{}
	for _, plan := range []string{"a", "b"} {
		pod := pool.sampledPod(plan)
		if !strings.HasPrefix(pod, plan) || other.sampledPod(plan) != pod {
			t.Errorf("plan %s: pods %q and %q are sampled", plan, pod, other.sampledPod(plan))
		}
		want[pod] = served[pod]
	}
	if diff := cmp.Diff(want, asked); diff != "" || len(served) != len(backends) {
		t.Errorf("served %v, asked (-want +got):\n%s", served, diff)
	}
	report := reported(t, observations)
	eligible := int64(0)
	for _, n := range want {
		eligible += int64(n)
	}
	if p := report.Population; p.Replicas != lar.ReplicasOne || p.Eligible != eligible || p.Sampled != eligible {
		t.Errorf("population %+v, want %d of %d requests", p, eligible, requests)
	}
	if pod := pool.sampledPod("none"); pod != "" {
		t.Errorf("pod %q has a plan that no pod has", pod)
	}
}

// TestCaptureIsTimed checks that the time of each response is recorded for its group when the response was read to its
// end, and is not recorded if the client disconnects.
func TestCaptureIsTimed(t *testing.T) {
	release := make(chan struct{})
	backend := newEngine(t, "a", 4, func(w http.ResponseWriter, r *http.Request) {
		if body, _ := io.ReadAll(r.Body); strings.Contains(string(body), "hang") {
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "data: {}\n\n")
			w.(http.Flusher).Flush()
			select {
			case <-release:
			case <-r.Context().Done():
			}
			return
		}
		fmt.Fprint(w, `{"choices":[{"text":"x"}]}`)
	})
	defer close(release)
	url, observations := routerFor(t, adapterOf(t, "SGLang"), 50, backend)
	const requests = 100
	for range requests {
		request, err := http.NewRequest(http.MethodPost, url+"/v1/completions", strings.NewReader(`{"prompt":"x","max_tokens":10}`))
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set(HeaderRequestID, "the same") // does not influence the choice
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, response.Body) //nolint:errcheck // the test checks the outcome
		response.Body.Close()
	}
	want := int(reported(t, observations).Population.Sampled)
	if want == 0 || want == requests {
		t.Fatalf("%d of %d requests with one id are sampled", want, requests)
	}
	ctx, leave := context.WithCancel(context.Background())
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", strings.NewReader(`{"prompt":"hang"}`))
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	leave()
	response.Body.Close()
	report := reported(t, observations)
	cost := report.CaptureCost
	if cost == nil || cost.Asked.Requests != int64(want) || cost.Plain.Requests != int64(requests-want) {
		t.Fatalf("%d of %d requests were sampled; the cost is of %+v", want, requests, cost)
	}
	if cost.Asked.Seconds <= 0 || cost.Plain.Seconds <= 0 || cost.Plain.Tokens < float64(10*cost.Plain.Requests) {
		t.Errorf("%+v", cost)
	}
	// The request of the disconnected client was eligible as well.
	if p := report.Population; p.Eligible != requests+1 || p.Requests != lar.RequestsAll || p.Replicas != lar.ReplicasAll || p.SamplePercent != 50 {
		t.Errorf("population %+v", p)
	}
}

// TestPopulationOfVLLM checks the population of vLLM, which reports experts of unstreamed requests without being asked.
// There is no capture cost to compare.
func TestPopulationOfVLLM(t *testing.T) {
	backend := newEngine(t, "a", 4, func(w http.ResponseWriter, r *http.Request) {
		if body, _ := io.ReadAll(r.Body); strings.Contains(string(body), "stream") {
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "data: [DONE]\n\n")
			return
		}
		fmt.Fprintf(w, `{"choices":[{"text":"a","routed_experts":%q}]}`, vllmRouting())
	})
	backend.Shape, backend.Revision = &planstest.Shape, "r"
	url, observations := routerFor(t, adapterOf(t, "VLLM"), 100, backend)
	for range 3 {
		post(t, url+"/v1/completions", `{"prompt":"x"}`)
	}
	for _, body := range []string{`{"prompt":"x","stream":true}`, `{"prompt":"x","return_routed_experts":true}`} {
		post(t, url+"/v1/completions", body)
	}
	post(t, url+"/tokenize", `{"prompt":"x"}`)
	want := lar.Population{Requests: lar.RequestsUnstreamed, Replicas: lar.ReplicasAll, SamplePercent: 100, Eligible: 3, Sampled: 3, Streamed: 1}
	report := reported(t, observations)
	if diff := cmp.Diff(want, report.Population); diff != "" || report.CaptureCost != nil {
		t.Errorf("cost %+v, population (-want +got):\n%s", report.CaptureCost, diff)
	}
	if n := report.Revision("r").Overall.Requests; n != 3 || len(report.Window) == 0 || report.Window[0].Eligible == 0 {
		t.Errorf("%d requests, window %+v", n, report.Window)
	}
}

// TestObservedMetrics checks that the metrics have the values of the report and few labels, and that the guide
// documents all of them.
func TestObservedMetrics(t *testing.T) {
	registry := prometheus.NewRegistry()
	pool := NewPool()
	adapter := adapterOf(t, "SGLang")
	_, o := NewProxy(pool, registry, logr.Discard(), ProxyOptions{RoutedExperts: adapter.RoutedExperts, SamplePercent: 5})
	now := time.Unix(1_700_000_055, 0)
	o.now, o.started = func() time.Time { return now }, now.Add(-time.Hour)
	for i := range 40 {
		predicted := 0.2 + float64(i%5)/100
		o.addEligible(i%2 == 0)
		o.addEligible(false)
		o.add(lar.Observation{Revision: "r", Rank: i % 4, Forecast: &lar.Forecast{Predicted: predicted}, Count: lar.Count{
			Activations: lar.Activations{Local: int64(20 + i%5), Total: 100}, LayerGroups: []lar.Activations{{Local: 10, Total: 50}, {Local: int64(10 + i%5), Total: 50}},
			Tokens: 5, TokenLayers: 10, RemoteRanks: 20, SavedBytes: 1000,
		}})
	}
	values := gauges(t, registry)
	for name, want := range map[string]float64{
		"semmoe_local_activation_rate": 0.22, "semmoe_predicted_local_activation_rate": 0.22, "semmoe_forecast_bias": 0, "semmoe_forecast_slope": 1,
		"semmoe_rank_local_activation_rate/0": 0.22, "semmoe_layer_group_local_activation_rate/0": 0.2, "semmoe_layer_group_local_activation_rate/1": 0.24,
		"semmoe_remote_ranks_per_token": 2, "semmoe_observed_requests": 40, "semmoe_sample_eligible_requests_total": 80, "semmoe_sampled_requests_total": 20,
		// The window covers 110 s and the 5 s since its last bucket began, and half of the requests were observed.
		"semmoe_saved_bytes_per_second": 40 * 1000 * 2 / 115.,
		"semmoe_sampling_narrowed":      0,
	} {
		if got, known := values[name]; !known || got < want-1e-9 || got > want+1e-9 {
			t.Errorf("%s is %v (%v), want %v", name, got, known, want)
		}
	}
	if se := values["semmoe_local_activation_rate_standard_error"]; se < 0.002 || se > 0.003 { // 0.0141/sqrt(40), with some tolerance
		t.Errorf("the standard error is %v", se)
	}
	if cost := values["semmoe_capture_cost_ratio"]; cost == cost {
		t.Errorf("without a request the capture cost is %v", cost)
	}
	guide, err := os.ReadFile("../../docs/locality.md")
	if err != nil {
		t.Fatal(err)
	}
	for name := range values {
		if name, _, _ = strings.Cut(name, "/"); !strings.HasPrefix(name, "semmoe_router_") && !strings.Contains(string(guide), "`"+name) {
			t.Errorf("docs/locality.md does not document %s", name)
		}
	}
}

// gauges returns the values of all metrics with a single value, by metric name and label value.
func gauges(t *testing.T, registry *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, family := range families {
		for _, metric := range family.Metric {
			name := family.GetName()
			for _, label := range metric.Label {
				name += "/" + label.GetValue()
			}
			values[name] = metric.GetGauge().GetValue() + metric.GetCounter().GetValue()
		}
	}
	return values
}

// TestPopulationThroughAGateway checks that requests with a response that the gateway does not let the picker change
// are not in the population. Other requests are sampled and timed like requests of the proxy.
func TestPopulationThroughAGateway(t *testing.T) {
	pool := NewPool()
	pool.Set([]discovery.Backend{{Pod: "a", Address: "10.0.0.1:8000", Ranks: 4, Revision: "r", Shape: &planstest.Shape}})
	chooser, observations := NewEndpointPicker(pool, prometheus.NewRegistry(), ProxyOptions{RoutedExperts: adapterOf(t, "SGLang").RoutedExperts, SamplePercent: 100}, 0)
	for _, fixed := range []bool{true, false} {
		exchange, err := chooser.Pick(t.Context(), &picker.Request{
			Method: http.MethodPost, Path: "/v1/completions", Header: http.Header{}, Body: []byte(`{"prompt":"x"}`), ResponseFixed: fixed,
		})
		if err != nil {
			t.Fatal(err)
		}
		decision := exchange.Decision()
		if asked := strings.Contains(decision.Head+string(decision.Body), "return_routed_experts"); asked == fixed {
			t.Errorf("response fixed is %v, and the engine is asked: %v", fixed, asked)
		}
		response := &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(`{"choices":[]}`))}
		if err := exchange.ModifyResponse("", response); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, response.Body); err != nil {
			t.Fatal(err)
		}
		exchange.Release()
	}
	report := reported(t, observations)
	if p, asked := report.Population, report.CaptureCost.Asked.Requests; p.Eligible != 1 || p.Sampled != 1 || asked != 1 || report.CaptureCost.Plain.Requests != 0 {
		t.Errorf("%d requests timed, population %+v", asked, p)
	}
}
