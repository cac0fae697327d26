// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/router"
	"github.com/semmoe/operator/test/faults"
	"github.com/semmoe/operator/test/tier"
)

// installing serializes the installation of a kind, so that two tests do not create it at the same time.
var installing sync.Mutex

// installInferencePools installs the kind InferencePool from its release.
func installInferencePools(t *testing.T) {
	t.Helper()
	installing.Lock()
	defer installing.Unlock()
	file := filepath.Join(moduleDir(t, "gateway", "sigs.k8s.io/gateway-api-inference-extension"), "config", "crd", "bases", "inference.networking.k8s.io_inferencepools.yaml")
	if _, err := envtest.InstallCRDs(restConfig, envtest.CRDInstallOptions{Paths: []string{file}, ErrorIfPathMissing: true}); err != nil {
		t.Fatal(err)
	}
}

// moduleDir returns the directory of a module that the go.mod of a directory below test pins.
func moduleDir(t *testing.T, directory, module string) string {
	t.Helper()
	command := exec.CommandContext(t.Context(), "go", "mod", "download", "-json", module)
	command.Dir = filepath.Join(repository, "test", directory)
	output, err := command.Output()
	var found struct{ Dir string }
	if err := errors.Join(err, json.Unmarshal(output, &found)); err != nil {
		t.Fatalf("failed to download module %s: %v: %s", module, err, output)
	}
	return found.Dir
}

// removeInferencePools deletes the kind InferencePool, if it exists.
func removeInferencePools(t *testing.T) {
	t.Helper()
	kind := &unstructured.Unstructured{}
	kind.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"})
	kind.SetName("inferencepools.inference.networking.k8s.io")
	if err := client.IgnoreNotFound(api.Delete(t.Context(), kind)); err != nil {
		t.Fatal(err)
	}
	eventually(t, waitTimeout, "the kind InferencePool is deleted", func() error {
		return absent(t.Context(), kind, "", kind.GetName())
	})
}

// getPool reads the InferencePool of a MoEDeployment. The API server may have just registered the kind.
func getPool(ctx context.Context, moed *semmoev1.MoEDeployment) (*unstructured.Unstructured, error) {
	pool := &unstructured.Unstructured{}
	pool.SetGroupVersionKind(schema.GroupVersionKind{Group: "inference.networking.k8s.io", Version: "v1", Kind: "InferencePool"})
	return pool, api.Get(ctx, client.ObjectKeyFromObject(moed), pool)
}

// absent returns an error unless no object with that name exists.
func absent(ctx context.Context, object client.Object, namespace, name string) error {
	err := api.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, object)
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return err
	}
	return fmt.Errorf("%s %s exists", kindOf(object), name)
}

// sendSteadily sends requests until the returned function stops it, and fails the test if a request is not answered.
func sendSteadily(t *testing.T, url string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	var served atomic.Int64
	for range 4 {
		clients.Go(func() {
			for ; ctx.Err() == nil; time.Sleep(requestPause) {
				if err := sendRequest(context.WithoutCancel(ctx), url, "tiny"); err != nil {
					t.Errorf("a request failed: %v", err)
				}
				served.Add(1)
			}
		})
	}
	t.Cleanup(clients.Wait) // also after a test failure: the context ends first
	return func() {
		cancel()
		clients.Wait()
		if served.Load() < 20 {
			t.Errorf("only %d requests were answered, too few for steady traffic", served.Load())
		}
	}
}

