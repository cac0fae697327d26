// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/yaml"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers"
	"github.com/semmoe/operator/test/apiserver"
	"github.com/semmoe/operator/test/openshift"
	"github.com/semmoe/operator/test/programs"
	"github.com/semmoe/operator/test/tier"
)

// release is the name of the Helm release. No object's name depends on it.
const release = "user-s-choice"

// watched are the namespaces of testdata/watched.values.yaml.
var watched = []string{"team-a", "team-b"}

// apiServer is a real API server. Its Pod Security admission is enabled by default.
type apiServer struct {
	client.Client
	config     *rest.Config
	kubeconfig string // path of the kubeconfig of an administrator
	server     *apiserver.Server
	dir        string
}

// api is the API server that the tests share. The first test that needs it starts it. The chart can be installed only
// once per cluster.
var api = sync.OnceValues(startAPI)

var stopAPI = func() error { return nil }

func TestMain(m *testing.M) {
	code := m.Run()
	if err := stopAPI(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func startAPI() (*apiServer, error) {
	server, err := apiserver.Start(&envtest.Environment{})
	if err != nil {
		return nil, err
	}
	a := &apiServer{server: server, config: server.Config}
	stopAPI = func() error { return errors.Join(a.server.Stop(), os.RemoveAll(a.dir)) }
	if a.dir, err = os.MkdirTemp("", "chart-"); err != nil {
		return nil, err
	}
	a.kubeconfig = filepath.Join(a.dir, "kubeconfig")
	if err := os.WriteFile(a.kubeconfig, a.server.KubeConfig, 0o600); err != nil {
		return nil, err
	}
	// The tests read each object many times.
	a.config.QPS, a.config.Burst = 1000, 1000
	scheme, err := controllers.Scheme()
	if err != nil {
		return nil, err
	}
	if a.Client, err = client.New(a.config, client.Options{Scheme: scheme}); err != nil {
		return nil, err
	}
	for _, name := range append([]string{"team-c"}, watched...) {
		if err := a.Create(context.Background(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}); err != nil {
			return nil, err
		}
	}
	// The namespace of config/default enforces the pod security standard.
	_, err = a.kubectl("", "apply", "--server-side", "-f", filepath.Join(repository, "config", "manager", "namespace.yaml"))
	return a, err
}

func startedAPI(t *testing.T) *apiServer {
	t.Helper()
	a, err := api()
	tier.Require(t, err)
	return a
}

func (a *apiServer) kubectl(stdin string, args ...string) (string, error) {
	path, err := programs.Kubectl()
	if err != nil {
		return "", err
	}
	return programs.Run(path, []string{"KUBECONFIG=" + a.kubeconfig}, stdin, args...)
}

// helm runs a Helm command on the release, without the rate limit of its client.
func (a *apiServer) helm(t *testing.T, values, command string, args ...string) string {
	t.Helper()
	output, err := helm(t, []string{"KUBECONFIG=" + a.kubeconfig}, values, append([]string{command, release, "--namespace", namespace, "--qps", "1000", "--burst-limit", "1000"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	return output
}

// TestManifestsApply checks, for every value set, that the API server knows every field, and that its pod security
// admission admits the pods.
func TestManifestsApply(t *testing.T) {
	a := startedAPI(t)
	for name, values := range valueSets(t) {
		t.Run(name, func(t *testing.T) {
			rendered, err := template(t, values)
			if err != nil {
				t.Fatal(err)
			}
			manifest := withoutForeign(t, rendered)
			output, err := a.kubectl(manifest, "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-")
			if err != nil {
				t.Fatal(err)
			}
			all, pods := objects(t, manifest), 0
			if got := strings.Count(output, "serverside-applied"); got != len(all) {
				t.Errorf("%d of %d objects were applied:\n%s", got, len(all), output)
			}
			for _, u := range all {
				if pod := podOf(t, u); pod != nil {
					pods++
					if err := a.Create(t.Context(), pod, client.DryRunAll); err != nil {
						t.Errorf("a pod of %s is not admitted: %v", key(u), err)
					}
				}
			}
			if pods == 0 {
				t.Error("the value set renders no pod")
			}
		})
	}
}

// foreign contains the API groups of other projects, which this API server does not have.
var foreign = []string{"cert-manager.io", "grafana.integreatly.org", "monitoring.coreos.com"}

// withoutForeign returns a manifest without the objects of foreign kinds. test/prometheus checks the fields of the
// monitoring objects.
func withoutForeign(t *testing.T, manifest string) string {
	t.Helper()
	var left []string
	for _, u := range objects(t, manifest) {
		if slices.Contains(foreign, u.GroupVersionKind().Group) {
			continue
		}
		document, err := yaml.Marshal(u.Object)
		if err != nil {
			t.Fatal(err)
		}
		left = append(left, string(document))
	}
	return strings.Join(left, "---\n")
}

// TestPodSecurityIsEnforced checks that the namespace refuses insecure pods. Without this test, a namespace that
// enforces no standard would pass TestManifestsApply.
func TestPodSecurityIsEnforced(t *testing.T) {
	a := startedAPI(t)
	for _, u := range render(t, "{}", withoutCRDs...) {
		pod := podOf(t, u)
		if pod == nil {
			continue
		}
		pod.Spec.SecurityContext.RunAsNonRoot = nil
		if err := a.Create(t.Context(), pod, client.DryRunAll); err == nil || !strings.Contains(err.Error(), "violates PodSecurity") {
			t.Errorf("a pod of %s that may run as root is not refused: error %v", key(u), err)
		}
	}
}

// TestOpenShift checks that the API server admits the pods of every value set with the user ranges of OpenShift, if the
// chart is rendered for a cluster with the API of OpenShift: no pod names a user or a group.
func TestOpenShift(t *testing.T) {
	a := startedAPI(t)
	if err := openshift.Restrict(t.Context(), a); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := openshift.Remove(context.WithoutCancel(t.Context()), a); err != nil {
			t.Error(err)
		}
	})
	for name, values := range valueSets(t) {
		pods := 0
		for _, u := range render(t, values, append(slices.Clone(withoutCRDs), "--api-versions", "security.openshift.io/v1")...) {
			if pod := podOf(t, u); pod != nil {
				pods++
				if err := a.Create(t.Context(), pod, client.DryRunAll); err != nil {
					t.Errorf("%s: a pod of %s is not admitted: %v", name, key(u), err)
				}
			}
		}
		if pods == 0 {
			t.Errorf("%s renders no pod", name)
		}
	}
	for _, u := range render(t, "{}", withoutCRDs...) { // for another cluster
		if pod := podOf(t, u); pod != nil {
			err := a.Create(t.Context(), pod, client.DryRunAll)
			if rejected, want := openshift.Rejected(err), u.GetName() == "semmoe-store"; rejected != want {
				t.Errorf("a pod of %s for another cluster is rejected: %v, want %v: %v", key(u), rejected, want, err)
			}
		}
	}
}

// podOf returns a pod from the template of a workload; nil for other kinds.
func podOf(t *testing.T, u *unstructured.Unstructured) *corev1.Pod {
	t.Helper()
	template, ok, _ := unstructured.NestedMap(u.Object, "spec", "template")
	if !ok {
		return nil
	}
	pod := &corev1.Pod{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(template, pod, true); err != nil {
		t.Fatalf("%s: %v", key(u), err)
	}
	pod.Namespace, pod.GenerateName = u.GetNamespace(), u.GetName()+"-"
	return pod
}

// TestLifecycle upgrades, uninstalls and reinstalls the chart. No object is replaced unnecessarily, selectors do not
// change, and objects of users stay.
func TestLifecycle(t *testing.T) {
	a := startedAPI(t)
	installed := render(t, "{}")
	a.install(t, "{}")
	first := a.identities(t, installed)
	if len(first) != len(installed) {
		t.Errorf("%d of %d objects exist after the installation", len(first), len(installed))
	}
	a.checkReleaseSize(t)

	moed := moedeployment("team-a")
	if err := a.Create(t.Context(), moed); err != nil {
		t.Fatal(err)
	}
	user := moed.GetUID()

	before := first
	for _, values := range []string{narrow, valueSets(t)["bucket"], "{}"} {
		a.upgrade(t, values)
		after := a.identities(t, installed)
		sameIdentities(t, "upgrade to "+values, before, after)
		before = after
	}
	if len(before) != len(installed) {
		t.Errorf("%d of %d objects exist after the upgrades", len(before), len(installed))
	}
	kept := a.identities(t, keptObjects(installed))
	sameIdentities(t, "all upgrades", first, kept)

	a.helm(t, "", "uninstall")
	if diff := cmp.Diff(kept, a.identities(t, installed)); diff != "" {
		t.Errorf("remaining objects after the uninstallation (-kept +found):\n%s", diff)
	}
	if err := a.Get(t.Context(), client.ObjectKeyFromObject(moed), moed); err != nil || moed.GetUID() != user {
		t.Errorf("the uninstallation changed the MoEDeployment: error %v, UID %s, before %s", err, moed.GetUID(), user)
	}
	a.install(t, "{}")
	sameIdentities(t, "installing again", kept, a.identities(t, keptObjects(installed)))
	a.removeAll(t, installed)
}

// TestHelmAdoptsObjects checks that Helm takes over objects that kubectl applied, and upgrades them without a conflict.
func TestHelmAdoptsObjects(t *testing.T) {
	a := startedAPI(t)
	if _, err := a.kubectl("", "apply", "--server-side", "-k", filepath.Join(repository, "config", "default")); err != nil {
		t.Fatal(err)
	}
	installed := render(t, "{}")
	before := a.identities(t, installed)
	a.helm(t, "{}", "install", directory, "--take-ownership", "--server-side=false")
	sameIdentities(t, "taking over", before, a.identities(t, installed))

	a.upgrade(t, narrow)
	sameIdentities(t, "upgrading", before, a.identities(t, installed))
	deployment := &appsv1.Deployment{}
	if err := a.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "semmoe-manager"}, deployment); err != nil {
		t.Fatal(err)
	}
	want := managerArguments(t, render(t, narrow, withoutCRDs...))
	if diff := cmp.Diff(want, deployment.Spec.Template.Spec.Containers[0].Args); diff != "" {
		t.Errorf("arguments after the upgrade (-rendered +found):\n%s", diff)
	}
	a.removeAll(t, installed)
}

// install installs the chart, and waits until the API server serves the operator's kinds.
func (a *apiServer) install(t *testing.T, values string) {
	t.Helper()
	a.helm(t, values, "install", directory)
	var known error
	if err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		known = errors.Join(a.List(ctx, &semmoev1.MoEDeploymentList{}), a.List(ctx, &semmoev1.AffinityProfileList{}), a.List(ctx, &semmoev1.PlacementPlanList{}))
		return known == nil, nil
	}); err != nil {
		t.Fatalf("%v: %v", err, known)
	}
}

