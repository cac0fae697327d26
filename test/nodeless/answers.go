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

// ServeHTTP answers for the pod at the request's address, as the proxy of all pods: a manager with HTTP_PROXY and HTTPS_PROXY reaches
// every pod through it.
func (a *Agent) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodConnect {
		connectproxy.Dial(a.dialTLS).ServeHTTP(w, r)
		return
	}
	host := r.URL.Hostname()
	if host == "" { // within a tunnel
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
	_ = json.NewEncoder(w).Encode(answer) // a manager that went away needs no answer
}

// liveTokens is how many tokens every router has counted at any time that is not to come: fewer than any profile waits for.
const liveTokens = 500

// dialTLS connects to the TLS server that answers for the ports of pods with TLS.
func (a *Agent) dialTLS(ctx context.Context, network, _ string) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, network, a.tls().Listener.Addr().String())
}

// RoundTrip answers for the pods inside this process.
func (a *Agent) RoundTrip(r *http.Request) (*http.Response, error) {
	recorder := httptest.NewRecorder()
	a.ServeHTTP(recorder, r)
	return recorder.Result(), nil
}

// completion is what every engine answers, whatever it is asked: plans change no outputs.
func completion() any {
	return map[string]any{"choices": []any{map[string]any{"logprobs": map[string]any{
		"tokens": []string{" a", " b"}, "token_logprobs": []float64{-0.1, -0.2},
		"top_logprobs": []any{map[string]float64{" a": -0.1, " c": -5}, map[string]float64{" b": -0.2, " c": -5}},
	}}}}
}

// observations are the report of a request router whose traffic is stationary: of each revision, enough requests, spread over the
// ranks, with seven of ten activations local.
func (a *Agent) observations(router *corev1.Pod) lar.Report {
	report := lar.Report{
		Population: lar.Population{Requests: lar.RequestsAll, Replicas: lar.ReplicasAll, SamplePercent: 5},
		Last:       lar.Set{},
	}
	told := map[string]bool{}
	for _, engine := range a.enginesOf(router.Namespace, router.Labels[semmoev1.LabelDeployment]) {
		revision := engine.Labels[semmoev1.LabelRevision]
		if told[revision] {
			continue
		}
		told[revision] = true
		for i := range 64 {
			report.Last.Add(lar.Observation{
				Time: observedAt, Revision: revision, Plan: engine.Annotations[semmoev1.AnnotationPlanDigest], Rank: i % 4,
				Count: lar.Count{Activations: lar.Activations{Local: 70, Total: 100}, Tokens: 10, TokenLayers: 25, RemoteRanks: 20},
			})
		}
	}
	return report
}
