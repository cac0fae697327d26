// SPDX-License-Identifier: Apache-2.0

// Package api tests the validation of the kinds against a real API server.
package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/yaml"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers"
	"github.com/semmoe/operator/test/apiserver"
	"github.com/semmoe/operator/test/tier"
)

var (
	api    client.Client
	config *rest.Config
)

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	groups, err := moduleDir(".", "sigs.k8s.io/lws")
	if err != nil {
		return tier.ExitCode(err)
	}
	argo, err := moduleDir(filepath.Join("..", "argocd"), "github.com/argoproj/argo-cd/v3")
	if err != nil {
		return tier.ExitCode(err)
	}
	configured := &envtest.Environment{
		CRDDirectoryPaths: []string{
			filepath.Join("..", "..", "config", "crd"),
			filepath.Join(groups, "config", "crd", "bases", "leaderworkerset.x-k8s.io_leaderworkersets.yaml"),
			filepath.Join(argo, "manifests", "crds", "application-crd.yaml"),
			filepath.Join(argo, "manifests", "crds", "appproject-crd.yaml"),
		},
		ErrorIfCRDPathMissing:    true,
		DownloadBinaryAssets:     false,
		AttachControlPlaneOutput: os.Getenv("API_SERVER_LOG") != "",
	}
	// Some distributions require the right to update the finalizers of the owner for a child with blockOwnerDeletion.
	configured.ControlPlane.GetAPIServer().Configure().Append("enable-admission-plugins", "OwnerReferencesPermissionEnforcement")
	environment, err := apiserver.Start(configured)
	if err != nil {
		return tier.ExitCode(err)
	}
	defer environment.Stop() //nolint:errcheck // the processes end with this one
	config = environment.Config
	scheme, err := controllers.Scheme()
	if err != nil {
		return tier.ExitCode(err)
	}
	// Misspelled fields are an error, as with kubectl apply.
	if api, err = client.New(config, client.Options{Scheme: scheme}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	api = client.WithFieldValidation(api, "Strict")
	return m.Run()
}

// moduleDir returns the directory of a module, of the version that the module around the given directory requires.
func moduleDir(directory, module string) (string, error) {
	command := exec.Command("go", "mod", "download", "-json", module)
	command.Dir = directory
	output, err := command.Output()
	var found struct{ Dir string }
	if err := errors.Join(err, json.Unmarshal(output, &found)); err != nil {
		return "", fmt.Errorf("failed to find module %s: %w: %s", module, err, output)
	}
	return found.Dir, nil
}

const minimal = `
apiVersion: semmoe.io/v1alpha1
kind: MoEDeployment
metadata: {name: NAME, namespace: default}
spec:
  model: {volume: {hostPath: {path: /srv/m}}}
  engine: {image: "engine:1"}
  parallelism: {expertParallelSize: 4}
`

func object(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	u := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &u.Object); err != nil {
		t.Fatal(err)
	}
	return u
}

func TestDefaults(t *testing.T) {
	u := object(t, strings.Replace(minimal, "NAME", "defaults", 1))
	if err := api.Create(t.Context(), u); err != nil {
		t.Fatal(err)
	}
	var moed semmoev1.MoEDeployment
	if err := api.Get(t.Context(), client.ObjectKeyFromObject(u), &moed); err != nil {
		t.Fatal(err)
	}
	spec := moed.Spec
	switch {
	case *spec.Replicas != 1, spec.Reconciliation != "Active", spec.Routing.Mode != "Router", spec.Routing.Replicas != 2,
		spec.Routing.NetworkPolicy != "Managed", spec.Routing.Weights != nil, spec.Routing.PendingLimitPerRank != nil, spec.Routing.HoldMilliseconds != nil:
		t.Errorf("wrong defaults of the deployment: %+v", spec)
	case *spec.Rollout.MaxUnavailable != 1, *spec.Rollout.MaxSurge != 0:
		t.Errorf("wrong defaults of the roll-out: %+v", spec.Rollout)
	case spec.Drift.Source != "Router", spec.Drift.ThresholdPercent != 10, spec.Drift.WindowSeconds != 3600, *spec.Drift.CooldownSeconds != 3600, *spec.Drift.MaxReplansPerDay != 4:
		t.Errorf("wrong defaults of drift: %+v", spec.Drift)
	case spec.Engine.Type != "SGLang", spec.Engine.Port != 30000, spec.Model.Path != "/models":
		t.Errorf("wrong defaults of engine or model: %+v %+v", spec.Engine, spec.Model)
	case spec.Parallelism.Attention != "DataParallel", spec.Parallelism.ResourceName != "nvidia.com/gpu":
		t.Errorf("wrong defaults of the parallelism: %+v", spec.Parallelism)
	}
}

// dataset returns a profiling spec with a data set from one source.
func dataset(source string, value any) map[string]any {
	return map[string]any{"dataset": map[string]any{source: value}}
}

// prometheus returns a drift spec with a Prometheus server.
func prometheus(address, query string) map[string]any {
	return map[string]any{"source": "Prometheus", "prometheus": map[string]any{"address": address, "query": query}}
}