// upgrade upgrades the release to other values. Without --reset-values, Helm would reuse the previous values if none
// are given.
func (a *apiServer) upgrade(t *testing.T, values string) {
	t.Helper()
	a.helm(t, values, "upgrade", directory, "--reset-values")
}

// removeAll uninstalls the chart, and deletes the objects that Helm keeps.
func (a *apiServer) removeAll(t *testing.T, installed []*unstructured.Unstructured) {
	t.Helper()
	a.upgrade(t, "{crds: {keep: false}, store: {persistence: {keep: false}}}")
	a.helm(t, "", "uninstall")
	// No controller runs that would remove the protection finalizer of the claim.
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "semmoe-store"}}
	if err := a.Patch(t.Context(), claim, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))); err != nil {
		t.Errorf("%s/%s: %v", claim.Namespace, claim.Name, err)
	}
	for _, u := range installed {
		a.waitUntilGone(t, u)
	}
}

// narrow are values that change every field that an upgrade may change. The fields of a claim are immutable.
const narrow = `
namespaces: [team-a]
image: {digest: "sha256:3b1c0a6b1f5e0c2d7c3f9e8a4d5b6c7e8f90123456789abcdef0123456789abc"}
manager: {replicas: 3, priorityClassName: system-cluster-critical, nodeSelector: {disk: large}, podLabels: {team: a}, podAnnotations: {note: "1"}, logLevel: 1, env: [{name: HTTPS_PROXY, value: "http://proxy"}], serviceAccountAnnotations: {note: "1"}}
store: {resources: {limits: {memory: 1Gi}}}
`

