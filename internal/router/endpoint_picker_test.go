// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	processingv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/types/known/structpb"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/picker"
	"github.com/semmoe/operator/internal/router/picker/gatewaytest"
	"github.com/semmoe/operator/internal/router/plans/planstest"
	"github.com/semmoe/operator/internal/router/wire"
	"github.com/semmoe/operator/test/ports"
)

// newPicker serves an endpoint picker over a pool, and returns the connection of a gateway to it.
func newPicker(t *testing.T, pool *Pool, options ProxyOptions) (*grpc.ClientConn, *Observations, *prometheus.Registry) {
	t.Helper()
	if options.MaxBodyBytes == 0 {
		options.MaxBodyBytes = 1 << 20
	}
	registry := prometheus.NewRegistry()
	chooser, observations := NewEndpointPicker(pool, registry, options, 2)
	config, err := picker.TLSConfig("", "", "")
	if err != nil {
		t.Fatal(err)
	}
	server := picker.NewServer(chooser, picker.Options{TLS: config, MaxBodyBytes: options.MaxBodyBytes})
	var listeners [2]net.Listener
	for i := range listeners {
		if listeners[i], err = listen("127.0.0.1", 0); err != nil {
			t.Fatal(err)
		}
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listeners[0], listeners[1]) }()
	t.Cleanup(func() {
		stopped, cancel := context.WithCancel(context.Background())
		cancel()
		server.Shutdown(stopped) //nolint:errcheck // reports the streams that a test has left open
		if err := <-ended; err != nil {
			t.Errorf("the server ended with %v", err)
		}
	})
	return gatewaytest.Dial(t, listeners[0].Addr().String()), observations, registry
}

func newPool(backends ...discovery.Backend) *Pool {
	pool := NewPool()
	pool.Set(backends)
	return pool
}

// begin opens a request and returns its endpoint.
func begin(t *testing.T, gateway *grpc.ClientConn, body string, header map[string]string, hint *structpb.Value) (*gatewaytest.Stream, []string, gatewaytest.Change) {
	t.Helper()
	s := gatewaytest.Open(t, gateway, gatewaytest.FullDuplex)
	s.RequestHeaders("POST", "/v1/completions", header, false, hint)
	s.RequestBody([]byte(body), 1000, true)
	endpoints, change := s.Picked()
	s.Body(-1)
	return s, endpoints, change
}

// record is a response of an engine.
type record struct {
	header http.Header
	body   []byte
}

// servedRank matches the rank in a response of the native route.
var servedRank = regexp.MustCompile(`"dp_rank":\d+`)

// recorder is an engine that forwards to another one, and returns the same bytes, except for the rank, for equal
// requests.
type recorder struct {
	mu      sync.Mutex
	address string
	records map[string]record
}

func (e *recorder) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	rank := servedRank.FindString(strings.Replace(string(body), "routed_", "", 1))
	parsed := wire.ParseBody(body)
	parsed.DropRank()
	key := r.URL.Path + string(body)
	if _, known := e.records[key]; !known {
		response, err := http.Post("http://"+e.address+r.URL.Path, "application/json", bytes.NewReader(body))
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		defer response.Body.Close()
		data, err := io.ReadAll(response.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		e.records[key] = record{response.Header, data}
	}
	w.Header().Set("Content-Type", e.records[key].header.Get("Content-Type"))
	w.Write(servedRank.ReplaceAll(e.records[key].body, []byte(rank))) //nolint:errcheck // the client verifies the body
}

// throughGateway sends a request like a gateway: it sends the output of the picker to the endpoint, and passes the
// response of the endpoint through the picker in chunks.
func throughGateway(t *testing.T, gateway *grpc.ClientConn, path, body string, chunkBytes int) (http.Header, string) {
	t.Helper()
	s := gatewaytest.Open(t, gateway, gatewaytest.FullDuplex)
	s.RequestHeaders("POST", path, map[string]string{"content-type": "application/json", "x-request-id": "r", "accept-encoding": "gzip"}, false, nil)
	s.RequestBody([]byte(body), chunkBytes, true)
	endpoints, change := s.Picked()
	sent, _ := s.Body(-1)
	request, err := http.NewRequest(http.MethodPost, "http://"+endpoints[0]+path, bytes.NewReader(sent))
	if err != nil {
		t.Fatal(err)
	}
	change.Apply(request.Header)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	header := map[string]string{}
	for name := range response.Header {
		header[strings.ToLower(name)] = response.Header.Get(name)
	}
	s.ResponseHeaders(response.StatusCode, header, false, endpoints[0])
	sending := make(chan struct{})
	go func() { // sending everything before receiving would fill the windows of both sides
		defer close(sending)
		s.ResponseBody(data, chunkBytes, true)
	}()
	s.Answered().Apply(response.Header)
	got, ended := s.Body(-1)
	<-sending
	if !ended {
		t.Error("the response does not end")
	}
	if err := s.End(); err != io.EOF {
		t.Errorf("the stream ended with %v", err)
	}
	return response.Header, string(got)
}

