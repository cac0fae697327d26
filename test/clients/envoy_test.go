// SPDX-License-Identifier: Apache-2.0

package clients

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"text/template"
	"time"

	"github.com/semmoe/operator/internal/router"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/picker"
	"github.com/semmoe/operator/internal/router/plans/planstest"
	"github.com/semmoe/operator/test/ports"
	"github.com/semmoe/operator/test/tier"
)

const (
	overrideHost = "override_host"
	originalDst  = "ORIGINAL_DST"
	// rankHeader selects a rank of the engines.
	rankHeader = "X-Data-Parallel-Rank"
	// largeBody is larger than all buffers of Envoy, and smaller than --max-body-bytes.
	largeBody = 20 << 20
	// answerTimeout is the maximum time for an answer through Envoy.
	answerTimeout = 2 * time.Minute
)

// envoyConfig is the configuration of docs/gateway.md for one listener.
var envoyConfig = template.Must(template.ParseFiles("testdata/envoy.yaml"))

// envoy is a running Envoy in front of pods.
type envoy struct {
	url    string
	picker gateway
	client *http.Client
	// stopPicker ends the endpoint picker.
	stopPicker func()
	// destination is an endpoint that clients try to choose; empty for none.
	destination string
}

// startEnvoy starts the endpoint picker and Envoy in front of pods. cluster is the kind of the cluster of the engines.
func startEnvoy(t *testing.T, cluster string, pods []discovery.Backend, change func(*router.Options)) *envoy {
	t.Helper()
	program := filepath.Join(install(t), "bin", "envoy")
	tls, err := picker.TLSConfig("", "", "")
	if err != nil {
		t.Fatal(err)
	}
	options := &router.EndpointPickerOptions{Port: ports.Reserve(t), HealthPort: ports.Reserve(t), TLS: tls, Fallbacks: 2}
	if cluster == originalDst {
		options.Fallbacks = 0
	}
	e := &envoy{client: &http.Client{Timeout: answerTimeout, Transport: &http.Transport{}}}
	t.Cleanup(e.client.CloseIdleConnections)
	e.picker, e.stopPicker = route(t, "SGLang", pods, func(o *router.Options) {
		o.EndpointPicker = options
		if change != nil {
			change(o)
		}
	})
	ports := map[string]int{"Clients": ports.Reserve(t), "Admin": ports.Reserve(t)}
	var engines []map[string]string
	for _, pod := range pods {
		host, port, err := net.SplitHostPort(pod.Address)
		if err != nil {
			t.Fatal(err)
		}
		engines = append(engines, map[string]string{"Host": host, "Port": port})
	}
	var text bytes.Buffer
	if err := envoyConfig.Execute(&text, map[string]any{
		"Ports": ports, "Picker": options.Port, "Engines": engines, "OverrideHost": cluster == overrideHost, "MaxBodyBytes": 32 << 20,
	}); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "envoy.yaml")
	if err := os.WriteFile(file, text.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	e.url = fmt.Sprintf("http://127.0.0.1:%d", ports["Clients"])
	start(t, startTimeout, fmt.Sprintf("http://127.0.0.1:%d/ready", ports["Admin"]),
		exec.Command(program, "-c", file, "--disable-hot-restart", "--concurrency", "2", "-l", "warning"))
	return e
}

// post sends a completion request.
func (e *envoy) post(ctx context.Context, body io.Reader) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, e.url+"/v1/completions", body)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set(rankHeader, "1") // a client cannot choose a rank
	if e.destination != "" {
		request.Header.Set("X-Gateway-Destination-Endpoint", e.destination)
	}
	return e.client.Do(request)
}

