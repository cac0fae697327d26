// SPDX-License-Identifier: Apache-2.0

package alerts

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/controller-runtime/pkg/metrics/filters"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/yaml"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers"
	"github.com/semmoe/operator/controllers/moedeployment"
	"github.com/semmoe/operator/controllers/statemetrics"
	"github.com/semmoe/operator/controllers/storewatch"
	"github.com/semmoe/operator/controllers/watchmetrics"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/router/managerauth"
	"github.com/semmoe/operator/test/apiserver"
	"github.com/semmoe/operator/test/ports"
)

// Namespaces of the operator, of objects that the manager reconciles, of objects with a status set by the test, and of
// request routers.
const (
	own      = "semmoe-system"
	live     = "live"
	reported = "reported"
	serving  = "serving"
)

// hour is the number of rounds in one hour.
const hour = int(time.Hour / step)

// TestAlertsOfProcesses scrapes real processes with the configuration of the monitors, and checks that exactly the expected
// alerts fire. The processes are a manager that reconciles objects of a real API server, collectors of objects with a
// status set by the test, request routers, and artifact stores.
func TestAlertsOfProcesses(t *testing.T) {
	ctrl.SetLogger(logr.Discard())
	c := startCluster(t)
	full, roomy := c.startStore(t, t.TempDir()), c.startStore(t, t.TempDir())
	manager := c.startManager(t, roomy)
	collectors := c.startCollectors(t)
	busy := startHangingEngine(t)
	shedding, empty, well := c.startRouter(t, "shedding", busy.Server), c.startRouter(t, "empty", nil), c.startRouter(t, "well", startEngine(t))
	c.createLive(t)
	pages := map[string]string{"https://" + manager.metrics: "manager", "http://" + well.address: "router", "http://" + roomy.metrics: "store"}

	jobs := c.jobs(t, map[string][]process{
		"semmoe-manager": {{own, "manager", manager.metrics, ""}, {own, "collectors", collectors.address, ""}},
		"semmoe-store":   {{own, "full", full.metrics, ""}, {own, "roomy", roomy.metrics, ""}},
		"semmoe-router":  {shedding.process, empty.process, well.process},
	})
	for _, j := range jobs {
		if len(j.targets) == 0 {
			t.Errorf("monitor %s has no target", j.name)
		}
	}
	w := newWorld(t, jobs)
	collectors.begin(w.time())
	shedding.occupy(t, busy)
	began := map[string]time.Duration{}
	start := w.time()
	turn := func() {
		shedding.ask(t, 10, http.StatusTooManyRequests)
		empty.ask(t, 3, http.StatusServiceUnavailable)
		well.ask(t, 5, http.StatusOK)
		at := w.time().Sub(start)
		for _, alert := range w.round(t) {
			if _, known := began[alert]; !known {
				began[alert] = at
			}
		}
	}
	for round := range 2*hour + 10 {
		if round == 3 {
			c.overfill(t, full)
			c.damage(t, full)
		}
		turn()
	}
	for address, name := range pages {
		t.Run("metrics of "+name, func(t *testing.T) { c.checkPage(t, address+"/metrics") })
	}
	want := []string{
		"SemMoEDegraded warning live/broken",
		"SemMoEDegraded warning live/tainted",
		"SemMoENotReady critical live/broken",
		"SemMoENotReady critical live/tainted",
		"SemMoENotReady warning live/broken",
		"SemMoENotReady warning live/slow",
		"SemMoENotReady warning live/tainted",
		"SemMoEStoreUnavailable warning ",
		"SemMoEDriftRising info reported/far",
		"SemMoELocalityBelowTarget warning reported/far",
		"SemMoENoServingPod critical serving/empty",
		"SemMoENoServingPod warning live/broken",
		"SemMoENoServingPod warning live/slow",
		"SemMoENoServingPod warning live/tainted",
		"SemMoEHardwareProfileWrong warning reported/far",
		"SemMoEPlanStale info reported/old",
		"SemMoEPlanningFailed warning live/lost",
		"SemMoEProfilingFailed warning live/invalid",
		"SemMoERolloutStuck warning live/slow",
		"SemMoERolloutStuck warning live/tainted",
		"SemMoERolloutStuck warning live/zero", // the inspection of its checkpoint does not end
		"SemMoERolloutStuck warning reported/far",
		"SemMoERouterShedding warning serving/shedding",
		"SemMoEStoreCorrupt warning semmoe-system/full",
		"SemMoEStoreFull warning semmoe-system/full",
		"SemMoEWatchRefused warning ",
	}
	if roomy.nearlyFull(t) { // true if the disk of this machine is nearly full
		want = append(want, "SemMoEStoreFull warning semmoe-system/roomy")
	}
	slices.Sort(want)
	if diff := cmp.Diff(want, fired(began)); diff != "" {
		t.Errorf("alerts (-want +fired):\n%s", diff)
	}

	// After the leader ends, the other processes continue to serve, and an alert reports the missing leader.
	clear(began)
	manager.stop(t)
	for range 5 {
		turn()
	}
	if _, ok := began["SemMoEOperatorAbsent warning "]; !ok {
		t.Errorf("without a manager, firing: %v", fired(began))
	}
	// Every rule must have fired. A new rule needs a case in this test.
	for _, rule := range parsedRules(t) {
		key := rule.Alert + " " + rule.Labels["severity"]
		if !slices.ContainsFunc(append(want, fired(began)...), func(alert string) bool { return ruleOf(alert) == key }) {
			t.Errorf("%s has not fired in this test", key)
		}
	}
}