// TestGatewayAndProxyAreEquivalent checks that for the same bytes of an engine, a client gets the same bytes through a
// gateway and from the proxy, for any chunk size, sampled or not, and that the observations are the same.
func TestGatewayAndProxyAreEquivalent(t *testing.T) {
	gatewaytest.NoLeaks(t)
	p, _ := solved(t)
	address := startReferenceEngine(t, string(p.Artifact.Files["engine/sglang.json"]))
	backend := newEngine(t, "p", 4, (&recorder{address: address, records: map[string]record{}}).ServeHTTP)
	backend.Shape, backend.PlanDigest, backend.Revision = &planstest.Shape, p.Artifact.Digest, "r"
	requests := map[string]string{
		"/v1/completions stream":      `{"model":"tiny","prompt":"func main() {","max_tokens":6,"stream":true,"stream_options":{"include_usage":true}}`,
		"/v1/completions":             `{"model":"tiny","prompt":"SELECT name FROM","max_tokens":6}`,
		"/v1/completions asks itself": `{"model":"tiny","prompt":"SELECT","max_tokens":3,"return_routed_experts":true}`,
		"/v1/chat/completions stream": `{"model":"tiny","messages":[{"role":"user","content":"der Hund"}],"max_tokens":5,"stream":true}`,
		"/v1/chat/completions":        `{"model":"tiny","messages":[{"role":"user","content":"der Hund"}],"max_tokens":5}`,
		"/generate stream":            `{"text":"x","sampling_params":{"max_new_tokens":4},"stream":true}`,
		"/generate":                   `{"text":"x","sampling_params":{"max_new_tokens":4}}`,
	}
	adapter := adapterOf(t, "SGLang")
	for _, percent := range []int{0, 100} {
		t.Run(fmt.Sprint(percent, " percent"), func(t *testing.T) {
			options := ProxyOptions{RankHeader: adapter.RankHeader, RankRoutes: adapter.RankRoutes, RoutedExperts: adapter.RoutedExperts, SamplePercent: percent, MaxBodyBytes: 1 << 20, EndpointWait: time.Second}
			pool := newPool(backend)
			pool.AddLayout(p.layout)
			gateway, observed, _ := newPicker(t, pool, options)
			proxied := newPool(backend)
			proxied.AddLayout(p.layout)
			url, wanted := proxyServer(t, proxied, options)
			for name, body := range requests {
				path, _, _ := strings.Cut(name, " ")
				response, want := post(t, url+path, body)
				for _, chunkBytes := range []int{1, 7, 1 << 16} {
					header, got := throughGateway(t, gateway, path, body, chunkBytes)
					if steady(got) != steady(want) {
						t.Errorf("%s, chunks of %d bytes:\n%s\nfrom the proxy:\n%s", name, chunkBytes, got, want)
					}
					if strings.Contains(got, "routed_experts") != strings.Contains(name, "itself") {
						t.Errorf("%s: the client got %s", name, got)
					}
					if !strings.Contains(name, "stream") && header.Get("Content-Length") != fmt.Sprint(len(got)) {
						t.Errorf("%s: Content-Length is %q of %d bytes", name, header.Get("Content-Length"), len(got))
					}
					if header.Get(HeaderPod) != "p" || header.Get(HeaderPlan) != response.Header.Get(HeaderPlan) || header.Get(HeaderRank) == "" || header.Get(HeaderRequestID) != "r" {
						t.Errorf("%s: the client got the header %v", name, header)
					}
				}
			}
			want := 0
			if percent == 100 {
				want = len(requests) - 1 // all except the request that itself requests experts
			}
			if len(wanted.recent()) != want || len(observed.recent()) != 3*want {
				t.Fatalf("%d observations through the gateway, %d of the proxy; want %d and %d", len(observed.recent()), len(wanted.recent()), 3*want, want)
			}
			// The ranks were chosen again, and locality depends on them; everything else must match.
			known := map[string]bool{}
			for _, o := range wanted.recent() {
				known[fmt.Sprint(o.Revision, o.Plan, o.Tokens, o.Total)] = true
			}
			for _, o := range observed.recent() {
				if !known[fmt.Sprint(o.Revision, o.Plan, o.Tokens, o.Total)] {
					t.Errorf("%+v was not observed by the proxy", o)
				}
			}
			if got := outstanding(pool); got != 0 {
				t.Errorf("%d tokens are outstanding", got)
			}
		})
	}
}