// ask sends a completion request and returns the status and the body of the answer.
func (e *envoy) ask(t *testing.T, body string) (int, []byte) {
	t.Helper()
	response, err := e.post(t.Context(), strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, text
}

func onBothClusters(t *testing.T, run func(*testing.T, string)) {
	tier.Nightly(t)
	for _, cluster := range []string{overrideHost, originalDst} {
		t.Run(cluster, func(t *testing.T) { run(t, cluster) })
	}
}

// completed returns a completion's text. It fails the test if the answer contains routed experts, which only the picker
// requested.
func completed(t *testing.T, status int, body []byte) string {
	t.Helper()
	var answer struct {
		Choices []struct{ Text string } `json:"choices"`
	}
	if err := json.Unmarshal(body, &answer); err != nil || status != http.StatusOK || len(answer.Choices) != 1 || bytes.Contains(body, []byte("routed_experts")) {
		t.Fatalf("%d %.300s", status, body)
	}
	return answer.Choices[0].Text
}

// awaitChecks waits until the picker has checked which routes of the engines read a rank. An engine serves the check of
// a route that does not, and counts it.
func (e *envoy) awaitChecks(t *testing.T, engines int) {
	t.Helper()
	waitFor(t, startTimeout, "routes that read a rank", func() error {
		if checked := metric(t, e.picker.metrics, "semmoe_router_pinned_pods{", `pin="by-load"`, `route="/v1/responses"`); checked != float64(engines) {
			return fmt.Errorf("%v of %d engines are checked", checked, engines)
		}
		return nil
	})
}

// TestEnvoy sends requests through Envoy to two engines under a plan. Each request runs on the rank that the picker
// chose, and clients get the answers of the engines without the routed experts that the picker samples.
func TestEnvoy(t *testing.T) {
	onBothClusters(t, func(t *testing.T, cluster string) {
		planned, _ := planstest.Solved(t)
		engines := []string{engine(t), engine(t)}
		e := startEnvoy(t, cluster, backends(planned.Artifact.Digest, ranks, engines...), func(o *router.Options) { o.SamplePercent = 100 })
		e.awaitChecks(t, len(engines))
		// counts returns the number of served requests, and activations by rank.
		counts := func() (served float64, activations [ranks]float64) {
			for _, address := range engines {
				served += metric(t, "http://"+address+"/metrics", "sglang:num_requests_total{")
				for rank := range ranks {
					activations[rank] += metric(t, "http://"+address+"/metrics", "semmoe_engine_activations_total{", fmt.Sprintf(`rank="%d"`, rank))
				}
			}
			return served, activations
		}
		servedBefore, before := counts()
		const requests = 40
		var texts [requests]string
		for i := range requests {
			status, body := e.ask(t, fmt.Sprintf(`{"model":"tiny","prompt":"func number%d() {","max_tokens":4,"temperature":0}`, i))
			texts[i] = completed(t, status, body)
		}
		served, after := counts()
		if counted := served - servedBefore; counted != requests {
			t.Errorf("the engines count %v requests, want %d", counted, requests)
		}
		// All requests are sampled, so what the picker observes on each rank is what the engines count there.
		for rank := range ranks {
			label, computed := fmt.Sprintf(`rank="%d"`, rank), after[rank]-before[rank]
			if observed := metric(t, e.picker.metrics, "semmoe_activations_total{", label); observed != computed || observed == 0 {
				t.Errorf("rank %d: the picker observes %v activations, the engines count %v", rank, observed, computed)
			}
		}
		if mismatches := metric(t, e.picker.metrics, "semmoe_router_rank_mismatches_total{"); mismatches != 0 {
			t.Errorf("%v requests ran on another rank than the picker chose", mismatches)
		}
		for i := range requests {
			response, err := http.Post("http://"+engines[0]+"/v1/completions", "application/json",
				strings.NewReader(fmt.Sprintf(`{"model":"tiny","prompt":"func number%d() {","max_tokens":4,"temperature":0}`, i)))
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(response.Body)
			response.Body.Close()
			if err != nil {
				t.Fatal(err)
			}
			if direct := completed(t, response.StatusCode, body); direct != texts[i] {
				t.Errorf("request %d: %q through Envoy, %q from the engine", i, texts[i], direct)
			}
		}
		streamed := `{"model":"tiny","prompt":"func number0() {","max_tokens":4,"temperature":0,"stream":true}`
		status, body := e.ask(t, streamed)
		text := ""
		for line := range strings.Lines(string(body)) {
			if data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: {"); ok {
				var event struct{ Choices []struct{ Text string } }
				if err := json.Unmarshal([]byte("{"+data), &event); err != nil {
					t.Fatal(err)
				}
				for _, choice := range event.Choices {
					text += choice.Text
				}
			}
		}
		if status != http.StatusOK || text != texts[0] || !strings.HasSuffix(string(body), "data: [DONE]\n\n") || strings.Contains(string(body), "routed_experts") {
			t.Errorf("the stream has status %d and %q, want %q: %s", status, text, texts[0], body)
		}
	})
}

// pod is an engine that reports the requests it receives.
type pod struct {
	*httptest.Server
	mu sync.Mutex
	// status is the status of the answers.
	status int
	// answered counts the requests.
	answered int
	// release sends the last event of a stream. left is closed when the client of a stream has left.
	release, left chan struct{}
	leave         sync.Once
}

func newPod(t *testing.T, status int) *pod {
	p := &pod{status: status, release: make(chan struct{}), left: make(chan struct{})}
	p.Server = httptest.NewServer(p)
	t.Cleanup(p.Close)
	return p
}

func (p *pod) address() string { return p.Listener.Addr().String() }

func (p *pod) requests() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.answered
}

