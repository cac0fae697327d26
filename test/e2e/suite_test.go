// SPDX-License-Identifier: Apache-2.0

// Package e2e runs user stories of the operator on a real control plane and node: real pods of the real binary, the
// real reference engine and request router, over real HTTP. Only the manager runs inside the test process, so that
// tests can crash it, and make e2e can run it with the race detector.
package e2e

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	controllerconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers"
	"github.com/semmoe/operator/internal/observation/promquery"
	"github.com/semmoe/operator/internal/router/managerauth"
	"github.com/semmoe/operator/test/audit"
	"github.com/semmoe/operator/test/faults"
	"github.com/semmoe/operator/test/hub/incluster"
	"github.com/semmoe/operator/test/load"
	"github.com/semmoe/operator/test/localcluster"
	"github.com/semmoe/operator/test/openshift"
	"github.com/semmoe/operator/test/programs"
	"github.com/semmoe/operator/test/tier"
)

const (
	image = "semmoe:dev"
	// engineImage is the image of the reference engine.
	engineImage = "semmoe-refengine:dev"
	// nextImage is another name of the same image. It simulates an upgrade of the operator.
	nextImage = "semmoe:next"
	// waitTimeout is the limit of most waits. It is long enough for a loaded machine; a wait ends as soon as its
	// condition holds.
	waitTimeout = 2 * time.Minute
	// requestPause is the pause of a client between two requests. Clients without a pause would take the CPU time of the
	// stories that run at the same time.
	requestPause = 50 * time.Millisecond
	// pollInterval is the pause between two checks of a condition. Shorter pauses would take the time of the API server.
	pollInterval = 250 * time.Millisecond
)

var (
	repository string
	cluster    *localcluster.Cluster
	restConfig *rest.Config
	// managerConfig has the rights with which the manager is installed.
	managerConfig *rest.Config
	api           client.WithWatch
)

func TestMain(m *testing.M) {
	localcluster.RunChildIfAsked()
	flag.Parse()
	if err := setParallel(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code, err := run(m)
	if err != nil {
		code = tier.ExitCode(err)
	}
	os.Exit(code)
}

// parallelStories is the default number of stories that run at a time. Stories mostly wait for pods to start and drain,
// so that two cores run more of them than the default of the testing package, the number of cores.
const parallelStories = 8

// setParallel sets the number of parallel stories unless the command line sets it.
func setParallel() error {
	isSet := false
	flag.Visit(func(f *flag.Flag) { isSet = isSet || f.Name == "test.parallel" })
	if isSet {
		return nil
	}
	return flag.Set("test.parallel", strconv.Itoa(parallelStories))
}

func run(m *testing.M) (int, error) {
	ctrl.SetLogger(zap.New(zap.WriteTo(logFile())))
	var err error
	if repository, err = filepath.Abs(filepath.Join("..", "..")); err != nil {
		return 1, err
	}
	binary, err := programs.Built("semmoe")
	if err != nil {
		return 1, err
	}
	engine, err := programs.Built("semmoe-refengine")
	if err != nil {
		return 1, err
	}
	binaries, err := localcluster.FindBinaries()
	if err != nil {
		return 1, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	images := map[string]string{image: binary, nextImage: binary, engineImage: engine}
	if _, err := os.Stat(groupsBinary()); err == nil {
		images[groupsImage] = groupsBinary()
	}
	if _, err := os.Stat(kueueBinary()); err == nil {
		images[kueueImage] = kueueBinary()
	}
	if images[doubleImage], err = buildDouble(); err != nil {
		return 1, err
	}
	if images[incluster.Image], err = incluster.Build(); err != nil {
		return 1, err
	}
	cluster, err = localcluster.Start(ctx, localcluster.Options{
		Binaries: binaries,
		Images:   images,
		GPUs:     512,
		Forward:  512, // each story that sends requests uses one, and the nightly tier runs hundreds

		AuditPolicy: audit.Policy,
	})
	if err != nil {
		return 1, err
	}
	defer cluster.Stop() //nolint:errcheck // the processes end with this process
	restConfig = cluster.RESTConfig()
	restConfig.QPS, restConfig.Burst = 200, 400
	if _, err := envtest.InstallCRDs(restConfig, envtest.CRDInstallOptions{Paths: []string{filepath.Join(repository, "config", "crd")}, ErrorIfPathMissing: true}); err != nil {
		return 1, err
	}
	scheme, err := controllers.Scheme()
	if err != nil {
		return 1, err
	}
	if api, err = client.NewWithWatch(restConfig, client.Options{Scheme: scheme}); err != nil {
		return 1, err
	}
	// The whole suite runs under the user ranges of OpenShift: no pod of the operator may depend on a user ID.
	if err := openshift.Restrict(ctx, api); err != nil {
		return 1, err
	}
	if *statesDir != "" {
		recordStates(ctx, *statesDir)
	}
	if managerConfig, err = installRights(ctx); err != nil {
		return 1, fmt.Errorf("failed to install the rights: %w", err)
	}
	code := m.Run()
	if code == 0 {
		err = checkLog()
	}
	return code, err
}

// logFile returns the file for the managers' logs. They are discarded unless E2E_LOG names a file.
func logFile() *os.File {
	name := os.Getenv("E2E_LOG")
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

// checkpointDir returns the directory of the small real model in the repository.
func checkpointDir() string {
	return filepath.Join(repository, "internal", "refengine", "testdata", "tiny-qwen3moe")
}

var namespaces atomic.Int32

// newNamespace creates a namespace for a test. The audit log records pods that violate the restricted pod security
// standard.
func newNamespace(t *testing.T) string {
	t.Helper()
	name := fmt.Sprintf("e2e-%d", namespaces.Add(1))
	if err := api.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: name, Labels: map[string]string{"pod-security.kubernetes.io/audit": "restricted"},
	}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { logPods(t, name) })
	return name
}

// logPods logs the pods of a namespace if the test has failed: most failures are caused by a pod in an unexpected
// state.
func logPods(t *testing.T, namespace string) {
	if !t.Failed() {
		return
	}
	var pods corev1.PodList
	if err := api.List(context.WithoutCancel(t.Context()), &pods, client.InNamespace(namespace)); err != nil {
		t.Log(err)
	}
	for _, pod := range pods.Items {
		t.Logf("pod %s of %v: %s, created %v, deleted %v, node %q, owners %v", pod.Name, pod.Labels[semmoev1.LabelRevision], pod.Status.Phase, pod.CreationTimestamp, pod.DeletionTimestamp, pod.Spec.NodeName, pod.OwnerReferences)
		for _, status := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
			t.Logf("  container %s: ready %t, %d restarts, %v, last %v", status.Name, status.Ready, status.RestartCount, status.State.String(), status.LastTerminationState.Terminated)
		}
	}
}

