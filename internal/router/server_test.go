// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/test/ports"
)

// keeping returns the options of a router that has stored backends and a plan, and clients of an unreachable API
// server. The artifact store is unreachable too.
func keeping(t *testing.T, p planned, backends ...discovery.Backend) (kubernetes.Interface, Options) {
	t.Helper()
	dir := t.TempDir()
	if err := discovery.SaveSnapshot(dir, backends); err != nil {
		t.Fatal(err)
	}
	if err := plan.Write(filepath.Join(dir, plansName, p.Artifact.Digest), p.Artifact, []byte("{}")); err != nil {
		t.Fatal(err)
	}
	onlyFromDisk := func(_ context.Context, _, dir string) error {
		_, _, err := plan.Read(dir)
		return err
	}
	clients, err := kubernetes.NewForConfig(&rest.Config{Host: fmt.Sprintf("https://127.0.0.1:%d", ports.Reserve(t))})
	if err != nil {
		t.Fatal(err)
	}
	return clients, Options{
		ProxyOptions: ProxyOptions{MaxBodyBytes: 1 << 20, EndpointWait: time.Second},
		Pool:         DefaultPoolOptions(), Namespace: "ns", Selector: "a=b", SnapshotDir: dir, FetchPlan: onlyFromDisk,
		Host: "127.0.0.1", Port: ports.Reserve(t), MetricsPort: ports.Reserve(t), DrainTimeout: time.Minute,
	}
}

