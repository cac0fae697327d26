// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/corpus"
	"github.com/semmoe/operator/test/tier"
)

// TestBringYourOwn applies the sample of a workload that is not managed by a MoEDeployment, with the reference engine.
// The pods wait for the plan and start with it, and a user-provided request router sends requests to the ranks of their
// experts.
func TestBringYourOwn(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	profile := publishedProfile(t, namespace, "chat", "texts", filepath.Join(repository, "solver", "testdata", "tiny-32e-top4.safetensors.zst"))
	store := startStore(t)
	authority, err := store.Authority(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	create(t, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "semmoe-store-ca"}, Data: map[string]string{"ca.crt": authority}})

	sample, err := readAll(filepath.Join(repository, "config", "samples", "byo-deployment.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range sample {
		u.SetNamespace(namespace)
		switch u.GetKind() + " " + u.GetName() {
		case "AffinityProfile chat":
			set(t, u, specOf(t, profile), "spec")
		case "PlacementPlan chat-ep8":
			set(t, u, int64(4), "spec", "expertParallelSize")
			set(t, u, int64(0), "spec", "minimumGainPercent") // the profile has too few requests to prove a gain
		case "Deployment chat":
			onReferenceEngine(t, u)
		case "RoleBinding chat-router":
			set(t, u, []any{map[string]any{"kind": "ServiceAccount", "name": "chat-router", "namespace": namespace}}, "subjects")
		}
		create(t, u)
	}
	plan := waitPlan(t, newPlan(namespace, "chat-ep8", 4), semmoev1.ConditionReady, "Published")
	if plan.Status.StableConfigMap != "chat-ep8-plan" {
		t.Errorf("status.stableConfigMap is %q", plan.Status.StableConfigMap)
	}
	address, err := cluster.Forward(t.Context(), namespace, "chat", semmoev1.ServicePort)
	if err != nil {
		t.Fatal(err)
	}
	url := "http://" + address
	eventually(t, waitTimeout, "requests are routed by the plan", func() error { return sentBy(t.Context(), url, plan.Status.Plan) })

	requests := corpus.Requests(corpus.Written(), 300)
	for n := range 60 {
		body := fmt.Sprintf(`{"model": "tiny", "prompt": %q, "max_tokens": 1, "temperature": 0}`, requests[n*7%len(requests)].Text)
		if err := answered(http.Post(url+"/v1/completions", "application/json", strings.NewReader(body))); err != nil {
			t.Fatal(err)
		}
	}
	rate := localRate(t, namespace, client.MatchingLabels{"app": "chat"})
	t.Logf("local activation rate %.3f, default placement %.3f, forecast of the plan %.3f", rate, float64(plan.Status.Forecast.BaselineMilli)/1000, float64(plan.Status.Forecast.LARMilli)/1000)
	if baseline := float64(plan.Status.Forecast.BaselineMilli) / 1000; rate < 1.1*baseline {
		t.Errorf("the local activation rate is %.3f, want more than %.3f of the default placement", rate, baseline)
	}
}

// onReferenceEngine replaces the SGLang engine of a Deployment by the reference engine with the small model: the same
// flags, for four ranks.
func onReferenceEngine(t *testing.T, u *unstructured.Unstructured) {
	t.Helper()
	const large, small = "/models/Qwen3-30B-A3B", "/models"
	pod := func(field ...string) []string { return append([]string{"spec", "template", "spec"}, field...) }
	ranks := strings.NewReplacer(large, small, "-size=8", "-size=4", "--served-model-name=chat", "--served-model-name=tiny")
	for _, kind := range []string{"initContainers", "containers"} {
		containers, _, err := unstructured.NestedSlice(u.Object, pod(kind)...)
		if err != nil {
			t.Fatal(err)
		}
		for _, item := range containers {
			container := item.(map[string]any)
			args, _, err := unstructured.NestedStringSlice(container, "args")
			if err != nil {
				t.Fatal(err)
			}
			var changed []any
			for _, arg := range args {
				if arg != "--moe-a2a-backend=deepep" { // requires GPUs
					changed = append(changed, ranks.Replace(arg))
				}
			}
			container["args"], container["image"] = changed, image
			if kind == "containers" {
				container["image"], container["command"] = engineImage, []any{"/semmoe-refengine"}
				container["resources"] = map[string]any{"limits": map[string]any{"nvidia.com/gpu": int64(4)}}
			}
		}
		set(t, u, containers, pod(kind)...)
	}
	volumes, _, err := unstructured.NestedSlice(u.Object, pod("volumes")...)
	if err != nil {
		t.Fatal(err)
	}
	for i, item := range volumes {
		if volume := item.(map[string]any); volume["name"] == "models" {
			volumes[i] = map[string]any{"name": "models", "hostPath": map[string]any{"path": checkpointDir(), "type": "Directory"}}
		}
	}
	set(t, u, volumes, pod("volumes")...)
	set(t, u, "4", "spec", "template", "metadata", "annotations", semmoev1.AnnotationRanks)
}

// activationsMetric matches an activation counter in the metrics of a reference engine.
var activationsMetric = regexp.MustCompile(`(?m)^semmoe_engine_activations_total\{layer="\d+",locality="(\w+)",rank="\d+"\} (\S+)$`)

// localRate returns the share of local activations that the reference engines of a namespace counted.
func localRate(t *testing.T, namespace string, labels client.MatchingLabels) float64 {
	t.Helper()
	local, total := countedActivations(t, namespace, labels)
	if total == 0 {
		t.Fatal("no engine counted an activation")
	}
	return local / total
}

// countedActivations returns the activations that the reference engines of a namespace counted.
func countedActivations(t *testing.T, namespace string, labels client.MatchingLabels) (local, total float64) {
	t.Helper()
	for _, text := range metricsOf(t, namespace, labels, 30000) {
		for _, line := range activationsMetric.FindAllStringSubmatch(text, -1) {
			count, err := strconv.ParseFloat(line[2], 64)
			if err != nil {
				t.Fatal(err)
			}
			total += count
			if line[1] == "local" {
				local += count
			}
		}
	}
	return local, total
}

// metricsOf returns the metrics of the namespace's pods with the given labels, read from a port, each in the Prometheus
// text format.
func metricsOf(t *testing.T, namespace string, labels client.MatchingLabels, port int) (all []string) {
	t.Helper()
	var pods corev1.PodList
	if err := api.List(t.Context(), &pods, client.InNamespace(namespace), labels); err != nil {
		t.Fatal(err)
	}
	for _, pod := range pods.Items {
		response, err := podClient(t).Get(fmt.Sprintf("http://%s:%d/metrics", pod.Status.PodIP, port))
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, string(text))
	}
	return all
}