// startManager runs a manager for one namespace until the test ends or the returned function is called. The injector
// may be nil.
func startManager(t *testing.T, namespace string, injector *faults.Injector) (stop func()) {
	t.Helper()
	return startManagerOf(t, image, namespace, injector)
}

// startManagerOf runs a manager of one release. release is the image of the operator's own containers.
func startManagerOf(t *testing.T, release, namespace string, injector *faults.Injector) (stop func()) {
	t.Helper()
	return startManagerAs(t, managerConfig, release, namespace, injector)
}

// startManagerAs runs a manager with the rights of a configuration.
func startManagerAs(t *testing.T, config *rest.Config, release, namespace string, injector *faults.Injector) (stop func()) {
	t.Helper()
	log := ctrl.Log
	if injector != nil {
		config, log = injector.Config(config), injector.Logger(ctrl.Log)
	}
	options := controllers.Options{Image: release, Namespaces: []string{namespace}, HTTP: podClient(t), Routers: routerIdentity(t), Store: startStore(t), PrometheusHosts: promquery.Hosts{"127.0.0.1"}}
	if injector != nil {
		options.Now = injector.Now
	}
	manager, err := controllers.NewManager(config, options, ctrl.Options{
		Metrics:    metricsserver.Options{BindAddress: "0"},
		Controller: controllerconfig.Controller{SkipNameValidation: ptr.To(true)},
		Logger:     log,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- manager.Start(ctx) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("the manager exited with %v", err)
			}
		case <-time.After(time.Minute):
			t.Error("the manager does not exit")
		}
	}
	t.Cleanup(stop)
	return stop
}