func (p *pod) setStatus(status int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.status = status
}

// received is the answer of a pod: what it has received.
type received struct {
	SHA256 string `json:"sha256"`
	Bytes  int    `json:"bytes"`
	Rank   string `json:"rank"`
}

// ServeHTTP answers with what it has received. A stream has one event, and a second one after release.
func (p *pod) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client has left
	}
	if rank, err := strconv.Atoi(r.Header.Get(rankHeader)); err == nil && rank >= ranks { // as engines reject the router's check
		http.Error(w, fmt.Sprintf(`{"error":{"message":"the rank is %d; allowed is 0 to %d"}}`, rank, ranks-1), http.StatusBadRequest)
		return
	}
	p.mu.Lock()
	p.answered++
	status := p.status
	p.mu.Unlock()
	if status != http.StatusOK {
		http.Error(w, `{"error":{"message":"the model is still being loaded"}}`, status)
		return
	}
	if !bytes.Contains(body, []byte(`"stream":true`)) {
		w.Header().Set("Content-Type", "application/json")
		sum := sha256.Sum256(body)
		_ = json.NewEncoder(w).Encode(received{hex.EncodeToString(sum[:]), len(body), r.Header.Get(rankHeader)}) // a client that has left needs no answer
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	fmt.Fprint(w, "data: {\"choices\":[{\"text\":\"a\"}]}\n\n")
	w.(http.Flusher).Flush()
	select {
	case <-p.release:
		fmt.Fprint(w, "data: [DONE]\n\n")
	case <-r.Context().Done():
		p.leave.Do(func() { close(p.left) })
	}
}

// TestEnvoyStreams checks that events of a stream arrive before the stream is complete, and that the engine notices a
// client that leaves.
func TestEnvoyStreams(t *testing.T) {
	onBothClusters(t, func(t *testing.T, cluster string) {
		p := newPod(t, http.StatusOK)
		e := startEnvoy(t, cluster, backends("", ranks, p.address()), nil)
		open := func(ctx context.Context) (*http.Response, *bufio.Reader) {
			response, err := e.post(ctx, strings.NewReader(`{"model":"tiny","prompt":"a","max_tokens":2,"stream":true}`))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { response.Body.Close() })
			events := bufio.NewReader(response.Body)
			if first, err := events.ReadString('\n'); err != nil || !strings.Contains(first, `"text":"a"`) {
				t.Fatalf("first event %q: %v", first, err)
			}
			return response, events
		}
		_, events := open(t.Context())
		p.release <- struct{}{}
		if rest, err := io.ReadAll(events); err != nil || strings.TrimSpace(string(rest)) != "data: [DONE]" {
			t.Errorf("the stream ends with %q: %v", rest, err)
		}
		ctx, leave := context.WithCancel(t.Context())
		open(ctx)
		leave()
		select {
		case <-p.left:
		case <-time.After(answerTimeout):
			t.Error("the engine still generates for a client that has left")
		}
	})
}