// TestGatewayRemovesExpertsOfVLLM checks that experts that vLLM returns unasked are also removed for clients of a
// gateway.
func TestGatewayRemovesExpertsOfVLLM(t *testing.T) {
	gatewaytest.NoLeaks(t)
	engine := newEngine(t, "a", 4, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, `{"id":"c","choices":[{"index":0,"text":"a","routed_experts":%q}],"usage":{}}`, vllmRouting())
	})
	engine.Shape = &planstest.Shape
	adapter := adapterOf(t, "VLLM")
	gateway, observed, _ := newPicker(t, newPool(engine), ProxyOptions{RankHeader: adapter.RankHeader, RankRoutes: adapter.RankRoutes, RoutedExperts: adapter.RoutedExperts, SamplePercent: 100})
	if _, got := throughGateway(t, gateway, "/v1/completions", `{"prompt":"x"}`, 11); got != `{"id":"c","choices":[{"index":0,"text":"a"}],"usage":{}}` {
		t.Errorf("the client got %s", got)
	}
	if len(observed.recent()) != 1 {
		t.Errorf("%d observations, want 1", len(observed.recent()))
	}
}

// eightPorts returns a pod of an InferencePool with eight ports, each of which is a rank.
func eightPorts(pod, host string) discovery.Backend {
	b := discovery.Backend{Pod: pod, Address: host + ":8000", Ranks: 8}
	for rank := range 8 {
		b.RankAddresses = append(b.RankAddresses, fmt.Sprintf("%s:%d", host, 8000+rank))
	}
	return b
}

