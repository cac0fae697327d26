// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/router/clientauth"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/tlsfiles"
	"github.com/semmoe/operator/internal/router/tlsfiles/tlstest"
	"github.com/semmoe/operator/test/ports"
)

const clientKey = "team-a-0123456789"

func loadKeys(t *testing.T) *clientauth.Keys {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "team-a"), []byte(clientKey), 0o600); err != nil {
		t.Fatal(err)
	}
	keys, err := clientauth.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

// syncedLog collects log lines.
type syncedLog struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *syncedLog) logger() logr.Logger {
	return funcr.New(func(prefix, args string) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.text.WriteString(prefix + args + "\n")
	}, funcr.Options{Verbosity: 10})
}

func (l *syncedLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// TestClientKeys checks that a request without a valid key reaches no engine and has its body not read, that engines get
// no key of a client, and that keys and prompts appear neither in logs nor in metrics.
func TestClientKeys(t *testing.T) {
	var received atomic.Int64
	engine := newEngine(t, "a", 0, func(w http.ResponseWriter, r *http.Request) {
		received.Add(1)
		if r.Header.Get("Authorization") != "Bearer engine-key" || r.Header.Get("X-Api-Key") != "" {
			t.Errorf("the engine gets the header %v", r.Header)
		}
		http.Error(w, "no", http.StatusInternalServerError)
	})
	pool, registry, log := NewPool(), prometheus.NewRegistry(), &syncedLog{}
	handler, _ := NewProxy(pool, registry, log.logger(), ProxyOptions{
		MaxBodyBytes: 1 << 20, EndpointWait: time.Second, Keys: loadKeys(t), Engines: EngineConnections{APIKey: "engine-key"},
	})
	pool.Set([]discovery.Backend{engine})
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	send := func(path string, header http.Header, body io.Reader) (*http.Response, string) {
		t.Helper()
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL+path, body)
		if err != nil {
			t.Fatal(err)
		}
		request.Header = header
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		return response, string(text)
	}
	const prompt = `{"prompt":"a confidential question"}`
	for _, header := range []http.Header{{}, {"Authorization": {"Bearer wrong-0123456789"}}, {"X-Api-Key": {clientKey + "x"}}} {
		response, body := send("/v1/completions", header, strings.NewReader(prompt))
		if response.StatusCode != http.StatusUnauthorized || response.Header.Get("Www-Authenticate") != "Bearer" || !strings.Contains(body, `"type":"authentication_error"`) {
			t.Errorf("header %v: %d %s", header, response.StatusCode, body)
		}
	}
	if response, body := send("/v1/messages", http.Header{}, strings.NewReader(prompt)); response.StatusCode != http.StatusUnauthorized || !strings.Contains(body, `"type":"error"`) {
		t.Errorf("the error of the Messages API is %d %s", response.StatusCode, body)
	}
	// A preflight of a browser carries no key. Any other OPTIONS needs one.
	options := func(header http.Header) int {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodOptions, server.URL+"/v1/completions", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		request.Header = header
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		return response.StatusCode
	}
	if code := options(http.Header{}); code != http.StatusUnauthorized || received.Load() != 0 {
		t.Errorf("OPTIONS without a key: %d, %d requests", code, received.Load())
	}
	preflight := http.Header{"Origin": {"http://a"}, "Access-Control-Request-Method": {"POST"}, "X-Api-Key": {clientKey}}
	if code := options(preflight); code != http.StatusInternalServerError || received.Swap(0) != 1 {
		t.Errorf("a preflight: %d", code)
	}
	for name, value := range map[string]string{"X-Api-Key": "wrong-0123456789", "Content-Length": "3", "Origin": ""} {
		wrong := preflight.Clone()
		wrong.Del("X-Api-Key")
		body := io.Reader(http.NoBody)
		if wrong.Set(name, value); name == "Content-Length" {
			body = strings.NewReader("abc")
		}
		request, err := http.NewRequestWithContext(t.Context(), http.MethodOptions, server.URL+"/v1/completions", body)
		if err != nil {
			t.Fatal(err)
		}
		request.Header = wrong
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode != http.StatusUnauthorized || received.Load() != 0 {
			t.Errorf("a preflight with %s %q: %d, %d requests", name, value, response.StatusCode, received.Load())
		}
	}
	// A body that never ends is not read.
	endless, writer := io.Pipe()
	go io.WriteString(writer, `{"prompt":"`) //nolint:errcheck // the client closes the pipe
	if response, _ := send("/v1/completions", http.Header{}, endless); response.StatusCode != http.StatusUnauthorized {
		t.Errorf("an endless body: %d", response.StatusCode)
	}
	writer.Close()
	if got := received.Load(); got != 0 {
		t.Errorf("the engine has received %d requests without a valid key", got)
	}
	if response, _ := send("/v1/completions", http.Header{"Authorization": {"Bearer " + clientKey}}, strings.NewReader(prompt)); response.StatusCode != http.StatusInternalServerError || received.Load() != 1 {
		t.Errorf("a valid key: %d, %d requests", response.StatusCode, received.Load())
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	metrics := fmt.Sprint(families)
	if !strings.Contains(metrics, `value:"team-a"`) {
		t.Error("no metric names the client")
	}
	for _, secret := range []string{clientKey, "engine-key", "wrong-0123456789", "confidential"} {
		if strings.Contains(metrics, secret) || strings.Contains(log.String(), secret) {
			t.Errorf("%q is in a metric or a log", secret)
		}
	}
}

// TestClientLimits checks that a client at its limit gets 429 with Retry-After, and that its place is free after the
// response.
func TestClientLimits(t *testing.T) {
	arrived, release := make(chan struct{}), make(chan struct{})
	engine := newEngine(t, "a", 0, func(w http.ResponseWriter, _ *http.Request) {
		arrived <- struct{}{}
		<-release
		io.WriteString(w, "done") //nolint:errcheck // the client notices
	})
	pool, limits := NewPool(), &clientauth.Limits{Pending: 1}
	handler, _ := NewProxy(pool, prometheus.NewRegistry(), logr.Discard(), ProxyOptions{
		MaxBodyBytes: 1 << 20, EndpointWait: time.Second, Keys: loadKeys(t), ClientLimits: limits,
	})
	pool.Set([]discovery.Backend{engine})
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	send := func() *http.Response {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL+"/v1/completions", strings.NewReader("{}"))
		if err != nil {
			t.Error(err)
			return nil
		}
		request.Header.Set("X-Api-Key", clientKey)
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Error(err)
			return nil
		}
		io.Copy(io.Discard, response.Body) //nolint:errcheck // the status counts
		response.Body.Close()
		return response
	}
	for range 2 {
		first := make(chan *http.Response, 1)
		go func() { first <- send() }()
		<-arrived
		if response := send(); response.StatusCode != http.StatusTooManyRequests || response.Header.Get("Retry-After") != "1" {
			t.Errorf("above the limit: %d, Retry-After %q", response.StatusCode, response.Header.Get("Retry-After"))
		}
		release <- struct{}{}
		if response := <-first; response.StatusCode != http.StatusOK {
			t.Errorf("within the limit: %d", response.StatusCode)
		}
		// The handler may still be ending after the client has its response.
		eventually(t, "the place is free", func() bool {
			free, err := limits.Admit("team-a")
			if err == nil {
				free()
			}
			return err == nil
		})
	}
}

