// SPDX-License-Identifier: Apache-2.0

package specfields

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/router/managerauth"
	"github.com/semmoe/operator/test/nodeless"
	"github.com/semmoe/operator/test/tier"
)

var (
	only = flag.String("fields", "", "regular expression that matches the paths of the fields to try; empty matches all")
	// walks is the number of random walks over specs, and steps the number of changes of the spec in each of them.
	walks = tier.Choose(0, 4, 100)
	steps = tier.Choose(0, 6, 12)

	repository string
	cluster    *nodeless.Cluster
	agent      *nodeless.Agent
	prometheus *httptest.Server
	// api reads from and writes to the API server; seen reads from a cache, because states are read very often.
	api  client.Client
	seen cache.Cache
)

func TestMain(m *testing.M) {
	flag.Parse()
	code, err := run(m)
	if err != nil {
		code = tier.ExitCode(err)
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ctrl.SetLogger(zap.New(zap.WriteTo(logFile())))
	if repository, err = filepath.Abs(filepath.Join("..", "..")); err != nil {
		return 1, err
	}
	if cluster, err = nodeless.Start(ctx); err != nil {
		return 1, err
	}
	defer cluster.Stop() //nolint:errcheck // the processes end with this one
	scheme, err := controllers.Scheme()
	if err != nil {
		return 1, err
	}
	cluster.Config.QPS = -1
	if api, err = client.New(cluster.Config, client.Options{Scheme: scheme}); err != nil {
		return 1, err
	}
	api = client.WithFieldValidation(api, "Strict")
	if seen, err = cache.New(cluster.Config, cache.Options{Scheme: scheme}); err != nil {
		return 1, err
	}
	prometheus = httptest.NewServer(http.HandlerFunc(answerQuery))
	defer prometheus.Close()
	go seen.Start(ctx) //nolint:errcheck // if the cache does not start, every read fails
	for _, list := range kinds() {
		if _, err := seen.GetInformer(ctx, objectOf(list)); err != nil {
			return 1, err
		}
	}
	return m.Run(), nil
}

// answerQuery answers queries like Prometheus: the expression "lar" has a series whose values are NaN, and other
// expressions have none.
func answerQuery(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/api/v1/query_range" {
		http.NotFound(w, r)
		return
	}
	series := ""
	if r.FormValue("query") == "lar" {
		series = fmt.Sprintf(`{"metric":{},"values":[[%d,"NaN"]]}`, time.Now().Unix())
	}
	fmt.Fprintf(w, `{"status":"success","data":{"resultType":"matrix","result":[%s]}}`, series)
}

// nameServer sets the Prometheus address of a spec to the server of this package.
func nameServer(_ context.Context, _ string, s spec) error {
	source, found := nested(s, "drift", "prometheus")
	if !found {
		return errors.New("the spec has no spec.drift.prometheus")
	}
	source["address"] = prometheus.URL
	return nil
}

// logFile returns the log file of the manager, which the environment variable WALK_LOG names. Without WALK_LOG logs are
// discarded.
func logFile() *os.File {
	name := os.Getenv("WALK_LOG")
	if name == "" {
		name = os.DevNull
	}
	file, err := os.OpenFile(name, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return os.Stderr
	}
	return file
}

// startManager runs the agent, and the controllers for all namespaces, until the test ends.
func startManager(t *testing.T) {
	t.Helper()
	store := cluster.Run(t)
	var err error
	if agent, err = nodeless.NewAgent(cluster.Config, store.Client(t), repository); err != nil {
		t.Fatal(err)
	}
	runUntilEnd(t, agent.Run)
	startController(t, store.Access)
}

func startController(t *testing.T, store *access.Access) {
	t.Helper()
	manager, err := controllers.NewManager(cluster.Config, controllers.Options{Image: "semmoe:dev", HTTP: &http.Client{Transport: agent}, Routers: &managerauth.Identity{HTTP: &http.Client{Transport: agent}}, Store: store, SolverWorkers: 4}, ctrl.Options{
		Metrics:    metricsserver.Options{BindAddress: "0"},
		Controller: config.Controller{SkipNameValidation: ptr.To(true)},
	})
	if err != nil {
		t.Fatal(err)
	}
	runUntilEnd(t, manager.Start)
}

// runUntilEnd runs a function until the test ends, and then cancels its context. An error of the function fails the
// test.
func runUntilEnd(t *testing.T, f func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- f(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

var namespaces atomic.Int32

// newNamespace creates a namespace. A failure is reported, but does not end the test, so that any goroutine may call
// it: all later requests in the namespace fail too.
func newNamespace(t *testing.T) string {
	t.Helper()
	name := fmt.Sprintf("walk-%d", namespaces.Add(1))
	if err := cluster.NewNamespace(t.Context(), name); err != nil {
		t.Error(err)
	}
	return name
}

// objectNamed returns an object of the operator's kinds with a spec.
func objectNamed(kind, namespace, name string, s spec) *unstructured.Unstructured {
	u := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any(s.clone())}}
	u.SetGroupVersionKind(semmoev1.GroupVersion.WithKind(kind))
	u.SetNamespace(namespace)
	u.SetName(name)
	return u
}

// replace replaces the spec of an object, and returns the updated object. It returns an error if the API server refuses
// the spec.
func replace(ctx context.Context, object *unstructured.Unstructured, s spec, options ...client.PatchOption) (*unstructured.Unstructured, error) {
	patch, err := json.Marshal([]any{map[string]any{"op": "replace", "path": "/spec", "value": s}})
	if err != nil {
		return nil, err
	}
	next := object.DeepCopy()
	return next, api.Patch(ctx, next, client.RawPatch(types.JSONPatchType, patch), options...)
}

// counter returns the sum of a counter of the manager over all controllers.
func counter(t *testing.T, name string) float64 {
	t.Helper()
	families, err := metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for _, family := range families {
		if family.GetName() == name {
			for _, metric := range family.GetMetric() {
				sum += metric.GetCounter().GetValue()
			}
		}
	}
	return sum
}
