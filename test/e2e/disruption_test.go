// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/certs"
	"github.com/semmoe/operator/test/faults"
	"github.com/semmoe/operator/test/load"
	"github.com/semmoe/operator/test/processes"
	"github.com/semmoe/operator/test/tier"
)

// process returns the ID of the cluster process with arguments that satisfy the function, or 0 if there is none. All
// processes of the cluster are descendants of the test process.
func process(t *testing.T, is func(args []string) bool) int {
	t.Helper()
	number, err := processes.Find(func(number int, args []string) bool { return is(args) && processes.Below(number, os.Getpid()) })
	if err != nil {
		t.Fatal(err)
	}
	return number
}

// TestLeaderKilled runs two installed managers with webhooks and kills the leader. The other manager acts within the
// time limit, and nothing is recreated. Only clients that the API server authorizes can read the managers' metrics, and
// the managers renew certificates that are about to expire.
func TestLeaderKilled(t *testing.T) {
	t.Parallel()
	startStore(t)
	namespace := newNamespace(t)
	journal := recordJournal(t, namespace)
	installManagers(t, namespace)
	waitReviewed(t, namespace)
	checkOverlapRefused(t, namespace)
	moed := newDeployment(namespace, "tiny")
	create(t, moed)
	waitComplete(t, moed)
	readMetrics(t, namespace)
	renewed := expireAuthority(t)
	counts, err := journal.Counts()
	if err != nil {
		t.Fatal(err)
	}

	leader := &corev1.Pod{}
	lease := &coordinationv1.Lease{}
	if err := api.Get(t.Context(), client.ObjectKey{Namespace: storeNamespace, Name: "manager.semmoe.io"}, lease); err != nil {
		t.Fatal(err)
	}
	holder := *lease.Spec.HolderIdentity
	name, _, _ := strings.Cut(holder, "_")
	if err := api.Get(t.Context(), client.ObjectKey{Namespace: storeNamespace, Name: name}, leader); err != nil {
		t.Fatal(err)
	}
	number := process(t, func(args []string) bool {
		return len(args) > 2 && args[1] == "manager" && slices.Contains(args, "--health-probe-bind-address=["+leader.Status.PodIP+"]:8081")
	})
	if number == 0 {
		t.Fatalf("the process of leader %s is not found", holder)
	}
	if err := syscall.Kill(number, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	killed := time.Now()
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Replicas = 2 })
	eventually(t, waitTimeout, "the successor reconciles", func() error {
		router := &appsv1.Deployment{}
		if err := api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "tiny-router"}, router); err != nil {
			return err
		}
		if *router.Spec.Replicas != 2 {
			return fmt.Errorf("%d replicas", *router.Spec.Replicas)
		}
		return nil
	})
	took := time.Since(killed)
	if err := api.Get(t.Context(), client.ObjectKeyFromObject(lease), lease); err != nil {
		t.Fatal(err)
	}
	if *lease.Spec.HolderIdentity == holder {
		t.Errorf("the leader is still %s", holder)
	}
	if limit := load.Scale(maxSuccession); took > limit {
		t.Errorf("the successor reconciled after %v, want at most %v", took, limit)
	}
	waitComplete(t, moed)
	after, err := journal.Counts()
	if err := errors.Join(err, same("record", counts, after)); err != nil {
		t.Error(err)
	}
	renewed()
	waitReviewed(t, namespace)

	// Without managers there are no webhooks, and no request is blocked.
	managers := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: storeNamespace, Name: managerName}}
	if err := api.Patch(t.Context(), managers, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"replicas":0}}`))); err != nil {
		t.Fatal(err)
	}
	eventually(t, time.Minute, "changes are accepted without webhooks", func() error {
		return api.Create(t.Context(), contradicting(namespace), client.DryRunAll)
	})
	t.Logf("the successor reconciled %.1f s after the leader was killed", took.Seconds())
	clearNamespace(t, namespace)
}

// waitReviewed waits until the webhooks refuse an invalid object in a namespace that they select.
func waitReviewed(t *testing.T, namespace string) {
	t.Helper()
	eventually(t, waitTimeout, "webhooks review objects", func() error {
		if err := api.Create(t.Context(), contradicting(namespace), client.DryRunAll); err == nil || !strings.Contains(err.Error(), `admission webhook "moedeployments.semmoe.io" denied`) {
			return fmt.Errorf("a contradicting flag was not refused: %w", err)
		}
		return nil
	})
}

// contradicting returns a MoEDeployment that the webhooks refuse.
func contradicting(namespace string) *semmoev1.MoEDeployment {
	return newDeployment(namespace, "wrong", func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = []string{"--ep-size=2"} })
}

// readMetrics reads the managers' metrics like an authorized Prometheus server.
func readMetrics(t *testing.T, namespace string) {
	t.Helper()
	reader := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "prometheus"}}
	create(t, reader)
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: namespace + "-prometheus"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "semmoe-metrics-reader"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: reader.Name}},
	}
	create(t, binding)
	managers := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: storeNamespace, Name: "managers"},
		Spec: corev1.ServiceSpec{
			Selector: map[string]string{"app.kubernetes.io/name": "semmoe", "app.kubernetes.io/component": "manager"},
			Ports:    []corev1.ServicePort{{Port: 443, TargetPort: intstr.FromString("metrics")}},
		},
	}
	create(t, managers)
	t.Cleanup(func() {
		if err := errors.Join(api.Delete(context.Background(), binding), api.Delete(context.Background(), managers)); err != nil {
			t.Error(err)
		}
	})
	token, err := newToken(t.Context(), reader)
	if err != nil {
		t.Fatal(err)
	}
	address, err := cluster.Forward(t.Context(), storeNamespace, managers.Name, 443)
	if err != nil {
		t.Fatal(err)
	}
	// The managers use self-signed certificates.
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}} //nolint:gosec // on the loopback interface
	defer transport.CloseIdleConnections()
	eventually(t, waitTimeout, "metrics are served", func() error {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+address+"/metrics", nil)
		if err != nil {
			return err
		}
		request.Header.Set("Authorization", "Bearer "+token)
		response, err := (&http.Client{Transport: transport}).Do(request)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return errors.New(response.Status)
		}
		return nil
	})
}

// expireAuthority replaces the webhooks' certificate authority by one that is about to expire. The returned function
// waits until a manager has renewed it.
func expireAuthority(t *testing.T) (renewed func()) {
	t.Helper()
	clients, err := kubernetes.NewForConfig(restConfig)
	if err != nil {
		t.Fatal(err)
	}
	old := types.NamespacedName{Namespace: storeNamespace, Name: "old-authority"}
	if _, err := certs.Load(t.Context(), clients, old, "semmoe webhook", time.Now().Add(-certs.Lifetime*3/4)); err != nil {
		t.Fatal(err)
	}
	aged, secret := &corev1.Secret{}, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: storeNamespace, Name: "semmoe-webhook-ca"}}
	if err := api.Get(t.Context(), old, aged); err != nil {
		t.Fatal(err)
	}
	patch := client.MergeFrom(secret.DeepCopy())
	secret.Data = aged.Data
	if err := api.Patch(t.Context(), secret, patch); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		eventually(t, waitTimeout, "the certificate authority is renewed", func() error {
			if err := api.Get(t.Context(), client.ObjectKeyFromObject(secret), secret); err != nil {
				return err
			}
			if bytes.Equal(secret.Data[corev1.TLSPrivateKeyKey], aged.Data[corev1.TLSPrivateKeyKey]) {
				return errors.New("the certificate authority is not renewed yet")
			}
			return nil
		})
	}
}

// installManagers installs the operator from config for one namespace, until the test ends.
func installManagers(t *testing.T, namespace string) {
	t.Helper()
	manager := &appsv1.Deployment{}
	for _, file := range []string{"manager/manager.yaml", "webhook/webhook.yaml"} {
		all, err := readAll(filepath.Join(repository, "config", file))
		if err != nil {
			t.Fatal(err)
		}
		for _, u := range all {
			var object client.Object = u
			switch u.GetKind() {
			case "Deployment":
				if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(u.Object, manager, true); err != nil {
					t.Fatal(err)
				}
				container := &manager.Spec.Template.Spec.Containers[0]
				container.Args = append(container.Args, "--namespaces="+namespace)
				object = manager
			case "ValidatingWebhookConfiguration":
				hooks := &admissionv1.ValidatingWebhookConfiguration{}
				if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(u.Object, hooks, true); err != nil {
					t.Fatal(err)
				}
				// Other tests run without webhooks.
				for i := range hooks.Webhooks {
					hooks.Webhooks[i].NamespaceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: namespace}}
				}
				object = hooks
			}
			create(t, object)
			t.Cleanup(func() {
				if err := api.Delete(context.Background(), object, client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
					t.Error(err)
				}
			})
		}
	}
	eventually(t, waitTimeout, "two managers are ready", func() error {
		if err := api.Get(t.Context(), client.ObjectKeyFromObject(manager), manager); err != nil {
			return err
		}
		if manager.Status.ReadyReplicas != 2 {
			return fmt.Errorf("status %+v", manager.Status)
		}
		return nil
	})
}

// TestNodeLost removes the only node with all pods, and restores it. The loss is reported within a minute, only pods
// are recreated, and the model is served again.
//
// This test is not parallel because other tests need the node.
func TestNodeLost(t *testing.T) {
	tier.Nightly(t)
	namespace := newNamespace(t)
	startStore(t)
	journal := recordJournal(t, namespace)
	injector := faults.New(faults.Schedule{})
	startManager(t, namespace, injector)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](2) })
	create(t, moed)
	waitComplete(t, moed)
	state, writes := endState(t, namespace), injector.Writes()
	counts, err := journal.Counts()
	if err != nil {
		t.Fatal(err)
	}

	taint := func(taints string) {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "local"}}
		if err := api.Patch(context.WithoutCancel(t.Context()), node, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"taints":`+taints+`}}`))); err != nil {
			t.Fatal(err)
		}
	}
	taint(`[{"key":"e2e.semmoe.io/lost","effect":"NoExecute"}]`)
	lost := time.Now()
	restore := func() { taint("null") }
	defer restore()
	eventually(t, time.Minute, "the loss is reported", func() error {
		current := get(t, moed)
		if _, err := readySince(current); err == nil {
			return errors.New("the deployment is still Ready")
		}
		return conditionIs(current.Status.Conditions, current.Generation, semmoev1.ConditionDegraded, metav1.ConditionTrue, "Unschedulable")
	})
	reported := time.Since(lost)
	restore()
	back := time.Now()
	waitComplete(t, moed)
	eventually(t, waitTimeout, "the model answers", func() error { return sendRequest(t.Context(), serviceURL(t, moed), "tiny") })
	serves := time.Since(back)
	eventually(t, waitTimeout, "the store responds", func() error { return tryStore(t.Context(), startStore(t)) })
	eventually(t, settleTimeout, "the previous state is restored", func() error { return same("state", state, endState(t, namespace)) })
	after, err := journal.Counts()
	if err := errors.Join(err, same("record", counts, after)); err != nil {
		t.Error(err)
	}
	t.Logf("the loss of the node is reported after %.1f s; the model is served %.1f s after the node's return; %d writes, %v", reported.Seconds(), serves.Seconds(), injector.Writes()-writes, injector)
	clearNamespace(t, namespace)
}