func fired(began map[string]time.Duration) []string {
	var names []string
	for name := range began {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// cluster is a real API server without controllers and nodes.
type cluster struct {
	client.Client
	config  *rest.Config
	clients *kubernetes.Clientset
	scraper string // path of the token file for scraping managers
}

func startCluster(t *testing.T) *cluster {
	t.Helper()
	server, err := apiserver.Start(&envtest.Environment{CRDDirectoryPaths: []string{filepath.Join(repository, "config", "crd")}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	config := server.Config
	config.QPS, config.Burst = 200, 400
	scheme, err := controllers.Scheme()
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{config: config}
	if c.Client, err = client.New(config, client.Options{Scheme: scheme}); err != nil {
		t.Fatal(err)
	}
	if c.clients, err = kubernetes.NewForConfig(config); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{own, live, reported, serving, "monitoring"} {
		c.create(t, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	c.create(t, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: own, Name: "semmoe-manager"}})
	c.create(t, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "monitoring", Name: "prometheus"}})
	for _, document := range documents(t, filepath.Join(repository, "config", "rbac", "manager.yaml")) {
		var kind metav1.PartialObjectMetadata
		if err := yaml.Unmarshal(document, &kind); err != nil {
			t.Fatal(err)
		}
		if kind.Kind == "ClusterRole" && kind.Name == "semmoe-metrics-reader" {
			c.create(t, decode(t, document, &rbacv1.ClusterRole{}))
		}
	}
	c.create(t, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "prometheus-semmoe"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "semmoe-metrics-reader"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "monitoring", Name: "prometheus"}},
	})
	c.scraper = c.token(t, "monitoring", "prometheus")
	return c
}

func (c *cluster) create(t *testing.T, object client.Object) {
	t.Helper()
	if err := c.Create(t.Context(), object); err != nil {
		t.Fatal(err)
	}
}

// token writes a token of a ServiceAccount to a file and returns the path.
func (c *cluster) token(t *testing.T, namespace, name string, audiences ...string) string {
	t.Helper()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: audiences}}
	if err := c.SubResource("token").Create(t.Context(), account, request); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(request.Status.Token), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// process is a scrape target with the metadata of service discovery.
type process struct{ namespace, pod, address, deployment string }

// jobs returns the scrape configurations of the monitors, with their targets. processes holds the targets by monitor
// name.
func (c *cluster) jobs(t *testing.T, processes map[string][]process) []job {
	t.Helper()
	m := renderedManifests(t)
	var jobs []job
	add := func(name string, config map[string]any, relabelings []map[string]any) {
		// The Prometheus Operator adds these labels to every job.
		for from, to := range map[string]string{"namespace": "namespace", "pod_name": "pod"} {
			relabelings = append(relabelings, map[string]any{"source_labels": []string{"__meta_kubernetes_" + from}, "target_label": to})
		}
		config["relabel_configs"] = relabelings
		j := job{name: name, config: config}
		for _, p := range processes[name] {
			j.targets = append(j.targets, map[string]string{
				"__address__": p.address, "__meta_kubernetes_namespace": p.namespace, "__meta_kubernetes_pod_name": p.pod,
				"__meta_kubernetes_pod_label_semmoe_io_deployment": p.deployment,
			})
		}
		jobs = append(jobs, j)
	}
	for _, monitor := range m.serviceMonitors {
		endpoint := monitor.Spec.Endpoints[0]
		config := map[string]any{"honor_labels": endpoint.HonorLabels}
		if endpoint.Scheme != nil {
			config["scheme"] = endpoint.Scheme.String()
		}
		if endpoint.TLSConfig != nil {
			config["tls_config"] = map[string]any{"insecure_skip_verify": *endpoint.TLSConfig.InsecureSkipVerify}
		}
		if endpoint.BearerTokenFile != "" {
			config["authorization"] = map[string]any{"credentials_file": c.scraper}
		}
		add(monitor.Name, config, nil)
	}
	for _, monitor := range m.podMonitors {
		var relabelings []map[string]any
		endpoint := monitor.Spec.PodMetricsEndpoints[0]
		for _, r := range endpoint.RelabelConfigs {
			var sources []string
			for _, label := range r.SourceLabels {
				sources = append(sources, string(label))
			}
			relabelings = append(relabelings, map[string]any{"source_labels": sources, "target_label": r.TargetLabel})
		}
		add(monitor.Name, map[string]any{"honor_labels": endpoint.HonorLabels}, relabelings)
	}
	return jobs
}

