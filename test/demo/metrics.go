// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// metricsServer lets a Prometheus server on this machine scrape the processes of the demo, which are in the cluster
// network. /targets answers an http_sd_config. The server forwards each scrape of a target to its pod.
type metricsServer struct {
	cluster *cluster
	address string
	token   string // of a service account that may read the managers' metrics

	mu       sync.Mutex
	managers map[string]string // address of each manager pod, by pod name
}

// offerMetrics serves the metrics of all processes at an address until the context ends. The managers must be running.
func (d *demo) offerMetrics(ctx context.Context, address string) error {
	return d.out.Step(ctx, "metrics at http://"+address+"/targets", func(func(string)) error {
		s := &metricsServer{cluster: d.cluster, managers: map[string]string{}}
		if err := s.mayRead(ctx); err != nil {
			return err
		}
		listener, err := net.Listen("tcp", address)
		if err != nil {
			return err
		}
		s.address = listener.Addr().String()
		handler := http.NewServeMux()
		handler.HandleFunc("GET /targets", s.targets)
		handler.HandleFunc("GET /pods/{namespace}/{pod}/metrics", s.metrics)
		server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second, BaseContext: func(net.Listener) context.Context { return ctx }}
		context.AfterFunc(ctx, func() { server.Close() }) //nolint:errcheck // the demo ends
		go server.Serve(listener)                         //nolint:errcheck // ends with the demo
		return nil
	})
}

// scraper is the service account that may read the managers' metrics.
const scraper = "demo-prometheus"

// mayRead creates the service account scraper, as docs/install.md describes, and a token for it.
func (s *metricsServer) mayRead(ctx context.Context) (err error) {
	for _, args := range [][]string{
		{"create", "serviceaccount", "-n", systemNamespace, scraper},
		{"create", "clusterrolebinding", scraper, "--clusterrole=semmoe-metrics-reader", "--serviceaccount=" + systemNamespace + ":" + scraper},
	} {
		if _, err := s.cluster.run(ctx, nil, args...); err != nil {
			return err
		}
	}
	s.token, err = s.cluster.run(ctx, nil, "create", "token", "-n", systemNamespace, scraper, "--duration=2h")
	return err
}

// target is one entry of the answer to an http_sd_config.
type target struct {
	Targets []string          `json:"targets"`
	Labels  map[string]string `json:"labels"`
}

// jobs maps components to the job names of their monitors.
var jobs = map[string]string{"manager": "semmoe-manager", "store": "semmoe-store", "router": "semmoe-router"}

func (s *metricsServer) targets(w http.ResponseWriter, r *http.Request) {
	var pods corev1.PodList
	text, err := s.cluster.run(r.Context(), nil, "get", "pods", "-A", "-o", "json")
	if err == nil {
		err = json.Unmarshal([]byte(text), &pods)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(s.targetsOf(pods.Items)) //nolint:errcheck // the client has gone
}

// targetsOf returns a target for each running pod of the operator, with the labels that the Prometheus Operator would
// add.
func (s *metricsServer) targetsOf(pods []corev1.Pod) []target {
	targets := []target{}
	for _, pod := range pods {
		job := jobs[cmp.Or(pod.Labels[semmoev1.LabelComponent], pod.Labels["app.kubernetes.io/component"])]
		if job == "" || pod.Status.Phase != corev1.PodRunning || pod.DeletionTimestamp != nil {
			continue
		}
		labels := map[string]string{
			"__metrics_path__": "/pods/" + pod.Namespace + "/" + pod.Name + "/metrics",
			"job":              job, "namespace": pod.Namespace, "pod": pod.Name, "instance": pod.Name,
		}
		if deployment := pod.Labels[semmoev1.LabelDeployment]; deployment != "" {
			labels["name"] = deployment
		}
		targets = append(targets, target{[]string{s.address}, labels})
	}
	return targets
}

func (s *metricsServer) metrics(w http.ResponseWriter, r *http.Request) {
	namespace, pod := r.PathValue("namespace"), r.PathValue("pod")
	read := s.throughAPIServer
	if namespace == systemNamespace && strings.HasPrefix(pod, storeManager+"-") {
		read = s.fromManager
	}
	text, err := read(r.Context(), namespace, pod)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	w.Header().Set("Content-Type", "text/plain; version=0.0.4")
	io.WriteString(w, text) //nolint:errcheck // the client has gone
}

func (s *metricsServer) throughAPIServer(ctx context.Context, namespace, pod string) (string, error) {
	return s.cluster.run(ctx, nil, "get", "--raw", "/api/v1/namespaces/"+namespace+"/pods/"+pod+":9090/proxy/metrics")
}

// fromManager reads the metrics directly from a manager. A manager requires a token, which the API server's proxy
// strips.
func (s *metricsServer) fromManager(ctx context.Context, namespace, pod string) (string, error) {
	address, err := s.reachManager(ctx, namespace, pod)
	if err != nil {
		return "", err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+address+"/metrics", nil)
	if err != nil {
		return "", err
	}
	request.Header.Set("Authorization", "Bearer "+s.token)
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}} //nolint:gosec // each manager signs its own certificate
	defer transport.CloseIdleConnections()
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("manager %s: %s: %s", pod, response.Status, text)
	}
	return string(text), err
}

// reachManager returns the address of a manager pod. It creates one Service per pod, because only Services are
// reachable.
func (s *metricsServer) reachManager(ctx context.Context, namespace, pod string) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if address := s.managers[pod]; address != "" {
		return address, nil
	}
	service := "demo-" + pod
	if _, err := s.cluster.run(ctx, nil, "label", "pod", "-n", namespace, pod, "demo="+pod, "--overwrite"); err != nil {
		return "", err
	}
	manifest, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Service", "metadata": map[string]any{"name": service, "namespace": namespace},
		"spec": map[string]any{"selector": map[string]any{"demo": pod}, "ports": []any{map[string]any{"port": 8443, "targetPort": "metrics"}}},
	})
	if err != nil {
		return "", err
	}
	if _, err := s.cluster.run(ctx, manifest, "apply", "-f", "-"); err != nil {
		return "", err
	}
	s.managers[pod], err = s.cluster.reach(ctx, namespace, service, 8443)
	return s.managers[pod], err
}
