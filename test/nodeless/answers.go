// SPDX-License-Identifier: Apache-2.0

package nodeless

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/router/livesamples"
	"github.com/semmoe/operator/test/connectproxy"
)

// ServeHTTP responds for the pod at the request's address, as the proxy for all pods. A manager with HTTP_PROXY and
// HTTPS_PROXY set to this proxy reaches every pod through it.
func (a *Agent) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodConnect {
		connectproxy.Dial(a.dialTLS).ServeHTTP(w, r)
		return
	}
	host := r.URL.Hostname()
	if host == "" { // inside a tunnel
		host, _, _ = net.SplitHostPort(r.Host)
	}
	pod, err := a.podAt(host)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	var answer any
	switch component := pod.Labels[semmoev1.LabelComponent]; {
	case component == semmoev1.ComponentEngine && r.URL.Path == "/v1/completions":
		answer = completion()
	case component == semmoev1.ComponentRouter && r.URL.Path == "/v1/observations":
		answer = a.observations(pod)
	case component == semmoev1.ComponentRouter && r.URL.Path == livesamples.CountsPath && r.Method == http.MethodHead:
		tokens := liveTokens
		if since, err := time.Parse(time.RFC3339, r.URL.Query().Get(livesamples.QuerySince)); err == nil && since.After(time.Now()) {
			tokens = 0
		}
		w.Header().Set(livesamples.HeaderTokens, strconv.Itoa(tokens))
		return
	default:
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answer) // the manager may have closed the connection
}

// liveTokens is the number of tokens that every router reports for a start time that is not in the future. It is below
// the number that any profile waits for.
const liveTokens = 500

// dialTLS connects to the TLS server that responds for the TLS ports of all pods.
func (a *Agent) dialTLS(ctx context.Context, network, _ string) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, network, a.tls().Listener.Addr().String())
}

// RoundTrip responds for the pods inside this process.
func (a *Agent) RoundTrip(r *http.Request) (*http.Response, error) {
	recorder := httptest.NewRecorder()
	a.ServeHTTP(recorder, r)
	return recorder.Result(), nil
}

// completion returns the response of every engine to any prompt. It is constant, because plans do not change outputs.
func completion() any {
	return map[string]any{"choices": []any{map[string]any{"logprobs": map[string]any{
		"tokens": []string{" a", " b"}, "token_logprobs": []float64{-0.1, -0.2},
		"top_logprobs": []any{map[string]float64{" a": -0.1, " c": -5}, map[string]float64{" b": -0.2, " c": -5}},
	}}}}
}

// observations returns the report of a request router with stationary traffic: 64 observations per revision, spread
// over the ranks, with 70% local activations.
func (a *Agent) observations(router *corev1.Pod) lar.Report {
	report := lar.Report{
		Population: lar.Population{Requests: lar.RequestsAll, Replicas: lar.ReplicasAll, SamplePercent: 5},
		Last:       lar.Set{},
	}
	reported := map[string]bool{}
	for _, engine := range a.enginesOf(router.Namespace, router.Labels[semmoev1.LabelDeployment]) {
		revision := engine.Labels[semmoev1.LabelRevision]
		if reported[revision] {
			continue
		}
		reported[revision] = true
		for i := range 64 {
			report.Last.Add(lar.Observation{
				Time: observedAt, Revision: revision, Plan: engine.Annotations[semmoev1.AnnotationPlanDigest], Rank: i % 4,
				Count: lar.Count{Activations: lar.Activations{Local: 70, Total: 100}, Tokens: 10, TokenLayers: 25, RemoteRanks: 20},
			})
		}
	}
	return report
}
