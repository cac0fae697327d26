// SPDX-License-Identifier: Apache-2.0

package alerts

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/router"
	"github.com/semmoe/operator/test/ports"
)

// runningRouter is a running request router.
type runningRouter struct {
	process
	url string
}

// startRouter runs a request router for a MoEDeployment with one engine pod, which accepts one request at a time. If
// engine is nil, there is no pod.
func (c *cluster) startRouter(t *testing.T, name string, engine *httptest.Server) *runningRouter {
	t.Helper()
	labels := map[string]string{semmoev1.LabelDeployment: name, semmoev1.LabelComponent: semmoev1.ComponentEngine}
	if engine != nil {
		_, port, err := net.SplitHostPort(strings.TrimPrefix(engine.URL, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: serving, Name: name + "-0", Labels: labels, Annotations: map[string]string{semmoev1.AnnotationPort: port}},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "engine", Image: "engine:1"}}},
		}
		c.create(t, pod)
		pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "127.0.0.1", PodIPs: []corev1.PodIP{{IP: "127.0.0.1"}},
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
		if err := c.Status().Update(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
	}
	clientPort, metricsPort := ports.Reserve(t), ports.Reserve(t)
	r := &runningRouter{process{serving, name + "-router", fmt.Sprintf("127.0.0.1:%d", metricsPort), name}, fmt.Sprintf("http://127.0.0.1:%d", clientPort)}
	options := router.Options{
		ProxyOptions: router.ProxyOptions{MaxBodyBytes: 1 << 20, EndpointWait: time.Millisecond},
		Pool:         router.DefaultPoolOptions(),
		Namespace:    serving, Selector: metav1.FormatLabelSelector(&metav1.LabelSelector{MatchLabels: labels}), SnapshotDir: t.TempDir(),
		Host: "127.0.0.1", Port: clientPort, MetricsPort: metricsPort, DrainTimeout: time.Second,
	}
	options.Pool.PendingLimitPerRank = 1
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- router.Run(logr.NewContext(ctx, logr.Discard()), c.clients, options) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("router %s: %v", name, err)
		}
	})
	eventually(t, "router "+name+" is ready", func() error {
		return answers(http.Get("http://" + r.address + "/readyz"))
	})
	return r
}

const completion = `{"model":"m","prompt":"x","max_tokens":1}`

// occupy sends a request that occupies the engine until the test ends.
func (r *runningRouter) occupy(t *testing.T, engine *hangingEngine) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url+"/v1/completions", strings.NewReader(completion))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if response, err := http.DefaultClient.Do(request); err == nil {
			response.Body.Close()
		}
	}()
	t.Cleanup(func() { cancel(); <-ended })
	select {
	case <-engine.asked:
	case <-time.After(time.Minute):
		t.Fatal("the request has not reached the engine")
	}
}

// ask sends requests, and fails the test unless all get the status code.
func (r *runningRouter) ask(t *testing.T, requests, code int) {
	t.Helper()
	for range requests {
		if err := r.answers(code); err != nil {
			t.Fatalf("%s: %v", r.pod, err)
		}
	}
}

func (r *runningRouter) answers(code int) error {
	response, err := http.Post(r.url+"/v1/completions", "application/json", strings.NewReader(completion))
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if text, _ := io.ReadAll(response.Body); response.StatusCode != code {
		return fmt.Errorf("%s instead of %d: %s", response.Status, code, text)
	}
	return nil
}

// startEngine starts an engine that answers immediately.
func startEngine(t *testing.T) *httptest.Server {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"choices":[{"text":"a"}]}`)
	}))
	t.Cleanup(server.Close)
	return server
}

// hangingEngine does not answer requests until their clients disconnect.
type hangingEngine struct {
	*httptest.Server
	// asked receives a value for each request.
	asked chan struct{}
}

func startHangingEngine(t *testing.T) *hangingEngine {
	e := &hangingEngine{asked: make(chan struct{}, 1)}
	e.Server = httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // the server detects a closed connection only after reading the body
		e.asked <- struct{}{}
		<-r.Context().Done()
	}))
	t.Cleanup(e.Close)
	return e
}