// routerIdentity returns the identity with which managers authenticate to request routers.
func routerIdentity(t *testing.T) *managerauth.Identity {
	t.Helper()
	clients, err := kubernetes.NewForConfig(managerConfig)
	if err != nil {
		t.Fatal(err)
	}
	identity, err := managerauth.Load(t.Context(), clients, types.NamespacedName{Namespace: storeNamespace, Name: managerauth.SecretName})
	if err != nil {
		t.Fatal(err)
	}
	proxy, err := cluster.PodProxy(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	identity.HTTP.Transport.(*http.Transport).Proxy = http.ProxyURL(proxy)
	return identity
}

// podClient returns a client that reaches pods by their address. It uses the API server's proxy, because this process
// is outside the cluster's network.
func podClient(t *testing.T) *http.Client {
	t.Helper()
	transport, err := rest.TransportFor(restConfig)
	if err != nil {
		t.Fatal(err)
	}
	return &http.Client{Transport: podTransport{transport}}
}

type podTransport struct{ next http.RoundTripper }

func (p podTransport) RoundTrip(request *http.Request) (*http.Response, error) {
	var pods corev1.PodList
	if err := api.List(request.Context(), &pods, client.MatchingFields{"status.podIP": request.URL.Hostname()}); err != nil {
		return nil, err
	}
	if len(pods.Items) == 0 {
		return nil, fmt.Errorf("no pod has address %s", request.URL.Hostname())
	}
	pod := pods.Items[0]
	name := pod.Name
	if request.URL.Scheme == "https" {
		name = "https:" + name // the proxy verifies no certificate, as the client of the manager
	}
	through, err := url.Parse(fmt.Sprintf("%s/api/v1/namespaces/%s/pods/%s:%s/proxy%s", restConfig.Host, pod.Namespace, name, request.URL.Port(), request.URL.Path))
	if err != nil {
		return nil, err
	}
	through.RawQuery = request.URL.RawQuery
	request = request.Clone(request.Context())
	request.URL, request.Host = through, through.Host
	return p.next.RoundTrip(request)
}

// newDeployment returns a MoEDeployment of the small model on the reference engine.
func newDeployment(namespace, name string, change ...func(*semmoev1.MoEDeployment)) *semmoev1.MoEDeployment {
	moed := &semmoev1.MoEDeployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: semmoev1.MoEDeploymentSpec{
			Model: semmoev1.ModelSpec{Volume: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{
				Path: checkpointDir(), Type: ptr.To(corev1.HostPathDirectory),
			}}},
			Engine:      semmoev1.EngineSpec{Image: engineImage, Command: []string{"/semmoe-refengine"}},
			Parallelism: semmoev1.ParallelismSpec{ExpertParallelSize: 4},
			Replicas:    ptr.To[int32](1),
			Routing:     semmoev1.RoutingSpec{Replicas: 1},
			// By default a canary is not compared, because most stories send no requests; stories of canaries set a
			// soak time. Plans are judged at large batches, because at smaller ones latency is most of the modelled
			// layer time of a model this small.
			Rollout: semmoev1.RolloutSpec{SoakSeconds: ptr.To[int32](0), BatchTokens: 1 << 20, MinimumGainPercent: ptr.To[int32](0)},
		},
	}
	for _, c := range change {
		c(moed)
	}
	return moed
}

func create(t *testing.T, object client.Object) {
	t.Helper()
	if err := api.Create(t.Context(), object); err != nil {
		t.Fatal(err)
	}
}

// update changes the spec like a user, with a merge patch that does not conflict with other writers.
func update(t *testing.T, moed *semmoev1.MoEDeployment, change func(*semmoev1.MoEDeployment)) {
	t.Helper()
	base := get(t, moed)
	changed := base.DeepCopy()
	change(changed)
	if err := api.Patch(t.Context(), changed, client.MergeFrom(base)); err != nil {
		t.Fatal(err)
	}
}

func get(t *testing.T, moed *semmoev1.MoEDeployment) *semmoev1.MoEDeployment {
	t.Helper()
	current := &semmoev1.MoEDeployment{}
	if err := api.Get(t.Context(), client.ObjectKeyFromObject(moed), current); err != nil {
		t.Fatal(err)
	}
	return current
}

// eventually polls until f returns no error. It fails the test with the last error after the timeout, which load.Clock
// extends on a loaded machine.
func eventually(t *testing.T, within time.Duration, what string, f func() error) {
	t.Helper()
	pollEvery(t, pollInterval, within, what, f)
}

// pollEvery is eventually with another pause between two polls, for an f that also observes states that pass.
func pollEvery(t *testing.T, pause, within time.Duration, what string, f func() error) {
	t.Helper()
	var clock load.Clock
	for {
		late := clock.Elapsed() > within
		err := f()
		if err == nil {
			return
		}
		if late {
			t.Fatalf("%s: timed out after %v: %v", what, within, err)
		}
		time.Sleep(pause)
	}
}