// TestEnvoyLargeBodies sends bodies up to the limit and above it.
func TestEnvoyLargeBodies(t *testing.T) {
	onBothClusters(t, func(t *testing.T, cluster string) {
		p := newPod(t, http.StatusOK)
		e := startEnvoy(t, cluster, backends("", ranks, p.address()), nil)
		for _, size := range []int{1 << 10, 1 << 20, largeBody} {
			body := `{"model":"tiny","prompt":"` + strings.Repeat("a", size) + `","max_tokens":2}`
			status, text := e.ask(t, body)
			var got received
			if err := json.Unmarshal(text, &got); err != nil {
				t.Fatalf("%d bytes: %d %.300s", size, status, text)
			}
			sum := sha256.Sum256([]byte(body))
			if got.Bytes != len(body) || got.SHA256 != hex.EncodeToString(sum[:]) || got.Rank == "" {
				t.Errorf("a body of %d bytes arrives as %+v", len(body), got)
			}
		}
		before := p.requests()
		status, text := e.ask(t, `{"model":"tiny","prompt":"`+strings.Repeat("a", 33<<20)+`"}`)
		if status != http.StatusRequestEntityTooLarge || p.requests() != before {
			t.Errorf("a body above the limit gets %d %.300s", status, text)
		}
	})
}

// TestEnvoyFailingPods sends requests while one pod refuses connections and another one answers 503.
func TestEnvoyFailingPods(t *testing.T) {
	onBothClusters(t, func(t *testing.T, cluster string) {
		loading, healthy := newPod(t, http.StatusServiceUnavailable), newPod(t, http.StatusOK)
		e := startEnvoy(t, cluster, backends("", ranks, ports.Address(t), loading.address(), healthy.address()), nil)
		const requests = 60
		failed := 0
		for i := range requests {
			body := fmt.Sprintf(`{"model":"tiny","prompt":"%d","max_tokens":2}`, i)
			if i == 0 { // a retry needs the whole body
				body = `{"model":"tiny","prompt":"` + strings.Repeat("a", largeBody) + `","max_tokens":2}`
			}
			if status, _ := e.ask(t, body); status != http.StatusOK {
				failed++
			}
		}
		retried := metric(t, e.picker.metrics, `semmoe_router_retries_total{reason="fallback"`)
		switch {
		case cluster == overrideHost && (failed > 0 || retried == 0 || healthy.requests() < requests):
			t.Errorf("%d of %d requests failed, %v were sent to a fallback, the healthy pod answered %d", failed, requests, retried, healthy.requests())
		case cluster == originalDst && failed > requests/3:
			// Envoy knows one endpoint. The picker passes over a pod that fails requests in a row.
			t.Errorf("%d of %d requests failed", failed, requests)
		}
		loading.setStatus(http.StatusOK)
		waitFor(t, startTimeout, "a pod that has loaded gets requests", func() error {
			before := loading.requests()
			if status, body := e.ask(t, `{"model":"tiny","prompt":"b","max_tokens":2}`); status != http.StatusOK && cluster == overrideHost {
				t.Errorf("%d %.300s", status, body)
			}
			if loading.requests() == before {
				return errors.New("the request went to another pod")
			}
			return nil
		})
	})
}

// TestEnvoyWithoutPicker ends the picker. After a health check has noticed, a cluster with a fallback policy serves
// without the picker (FailOpen), and an ORIGINAL_DST cluster refuses requests. Clients cannot choose an endpoint.
func TestEnvoyWithoutPicker(t *testing.T) {
	onBothClusters(t, func(t *testing.T, cluster string) {
		p := newPod(t, http.StatusOK)
		e := startEnvoy(t, cluster, backends("", ranks, p.address()), nil)
		const body = `{"model":"tiny","prompt":"a","max_tokens":2}`
		if status, text := e.ask(t, body); status != http.StatusOK {
			t.Fatalf("%d %s", status, text)
		}
		other := newPod(t, http.StatusOK)
		e.destination = other.address()
		if status, text := e.ask(t, body); status != http.StatusOK {
			t.Errorf("%d %s", status, text)
		}
		e.stopPicker()
		want := map[string]int{overrideHost: http.StatusOK, originalDst: http.StatusInternalServerError}[cluster]
		waitFor(t, startTimeout, "requests are answered without the picker", func() error {
			if status, text := e.ask(t, body); status != want {
				return fmt.Errorf("%d %s, want %d", status, text, want)
			}
			return nil
		})
		if other.requests() != 0 {
			t.Errorf("a client chose an endpoint of its own %d times", other.requests())
		}
	})
}