// runningManager is a manager that holds the leader lease.
type runningManager struct {
	metrics string
	cancel  context.CancelFunc
	ended   chan error
	stopped bool
}

func (c *cluster) startManager(t *testing.T, artifacts *runningStore) *runningManager {
	t.Helper()
	manager := &runningManager{metrics: ports.Address(t), ended: make(chan error, 1)}
	clients, err := kubernetes.NewForConfig(c.config)
	if err != nil {
		t.Fatal(err)
	}
	routers, err := managerauth.Load(t.Context(), clients, types.NamespacedName{Namespace: own, Name: managerauth.SecretName})
	if err != nil {
		t.Fatal(err)
	}
	options := controllers.Options{
		Routers: routers,
		Image:   "semmoe:test", OwnNamespace: own, Namespaces: []string{live}, SolverWorkers: 1,
		Store: &access.Access{
			URL: "https://" + artifacts.address, CA: types.NamespacedName{Namespace: own, Name: "semmoe-store-ca"},
			TokenFile: c.token(t, own, "semmoe-manager", artifact.Audience),
		},
	}
	lease, renew, retry := 15*time.Second, 10*time.Second, 2*time.Second
	m, err := controllers.NewManager(c.config, options, ctrl.Options{
		Logger:  logr.Discard(),
		Metrics: metricsserver.Options{BindAddress: manager.metrics, SecureServing: true, FilterProvider: filters.WithAuthenticationAndAuthorization},
		// The same settings as in semmoe manager, except for the namespace, which semmoe manager reads from its pod.
		LeaderElection: true, LeaderElectionID: "manager.semmoe.io", LeaderElectionNamespace: own, LeaderElectionReleaseOnCancel: true,
		LeaseDuration: &lease, RenewDeadline: &renew, RetryPeriod: &retry,
		HealthProbeBindAddress: "0",
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	manager.cancel = cancel
	go func() { manager.ended <- m.Start(ctx) }()
	t.Cleanup(func() { manager.stop(t) })
	select {
	case <-m.Elected():
	case err := <-manager.ended:
		t.Fatalf("the manager ended: %v", err)
	case <-time.After(time.Minute):
		t.Fatal("the manager has not become the leader within 1 minute")
	}
	return manager
}

func (m *runningManager) stop(t *testing.T) {
	t.Helper()
	m.cancel()
	if m.stopped {
		return
	}
	m.stopped = true
	if err := <-m.ended; err != nil {
		t.Error(err)
	}
}

// createLive creates objects for the manager: objects with errors, and for comparison objects that are healthy or
// waiting.
func (c *cluster) createLive(t *testing.T) {
	t.Helper()
	model := semmoev1.ModelSpec{Volume: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}
	deployment := func(name string, change func(*semmoev1.MoEDeploymentSpec)) {
		moed := &semmoev1.MoEDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: live, Name: name}, Spec: semmoev1.MoEDeploymentSpec{
			Model: model, Engine: semmoev1.EngineSpec{Image: "engine:1"}, Parallelism: semmoev1.ParallelismSpec{ExpertParallelSize: 4},
		}}
		change(&moed.Spec)
		c.create(t, moed)
	}
	deployment("broken", func(spec *semmoev1.MoEDeploymentSpec) { spec.Engine.Args = []string{"--ep-size=3"} })
	deployment("slow", func(*semmoev1.MoEDeploymentSpec) {})
	deployment("tainted", func(*semmoev1.MoEDeploymentSpec) {})
	c.unschedulable(t, "tainted")
	deployment("zero", func(spec *semmoev1.MoEDeploymentSpec) { spec.Replicas = ptr.To[int32](0) })

	profile := func(name string, change func(*semmoev1.AffinityProfileSpec)) {
		aprof := &semmoev1.AffinityProfile{ObjectMeta: metav1.ObjectMeta{Namespace: live, Name: name}, Spec: semmoev1.AffinityProfileSpec{
			Model: model, Engine: semmoev1.EngineSpec{Image: "engine:1"}, Parallelism: semmoev1.ParallelismSpec{ExpertParallelSize: 4},
			Target:  semmoev1.ProfilingTargetDedicated,
			Dataset: &semmoev1.DatasetSpec{ConfigMap: &semmoev1.DatasetConfigMap{Name: "requests", Key: "requests.jsonl"}},
		}}
		change(&aprof.Spec)
		c.create(t, aprof)
	}
	profile("invalid", func(spec *semmoev1.AffinityProfileSpec) { spec.Engine.Args = []string{"--ep-size=3"} })
	profile("waits", func(*semmoev1.AffinityProfileSpec) {})

	for name, of := range map[string]string{"lost": "nowhere", "waits": "waits"} {
		c.create(t, &semmoev1.PlacementPlan{ObjectMeta: metav1.ObjectMeta{Namespace: live, Name: name}, Spec: semmoev1.PlacementPlanSpec{
			ProfileRef: semmoev1.ProfileReference{Name: of}, ExpertParallelSize: 4, Attention: semmoev1.AttentionDataParallel,
		}})
	}
}