// TestEndpointPicker serves behind a Gateway. The kind InferencePool may be missing at first and is installed later.
// The InferencePool is repaired after edits and removed in another routing mode, and no change of the mode fails a
// request.
//
// This test is not parallel because other tests need the kind.
func TestEndpointPicker(t *testing.T) {
	tier.Nightly(t)
	removeInferencePools(t)
	namespace := newNamespace(t)
	counting := faults.New(faults.Schedule{})
	startManager(t, namespace, counting)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeEndpointPicker })
	create(t, moed)
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionDegraded, metav1.ConditionTrue, "InferencePoolMissing", "inference.networking.k8s.io/v1", "Gateway API Inference Extension")
	url := serviceURL(t, moed)
	eventually(t, waitTimeout, "the Service selects the engine", func() error { return sendRequest(t.Context(), url, "tiny") })

	installInferencePools(t)
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionDegraded, metav1.ConditionFalse, "AsExpected")
	pool, err := getPool(t.Context(), moed)
	if err != nil {
		t.Fatal(err)
	}
	checkPool(t, pool)
	changed := pool.DeepCopy()
	if err := unstructured.SetNestedField(changed.Object, "FailClose", "spec", "endpointPickerRef", "failureMode"); err != nil {
		t.Fatal(err)
	}
	if err := api.Update(t.Context(), changed, client.FieldOwner("another-user")); err != nil {
		t.Fatal(err)
	}
	touchPods(t, moed, time.Second) // the operator polls it only twice a minute
	eventually(t, waitTimeout, "an edited InferencePool is repaired", func() error {
		if pool, err = getPool(t.Context(), moed); err != nil {
			return err
		}
		if mode, _, _ := unstructured.NestedString(pool.Object, "spec", "endpointPickerRef", "failureMode"); mode != "FailOpen" {
			return fmt.Errorf("failureMode is %s", mode)
		}
		return nil
	})
	if err := absent(t.Context(), &networkingv1.NetworkPolicy{}, namespace, "tiny"); err != nil {
		t.Errorf("the network policy closes the engines to Gateways: %v", err)
	}
	waitComplete(t, moed)
	waitReleases(t, moed)
	before := counting.Writes()
	reconcileSteadily(t, counting, 5*time.Second, func() int { return touchPodsOnce(t, moed) })
	if writes := counting.Writes() - before; writes != 0 {
		t.Errorf("%d writes in steady state, want none:\n%s", writes, strings.Join(counting.LastWrites(), "\n"))
	}

	stop := sendSteadily(t, url)
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeRouter })
	waitComplete(t, moed)
	eventually(t, waitTimeout, "the Service selects the router, and the objects for a Gateway are deleted", func() error { return proxied(t.Context(), moed) })
	waitThroughRouter(t, url)
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeEndpointPicker })
	waitComplete(t, moed)
	eventually(t, waitTimeout, "the InferencePool exists again, and the engines are open", func() error {
		_, err := getPool(t.Context(), moed)
		return errors.Join(err, absent(t.Context(), &networkingv1.NetworkPolicy{}, namespace, "tiny"))
	})
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeNone })
	waitComplete(t, moed)
	eventually(t, waitTimeout, "the objects for the router and the Gateway are deleted", func() error {
		if _, err := getPool(t.Context(), moed); !apierrors.IsNotFound(err) {
			return fmt.Errorf("reading the InferencePool returned %v, want not found", err)
		}
		return errors.Join(absent(t.Context(), &appsv1.Deployment{}, namespace, "tiny-router"), absent(t.Context(), &corev1.Service{}, namespace, "tiny-router"),
			absent(t.Context(), &networkingv1.NetworkPolicy{}, namespace, "tiny-router"))
	})
	stop()
}

// proxied returns an error unless all objects of mode Router exist and none of mode EndpointPicker.
func proxied(ctx context.Context, moed *semmoev1.MoEDeployment) error {
	service, key := &corev1.Service{}, client.ObjectKeyFromObject(moed)
	if err := api.Get(ctx, key, service); err != nil {
		return err
	}
	if component := service.Spec.Selector[semmoev1.LabelComponent]; component != semmoev1.ComponentRouter {
		return fmt.Errorf("the Service selects %s", component)
	}
	if _, err := getPool(ctx, moed); !apierrors.IsNotFound(err) {
		return fmt.Errorf("reading the InferencePool returned %v, want not found", err)
	}
	return errors.Join(absent(ctx, &corev1.Service{}, moed.Namespace, moed.Name+"-router"), api.Get(ctx, key, &networkingv1.NetworkPolicy{}))
}