// TestPicksAmongEightPorts checks that each port is an endpoint: load is spread over all of them, hints select among
// them, no header names a rank, and other ports are fallbacks.
func TestPicksAmongEightPorts(t *testing.T) {
	gatewaytest.NoLeaks(t)
	pod := eightPorts("a", "10.0.0.1")
	pod.RankAddresses[5] = "" // inactive
	pool := newPool(pod)
	gateway, _, registry := newPicker(t, pool, ProxyOptions{}) // with any header for pods that name no engine
	const body = `{"prompt":"x","max_tokens":10}`
	seen := map[string]int{}
	var streams []*gatewaytest.Stream
	for range 14 {
		s, endpoints, change := begin(t, gateway, body, map[string]string{strings.ToLower(rankHeader): "5"}, nil)
		streams = append(streams, s)
		seen[endpoints[0]]++
		if len(endpoints) != 3 || endpoints[1] == endpoints[0] || slices.Contains(endpoints, "10.0.0.1:8005") {
			t.Errorf("endpoints %v", endpoints)
		}
		if !change.Remove[strings.ToLower(rankHeader)] || change.Set[strings.ToLower(rankHeader)] != "" {
			t.Errorf("the header is changed by %v: the client's rank must go", change)
		}
	}
	for rank := range 8 {
		want := 2
		if rank == 5 {
			want = 0
		}
		if got := seen[fmt.Sprintf("10.0.0.1:%d", 8000+rank)]; got != want {
			t.Errorf("port %d got %d requests, want %d", 8000+rank, got, want)
		}
	}
	for _, s := range streams {
		s.Cancel()
	}
	eventually(t, "no token is outstanding", func() bool { return outstanding(pool) == 0 })
	eventually(t, "all are counted as 499", func() bool {
		return testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP semmoe_router_requests_total Answered requests, by HTTP status code.
# TYPE semmoe_router_requests_total counter
semmoe_router_requests_total{code="429"} 0
semmoe_router_requests_total{code="499"} 14
semmoe_router_requests_total{code="503"} 0
`), "semmoe_router_requests_total") == nil
	})

	for hint, want := range map[string][]string{
		"10.0.0.1:8003": {"10.0.0.1:8003"}, "10.0.0.1:8002,10.0.0.1:8005,10.0.0.1:8006": {"10.0.0.1:8002", "10.0.0.1:8006"},
		"10.0.0.1:8005": nil, "10.0.0.2": nil, "": nil,
	} {
		for range 4 {
			s := gatewaytest.Open(t, gateway, gatewaytest.FullDuplex)
			s.RequestHeaders("POST", "/v1/completions", nil, false, structpb.NewStringValue(hint))
			s.RequestBody([]byte(body), 1000, true)
			if want == nil {
				if code, change, message := s.Refused(); code != 503 || change.Set["retry-after"] == "" || !strings.Contains(message, "no serving pod is ready") {
					t.Errorf("hint %q: code %d, %v, %s", hint, code, change, message)
				}
				continue
			}
			endpoints, _ := s.Picked()
			if slices.Sort(endpoints); !slices.Equal(endpoints, want) {
				t.Errorf("hint %q: endpoints %v, want %v", hint, endpoints, want)
			}
			s.Cancel()
		}
	}
}

// podOf returns the pod, which has the name of the host of its endpoint.
func podOf(endpoint string) string {
	pod, _, _ := strings.Cut(endpoint, ":")
	return pod
}

// TestGatewayClientDisconnects checks that no load remains when a client disconnects at any point.
func TestGatewayClientDisconnects(t *testing.T) {
	gatewaytest.NoLeaks(t)
	p, _ := solved(t)
	pool := newPool(discovery.Backend{Pod: "a", Address: "a:1", Ranks: 4, PlanDigest: p.Artifact.Digest, Shape: &planstest.Shape})
	pool.AddLayout(p.layout)
	adapter := adapterOf(t, "SGLang")
	gateway, _, _ := newPicker(t, pool, ProxyOptions{RankHeader: adapter.RankHeader, RankRoutes: adapter.RankRoutes, RoutedExperts: adapter.RoutedExperts, SamplePercent: 100})
	for name, play := range map[string]func(*gatewaytest.Stream){
		"before its body has ended": nil,
		"before the response":       func(*gatewaytest.Stream) {},
		"in a stream": func(s *gatewaytest.Stream) {
			s.ResponseHeaders(200, map[string]string{"content-type": "text/event-stream"}, false, "a:1")
			s.Answered()
			s.ResponseBody([]byte("data: {\"choices\":[]}\n\ndata: {"), 5, false)
			s.Body(10)
		},
		"in a response that is read whole": func(s *gatewaytest.Stream) {
			s.ResponseHeaders(200, map[string]string{"content-type": "application/json"}, false, "a:1")
			s.ResponseBody([]byte(`{"choices":`), 5, false)
		},
	} {
		s := gatewaytest.Open(t, gateway, gatewaytest.FullDuplex)
		s.RequestHeaders("POST", "/v1/completions", nil, false, nil)
		s.RequestBody([]byte(`{"prompt":"x"}`), 3, play != nil)
		if play != nil {
			s.Picked()
			s.Body(-1)
			if outstanding(pool) == 0 {
				t.Errorf("%s: nothing is outstanding while it runs", name)
			}
			play(s)
		}
		s.Cancel()
		eventually(t, name+": no token is outstanding", func() bool { return outstanding(pool) == 0 })
	}
}

// TestUnchangedResponses checks that a gateway that forwards responses unchanged gets no sampled requests, and that
// requests for experts do not go to pods with a permuted checkpoint.
func TestUnchangedResponses(t *testing.T) {
	gatewaytest.NoLeaks(t)
	adapter := adapterOf(t, "SGLang")
	options := ProxyOptions{RankHeader: adapter.RankHeader, RankRoutes: adapter.RankRoutes, RoutedExperts: adapter.RoutedExperts, SamplePercent: 100}
	pool := NewPool()
	pool.AddLayout(permutedLayout(2, 2, 0, 3, 1))
	permuted := discovery.Backend{Pod: "permuted", Address: "p:1", Ranks: 2, PlanDigest: "d", Permuted: true, Shape: &permutedShape}
	plain := discovery.Backend{Pod: "plain", Address: "a:1", Ranks: 2, PlanDigest: "d", Shape: &permutedShape}
	pool.Set([]discovery.Backend{permuted, plain})
	gateway, _, _ := newPicker(t, pool, options)
	config := &extprocv3.ProtocolConfiguration{RequestBodyMode: processingv3.ProcessingMode_FULL_DUPLEX_STREAMED, ResponseBodyMode: processingv3.ProcessingMode_NONE}
	open := func(body string) *gatewaytest.Stream {
		s := gatewaytest.Open(t, gateway, config)
		s.RequestHeaders("POST", "/v1/completions", nil, false, nil)
		s.RequestBody([]byte(body), 1000, true)
		return s
	}
	for range 20 {
		s := open(`{"prompt":"x"}`)
		s.Picked()
		if body, _ := s.Body(-1); string(body) != `{"prompt":"x"}` {
			t.Fatalf("the engine is asked %s", body)
		}
		s.Cancel()
		s = open(`{"prompt":"x","return_routed_experts":true}`)
		if endpoints, _ := s.Picked(); endpoints[0] != "a:1" {
			t.Fatalf("endpoints %v for who asks for experts", endpoints)
		}
		s.Cancel()
	}
	pool.Set([]discovery.Backend{permuted})
	if code, _, body := open(`{"prompt":"x","return_routed_experts":true}`).Refused(); code != 503 || !strings.Contains(body, "logical expert IDs") {
		t.Errorf("code %d, %s", code, body)
	}
}

// TestRunsAsAnEndpointPicker checks that an endpoint picker starts from its snapshot without the API server, reports
// its readiness, and lets a running stream finish on shutdown.
func TestRunsAsAnEndpointPicker(t *testing.T) {
	gatewaytest.NoLeaks(t)
	dir := t.TempDir()
	if err := discovery.SaveSnapshot(dir, []discovery.Backend{eightPorts("a", "10.0.0.1")}); err != nil {
		t.Fatal(err)
	}
	clients, err := kubernetes.NewForConfig(&rest.Config{Host: fmt.Sprintf("https://127.0.0.1:%d", ports.Reserve(t))})
	if err != nil {
		t.Fatal(err)
	}
	options := Options{
		ProxyOptions: ProxyOptions{RankHeader: rankHeader, MaxBodyBytes: 1 << 20}, Pool: DefaultPoolOptions(), Namespace: "ns", Selector: "a=b", SnapshotDir: dir, Host: "127.0.0.1",
		FetchPlan: func(context.Context, string, string) error { return nil }, MetricsPort: ports.Reserve(t), DrainTimeout: time.Minute,
	}
	options.EndpointPicker = &EndpointPickerOptions{Port: ports.Reserve(t), HealthPort: ports.Reserve(t), Fallbacks: 1}
	if options.EndpointPicker.TLS, err = picker.TLSConfig("", "", ""); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, clients, options) }()
	health, err := grpc.NewClient(fmt.Sprintf("dns:///127.0.0.1:%d", options.EndpointPicker.HealthPort), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer health.Close()
	ready := func() bool {
		answer, err := healthpb.NewHealthClient(health).Check(t.Context(), &healthpb.HealthCheckRequest{Service: "readiness"})
		return err == nil && answer.GetStatus() == healthpb.HealthCheckResponse_SERVING
	}
	eventually(t, "ready", ready)
	address := fmt.Sprintf("127.0.0.1:%d", options.EndpointPicker.Port)
	s, endpoints, _ := begin(t, gatewaytest.Dial(t, address), "{}", nil, nil)
	if len(endpoints) != 2 || !strings.HasPrefix(endpoints[0], "10.0.0.1:800") {
		t.Errorf("endpoints %v", endpoints)
	}
	stop()
	eventually(t, "no new connections", func() bool {
		connection, err := tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true})
		if err == nil {
			connection.Close()
		}
		return err != nil
	})
	s.ResponseHeaders(200, nil, true, endpoints[0])
	s.Answered()
	if err := s.End(); err != io.EOF {
		t.Errorf("the running stream ended with %v", err)
	}
	if err := <-ended; err != nil {
		t.Errorf("the router ended with %v", err)
	}
}

// TestManyStreamsAtOnce checks many concurrent clients, some of which disconnect, while pods change: each request gets
// an existing endpoint or 503, and in the end no load and no waiting request remain.
func TestManyStreamsAtOnce(t *testing.T) {
	gatewaytest.NoLeaks(t)
	p, _ := solved(t)
	adapter := adapterOf(t, "SGLang")
	var pods []discovery.Backend
	for i := range 4 {
		pod := eightPorts(fmt.Sprint("pod-", i), fmt.Sprintf("10.0.0.%d", i))
		if i%2 == 0 {
			pod.Ranks, pod.RankAddresses, pod.PlanDigest, pod.Shape = 4, nil, p.Artifact.Digest, &planstest.Shape
		}
		pods = append(pods, pod)
	}
	pool := newPool(pods...)
	pool.AddLayout(p.layout)
	gateway, _, _ := newPicker(t, pool, ProxyOptions{RankHeader: adapter.RankHeader, RankRoutes: adapter.RankRoutes, RoutedExperts: adapter.RoutedExperts, SamplePercent: 50})
	var clients sync.WaitGroup
	for client := range 16 {
		clients.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(client)))
			for i := range 25 {
				pool.Set(pods[random.IntN(4):])
				s := gatewaytest.Open(t, gateway, gatewaytest.FullDuplex)
				s.RequestHeaders("POST", "/v1/completions", map[string]string{"x-request-id": fmt.Sprint(client, "-", i)}, false, nil)
				s.RequestBody(fmt.Appendf(nil, `{"prompt":[%d],"max_tokens":3}`, i), 1+random.IntN(40), true)
				endpoints, change := s.Picked()
				if pinned := change.Set[strings.ToLower(adapter.RankHeader)] != ""; pinned != slices.Contains([]string{"10.0.0.0:8000", "10.0.0.2:8000"}, endpoints[0]) {
					t.Errorf("endpoints %v, header %v", endpoints, change)
				}
				s.Body(-1)
				stage := random.IntN(4)
				if stage > 0 {
					s.ResponseHeaders(200, map[string]string{"content-type": "text/event-stream"}, false, endpoints[random.IntN(len(endpoints))])
					s.Answered()
				}
				if stage > 1 {
					s.ResponseBody([]byte("data: {\"text\":\"a\"}\n\ndata: [DONE]\n\n"), 1+random.IntN(40), stage > 2)
				}
				if stage > 2 {
					if got, _ := s.Body(-1); string(got) != "data: {\"text\":\"a\"}\n\ndata: [DONE]\n\n" {
						t.Errorf("the client got %q", got)
					}
				}
				s.Cancel()
			}
		})
	}
	clients.Wait()
	eventually(t, "no token is outstanding", func() bool { return outstanding(pool) == 0 })
}

// TestGatewayWithAllRanksFull checks that a gateway's client gets 429 immediately while all ranks are at their limit,
// and that a released place is used.
func TestGatewayWithAllRanksFull(t *testing.T) {
	gatewaytest.NoLeaks(t)
	options := DefaultPoolOptions()
	options.PendingLimitPerRank = 1
	pool, err := NewPoolWith(options)
	if err != nil {
		t.Fatal(err)
	}
	pool.Set([]discovery.Backend{{Pod: "a", Address: "a:1", Ranks: 2}})
	gateway, _, _ := newPicker(t, pool, ProxyOptions{RankHeader: rankHeader})
	first, _, _ := begin(t, gateway, `{"prompt":"x"}`, nil, nil)
	begin(t, gateway, `{"prompt":"y"}`, nil, nil)
	s := gatewaytest.Open(t, gateway, gatewaytest.FullDuplex)
	s.RequestHeaders("POST", "/v1/completions", nil, false, nil)
	s.RequestBody([]byte(`{"prompt":"z"}`), 100, true)
	if code, change, body := s.Refused(); code != 429 || change.Set["retry-after"] == "" {
		t.Errorf("code %d, %v, %s", code, change, body)
	}
	first.Cancel()
	eventually(t, "a rank has a place", func() bool {
		pool.mu.Lock()
		defer pool.mu.Unlock()
		return pool.groups[0].backends[0].pending[0]+pool.groups[0].backends[0].pending[1] == 1
	})
	if _, endpoints, _ := begin(t, gateway, `{"prompt":"z"}`, nil, nil); endpoints[0] != "a:1" {
		t.Errorf("endpoints %v", endpoints)
	}
}