// unschedulable creates a request router pod of a MoEDeployment with the condition that no node can run it.
func (c *cluster) unschedulable(t *testing.T, deployment string) {
	t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: live, Name: deployment + "-router-0", Labels: map[string]string{
			semmoev1.LabelDeployment: deployment, semmoev1.LabelComponent: semmoev1.ComponentRouter,
		}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "router", Image: "semmoe:test"}}},
	}
	c.create(t, pod)
	pod.Status.Conditions = []corev1.PodCondition{{
		Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable,
		Message: "0/1 nodes are available: 1 node(s) had untolerated taint {maintenance: }.", LastTransitionTime: metav1.Now(),
	}}
	if err := c.Status().Update(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
}

// runningCollectors are the collectors of a manager for objects with status and figures set by the test.
type runningCollectors struct {
	address string
	metrics *moedeployment.Metrics
	now     time.Time
}

func (c *cluster) startCollectors(t *testing.T) *runningCollectors {
	t.Helper()
	for name, onTarget := range map[string]metav1.ConditionStatus{"far": metav1.ConditionFalse, "well": metav1.ConditionTrue, "old": metav1.ConditionUnknown} {
		moed := &semmoev1.MoEDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: reported, Name: name}, Spec: semmoev1.MoEDeploymentSpec{
			Model:  semmoev1.ModelSpec{Volume: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
			Engine: semmoev1.EngineSpec{Image: "engine:1"}, Parallelism: semmoev1.ParallelismSpec{ExpertParallelSize: 4},
		}}
		c.create(t, moed)
		moed.Status.Replicas, moed.Status.ReadyReplicas, moed.Status.UpdatedReplicas = 1, 1, 1
		for kind, status := range map[string]metav1.ConditionStatus{
			semmoev1.ConditionReady: metav1.ConditionTrue, semmoev1.ConditionDegraded: metav1.ConditionFalse, semmoev1.ConditionStalled: metav1.ConditionFalse,
			semmoev1.ConditionReconciling: metav1.ConditionFalse, semmoev1.ConditionLocalityOnTarget: onTarget,
		} {
			moed.Status.Conditions = append(moed.Status.Conditions, metav1.Condition{Type: kind, Status: status, Reason: "Told", LastTransitionTime: metav1.Now()})
		}
		if err := c.Status().Update(t.Context(), moed); err != nil {
			t.Fatal(err)
		}
	}
	r := &runningCollectors{now: time.Now()}
	r.metrics = moedeployment.NewMetrics(func() time.Time { return r.now })
	elected := make(chan struct{})
	close(elected)
	registry := prometheus.NewRegistry()
	registry.MustRegister(r.metrics, &statemetrics.Collector{Reader: client.NewNamespacedClient(c.Client, reported), Elected: elected, Log: logr.Discard()})
	registry.MustRegister(c.refuse(t), c.watchMissingStore(t))
	server := httptest.NewTLSServer(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	t.Cleanup(server.Close)
	r.address = strings.TrimPrefix(server.URL, "https://")
	return r
}