// storeFaults are failures of the artifact store that occur before a plan is stored. Each damage function returns a
// function that repairs the store.
var storeFaults = map[string]struct {
	damage          func(t *testing.T) (repair func())
	reason, message string
}{
	"gone": {reason: "StoreUnavailable", message: "artifact store", damage: func(t *testing.T) func() {
		scale := func(replicas int) {
			store := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: storeNamespace, Name: storeName}}
			patch := fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas)
			if err := api.Patch(context.WithoutCancel(t.Context()), store, client.RawPatch(types.MergePatchType, patch)); err != nil {
				t.Error(err)
			}
		}
		scale(0)
		eventually(t, waitTimeout, "the store is stopped", func() error {
			if tryStore(t.Context(), startStore(t)) == nil {
				return errors.New("the store responds")
			}
			return nil
		})
		return func() { scale(1) }
	}},
	// The store cannot write a file larger than a header. It gets the same error as on a full disk.
	"full": {reason: "SolveFailed", message: "the store is full", damage: func(t *testing.T) func() {
		limit := func(bytes uint64) {
			number := process(t, func(args []string) bool {
				return len(args) > 1 && strings.HasSuffix(args[0], "semmoe") && args[1] == "store"
			})
			if number == 0 {
				t.Fatal("the process of the store is not found")
			}
			if err := unix.Prlimit(number, unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: bytes, Max: unix.RLIM_INFINITY}, nil); err != nil {
				t.Fatal(err)
			}
		}
		limit(100)
		return func() { limit(unix.RLIM_INFINITY) }
	}},
}