// TestServesFromStoredState checks that a router that starts without API server and artifact store serves from its
// snapshot and the stored plan. On SIGTERM it first becomes not ready, then stops accepting connections, and lets a
// running request finish.
func TestServesFromStoredState(t *testing.T) {
	p, _ := solved(t)
	release := make(chan struct{})
	engine := newEngine(t, "a", 2, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/generate" {
			fmt.Fprint(w, "begun ")
			w.(http.Flusher).Flush()
			<-release
		}
		fmt.Fprint(w, "done")
	})
	engine.Ranks, engine.PlanDigest = 4, p.Artifact.Digest
	clients, options := keeping(t, p, engine)
	options.RankHeader, options.ShutdownDelay = rankHeader, 2*time.Second
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, clients, options) }()
	service, probes := fmt.Sprintf("http://127.0.0.1:%d", options.Port), fmt.Sprintf("http://127.0.0.1:%d", options.MetricsPort)
	eventually(t, "ready", func() bool {
		response, err := http.Get(probes + "/readyz")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	if response, body := post(t, service+"/v1/completions", "{}"); response.StatusCode != http.StatusOK || body != "done" {
		t.Fatalf("status %d, body %q", response.StatusCode, body)
	}
	eventually(t, "requests are scored by the plan", func() bool {
		response, _ := post(t, service+"/v1/completions", `{"prompt":[1,2,3]}`)
		return response.Header.Get(HeaderPlan) == p.Short()
	})

	response, err := http.Post(service+"/generate", "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	begun := make([]byte, len("begun "))
	if _, err := io.ReadFull(response.Body, begun); err != nil {
		t.Fatal(err)
	}
	stop()
	eventually(t, "not ready", func() bool {
		response, err := http.Get(probes + "/readyz")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusServiceUnavailable
	})
	// A client that has not seen the change yet is served, and gets Connection: close.
	client := &http.Client{Transport: &http.Transport{}}
	if response, err := client.Post(service+"/v1/completions", "application/json", strings.NewReader("{}")); err != nil {
		t.Error(err)
	} else if response.Body.Close(); response.StatusCode != http.StatusOK || !response.Close {
		t.Errorf("before the router stops: %s, the connection ends: %v", response.Status, response.Close)
	}
	eventually(t, "no new connections", func() bool {
		connection, err := net.Dial("tcp", strings.TrimPrefix(service, "http://"))
		if err != nil {
			return true
		}
		connection.Close()
		return false
	})
	close(release)
	if rest, err := io.ReadAll(response.Body); err != nil || string(rest) != "done" {
		t.Errorf("the running request ended with %q, %v", rest, err)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("the router ended with %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Error("the router does not end")
	}
}

// TestServesPlansNextToAnEngineWithoutRanks checks that while an engine without ranks replaces another engine, or is
// replaced, pods of the other engine are served by plans, their own or the default, and pods without ranks by load.
func TestServesPlansNextToAnEngineWithoutRanks(t *testing.T) {
	p, _ := solved(t)
	serve := func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.Header.Get(rankHeader)) }
	own, byDefault, without := newEngine(t, "own", 4, serve), newEngine(t, "default", 4, serve), newEngine(t, "without", 4, serve)
	own.Engine, byDefault.Engine, without.Engine, own.PlanDigest = "SGLang", "VLLM", "TensorRTLLM", p.Artifact.Digest
	for _, header := range []string{rankHeader, ""} {
		clients, options := keeping(t, p, own, byDefault, without)
		options.RankHeader, options.DefaultPlan = header, p.Artifact.Digest
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- Run(ctx, clients, options) }()
		planned := map[string]bool{"own": false, "default": false}
		eventually(t, "pods of engines that take ranks are served by the plan, and the other one is served", func() bool {
			response, err := http.Post(fmt.Sprintf("http://127.0.0.1:%d/v1/completions", options.Port), "application/json", strings.NewReader(`{"prompt":[1,2,3]}`))
			if err != nil {
				return false // still starting
			}
			defer response.Body.Close()
			rank, err := io.ReadAll(response.Body)
			if err != nil || response.StatusCode != http.StatusOK {
				return false
			}
			pod, short := response.Header.Get(HeaderPod), response.Header.Get(HeaderPlan)
			if pins := pod != "without"; pins != (len(rank) == 1) || !pins && short != "" {
				t.Errorf("router with header %q: pod %s gets rank %q by plan %q", header, pod, rank, short)
			}
			planned[pod] = planned[pod] || short == p.Short() || pod == "without"
			return planned["own"] && planned["default"] && planned["without"]
		})
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// TestIsNotReadyWithoutEndpoints checks that a router without a snapshot and without the API server is not ready.
func TestIsNotReadyWithoutEndpoints(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	clients, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	options := Options{
		ProxyOptions: ProxyOptions{RankHeader: rankHeader, MaxBodyBytes: 1 << 20, EndpointWait: 10 * time.Millisecond, ClientTimeout: 100 * time.Millisecond},
		Pool:         DefaultPoolOptions(), Namespace: "ns", Selector: "a=b", SnapshotDir: t.TempDir(), Host: "127.0.0.1", Port: ports.Reserve(t), MetricsPort: ports.Reserve(t), DrainTimeout: time.Second,
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, clients, options) }()
	eventually(t, "alive", func() bool {
		response, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/healthz", options.MetricsPort))
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	response, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/readyz", options.MetricsPort))
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("/readyz answers %s", response.Status)
	}
	if err := endsWithoutHeader(options.Port); err != nil {
		t.Errorf("a client that does not send a header: %v", err)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestDrainingIsPermanent checks that a draining router never becomes ready again, regardless of what it discovers.
func TestDrainingIsPermanent(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	is := false
	setReady := readyWithin(ctx, func(ready bool) { is = ready })
	if setReady(true); !is {
		t.Error("not ready with its endpoints")
	}
	cancel()
	setReady(false)
	if setReady(true); is {
		t.Error("ready again while it drains")
	}
}

// endsWithoutHeader sends a part of a header and waits until the server closes the connection.
func endsWithoutHeader(port int) error {
	connection, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return err
	}
	defer connection.Close()
	if err := connection.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return err
	}
	if _, err := io.WriteString(connection, "POST /generate HTTP/1.1\r\nHost: "); err != nil {
		return err
	}
	_, err = io.ReadAll(connection)
	return err
}