// TestValidation checks that invalid values are refused, with a message that names the field and what is allowed.
func TestValidation(t *testing.T) {
	cases := map[string]struct {
		path    string // path of the field to set, separated by dots
		value   any
		message []string // parts of the message; empty if the value is valid
	}{
		"scaled to zero":                 {"spec.replicas", 0, nil},
		"negative replicas":              {"spec.replicas", -1, []string{"spec.replicas", "greater than or equal to 0"}},
		"too many replicas":              {"spec.replicas", 1001, []string{"spec.replicas", "less than or equal to 1000"}},
		"unknown engine":                 {"spec.engine.type", "Other", []string{"spec.engine.type", `supported values: "SGLang", "VLLM", "VLLMAscend", "TensorRTLLM"`}},
		"vLLM":                           {"spec.engine.type", "VLLM", nil},
		"vllm-ascend":                    {"spec.engine.type", "VLLMAscend", nil},
		"TensorRT-LLM":                   {"spec.engine.type", "TensorRTLLM", nil},
		"empty image":                    {"spec.engine.image", "", []string{"spec.engine.image", "at least 1 chars long"}},
		"port":                           {"spec.engine.port", 70000, []string{"spec.engine.port", "less than or equal to 65535"}},
		"unknown attention":              {"spec.parallelism.attention", "Pipeline", []string{"spec.parallelism.attention", `"DataParallel", "TensorParallel"`}},
		"attention":                      {"spec.parallelism.attention", "TensorParallel", nil},
		"EP size of zero":                {"spec.parallelism.expertParallelSize", 0, []string{"spec.parallelism.expertParallelSize", "greater than or equal to 1"}},
		"EP size as text":                {"spec.parallelism.expertParallelSize", "four", []string{"spec.parallelism.expertParallelSize", "must be of type integer"}},
		"resource without a domain":      {"spec.parallelism.resourceName", "gpu", []string{"spec.parallelism.resourceName", "should match"}},
		"path below /models":             {"spec.model.path", "/models/org/name", nil},
		"path elsewhere":                 {"spec.model.path", "/data", []string{"spec.model.path", "path must be /models, or a directory below it"}},
		"path that escapes":              {"spec.model.path", "/models/../etc", []string{"spec.model.path", "without '..'"}},
		"path that escapes at its end":   {"spec.model.path", "/models/..", []string{"spec.model.path", "without '..'"}},
		"unknown routing mode":           {"spec.routing.mode", "Mesh", []string{"spec.routing.mode", `"Router", "EndpointPicker", "None"`}},
		"endpoint picker":                {"spec.routing", map[string]any{"mode": "EndpointPicker", "samplePercent": int64(5), "pendingLimitPerRank": int64(64)}, nil},
		"weights":                        {"spec.routing.weights", map[string]any{"affinityPercent": int64(0), "prefixPercent": int64(1000)}, nil},
		"weights by default":             {"spec.routing.weights", map[string]any{}, nil},
		"a fractional weight":            {"spec.routing.weights", map[string]any{"loadPercent": 0.5}, []string{"spec.routing.weights.loadPercent", "must be of type integer"}},
		"a negative weight":              {"spec.routing.weights", map[string]any{"prefixPercent": int64(-1)}, []string{"spec.routing.weights.prefixPercent", "greater than or equal to 0"}},
		"too heavy a weight":             {"spec.routing.weights", map[string]any{"affinityPercent": int64(1001)}, []string{"spec.routing.weights.affinityPercent", "less than or equal to 1000"}},
		"all weights are zero":           {"spec.routing.weights", map[string]any{"affinityPercent": int64(0), "prefixPercent": int64(0), "loadPercent": int64(0), "waitPercent": int64(0)}, []string{"spec.routing.weights", "at least one of affinityPercent"}},
		"only the weight of waiting":     {"spec.routing.weights", map[string]any{"affinityPercent": int64(0), "prefixPercent": int64(0), "loadPercent": int64(0), "waitPercent": int64(50)}, nil},
		"weights without a router":       {"spec.routing", map[string]any{"mode": "None", "weights": map[string]any{"loadPercent": int64(50)}}, []string{"spec.routing.weights", "need mode Router or EndpointPicker"}},
		"hold":                           {"spec.routing.holdMilliseconds", 200, nil},
		"hold of zero":                   {"spec.routing.holdMilliseconds", 0, []string{"spec.routing.holdMilliseconds", "greater than or equal to 1"}},
		"hold above the limit":           {"spec.routing.holdMilliseconds", 1001, []string{"spec.routing.holdMilliseconds", "less than or equal to 1000"}},
		"hold behind a gateway":          {"spec.routing", map[string]any{"mode": "EndpointPicker", "holdMilliseconds": int64(8)}, []string{"spec.routing.holdMilliseconds", "needs mode Router"}},
		"TLS and keys":                   {"spec.routing", map[string]any{"tls": map[string]any{"secretName": "a"}, "auth": map[string]any{"secretName": "b.c"}}, nil},
		"TLS behind a gateway":           {"spec.routing", map[string]any{"mode": "EndpointPicker", "tls": map[string]any{"secretName": "a"}}, []string{"spec.routing.tls", "needs mode Router"}},
		"keys without a router":          {"spec.routing", map[string]any{"mode": "None", "auth": map[string]any{"secretName": "a"}}, []string{"spec.routing.auth", "needs mode Router"}},
		"limits of a client":             {"spec.routing.auth", map[string]any{"secretName": "a", "requestsPerMinute": int64(60), "pendingLimit": int64(4)}, nil},
		"no request of a client":         {"spec.routing.auth", map[string]any{"secretName": "a", "pendingLimit": int64(0)}, []string{"spec.routing.auth.pendingLimit", "greater than or equal to 1"}},
		"keys in no Secret":              {"spec.routing.auth", map[string]any{}, []string{"spec.routing.auth.secretName", "Required"}},
		"TLS of an invalid name":         {"spec.routing.tls", map[string]any{"secretName": "A_b"}, []string{"spec.routing.tls.secretName", "should match"}},
		"TLS to engines":                 {"spec.engine", map[string]any{"image": "e:1", "tls": map[string]any{"secretName": "a.b"}}, nil},
		"TLS to engines, invalid name":   {"spec.engine.tls", map[string]any{"secretName": "A_b"}, []string{"spec.engine.tls.secretName", "should match"}},
		"TLS to engines, no Secret":      {"spec.engine.tls", map[string]any{}, []string{"spec.engine.tls.secretName", "Required"}},
		"TLS to TensorRT-LLM":            {"spec.engine", map[string]any{"type": "TensorRTLLM", "image": "e:1", "tls": map[string]any{"secretName": "a"}}, []string{"spec.engine.tls", "TensorRTLLM does not"}},
		"pending limit":                  {"spec.routing.pendingLimitPerRank", 1, nil},
		"no request may be pending":      {"spec.routing.pendingLimitPerRank", 0, []string{"spec.routing.pendingLimitPerRank", "greater than or equal to 1"}},
		"pending limit without a router": {"spec.routing", map[string]any{"mode": "None", "pendingLimitPerRank": int64(8)}, []string{"spec.routing.pendingLimitPerRank", "needs mode Router or EndpointPicker"}},
		"queue":                          {"spec.routing", map[string]any{"pendingLimitPerRank": int64(8), "queue": map[string]any{"size": int64(100), "timeoutSeconds": int64(60), "maxPriority": int64(10)}}, nil},
		"queue without a limit":          {"spec.routing.queue", map[string]any{"size": int64(100)}, []string{"spec.routing.queue", "needs mode Router and pendingLimitPerRank"}},
		"queue behind a gateway":         {"spec.routing", map[string]any{"mode": "EndpointPicker", "pendingLimitPerRank": int64(8), "queue": map[string]any{"size": int64(1)}}, []string{"spec.routing.queue", "needs mode Router"}},
		"queue without a size":           {"spec.routing", map[string]any{"pendingLimitPerRank": int64(8), "queue": map[string]any{}}, []string{"spec.routing.queue.size", "Required"}},
		"queue that is too large":        {"spec.routing", map[string]any{"pendingLimitPerRank": int64(8), "queue": map[string]any{"size": int64(10001)}}, []string{"spec.routing.queue.size", "less than or equal to 10000"}},
		"circuit breaker":                {"spec.routing.circuitBreaker", map[string]any{"consecutiveFailures": int64(5), "failurePercent": int64(50), "ejectionSeconds": int64(10), "maxEjectionSeconds": int64(60), "halfOpenRequests": int64(1)}, nil},
		"ejection above its maximum":     {"spec.routing.circuitBreaker", map[string]any{"ejectionSeconds": int64(9)}, []string{"spec.routing.circuitBreaker.ejectionSeconds", "must be at most maxEjectionSeconds (default 8)"}},
		"circuit breaker without router": {"spec.routing", map[string]any{"mode": "None", "circuitBreaker": map[string]any{}}, []string{"spec.routing.circuitBreaker", "needs mode Router or EndpointPicker"}},
		"no retry":                       {"spec.routing.maxAttempts", 1, nil},
		"spans":                          {"spec.routing.tracing", map[string]any{"endpoint": "https://collector.observability:4318/v1/traces", "samplePercent": int64(0), "headersSecretName": "export"}, nil},
		"spans without a collector":      {"spec.routing.tracing", map[string]any{"samplePercent": int64(5)}, []string{"spec.routing.tracing.endpoint", "Required value"}},
		"spans by another protocol":      {"spec.routing.tracing", map[string]any{"endpoint": "grpc://collector:4317"}, []string{"spec.routing.tracing.endpoint", "must be an http or https URL"}},
		"spans without a host":           {"spec.routing.tracing", map[string]any{"endpoint": "http:///v1/traces"}, []string{"spec.routing.tracing.endpoint", "must be an http or https URL"}},
		"spans with a password":          {"spec.routing.tracing", map[string]any{"endpoint": "http://user:secret@collector:4318"}, []string{"spec.routing.tracing.endpoint", "credentials belong into headersSecretName"}},
		"spans without a router":         {"spec.routing", map[string]any{"mode": "None", "tracing": map[string]any{"endpoint": "http://collector:4318"}}, []string{"spec.routing.tracing", "needs mode Router or EndpointPicker"}},
		"access log":                     {"spec.routing.accessLogPercent", 100, nil},
		"access log of nothing":          {"spec.routing.accessLogPercent", 0, []string{"spec.routing.accessLogPercent", "greater than or equal to 1"}},
		"access log without a router":    {"spec.routing", map[string]any{"mode": "None", "accessLogPercent": int64(5)}, []string{"spec.routing.accessLogPercent", "needs mode Router or EndpointPicker"}},
		"KV events":                      {"spec.routing.kvEvents", map[string]any{}, nil},
		"KV events, a system port":       {"spec.routing.kvEvents", map[string]any{"port": int64(80)}, []string{"spec.routing.kvEvents.port", "greater than or equal to 1024"}},
		"KV events without a router":     {"spec.routing", map[string]any{"mode": "None", "kvEvents": map[string]any{}}, []string{"spec.routing.kvEvents", "needs mode Router or EndpointPicker"}},
		"no attempt":                     {"spec.routing.maxAttempts", 0, []string{"spec.routing.maxAttempts", "greater than or equal to 1"}},
		"attempts behind a gateway":      {"spec.routing", map[string]any{"mode": "EndpointPicker", "maxAttempts": int64(2)}, []string{"spec.routing.maxAttempts", "needs mode Router"}},
		"user-provided network policies": {"spec.routing.networkPolicy", "None", nil},
		"unknown network policy":         {"spec.routing.networkPolicy", "Cilium", []string{"spec.routing.networkPolicy", `"Managed", "None"`}},
		"sampling":                       {"spec.routing.samplePercent", 100, nil},
		"too many samples":               {"spec.routing.samplePercent", 101, []string{"spec.routing.samplePercent", "less than or equal to 100"}},
		"sampling without a router":      {"spec.routing", map[string]any{"mode": "None", "samplePercent": int64(5)}, []string{"spec.routing.samplePercent", "needs routing.mode Router or EndpointPicker"}},
		"profiling by ConfigMap":         {"spec.profiling", dataset("configMap", map[string]any{"name": "d"}), nil},
		"profiling by claim":             {"spec.profiling", dataset("persistentVolumeClaim", map[string]any{"claimName": "d", "path": "a/b.jsonl"}), nil},
		"profiling by path":              {"spec.profiling", dataset("path", "/models/d.jsonl"), nil},
		"profiling by reference":         {"spec.profiling", map[string]any{"profileRef": map[string]any{"name": "p"}}, nil},
		"profiling of own text":          {"spec.profiling", dataset("ownText", map[string]any{}), nil},
		"two data sets":                  {"spec.profiling", map[string]any{"dataset": map[string]any{"ownText": map[string]any{}, "path": "/models/d.jsonl"}}, []string{"spec.profiling.dataset", "exactly one of configMap"}},
		"own text for a refresh":         {"spec.profiling", map[string]any{"refresh": "Job", "dataset": map[string]any{"ownText": map[string]any{}}}, []string{"spec.profiling.refresh", "ownText is always the same"}},
		"profiling without a source":     {"spec.profiling", map[string]any{}, []string{"spec.profiling", "set either dataset or profileRef"}},
		"data set without a source":      {"spec.profiling", map[string]any{"dataset": map[string]any{}}, []string{"spec.profiling.dataset", "exactly one of configMap"}},
		"data set elsewhere":             {"spec.profiling", dataset("path", "/data/d.jsonl"), []string{"spec.profiling.dataset.path", "below /models"}},
		"data set that escapes":          {"spec.profiling", dataset("path", "/models/../etc/passwd"), []string{"spec.profiling.dataset.path", "without '..'"}},
		"claim path that escapes":        {"spec.profiling", dataset("persistentVolumeClaim", map[string]any{"claimName": "d", "path": "../x"}), []string{"persistentVolumeClaim.path", "relative to the root"}},
		"too few requests":               {"spec.profiling", map[string]any{"profileRef": map[string]any{"name": "p"}, "requests": int64(1)}, []string{"spec.profiling.requests", "greater than or equal to 10"}},
		"unknown target":                 {"spec.profiling", map[string]any{"profileRef": map[string]any{"name": "p"}, "target": "Moon"}, []string{"spec.profiling.target", `"Serving", "Dedicated"`}},
		"unknown approval":               {"spec.placement.approval", "Never", []string{"spec.placement.approval", `"Automatic", "Manual", "Advisory"`}},
		"train percent":                  {"spec.placement.solver", map[string]any{"trainPercent": int64(100)}, []string{"spec.placement.solver.trainPercent", "less than or equal to 99"}},
		"no router pod":                  {"spec.routing.replicas", 0, []string{"spec.routing.replicas", "greater than or equal to 1"}},
		"a budget that never moves":      {"spec.rollout.maxUnavailable", 0, []string{"spec.rollout.maxUnavailable", "must not both be 0"}},
		"drift by Prometheus":            {"spec.drift", prometheus("https://prometheus.monitoring.svc:9090/tenant/a", "avg(lar)"), nil},
		"drift by Prometheus, IPv6":      {"spec.drift", prometheus("http://[fd00::1]:9090", "lar"), nil},
		"Prometheus without an address":  {"spec.drift", map[string]any{"source": "Prometheus"}, []string{"spec.drift.prometheus", "required with source Prometheus"}},
		"an address for the routers":     {"spec.drift", map[string]any{"prometheus": map[string]any{"address": "http://p", "query": "lar"}}, []string{"spec.drift.prometheus", "not allowed with other sources"}},
		"no query":                       {"spec.drift", prometheus("http://p", ""), []string{"spec.drift.prometheus.query", "at least 1 chars long"}},
		"an address of files":            {"spec.drift", prometheus("file:///etc/passwd", "lar"), []string{"spec.drift.prometheus.address", "should match"}},
		"an address with a password":     {"spec.drift", prometheus("http://user:word@p", "lar"), []string{"spec.drift.prometheus.address", "should match"}},
		"an address with a query":        {"spec.drift", prometheus("http://p/?a=b", "lar"), []string{"spec.drift.prometheus.address", "should match"}},
		"unknown source of drift":        {"spec.drift.source", "Thanos", []string{"spec.drift.source", `"Router", "Prometheus"`}},
		"a threshold below the noise":    {"spec.drift.thresholdPercent", 4, []string{"spec.drift.thresholdPercent", "greater than or equal to 5"}},
		"a threshold above half":         {"spec.drift.thresholdPercent", 51, []string{"spec.drift.thresholdPercent", "less than or equal to 50"}},
		"a window of seconds":            {"spec.drift.windowSeconds", 59, []string{"spec.drift.windowSeconds", "greater than or equal to 60"}},
		"no cooldown":                    {"spec.drift.cooldownSeconds", 0, nil},
		"no plan for drift":              {"spec.drift.maxReplansPerDay", 0, nil},
		"too many plans per day":         {"spec.drift.maxReplansPerDay", 97, []string{"spec.drift.maxReplansPerDay", "less than or equal to 96"}},
		"no canary":                      {"spec.rollout.canaryReplicas", 0, []string{"spec.rollout.canaryReplicas", "greater than or equal to 1"}},
		"no soak":                        {"spec.rollout.soakSeconds", 0, nil},
		"a soak of days":                 {"spec.rollout.soakSeconds", 86401, []string{"spec.rollout.soakSeconds", "less than or equal to 86400"}},
		"unknown roll-back":              {"spec.rollout.rollback", "Never", []string{"spec.rollout.rollback", `"Automatic", "Manual"`}},
		"pausing":                        {"spec.reconciliation", "Paused", nil},
		"unknown reconciliation":         {"spec.reconciliation", "Off", []string{"spec.reconciliation", `"Active", "Paused"`}},
		"misspelled field":               {"spec.replica", 1, []string{"unknown field", "spec.replica"}},
		"overlay without containers":     {"spec.template", map[string]any{"spec": map[string]any{"nodeSelector": map[string]any{"a": "b"}}}, nil},
		"overlay with labels":            {"spec.template", map[string]any{"metadata": map[string]any{"labels": map[string]any{"a": "b"}}}, nil},
		"misspelled field in an overlay": {"spec.template", map[string]any{"spec": map[string]any{"nodeSelectors": map[string]any{}}}, []string{"unknown field", "spec.template.spec.nodeSelectors"}},
		"environment":                    {"spec.engine.env", []any{map[string]any{"name": "A", "value": "b"}}, nil},
		"environment without a name":     {"spec.engine.env", []any{map[string]any{"value": "b"}}, []string{"spec.engine.env[0].name", "Required"}},
		"name with a dot":                {"metadata.name", "a.b", []string{"metadata.name must be at most 40 characters"}},
		"name that starts with a digit":  {"metadata.name", "1a", []string{"metadata.name must be at most 40 characters"}},
		"longest name":                   {"metadata.name", strings.Repeat("a", 40), nil},
		"name too long":                  {"metadata.name", strings.Repeat("a", 41), []string{"metadata.name must be at most 40 characters"}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			u := object(t, strings.Replace(minimal, "NAME", "m", 1))
			if err := unstructured.SetNestedField(u.Object, normal(tc.value), strings.Split(tc.path, ".")...); err != nil {
				t.Fatal(err)
			}
			refusedWith(t, create(t.Context(), u), tc.message)
		})
	}
}