// keptObjects returns the objects with Helm's keep annotation.
func keptObjects(all []*unstructured.Unstructured) []*unstructured.Unstructured {
	var kept []*unstructured.Unstructured
	for _, u := range all {
		if u.GetAnnotations()["helm.sh/resource-policy"] == "keep" {
			kept = append(kept, u)
		}
	}
	return kept
}

// identity contains the attributes that must not change during the lifetime of an object.
type identity struct {
	UID      types.UID
	Selector any
}

func (a *apiServer) identity(ctx context.Context, u *unstructured.Unstructured) (identity, error) {
	found := &unstructured.Unstructured{}
	found.SetGroupVersionKind(u.GroupVersionKind())
	if err := a.Get(ctx, client.ObjectKeyFromObject(u), found); err != nil {
		return identity{}, err
	}
	selector, _, _ := unstructured.NestedFieldCopy(found.Object, "spec", "selector")
	return identity{found.GetUID(), selector}, nil
}

// identities returns the identities of the objects that exist.
func (a *apiServer) identities(t *testing.T, all []*unstructured.Unstructured) map[string]identity {
	t.Helper()
	found := map[string]identity{}
	for _, u := range all {
		i, err := a.identity(t.Context(), u)
		if err == nil {
			found[key(u)] = i
		} else if !apierrors.IsNotFound(err) {
			t.Fatalf("%s: %v", key(u), err)
		}
	}
	return found
}