// waitComplete waits until the current generation is in service.
func waitComplete(t *testing.T, moed *semmoev1.MoEDeployment) *semmoev1.MoEDeployment {
	t.Helper()
	var current *semmoev1.MoEDeployment
	eventually(t, waitTimeout, "the current generation is in service", func() error {
		current = get(t, moed)
		return complete(current)
	})
	return current
}

func complete(moed *semmoev1.MoEDeployment) error {
	for kind, want := range map[string]metav1.ConditionStatus{
		semmoev1.ConditionReady: metav1.ConditionTrue, semmoev1.ConditionProgressing: metav1.ConditionFalse, semmoev1.ConditionDegraded: metav1.ConditionFalse,
	} {
		c := meta.FindStatusCondition(moed.Status.Conditions, kind)
		if c == nil || c.Status != want || c.ObservedGeneration != moed.Generation {
			return fmt.Errorf("condition %s is %+v", kind, c)
		}
	}
	return nil
}

// waitCondition waits at most a minute for a condition with the given reason and a message that contains all parts.
func waitCondition(t *testing.T, moed *semmoev1.MoEDeployment, kind string, status metav1.ConditionStatus, reason string, parts ...string) {
	t.Helper()
	waitConditionWithin(t, time.Minute, moed, kind, status, reason, parts...)
}

// waitConditionWithin waits for a condition with the given reason and a message that contains all parts.
func waitConditionWithin(t *testing.T, within time.Duration, moed *semmoev1.MoEDeployment, kind string, status metav1.ConditionStatus, reason string, parts ...string) {
	t.Helper()
	eventually(t, within, kind+" is "+string(status)+" "+reason, func() error {
		current := get(t, moed)
		return conditionIs(current.Status.Conditions, current.Generation, kind, status, reason, parts...)
	})
}

// conditionIs returns an error unless a condition has the given generation, status and reason, and its message contains
// all parts.
func conditionIs(conditions []metav1.Condition, generation int64, kind string, status metav1.ConditionStatus, reason string, parts ...string) error {
	c := meta.FindStatusCondition(conditions, kind)
	if c == nil || c.Status != status || c.Reason != reason || c.ObservedGeneration != generation {
		return fmt.Errorf("condition %s is %+v", kind, c)
	}
	for _, part := range parts {
		if !strings.Contains(c.Message, part) {
			return fmt.Errorf("the message %q lacks %q", c.Message, part)
		}
	}
	return nil
}

// serviceURL returns the URL of a MoEDeployment's Service.
func serviceURL(t *testing.T, moed *semmoev1.MoEDeployment) string {
	t.Helper()
	address, err := cluster.Forward(t.Context(), moed.Namespace, moed.Name, semmoev1.ServicePort)
	if err != nil {
		t.Fatal(err)
	}
	return "http://" + address
}

// sendRequest sends a small completion request and returns an error unless it is answered in full.
func sendRequest(ctx context.Context, url, model string) error {
	body := fmt.Sprintf(`{"model": %q, "prompt": "func main() {", "max_tokens": 8, "temperature": 0}`, model)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", strings.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	return answered(http.DefaultClient.Do(request))
}

func listEnginePods(t *testing.T, moed *semmoev1.MoEDeployment) []corev1.Pod {
	t.Helper()
	var pods corev1.PodList
	if err := api.List(t.Context(), &pods, client.InNamespace(moed.Namespace),
		client.MatchingLabels{semmoev1.LabelDeployment: moed.Name, semmoev1.LabelComponent: semmoev1.ComponentEngine}); err != nil {
		t.Fatal(err)
	}
	return pods.Items
}

func listWorkloads(t *testing.T, moed *semmoev1.MoEDeployment) []appsv1.StatefulSet {
	t.Helper()
	var workloads appsv1.StatefulSetList
	if err := api.List(t.Context(), &workloads, client.InNamespace(moed.Namespace), client.MatchingLabels{semmoev1.LabelDeployment: moed.Name}); err != nil {
		t.Fatal(err)
	}
	return workloads.Items
}

// kindOf returns an object's kind, for messages.
func kindOf(object client.Object) string {
	gvk, err := apiutil.GVKForObject(object, api.Scheme())
	if err != nil {
		return fmt.Sprintf("%T", object)
	}
	return gvk.Kind
}