// TestStoreFaults runs the operator without its store, and with a full store. The model is served, a condition reports
// the problem within a minute, and profiling and planning continue when the store is repaired. No stored profile is
// recorded again.
//
// This test is not parallel because other tests need the store.
func TestStoreFaults(t *testing.T) {
	tier.Nightly(t)
	for name, tc := range storeFaults {
		t.Run(name, func(t *testing.T) {
			startStore(t)
			namespace := newNamespace(t)
			journal := recordJournal(t, namespace)
			injector := faults.New(faults.Schedule{})
			startManager(t, namespace, injector)
			storedProfile(t, namespace)
			repair := tc.damage(t)
			repaired := false
			defer func() {
				if !repaired {
					repair()
				}
			}()
			moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) {
				m.Spec.Replicas = ptr.To[int32](2)
				m.Spec.Profiling = &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "tiny"}}
			})
			create(t, moed)
			begin := time.Now()
			eventually(t, waitTimeout, "the model is served", func() error {
				_, err := readySince(get(t, moed))
				return err
			})
			waitConditionWithin(t, time.Minute, moed, semmoev1.ConditionDegraded, metav1.ConditionTrue, tc.reason, tc.message)
			reported := time.Since(begin)
			if err := sendRequest(t.Context(), serviceURL(t, moed), "tiny"); err != nil {
				t.Error(err)
			}
			repair()
			repaired = true
			back := time.Now()
			waitPlanned(t, moed)
			if jobs := profilingJobsMade(journal); jobs != 0 {
				t.Errorf("%d profiling Jobs for a stored profile, want none", jobs)
			}
			t.Logf("store %s: reported after %.1f s; the plan is in service %.1f s after the repair; %v", name, reported.Seconds(), time.Since(back).Seconds(), injector)
			clearNamespace(t, namespace)
		})
	}
}