func checkPool(t *testing.T, pool *unstructured.Unstructured) {
	t.Helper()
	var spec struct {
		Selector    struct{ MatchLabels map[string]string }
		TargetPorts []struct{ Number int32 }
		Picker      struct {
			Kind, Name, FailureMode string
			Port                    struct{ Number int32 }
		} `json:"endpointPickerRef"`
	}
	data, err := json.Marshal(pool.Object["spec"])
	if err := errors.Join(err, json.Unmarshal(data, &spec)); err != nil {
		t.Fatal(err)
	}
	if len(spec.TargetPorts) != 1 || spec.TargetPorts[0].Number != 30000 || spec.Picker.FailureMode != "FailOpen" {
		t.Errorf("the InferencePool is %s", data)
	}
	var pods corev1.PodList
	if err := api.List(t.Context(), &pods, client.InNamespace(pool.GetNamespace()), client.MatchingLabels(spec.Selector.MatchLabels)); err != nil || len(pods.Items) != 1 ||
		pods.Items[0].Labels[semmoev1.LabelComponent] != semmoev1.ComponentEngine {
		t.Errorf("the InferencePool selects %d pods, want the engine's: %v", len(pods.Items), err)
	}
	service := &corev1.Service{}
	if err := api.Get(t.Context(), client.ObjectKey{Namespace: pool.GetNamespace(), Name: spec.Picker.Name}, service); err != nil || spec.Picker.Kind != "Service" {
		t.Fatalf("the endpoint picker is %+v: %v", spec.Picker, err)
	}
	for _, port := range service.Spec.Ports {
		if port.Port == spec.Picker.Port.Number && port.TargetPort.String() == "ext-proc" && ptr.Deref(port.AppProtocol, "") == "http2" {
			return
		}
	}
	t.Errorf("the Service of the picker has no port %d for ext_proc: %+v", spec.Picker.Port.Number, service.Spec.Ports)
}

// waitThroughRouter waits until requests pass through the request router.
func waitThroughRouter(t *testing.T, url string) {
	t.Helper()
	eventually(t, waitTimeout, "requests pass through the router", func() error {
		// Use a new connection: an older one still leads to the engine.
		fresh := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		response, err := fresh.Post(url+"/v1/completions", "application/json", strings.NewReader(`{"model": "tiny", "prompt": "x", "max_tokens": 1}`))
		if err != nil {
			return err
		}
		response.Body.Close()
		if response.Header.Get(router.HeaderPod) == "" {
			return fmt.Errorf("header %s is missing in %v", router.HeaderPod, response.Header)
		}
		return nil
	})
}

// TestPendingLimit sends more requests than the ranks may have. The excess is answered with 429 and Retry-After, and
// admitted requests are answered in full. When these are done, requests are admitted again.
func TestPendingLimit(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) {
		m.Spec.Routing.PendingLimitPerRank = ptr.To[int32](1)
		m.Spec.Routing.Weights = &semmoev1.RoutingWeights{PrefixPercent: ptr.To[int32](150)}
	})
	create(t, moed)
	waitComplete(t, moed)
	url := serviceURL(t, moed)
	var clients sync.WaitGroup
	var admitted, refused atomic.Int64
	for range 32 {
		clients.Go(func() {
			response, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(`{"model": "tiny", "prompt": "func main() {", "max_tokens": 200, "ignore_eos": true}`))
			if err != nil {
				t.Error(err)
				return
			}
			if response.StatusCode == http.StatusTooManyRequests && response.Header.Get("Retry-After") != "" {
				refused.Add(1)
				response.Body.Close()
				return
			}
			if err := answered(response, nil); err != nil {
				t.Error(err)
			}
			admitted.Add(1)
		})
	}
	clients.Wait()
	t.Logf("%d requests admitted, %d refused", admitted.Load(), refused.Load())
	if admitted.Load() < 4 || refused.Load() == 0 {
		t.Errorf("of 32 concurrent requests %d are admitted and %d refused, with four ranks that take one request each", admitted.Load(), refused.Load())
	}
	if err := sendRequest(t.Context(), url, "tiny"); err != nil {
		t.Error(err)
	}
}

// sentBy returns an error unless a request is answered and its rank was chosen by the given plan.
func sentBy(ctx context.Context, url, plan string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", strings.NewReader(`{"model": "tiny", "prompt": "func main() {", "max_tokens": 4}`))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json") // vLLM refuses other types
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	got := response.Header.Get(router.HeaderPlan)
	if err := answered(response, nil); err != nil || got != plan {
		return fmt.Errorf("%s is %q, want %q, %v", router.HeaderPlan, got, plan, err)
	}
	return nil
}