// TestUndecodableValues checks that values which clients cannot decode, or only in minutes, are refused: one stored object
// of this kind would stop the operator for all namespaces.
func TestUndecodableValues(t *testing.T) {
	engine := func(fields string) string {
		return `{"spec": {"containers": [{"name": "engine", ` + fields + `}]}}`
	}
	memory := func(quantity string) string { return engine(`"resources": {"limits": {"memory": "` + quantity + `"}}`) }
	port := func(number string) string { return engine(`"livenessProbe": {"httpGet": {"port": ` + number + `}}`) }
	for name, tc := range map[string]struct {
		template string
		message  []string
	}{
		"a quantity":                  {memory("1.5Gi"), nil},
		"an exponent":                 {memory("15e8"), nil},
		"a small exponent":            {memory("1e-999999999"), []string{"resources.limits.memory", "should match"}},
		"a large exponent":            {memory("1e999999999"), []string{"resources.limits.memory", "should match"}},
		"an exponent with a fraction": {memory("1e1.5"), []string{"resources.limits.memory", "should match"}},
		"many digits":                 {memory(strings.Repeat("1", 1000)), []string{"resources.limits.memory", "should match"}},
		"the size of a volume":        {`{"spec": {"volumes": [{"name": "v", "emptyDir": {"sizeLimit": "1e-999999999"}}]}}`, []string{"emptyDir.sizeLimit", "should match"}},
		"a port":                      {port("8080"), nil},
		"the name of a port":          {port(`"http"`), nil},
		"a port above 32 bits":        {port("99999999999"), []string{"livenessProbe.httpGet.port", "less than or equal to 2147483647"}},
		"a port below 32 bits":        {port("-99999999999"), []string{"livenessProbe.httpGet.port", "greater than or equal to -2147483648"}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, text := range []string{minimal, minimalProfile} {
				u := object(t, strings.Replace(text, "NAME", "undecodable", 1)+"  template: "+tc.template+"\n")
				refusedWith(t, api.Create(t.Context(), u, client.DryRunAll), tc.message)
			}
		})
	}
}