// sameIdentities fails the test if an object that exists before and after a step has another identity.
func sameIdentities(t *testing.T, step string, before, after map[string]identity) {
	t.Helper()
	same := 0
	for name, b := range before {
		if i, ok := after[name]; ok {
			same++
			if diff := cmp.Diff(b, i); diff != "" {
				t.Errorf("%s: %s was replaced (-before +after):\n%s", step, name, diff)
			}
		}
	}
	if same == 0 {
		t.Errorf("%s: no object existed before", step)
	}
}

// waitUntilGone waits until an object is deleted, and periodically changes a CRD that is being deleted. The API
// server's finalizer of CRDs may fail once, because a kind that no client has listed yet has no storage at first. If
// its next attempt reads the CRD in the earlier version, this attempt ends with a conflict, and no retry follows: the
// finalizer's own writes do not trigger it. Without another change, the CRD would stay until the next resync.
func (a *apiServer) waitUntilGone(t *testing.T, u *unstructured.Unstructured) {
	t.Helper()
	looked := 0
	err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		_, err := a.identity(ctx, u)
		if looked++; err == nil && looked%40 == 0 && u.GetKind() == "CustomResourceDefinition" {
			err = a.Patch(ctx, u.DeepCopy(), client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata": {"annotations": {"looked": "%d"}}}`, looked)))
		}
		return apierrors.IsNotFound(err), client.IgnoreNotFound(err)
	})
	if err != nil {
		t.Errorf("%s still exists: %v", key(u), err)
	}
}

// checkReleaseSize checks that the release is well below 1 MiB, the maximum size of the Secret in which Helm stores the
// chart and its manifest. CRDs are large.
func (a *apiServer) checkReleaseSize(t *testing.T) {
	t.Helper()
	const limit = 512 << 10
	secret := &corev1.Secret{}
	if err := a.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "sh.helm.release.v1." + release + ".v1"}, secret); err != nil {
		t.Fatal(err)
	}
	if size := len(secret.Data["release"]); size > limit {
		t.Errorf("the release takes %d bytes of a Secret's 1 MiB, more than %d", size, limit)
	} else {
		t.Logf("the release takes %d bytes", size)
	}
}