// serveTLS returns an engine that serves TLS, with its address.
func serveTLS(t *testing.T, files *tlsfiles.Files, handler http.HandlerFunc) discovery.Backend {
	t.Helper()
	server := httptest.NewUnstartedServer(handler)
	server.Listener = tls.NewListener(server.Listener, files.Server()) // StartTLS would add a certificate
	server.Start()
	t.Cleanup(server.Close)
	return discovery.Backend{Pod: "a", Address: server.Listener.Addr().String(), TLS: true}
}

func certificates(t *testing.T, authority *tlstest.Authority, host string, notAfter time.Time, clients string) *tlsfiles.Files {
	t.Helper()
	certFile, keyFile := authority.Files(t.TempDir(), host, notAfter)
	files, err := tlsfiles.New(certFile, keyFile, clients)
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// TestTLSToEngines checks certificates of engines and of the router. A failed handshake names the engine and the reason
// once, and the engine counts as unreachable.
func TestTLSToEngines(t *testing.T) {
	authority, stranger := tlstest.NewAuthority(t), tlstest.NewAuthority(t)
	later := time.Now().Add(time.Hour)
	for name, tc := range map[string]struct {
		engine, router *tlsfiles.Files
		serverName     string
		code           int
		logged         string
	}{
		"mutual TLS":       {certificates(t, authority, "127.0.0.1", later, authority.File), certificates(t, authority, "router", later, authority.File), "", http.StatusOK, ""},
		"name":             {certificates(t, authority, "engine.example", later, ""), certificates(t, authority, "router", later, authority.File), "engine.example", http.StatusOK, ""},
		"wrong name":       {certificates(t, authority, "engine.example", later, ""), certificates(t, authority, "router", later, authority.File), "", http.StatusServiceUnavailable, "127.0.0.1"},
		"expired":          {certificates(t, authority, "127.0.0.1", time.Now().Add(-time.Minute), ""), certificates(t, authority, "router", later, authority.File), "", http.StatusServiceUnavailable, "certificate has expired"},
		"unknown":          {certificates(t, authority, "127.0.0.1", later, ""), certificates(t, authority, "router", later, stranger.File), "", http.StatusServiceUnavailable, "unknown authority"},
		"system authority": {certificates(t, authority, "127.0.0.1", later, ""), nil, "", http.StatusServiceUnavailable, "unknown authority"},
	} {
		t.Run(name, func(t *testing.T) {
			var received atomic.Int64
			engine := serveTLS(t, tc.engine, func(w http.ResponseWriter, _ *http.Request) {
				received.Add(1)
				io.WriteString(w, "done") //nolint:errcheck // the client notices
			})
			pool, log := NewPool(), &syncedLog{}
			handler, _ := NewProxy(pool, prometheus.NewRegistry(), logr.Discard(), ProxyOptions{
				MaxBodyBytes: 1 << 20, EndpointWait: 250 * time.Millisecond,
				Engines: EngineConnections{TLS: tc.router, ServerName: tc.serverName, Log: log.logger()},
			})
			pool.Set([]discovery.Backend{engine})
			server := httptest.NewServer(handler)
			t.Cleanup(server.Close)
			response, body := post(t, server.URL+"/v1/completions", "{}")
			if response.StatusCode != tc.code || (received.Load() > 0) != (tc.code == http.StatusOK) {
				t.Errorf("%d %s, %d requests", response.StatusCode, body, received.Load())
			}
			lines := strings.Count(log.String(), "TLS handshake with an engine failed")
			if want := map[bool]int{true: 1}[tc.logged != ""]; lines != want || !strings.Contains(log.String(), tc.logged) {
				t.Errorf("%d messages: %s", lines, log)
			}
		})
	}
}

// TestTLSByAnnotation serves from pods in plain text and with TLS at the same time, as during a roll-out. A pod whose
// certificate cannot be verified counts as unreachable, and the log names its address.
func TestTLSByAnnotation(t *testing.T) {
	const serverName = "m-pods.ns.svc"
	authority, stranger := tlstest.NewAuthority(t), tlstest.NewAuthority(t)
	for name, tc := range map[string]struct {
		trusted *tlstest.Authority
		pods    string
	}{
		"right authority": {authority, "plain secured"},
		"wrong authority": {stranger, "plain"},
	} {
		t.Run(name, func(t *testing.T) {
			var mu sync.Mutex
			received := map[string]bool{}
			handler := func(pod string) http.HandlerFunc {
				return func(w http.ResponseWriter, _ *http.Request) {
					mu.Lock()
					defer mu.Unlock()
					received[pod] = true
					io.WriteString(w, "done") //nolint:errcheck // the client notices
				}
			}
			plain := newEngine(t, "plain", 0, handler("plain")).Address
			secured := serveTLS(t, certificates(t, authority, serverName, time.Now().Add(time.Hour), ""), handler("secured")).Address
			pod := func(name, address, scheme string) *corev1.Pod {
				host, port, err := net.SplitHostPort(address)
				if err != nil {
					t.Fatal(err)
				}
				return &corev1.Pod{
					ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{semmoev1.AnnotationPort: port, semmoev1.AnnotationScheme: scheme}},
					Status:     corev1.PodStatus{PodIP: host, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
				}
			}
			files, err := tlsfiles.New("", "", tc.trusted.File)
			if err != nil {
				t.Fatal(err)
			}
			pool, log := NewPool(), &syncedLog{}
			proxy, _ := NewProxy(pool, prometheus.NewRegistry(), logr.Discard(), ProxyOptions{
				MaxBodyBytes: 1 << 20, EndpointWait: time.Second, Engines: EngineConnections{TLS: files, ServerName: serverName, Log: log.logger()},
			})
			pool.Set(discovery.Backends([]*corev1.Pod{pod("plain", plain, ""), pod("secured", secured, "https")}))
			server := httptest.NewServer(proxy)
			t.Cleanup(server.Close)
			for range 16 {
				if response, body := post(t, server.URL+"/v1/completions", "{}"); response.StatusCode != http.StatusOK {
					t.Fatalf("%d %s", response.StatusCode, body)
				}
			}
			mu.Lock()
			defer mu.Unlock()
			if got := strings.Join(slices.Sorted(maps.Keys(received)), " "); got != tc.pods {
				t.Errorf("pods %s serve, want %s", got, tc.pods)
			}
			if logged := strings.Contains(log.String(), secured); logged != (tc.trusted == stranger) {
				t.Errorf("log: %s", log)
			}
		})
	}
}

// TestTLSForClients serves clients by TLS with client certificates, from a list of backends. Probes and metrics stay
// without TLS.
func TestTLSForClients(t *testing.T) {
	engine := newEngine(t, "a", 0, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "done") }) //nolint:errcheck // the client notices
	list, err := discovery.NewList("http://"+engine.Address, discovery.ListDefaults{Engine: "SGLang"})
	if err != nil {
		t.Fatal(err)
	}
	authority := tlstest.NewAuthority(t)
	options := Options{
		ProxyOptions: ProxyOptions{MaxBodyBytes: 1 << 20, EndpointWait: time.Second}, Pool: DefaultPoolOptions(),
		Source: list.Watch, LocalPlan: list.PlanDir, Host: "127.0.0.1", Port: ports.Reserve(t), MetricsPort: ports.Reserve(t), DrainTimeout: time.Minute,
		TLS: certificates(t, authority, "127.0.0.1", time.Now().Add(time.Hour), authority.File),
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, nil, options) }()
	eventually(t, "ready", func() bool {
		response, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/readyz", options.MetricsPort))
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	code := func(files *tlsfiles.Files) int {
		config, err := files.Client("127.0.0.1")
		if err != nil {
			t.Fatal(err)
		}
		return statusOver(t, config, options.Port)
	}
	if got := code(certificates(t, authority, "client", time.Now().Add(time.Hour), authority.File)); got != http.StatusOK {
		t.Errorf("a client with a certificate gets %d", got)
	}
	if got := code(certificates(t, tlstest.NewAuthority(t), "client", time.Now().Add(time.Hour), authority.File)); got != 0 {
		t.Errorf("a client with the certificate of another authority gets %d", got)
	}
	response, err := http.Post(fmt.Sprintf("http://127.0.0.1:%d/v1/completions", options.Port), "application/json", strings.NewReader("{}"))
	if err == nil {
		if response.Body.Close(); response.StatusCode == http.StatusOK {
			t.Error("a client without TLS is served")
		}
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// statusOver returns the status of a request over TLS; 0 if the connection fails.
func statusOver(t *testing.T, config *tls.Config, port int) int {
	t.Helper()
	transport := &http.Transport{TLSClientConfig: config}
	defer transport.CloseIdleConnections()
	response, err := (&http.Client{Transport: transport}).Post(fmt.Sprintf("https://127.0.0.1:%d/v1/completions", port), "application/json", strings.NewReader("{}"))
	if err != nil {
		return 0
	}
	response.Body.Close()
	return response.StatusCode
}

// TestOwnHeaders checks that headers of the router come from the router only: engines get none of a client, and clients
// none of an engine, also as trailers.
func TestOwnHeaders(t *testing.T) {
	engine := newEngine(t, "a", 4, func(w http.ResponseWriter, r *http.Request) {
		for name := range r.Header {
			if isOwnHeader(name) {
				t.Errorf("the engine gets %s: %s", name, r.Header[name])
			}
		}
		w.Header().Set("Trailer", "X-Semmoe-Pod, X-Announced")
		for _, name := range []string{"X-Semmoe-Rank", "X-Semmoe-Plan", "X-Semmoe-Other"} {
			w.Header().Set(name, "99")
		}
		fmt.Fprint(w, `{"choices":[]}`)
		for _, name := range []string{"X-Semmoe-Pod", "X-Announced", http.TrailerPrefix + "X-Semmoe-Rank", http.TrailerPrefix + "X-Request-Id", http.TrailerPrefix + "X-Other"} {
			w.Header().Set(name, "99")
		}
	})
	url, _ := proxyServer(t, newPool(engine), ProxyOptions{RankHeader: "X-Data-Parallel-Rank", MaxBodyBytes: 1 << 20, EndpointWait: time.Second})
	request, err := http.NewRequest(http.MethodPost, url+"/v1/completions", strings.NewReader(`{"prompt":"x"}`))
	if err != nil {
		t.Fatal(err)
	}
	request.Header = http.Header{"X-Semmoe-Rank": {"3"}, "X-Semmoe-Priority": {"0"}, "x_semmoe_pod": {"b"}, "X-SEMMOE-new": {"1"}}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if _, err := io.ReadAll(response.Body); err != nil {
		t.Fatal(err)
	}
	rank, err := strconv.Atoi(response.Header.Get(HeaderRank))
	if err != nil || rank > 3 || response.Header.Get(HeaderPod) != "a" || response.Header.Get(HeaderPlan) != "" || response.Header.Get("X-Semmoe-Other") != "" {
		t.Errorf("header %v", response.Header)
	}
	if want := (http.Header{"X-Announced": {"99"}, "X-Other": {"99"}}); !reflect.DeepEqual(response.Trailer, want) {
		t.Errorf("trailer %v, want %v", response.Trailer, want)
	}
}