// TestPlanChangesUnderTraffic puts plans into service and replaces them under steady traffic. No request fails. The
// routers are not restarted, and route requests by the serving plan.
func TestPlanChangesUnderTraffic(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	storedProfile(t, namespace)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) {
		m.Spec.Replicas = ptr.To[int32](2)
		m.Spec.Profiling = &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "tiny"}}
		m.Spec.Placement.Approval = semmoev1.ApprovalAdvisory
	})
	create(t, moed)
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionRolledOut, metav1.ConditionFalse, "Advisory")
	waitComplete(t, moed)
	url, routers := serviceURL(t, moed), podNames(t, moed, semmoev1.ComponentRouter)

	stop := sendSteadily(t, url)
	plans := map[string]bool{}
	for _, change := range []func(*semmoev1.MoEDeployment){
		func(m *semmoev1.MoEDeployment) { m.Spec.Placement.Approval = semmoev1.ApprovalAutomatic },
		func(m *semmoev1.MoEDeployment) { m.Spec.Placement.Solver.Seed = ptr.To[int64](2) },
	} {
		update(t, moed, change)
		var plan string
		eventually(t, waitTimeout, "another plan is in service", func() error {
			if plan = get(t, moed).Status.PlanDigest; plan == "" || plans[plan] {
				return fmt.Errorf("the serving plan is %q", plan)
			}
			return nil
		})
		plans[plan] = true
		waitPlanned(t, moed)
		eventually(t, waitTimeout, "requests are routed by the plan", func() error { return sentBy(t.Context(), url, plan) })
	}
	stop()
	if now := podNames(t, moed, semmoev1.ComponentRouter); !slices.Equal(now, routers) {
		t.Errorf("the routers changed to %v from %v", now, routers)
	}
}

// podNames returns the names of a component's pods.
func podNames(t *testing.T, moed *semmoev1.MoEDeployment, component string) []string {
	t.Helper()
	var pods corev1.PodList
	if err := api.List(t.Context(), &pods, client.InNamespace(moed.Namespace), client.MatchingLabels{semmoev1.LabelDeployment: moed.Name, semmoev1.LabelComponent: component}); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, pod := range pods.Items {
		names = append(names, pod.Name)
	}
	slices.Sort(names)
	return names
}

// TestRouterWithoutAPIServer kills a request router while the API server and the operator are down. The router restarts
// and routes requests by the last serving plan.
//
// This test is not parallel because other tests need the API server.
func TestRouterWithoutAPIServer(t *testing.T) {
	namespace := newNamespace(t)
	stop := startManager(t, namespace, nil)
	storedProfile(t, namespace)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) {
		m.Spec.Replicas = ptr.To[int32](2)
		m.Spec.Profiling = &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "tiny"}}
	})
	create(t, moed)
	plan := waitPlanned(t, moed).Status.PlanDigest
	url := serviceURL(t, moed)
	byPlan := func() error { return sentBy(t.Context(), url, plan) }
	eventually(t, waitTimeout, "requests are routed by the plan", byPlan)

	stop()
	if err := cluster.PauseAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	resumed := false
	resume := func() {
		if !resumed {
			resumed = true
			if err := cluster.ResumeAPIServer(context.WithoutCancel(t.Context())); err != nil {
				t.Error(err)
			}
		}
	}
	defer resume()
	before := routerProcess(t, namespace)
	if err := syscall.Kill(before, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, time.Minute, "another router process is running", func() error {
		if now := routerProcess(t, namespace); now == 0 || now == before {
			return fmt.Errorf("the router process is %d", now)
		}
		return nil
	})
	eventually(t, time.Minute, "requests are routed by the plan without an API server", byPlan)
	ended := make(chan error, 1)
	go func() { // the API server must be down
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		ended <- api.Get(ctx, client.ObjectKeyFromObject(moed), &semmoev1.MoEDeployment{})
	}()
	if err := <-ended; err == nil {
		t.Error("the API server responds, but must be down")
	}
	resume()
	eventually(t, waitTimeout, "the API server responds again", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		return api.Get(ctx, client.ObjectKeyFromObject(moed), &semmoev1.MoEDeployment{})
	})
	if err := byPlan(); err != nil {
		t.Error(err)
	}
}

// routerProcess returns the process ID of a namespace's only request router, or 0 if there is none.
func routerProcess(t *testing.T, namespace string) int {
	t.Helper()
	return process(t, func(args []string) bool {
		return len(args) > 2 && args[1] == "router" && args[2] == "--namespace="+namespace
	})
}