// forbidPods creates a quota of no pods in a namespace, and waits until it is effective.
func forbidPods(t *testing.T, namespace string) *corev1.ResourceQuota {
	t.Helper()
	quota := &corev1.ResourceQuota{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "none"},
		Spec:       corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{corev1.ResourcePods: resource.MustParse("0")}},
	}
	create(t, quota)
	eventually(t, waitTimeout, "the quota is effective", func() error {
		if err := api.Get(t.Context(), client.ObjectKeyFromObject(quota), quota); err != nil {
			return err
		}
		if len(quota.Status.Hard) == 0 {
			return errors.New("the quota is not effective yet")
		}
		return nil
	})
	return quota
}

// TestQuotaAndWebhookRejections checks that a condition reports each refusal by the cluster within a minute, and that the end state
// shows no trace of the refusal once it is removed.
func TestQuotaAndWebhookRejections(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	cases := map[string]struct {
		refuse func(t *testing.T, namespace string) (allow client.Object)
		reason string
		parts  []string
	}{
		"a quota of no pods": {
			refuse: func(t *testing.T, namespace string) client.Object { return forbidPods(t, namespace) },
			reason: "PodsRejected", parts: []string{"exceeded quota: none"},
		},
		"a webhook that is down": {
			refuse: func(t *testing.T, namespace string) client.Object {
				hook := &admissionv1.ValidatingWebhookConfiguration{
					ObjectMeta: metav1.ObjectMeta{Name: namespace},
					Webhooks: []admissionv1.ValidatingWebhook{{
						Name: "down.example.com", FailurePolicy: ptr.To(admissionv1.Fail), SideEffects: ptr.To(admissionv1.SideEffectClassNone),
						AdmissionReviewVersions: []string{"v1"}, TimeoutSeconds: ptr.To[int32](1),
						ClientConfig:      admissionv1.WebhookClientConfig{URL: ptr.To("https://127.0.0.1:1/")},
						NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: namespace}},
						Rules: []admissionv1.RuleWithOperations{{
							Operations: []admissionv1.OperationType{admissionv1.Create},
							Rule:       admissionv1.Rule{APIGroups: []string{"apps"}, APIVersions: []string{"v1"}, Resources: []string{"statefulsets"}},
						}},
					}},
				}
				create(t, hook)
				return hook
			},
			reason: "ReconcileFailed", parts: []string{"down.example.com"},
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			namespace := newNamespace(t)
			injector := faults.New(faults.Schedule{})
			startManager(t, namespace, injector)
			moed := newDeployment(namespace, "tiny")
			create(t, moed)
			waitComplete(t, moed)
			state, writes := endState(t, namespace), injector.Writes()

			allow := tc.refuse(t, namespace)
			t.Cleanup(func() {
				if err := client.IgnoreNotFound(api.Delete(context.Background(), allow)); err != nil {
					t.Error(err)
				}
			})
			workload := listWorkloads(t, moed)[0]
			if err := api.Delete(t.Context(), &workload, client.PropagationPolicy(metav1.DeletePropagationForeground)); err != nil {
				t.Fatal(err)
			}
			refused := time.Now()
			waitConditionWithin(t, time.Minute, moed, semmoev1.ConditionDegraded, metav1.ConditionTrue, tc.reason, tc.parts...)
			reported := time.Since(refused)
			if err := api.Delete(t.Context(), allow); err != nil {
				t.Fatal(err)
			}
			allowed := time.Now()
			waitComplete(t, moed)
			repaired := time.Since(allowed)
			eventually(t, settleTimeout, "the previous state is restored", func() error { return same("state", state, endState(t, namespace)) })
			t.Logf("%s is reported after %.1f s; recovered %.1f s after its removal; %d writes; %v", name, reported.Seconds(), repaired.Seconds(), injector.Writes()-writes, injector)
			clearNamespace(t, namespace)
		})
	}
}