// TestContradictions checks that contradictory fields are refused, with a message that names the field to change.
func TestContradictions(t *testing.T) {
	routing := func(fields map[string]any) map[string]any { return map[string]any{"routing": fields} }
	tensorParallel := map[string]any{"expertParallelSize": int64(4), "attention": "TensorParallel"}
	engine := func(kind string) map[string]any { return map[string]any{"image": "engine:1", "type": kind} }
	pods := func(ranks, perReplica int64) map[string]any {
		return map[string]any{"parallelism": map[string]any{"expertParallelSize": ranks, "podsPerReplica": perReplica}}
	}
	profiling := func(target string) map[string]any {
		return map[string]any{"profiling": map[string]any{"target": target, "dataset": map[string]any{"configMap": map[string]any{"name": "d"}}}}
	}
	affinity := func(percent int64) map[string]any {
		return map[string]any{"weights": map[string]any{"affinityPercent": percent}}
	}
	overlap := func(fields map[string]any) map[string]any {
		return map[string]any{"engine": map[string]any{"image": "engine:1", "overlap": fields}}
	}
	placement := func(hardware map[string]any) map[string]any {
		return map[string]any{"placement": map[string]any{"hardware": hardware}}
	}
	placed := func(fields map[string]any) map[string]any { return map[string]any{"placement": fields} }
	by := func(algorithm string) map[string]any { return map[string]any{"algorithm": algorithm} }
	auto := func(more map[string]any) map[string]any {
		fields := map[string]any{"redundantExperts": "Auto", "redundantMemoryBytes": "8Gi"}
		maps.Copy(fields, more)
		return fields
	}
	cases := map[string]struct {
		spec    map[string]any // merged over the minimal one
		more    map[string]any
		message []string // empty if the spec is valid
	}{
		"picker with an engine that takes no rank":   {routing(map[string]any{"mode": "EndpointPicker"}), map[string]any{"engine": engine("TensorRTLLM")}, []string{"spec.routing.mode", "TensorRTLLM does not"}},
		"picker with another engine":                 {routing(map[string]any{"mode": "EndpointPicker"}), map[string]any{"engine": engine("VLLM")}, nil},
		"affinity with an engine that takes no rank": {routing(affinity(50)), map[string]any{"engine": engine("TensorRTLLM")}, []string{"spec.routing.weights.affinityPercent", "accepts a rank for each request"}},
		"hold with an engine that takes no rank":     {routing(map[string]any{"holdMilliseconds": int64(50)}), map[string]any{"engine": engine("TensorRTLLM")}, []string{"spec.routing.holdMilliseconds", "have no rank to wait for"}},
		"hold of requests without a rank":            {routing(map[string]any{"holdMilliseconds": int64(50)}), map[string]any{"parallelism": tensorParallel}, []string{"spec.routing.holdMilliseconds", "needs attention DataParallel"}},
		"affinity of requests without a rank":        {routing(affinity(50)), map[string]any{"parallelism": tensorParallel}, []string{"spec.routing.weights.affinityPercent", "attention DataParallel"}},
		"no affinity of requests without a rank":     {routing(affinity(0)), map[string]any{"parallelism": tensorParallel}, nil},
		"other weights of requests without a rank":   {routing(map[string]any{"weights": map[string]any{"prefixPercent": int64(50)}}), map[string]any{"parallelism": tensorParallel}, nil},
		"micro-batches":                     {overlap(map[string]any{"microBatches": int64(2), "distributionThresholdPercent": int64(0)}), nil, nil},
		"only multiprocessors for exchange": {overlap(map[string]any{"communicationSMs": int64(24)}), nil, nil},
		"an odd number of multiprocessors":  {overlap(map[string]any{"communicationSMs": int64(23)}), nil, []string{"spec.engine.overlap.communicationSMs", "multiple of 2"}},
		"one micro-batch":                   {overlap(map[string]any{"microBatches": int64(1)}), nil, []string{"spec.engine.overlap.microBatches", "greater than or equal to 2"}},
		"an empty overlap":                  {overlap(map[string]any{}), nil, []string{"spec.engine.overlap", "set microBatches, communicationSMs, or both"}},
		"an overlap that is chosen":         {overlap(map[string]any{"mode": "Auto"}), profiling("Serving"), nil},
		"an overlap of a pinned plan":       {overlap(map[string]any{"mode": "Auto"}), placed(map[string]any{"planRef": map[string]any{"name": "p"}}), nil},
		"an overlap that nothing chooses":   {overlap(map[string]any{"mode": "Auto"}), nil, []string{"spec.engine.overlap.mode", "mode Auto needs a plan"}},
		"an overlap that is chosen twice":   {overlap(map[string]any{"mode": "Auto", "microBatches": int64(2)}), profiling("Serving"), []string{"spec.engine.overlap.mode", "mode Auto chooses all other members"}},
		"an explicit overlap":               {overlap(map[string]any{"mode": "Manual", "microBatches": int64(2)}), nil, nil},
		"an empty explicit overlap":         {overlap(map[string]any{"mode": "Manual"}), nil, []string{"spec.engine.overlap", "set microBatches, communicationSMs, or both"}},
		"an unknown mode of overlap":        {overlap(map[string]any{"mode": "auto"}), nil, []string{"spec.engine.overlap.mode", "supported values"}},
		"a threshold of nothing":            {overlap(map[string]any{"communicationSMs": int64(24), "decodeThresholdTokens": int64(8)}), nil, []string{"spec.engine.overlap.decodeThresholdTokens", "needs microBatches"}},
		"tokens that an engine shuffles":    {map[string]any{"parallelism": tensorParallel}, map[string]any{"placement": map[string]any{"tokenShuffle": "Enabled"}}, nil},
		"tokens of requests with a rank":    {nil, map[string]any{"placement": map[string]any{"tokenShuffle": "Enabled"}}, []string{"spec.placement.tokenShuffle", "needs parallelism.attention TensorParallel"}},
		"tokens without an exchange":        {map[string]any{"parallelism": tensorParallel, "engine": engine("VLLM")}, map[string]any{"placement": map[string]any{"tokenShuffle": "Enabled"}}, []string{"spec.placement.tokenShuffle", "engine.type SGLang"}},
		"built-in hardware":                 {placement(map[string]any{"builtIn": "h200-nvlink"}), nil, nil},
		"user-provided hardware":            {placement(map[string]any{"configMap": map[string]any{"name": "gpus"}}), nil, nil},
		"two sources of hardware":           {placement(map[string]any{"builtIn": "h200-nvlink", "configMap": map[string]any{"name": "gpus"}}), nil, []string{"spec.placement.hardware", "exactly one of builtIn and configMap"}},
		"no source of hardware":             {placement(map[string]any{}), nil, []string{"spec.placement.hardware", "exactly one of builtIn and configMap"}},
		"all placement fields": {placed(map[string]any{
			"objective": "RankDedup", "tokenLoadLimitPercent": int64(110), "expertLoadLimitPercent": int64(120), "solver": by("auto"),
		}), nil, nil},
		"copies, by another algorithm":      {placed(map[string]any{"redundantExperts": int64(8), "solver": by("eplb")}), nil, nil},
		"copies that ranks cannot share":    {placed(map[string]any{"redundantExperts": int64(6)}), nil, []string{"spec.placement.redundantExperts", "multiple of parallelism.expertParallelSize"}},
		"copies in a permuted checkpoint":   {placed(map[string]any{"redundantExperts": int64(4), "realization": "ReshuffledWeights"}), nil, []string{"spec.placement.redundantExperts", "each expert once"}},
		"copies without a map":              {placed(map[string]any{"redundantExperts": int64(4)}), map[string]any{"engine": engine("VLLM")}, []string{"spec.placement.redundantExperts", "VLLM does not"}},
		"copies by an algorithm without":    {placed(map[string]any{"redundantExperts": int64(4), "solver": by("cross-entropy")}), nil, []string{"spec.placement.redundantExperts", "auto, eplb or contiguous"}},
		"copies from memory":                {placed(auto(nil)), nil, nil},
		"copies from a number of bytes":     {placed(auto(map[string]any{"redundantMemoryBytes": int64(8 << 30), "objective": "Time", "solver": by("auto")})), nil, nil},
		"copies from memory without a size": {placed(map[string]any{"redundantExperts": "Auto"}), nil, []string{"spec.placement.redundantMemoryBytes", "redundantExperts Auto needs redundantMemoryBytes"}},
		"copies from no memory":             {placed(auto(map[string]any{"redundantMemoryBytes": "0"})), nil, []string{"spec.placement.redundantMemoryBytes", "must be above 0"}},
		"copies from no bytes":              {placed(auto(map[string]any{"redundantMemoryBytes": int64(0)})), nil, []string{"spec.placement.redundantMemoryBytes", "must be above 0"}},
		"copies from negative memory":       {placed(auto(map[string]any{"redundantMemoryBytes": "-8Gi"})), nil, []string{"spec.placement.redundantMemoryBytes", "must be above 0"}},
		"copies from negative bytes":        {placed(auto(map[string]any{"redundantMemoryBytes": int64(-1)})), nil, []string{"spec.placement.redundantMemoryBytes", "must be above 0"}},
		// Comparing this quantity would take the API server minutes.
		"copies from memory with a long exponent":       {placed(auto(map[string]any{"redundantMemoryBytes": "1e999999999"})), nil, []string{"spec.placement.redundantMemoryBytes", "at most two digits in an exponent"}},
		"copies from a part of a byte":                  {placed(auto(map[string]any{"redundantMemoryBytes": "1n"})), nil, []string{"spec.placement.redundantMemoryBytes", "must be above 0"}},
		"copies from memory with an exponent":           {placed(auto(map[string]any{"redundantMemoryBytes": "8e9"})), nil, nil},
		"copies from memory as a word":                  {placed(auto(map[string]any{"redundantMemoryBytes": "much"})), nil, []string{"spec.placement.redundantMemoryBytes"}},
		"memory for a number of copies":                 {placed(auto(map[string]any{"redundantExperts": int64(4)})), nil, []string{"spec.placement.redundantMemoryBytes", "needs redundantExperts Auto"}},
		"memory for no copies":                          {placed(map[string]any{"redundantMemoryBytes": "8Gi"}), nil, []string{"spec.placement.redundantMemoryBytes", "needs redundantExperts Auto"}},
		"copies as a word":                              {placed(map[string]any{"redundantExperts": "auto"}), nil, []string{"spec.placement.redundantExperts", "a number from 0 to 65536, or Auto"}},
		"a number of copies as text":                    {placed(map[string]any{"redundantExperts": "8"}), nil, []string{"spec.placement.redundantExperts", "a number from 0 to 65536, or Auto"}},
		"too many copies":                               {placed(map[string]any{"redundantExperts": int64(65540)}), nil, []string{"spec.placement.redundantExperts", "a number from 0 to 65536, or Auto"}},
		"a negative number of copies":                   {placed(map[string]any{"redundantExperts": int64(-4)}), nil, []string{"spec.placement.redundantExperts", "a number from 0 to 65536, or Auto"}},
		"copies from memory, by activations":            {placed(auto(map[string]any{"objective": "Activation"})), nil, []string{"spec.placement.redundantExperts", "needs objective Time"}},
		"copies from memory, by eplb":                   {placed(auto(map[string]any{"solver": by("eplb")})), nil, []string{"spec.placement.redundantExperts", "needs objective Time and solver.algorithm auto"}},
		"copies from memory, without a map":             {placed(auto(nil)), map[string]any{"engine": engine("VLLM")}, []string{"spec.placement.redundantExperts", "VLLM does not"}},
		"copies from memory, permuted":                  {placed(auto(map[string]any{"realization": "ReshuffledWeights"})), nil, []string{"spec.placement.redundantExperts", "each expert once"}},
		"copies from memory and a limit":                {placed(auto(map[string]any{"expertLoadLimitPercent": int64(120)})), nil, []string{"spec.placement.expertLoadLimitPercent", "must not be set with redundantExperts"}},
		"copies from memory for tokens":                 {placed(auto(nil)), map[string]any{"parallelism": tensorParallel}, []string{"spec.placement.redundantExperts", "or tokenShuffle Enabled"}},
		"copies from memory, shuffled tokens":           {placed(auto(map[string]any{"tokenShuffle": "Enabled"})), map[string]any{"parallelism": tensorParallel}, nil},
		"copies and a limit":                            {placed(map[string]any{"redundantExperts": int64(4), "expertLoadLimitPercent": int64(120)}), nil, []string{"spec.placement.expertLoadLimitPercent", "must not be set with redundantExperts"}},
		"limits by an algorithm without":                {placed(map[string]any{"tokenLoadLimitPercent": int64(120), "solver": by("alternating")}), nil, []string{"spec.placement.tokenLoadLimitPercent", "auto or contiguous"}},
		"a limit below the mean":                        {placed(map[string]any{"expertLoadLimitPercent": int64(99)}), nil, []string{"spec.placement.expertLoadLimitPercent", "greater than or equal to 100"}},
		"an objective that the algorithm does not have": {placed(map[string]any{"objective": "RankDedup", "solver": by("alternating")}), nil, []string{"spec.placement.objective", "solver.algorithm auto"}},
		"an algorithm for comparisons only":             {placed(map[string]any{"solver": by("exflow")}), nil, []string{"spec.placement.solver.algorithm", `supported values: "auto"`}},
		"an unknown algorithm":                          {placed(map[string]any{"solver": by("best")}), nil, []string{"spec.placement.solver.algorithm", `"auto"`}},
		"a forecast of shuffled tokens":                 {placed(map[string]any{"tokenShuffle": "Enabled", "solver": map[string]any{"forecast": "LookBack"}}), map[string]any{"parallelism": tensorParallel}, nil},
		"a forecast of tokens that stay":                {placed(map[string]any{"solver": map[string]any{"forecast": "Transition"}}), map[string]any{"parallelism": tensorParallel}, []string{"spec.placement.solver.forecast", "needs placement.tokenShuffle Enabled", "use Auto or Table"}},
		"a forecast of tokens for requests":             {placed(map[string]any{"solver": map[string]any{"forecast": "LookAhead"}}), nil, []string{"spec.placement.solver.forecast", "use Auto or Table"}},
		"the forecast of requests":                      {placed(map[string]any{"solver": map[string]any{"forecast": "Table"}}), nil, nil},
		"an unknown forecast":                           {placed(map[string]any{"solver": map[string]any{"forecast": "decode"}}), nil, []string{"spec.placement.solver.forecast", `"decode"`, `"Auto", "Table", "Transition", "LookBack", "LookAhead"`}},
		"messages between nodes":                        {placed(map[string]any{"objective": "Hierarchical"}), pods(4, 2), nil},
		"messages between nodes, on one":                {placed(map[string]any{"objective": "NodeDedup"}), nil, []string{"spec.placement.objective", "podsPerReplica above 1"}},
		"activations of tokens that stay":               {placed(map[string]any{"objective": "Activation"}), map[string]any{"parallelism": tensorParallel}, []string{"spec.placement.objective", "use RankDedup"}},
		"two pods":                                      {pods(4, 2), profiling("Serving"), nil},
		"one pod, as a Job has":                         {pods(4, 1), profiling("Dedicated"), nil},
		"two pods, and a Job of one":                    {pods(4, 2), profiling("Dedicated"), []string{"spec.profiling.target", "needs parallelism.podsPerReplica 1"}},
		"ranks that pods cannot share evenly":           {pods(4, 3), nil, []string{"spec.parallelism.podsPerReplica", "must divide expertParallelSize"}},
		"no pods":                                       {pods(4, 0), nil, []string{"spec.parallelism.podsPerReplica", "greater than or equal to 1"}},
		"samples of requests without a rank":            {routing(map[string]any{"samplePercent": int64(5)}), map[string]any{"parallelism": tensorParallel}, []string{"spec.routing.samplePercent", "attention DataParallel"}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			u := object(t, strings.Replace(minimal, "NAME", "m", 1))
			spec := u.Object["spec"].(map[string]any)
			maps.Copy(spec, tc.spec)
			maps.Copy(spec, tc.more)
			refusedWith(t, create(t.Context(), u), tc.message)
		})
	}
}