// refuse lets a manager's cache watch ConfigMaps as a user without permission.
func (c *cluster) refuse(t *testing.T) *watchmetrics.Refusals {
	t.Helper()
	refusals := watchmetrics.New(time.Now)
	stranger := rest.CopyConfig(c.config)
	stranger.Impersonate = rest.ImpersonationConfig{UserName: "stranger"}
	objects, err := cache.New(stranger, cache.Options{DefaultWatchErrorHandler: refusals.Handle})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := objects.GetInformer(t.Context(), &corev1.ConfigMap{}, cache.BlockUntilSynced(false)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- objects.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return refusals
}

// watchMissingStore checks an artifact store at an address without a listener.
func (c *cluster) watchMissingStore(t *testing.T) *storewatch.Watch {
	t.Helper()
	watch := storewatch.New(&access.Access{
		URL: "https://" + ports.Address(t), CA: types.NamespacedName{Namespace: own, Name: "semmoe-store-ca"},
		TokenFile: c.token(t, own, "semmoe-manager", artifact.Audience), Reader: c.Client,
	}, time.Now)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- watch.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return watch
}

// begin sets the figures. Ages are relative to the clock of Prometheus.
func (r *runningCollectors) begin(now time.Time) {
	const day = 24 * time.Hour
	canary := &semmoev1.RolloutStatus{Phase: semmoev1.RolloutPhaseCanary, Since: metav1.NewTime(now)}
	for name, f := range map[string]moedeployment.Figures{
		"far":  {Statistic: 0.7, Threshold: 1, Observed: 0.3, Promised: 0.5, Baseline: 0.25, PlanCreated: now.Add(-day), Rollout: canary, Soak: 5 * time.Minute, PredictedOverMeasured: 4, PredictedOverMeasuredLow: 3, PredictedOverMeasuredHigh: 6},
		"well": {Statistic: 0.1, Threshold: 1, Observed: 0.5, Promised: 0.5, Baseline: 0.25, PlanCreated: now.Add(-30 * day), Rollout: canary, Soak: day, PredictedOverMeasured: 1, PredictedOverMeasuredLow: 0.8, PredictedOverMeasuredHigh: 1.5},
		"old":  {Statistic: math.NaN(), Threshold: math.NaN(), Observed: math.NaN(), Promised: 0.5, Baseline: 0.25, PlanCreated: now.Add(-8 * day), PredictedOverMeasured: math.NaN(), PredictedOverMeasuredLow: math.NaN(), PredictedOverMeasuredHigh: math.NaN()},
		"new":  {Statistic: math.NaN(), Threshold: math.NaN(), Observed: math.NaN(), Promised: 0.5, Baseline: 0.25, PlanCreated: now.Add(-6 * day), PredictedOverMeasured: math.NaN(), PredictedOverMeasuredLow: math.NaN(), PredictedOverMeasuredHigh: math.NaN()},
	} {
		r.metrics.Set(types.NamespacedName{Namespace: reported, Name: name}, f)
	}
}

// insecure returns a client for servers with self-signed certificates.
func insecure(t *testing.T, expect time.Duration) *http.Client {
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ExpectContinueTimeout: expect} //nolint:gosec // on the loopback interface
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// ofLibraries maps metrics of libraries to the linter's messages about them. The project cannot change their names.
var ofLibraries = map[string]string{}

// checkPage lints the metrics of a process, and fails the test for undocumented metrics of the project.
func (c *cluster) checkPage(t *testing.T, url string) {
	t.Helper()
	token, err := os.ReadFile(c.scraper)
	if err != nil {
		t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer "+string(token))
	response, err := insecure(t, 0).Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s, %v: %s", url, response.Status, err, text)
	}
	problems, err := promlint.New(strings.NewReader(string(text))).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, problem := range problems {
		if ofLibraries[problem.Metric] != problem.Text {
			t.Errorf("%s: %s", problem.Metric, problem.Text)
		}
	}
	known, series := documentedMetrics(t), 0
	for line := range strings.Lines(string(text)) {
		if declaration, ok := strings.CutPrefix(line, "# TYPE "); ok && strings.HasPrefix(declaration, "semmoe_") {
			if _, ok := known[strings.Fields(declaration)[0]]; !ok {
				t.Errorf("metric %s is not in docs/metrics.md", declaration)
			}
		}
		if strings.HasPrefix(line, "semmoe_") {
			series++
		}
	}
	t.Logf("%d series of the project", series)
}

// eventually waits at most one minute until holds returns no error.
func eventually(t *testing.T, what string, holds func() error) {
	t.Helper()
	var last error
	if err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) {
		last = holds()
		return last == nil, nil
	}); err != nil {
		t.Fatalf("%s: %v: %v", what, err, last)
	}
}

// answers returns an error unless a request was answered with status 200.
func answers(response *http.Response, err error) error {
	if err != nil {
		return err
	}
	response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return errors.New(response.Status)
	}
	return nil
}