// TestNamesOfGroups checks the limit on the names of groups: the pods of a group have a label that is longer than the
// name of their workload, so that pods with a longer name could not be created.
func TestNamesOfGroups(t *testing.T) {
	for length, message := range map[int][]string{36: nil, 37: {"metadata.name must be at most 36 characters where spec.parallelism.podsPerReplica is above 1"}} {
		u := object(t, strings.Replace(minimal, "NAME", strings.Repeat("m", length), 1))
		u.Object["spec"].(map[string]any)["parallelism"] = map[string]any{"expertParallelSize": int64(4), "podsPerReplica": int64(2)}
		refusedWith(t, create(t.Context(), u), message)
	}
}

// refusedWith fails the test unless the error contains all parts of the message; without parts the error must be nil.
func refusedWith(t *testing.T, err error, parts []string) {
	t.Helper()
	if len(parts) == 0 {
		if err != nil {
			t.Errorf("valid object is refused: %v", err)
		}
		return
	}
	if err == nil {
		t.Fatal("invalid object is accepted")
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the message %q lacks %q", err, part)
		}
	}
}

func TestRequiredFields(t *testing.T) {
	for _, path := range []string{"spec", "spec.model", "spec.model.volume", "spec.engine", "spec.engine.image", "spec.parallelism", "spec.parallelism.expertParallelSize"} {
		t.Run(path, func(t *testing.T) {
			u := object(t, strings.Replace(minimal, "NAME", "m", 1))
			unstructured.RemoveNestedField(u.Object, strings.Split(path, ".")...)
			if err := create(t.Context(), u); err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "Required") {
				t.Errorf("error %v does not say that %s is required", err, path)
			}
		})
	}
}

func create(ctx context.Context, u *unstructured.Unstructured) error {
	return api.Create(ctx, u, client.DryRunAll)
}

// normal converts integers to the type that unstructured objects contain.
func normal(value any) any {
	if number, ok := value.(int); ok {
		return int64(number)
	}
	return value
}
