// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/tier"
)

// answered reads a whole response and returns an error unless it is a complete completion.
func answered(response *http.Response, err error) error {
	if err != nil {
		return err
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	var completion struct {
		Usage struct {
			CompletionTokens int `json:"completion_tokens"`
		} `json:"usage"`
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", response.Status, data)
	}
	if err := json.Unmarshal(data, &completion); err != nil {
		return err
	}
	if completion.Usage.CompletionTokens == 0 {
		return fmt.Errorf("no token was generated: %s", data)
	}
	return nil
}

func TestServeScaleDelete(t *testing.T) {
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	moed := newDeployment(namespace, "tiny")
	create(t, moed)
	current := waitComplete(t, moed)

	model := current.Status.Model
	if model == nil || model.Family != "qwen3_moe" || model.Experts != 32 || model.ExpertsPerToken != 4 || model.MoELayers != 4 || model.Layers != 4 {
		t.Errorf("status.model is %+v", model)
	}
	if len(current.Status.Conditions) != 9 || current.Status.Summary != "1/1" || current.Status.Revision == "" {
		t.Errorf("status is %+v", current.Status)
	}
	url := serviceURL(t, moed)
	if err := sendRequest(t.Context(), url, "tiny"); err != nil {
		t.Error(err)
	}
	response, err := http.Post(url+"/metrics", "", nil)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusNotFound {
		t.Errorf("/metrics of the engine is reachable through the Service: %s", response.Status)
	}

	// kubectl scale and autoscalers use the scale subresource.
	scale := &autoscalingv1.Scale{}
	if err := api.SubResource("scale").Get(t.Context(), moed, scale); err != nil {
		t.Fatal(err)
	}
	if scale.Status.Replicas != 1 || scale.Status.Selector == "" {
		t.Errorf("scale is %+v", scale.Status)
	}
	for _, replicas := range []int32{3, 0, 2} {
		update := &autoscalingv1.Scale{Spec: autoscalingv1.ScaleSpec{Replicas: replicas}}
		if err := api.SubResource("scale").Update(t.Context(), get(t, moed), client.WithSubResourceBody(update)); err != nil {
			t.Fatal(err)
		}
		eventually(t, waitTimeout, "scaled", func() error {
			current := get(t, moed)
			if current.Status.ReadyReplicas != replicas || current.Status.Replicas != replicas {
				return fmt.Errorf("%d of %d ready, want %d", current.Status.ReadyReplicas, current.Status.Replicas, replicas)
			}
			return complete(current)
		})
	}
	if workloads := listWorkloads(t, moed); len(workloads) != 1 {
		t.Errorf("%d workloads after scaling, want 1", len(workloads))
	}

	if err := api.Delete(t.Context(), moed); err != nil {
		t.Fatal(err)
	}
	eventually(t, waitTimeout, "all objects are deleted", func() error { return nothingLeft(t.Context(), namespace) })
}

// kinds returns empty lists of the kinds that the operator creates.
func kinds() []client.ObjectList {
	return []client.ObjectList{
		&appsv1.StatefulSetList{}, &appsv1.DeploymentList{}, &batchv1.JobList{}, &corev1.ServiceList{}, &corev1.PodList{},
		&corev1.ServiceAccountList{}, &policyv1.PodDisruptionBudgetList{}, &rbacv1.RoleBindingList{}, &corev1.ConfigMapList{},
		&networkingv1.NetworkPolicyList{},
		&semmoev1.MoEDeploymentList{}, &semmoev1.AffinityProfileList{}, &semmoev1.PlacementPlanList{},
	}
}

func nothingLeft(ctx context.Context, namespace string) error {
	for _, list := range kinds() {
		if err := api.List(ctx, list, client.InNamespace(namespace)); err != nil {
			return err
		}
		for _, object := range objects(list) {
			if name := object.GetName(); name != "default" && name != "kube-root-ca.crt" { // created by the cluster in every namespace
				return fmt.Errorf("%s %s is not deleted", kindOf(object), object.GetName())
			}
		}
	}
	return nil
}

func TestChildrenRecreated(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	moed := newDeployment(namespace, "tiny")
	create(t, moed)
	current := waitComplete(t, moed)
	before := endState(t, namespace)

	meta := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: namespace, Name: name} }
	for _, child := range []client.Object{
		&corev1.Service{ObjectMeta: meta("tiny")},
		&corev1.Service{ObjectMeta: meta("tiny-pods")},
		&appsv1.StatefulSet{ObjectMeta: meta("tiny-" + current.Status.Revision)},
		&appsv1.Deployment{ObjectMeta: meta("tiny-router")},
		&corev1.ServiceAccount{ObjectMeta: meta("tiny-router")},
		&rbacv1.RoleBinding{ObjectMeta: meta("tiny-router")},
		&policyv1.PodDisruptionBudget{ObjectMeta: meta("tiny")},
		&policyv1.PodDisruptionBudget{ObjectMeta: meta("tiny-router")},
		&networkingv1.NetworkPolicy{ObjectMeta: meta("tiny")},
		&networkingv1.NetworkPolicy{ObjectMeta: meta("tiny-router")},
	} {
		what := kindOf(child) + " " + child.GetName()
		if err := api.Get(t.Context(), client.ObjectKeyFromObject(child), child); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		old := child.GetUID()
		if err := api.Delete(t.Context(), child, client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		eventually(t, time.Minute, what+" is recreated", func() error {
			if err := api.Get(t.Context(), client.ObjectKeyFromObject(child), child); err != nil {
				return err
			}
			if child.GetUID() == old {
				return errors.New("the old object still exists")
			}
			return nil
		})
	}
	// A child that another user edits is repaired.
	service := &corev1.Service{ObjectMeta: meta("tiny")}
	if err := api.Get(t.Context(), client.ObjectKeyFromObject(service), service); err != nil {
		t.Fatal(err)
	}
	service.Spec.Selector = map[string]string{"nobody": "here"}
	if err := api.Update(t.Context(), service, client.FieldOwner("another-user")); err != nil {
		t.Fatal(err)
	}
	eventually(t, time.Minute, "the Service's selector is repaired", func() error {
		if err := api.Get(t.Context(), client.ObjectKeyFromObject(service), service); err != nil {
			return err
		}
		if service.Spec.Selector[semmoev1.LabelDeployment] != "tiny" {
			return fmt.Errorf("selector %v", service.Spec.Selector)
		}
		return nil
	})
	waitComplete(t, moed)
	// The edit added a key that the operator does not own and therefore does not remove. Everything else is as before.
	after := endState(t, namespace)
	delete(after, "Service tiny")
	delete(before, "Service tiny")
	compare(t, before, after)
	eventually(t, waitTimeout, "the model answers", func() error { return sendRequest(t.Context(), serviceURL(t, moed), "tiny") })
}

// TestFailureConditions checks that a condition reports each failure within a minute, and that the object becomes
// ready after the repair without deleting anything.
func TestFailureConditions(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	broken := t.TempDir()
	modelAt := func(path string) func(*semmoev1.MoEDeployment) {
		return func(m *semmoev1.MoEDeployment) {
			m.Spec.Model.Volume = corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: path, Type: ptr.To(corev1.HostPathDirectory)}}
		}
	}
	cases := map[string]struct {
		breaks  func(t *testing.T, m *semmoev1.MoEDeployment)
		reason  string
		message []string
		repair  func(t *testing.T, m *semmoev1.MoEDeployment)
	}{
		"an EP size that does not divide the experts": {
			breaks:  func(_ *testing.T, m *semmoev1.MoEDeployment) { m.Spec.Parallelism.ExpertParallelSize = 5 },
			reason:  "InvalidExpertParallelSize",
			message: []string{"spec.parallelism.expertParallelSize", "32", "5"},
			repair: func(t *testing.T, m *semmoev1.MoEDeployment) {
				update(t, m, func(m *semmoev1.MoEDeployment) { m.Spec.Parallelism.ExpertParallelSize = 8 })
			},
		},
		"a path that does not exist": {
			breaks:  func(_ *testing.T, m *semmoev1.MoEDeployment) { m.Spec.Model.Path = "/models/nowhere" },
			reason:  "ModelInvalid",
			message: []string{"/models/nowhere", "does not exist"},
			repair: func(t *testing.T, m *semmoev1.MoEDeployment) {
				update(t, m, func(m *semmoev1.MoEDeployment) { m.Spec.Model.Path = "/models" })
			},
		},
		"a truncated shard, repaired on disk": {
			breaks: func(t *testing.T, m *semmoev1.MoEDeployment) {
				dir := filepath.Join(broken, "truncated")
				copyCheckpoint(t, dir)
				if err := os.Truncate(filepath.Join(dir, "model-00002-of-00003.safetensors"), 100_000); err != nil {
					t.Fatal(err)
				}
				modelAt(dir)(m)
			},
			reason:  "ModelInvalid",
			message: []string{"model-00002-of-00003.safetensors", "100000"},
			repair:  func(t *testing.T, _ *semmoev1.MoEDeployment) { copyCheckpoint(t, filepath.Join(broken, "truncated")) },
		},
		"a volume that does not exist, repaired on disk": {
			breaks:  func(_ *testing.T, m *semmoev1.MoEDeployment) { modelAt(filepath.Join(broken, "absent"))(m) },
			reason:  "VolumeNotMounted",
			message: []string{"absent", "spec.model.volume"},
			repair:  func(t *testing.T, _ *semmoev1.MoEDeployment) { copyCheckpoint(t, filepath.Join(broken, "absent")) },
		},
		"an image that cannot be pulled": {
			breaks:  func(_ *testing.T, m *semmoev1.MoEDeployment) { m.Spec.Engine.Image = "nobody/nothing:1" },
			reason:  "ImagePullFailed",
			message: []string{`"nobody/nothing:1"`, "spec.engine.image"},
			repair: func(t *testing.T, m *semmoev1.MoEDeployment) {
				update(t, m, func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Image = engineImage })
			},
		},
		"an engine that crashes": {
			breaks:  func(_ *testing.T, m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = []string{"--no-such-flag"} },
			reason:  "ContainerCrashing",
			message: []string{"unknown flag: --no-such-flag"},
			repair: func(t *testing.T, m *semmoev1.MoEDeployment) {
				update(t, m, func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = nil })
			},
		},
		"a flag that contradicts the operator's": {
			breaks:  func(_ *testing.T, m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = []string{"--ep-size=2"} },
			reason:  "ContradictingFlags",
			message: []string{"--ep-size=2", "spec.parallelism.expertParallelSize"},
			repair: func(t *testing.T, m *semmoev1.MoEDeployment) {
				update(t, m, func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = nil })
			},
		},
		"more devices than any node has": {
			breaks:  func(_ *testing.T, m *semmoev1.MoEDeployment) { m.Spec.Parallelism.ResourceName = "example.com/none" },
			reason:  "Unschedulable",
			message: []string{"Insufficient example.com/none"},
			repair: func(t *testing.T, m *semmoev1.MoEDeployment) {
				update(t, m, func(m *semmoev1.MoEDeployment) { m.Spec.Parallelism.ResourceName = "nvidia.com/gpu" })
			},
		},
	}
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	i := 0
	for name, tc := range cases {
		moed := newDeployment(namespace, fmt.Sprintf("fault-%d", i))
		i++
		tc.breaks(t, moed)
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			create(t, moed)
			waitCondition(t, moed, semmoev1.ConditionDegraded, metav1.ConditionTrue, tc.reason, tc.message...)
			tc.repair(t, moed)
			waitComplete(t, moed)
		})
	}
}

func copyCheckpoint(t *testing.T, dir string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	files, err := os.ReadDir(checkpointDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		data, err := os.ReadFile(filepath.Join(checkpointDir(), file.Name()))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, file.Name()), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestRestrictedNamespace serves in a namespace that enforces the restricted pod security standard, under the user
// ranges of OpenShift. An engine without a matching security context, or with a user outside the range, is refused: the
// condition says so, and a security context in the template fixes it.
func TestRestrictedNamespace(t *testing.T) {
	t.Parallel()
	namespace := newNamespace(t)
	object := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	patch := []byte(`{"metadata":{"labels":{"pod-security.kubernetes.io/enforce":"restricted"}}}`)
	if err := api.Patch(t.Context(), object, client.RawPatch(types.MergePatchType, patch)); err != nil {
		t.Fatal(err)
	}
	startManager(t, namespace, nil)
	// hostPath volumes are forbidden in such a namespace, so a claim provides the checkpoint.
	claim := claimCheckpoint(t, namespace)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) {
		m.Spec.Model.Volume = corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}
	})
	create(t, moed)
	waitCondition(t, moed, semmoev1.ConditionDegraded, metav1.ConditionTrue, "PodsRejected", "violates PodSecurity", "allowPrivilegeEscalation")
	update(t, moed, func(m *semmoev1.MoEDeployment) {
		m.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{
			SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: ptr.To(true), RunAsUser: ptr.To[int64](65532), SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
			Containers: []corev1.Container{{Name: semmoev1.EngineContainer, SecurityContext: &corev1.SecurityContext{
				AllowPrivilegeEscalation: ptr.To(false), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			}}},
		}}
	})
	waitCondition(t, moed, semmoev1.ConditionDegraded, metav1.ConditionTrue, "PodsRejected", ".spec.securityContext.runAsUser: must be in the ranges")
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Template.Spec.SecurityContext.RunAsUser = nil })
	waitComplete(t, moed)
}

// claimCheckpoint creates a volume with the checkpoint's directory and a claim bound to it.
func claimCheckpoint(t *testing.T, namespace string) string {
	t.Helper()
	return claimDirectory(t, namespace, checkpointDir(), corev1.ReadOnlyMany)
}

// claimDirectory creates a volume with a directory and a claim bound to it.
func claimDirectory(t *testing.T, namespace, dir string, mode corev1.PersistentVolumeAccessMode) string {
	t.Helper()
	size := corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
	modes := []corev1.PersistentVolumeAccessMode{mode}
	create(t, &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: namespace},
		Spec: corev1.PersistentVolumeSpec{
			Capacity: size, AccessModes: modes, StorageClassName: namespace, PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
			PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: dir}},
		},
	})
	create(t, &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "models"},
		Spec:       corev1.PersistentVolumeClaimSpec{AccessModes: modes, StorageClassName: &namespace, Resources: corev1.VolumeResourceRequirements{Requests: size}},
	})
	return "models"
}

// TestRollingChangeUnderTraffic changes the template under steady traffic. No request fails, and the number of ready
// replicas never falls below the budget.
func TestRollingChangeUnderTraffic(t *testing.T) {
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) {
		m.Spec.Replicas = ptr.To[int32](3)
		m.Spec.Routing.Replicas = 2
	})
	create(t, moed)
	first := waitComplete(t, moed).Status.Revision
	url := serviceURL(t, moed)

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var clients sync.WaitGroup
	var served, failed atomic.Int64
	for range 4 {
		clients.Go(func() {
			for ; ctx.Err() == nil; time.Sleep(requestPause) {
				if err := sendRequest(context.WithoutCancel(ctx), url, "tiny"); err != nil {
					failed.Add(1)
					t.Errorf("a request failed: %v", err)
				}
				served.Add(1)
			}
		})
	}
	for round, change := range []func(*semmoev1.MoEDeployment){
		func(m *semmoev1.MoEDeployment) {
			m.Spec.Template = &corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"round": "1"}}}
		},
		func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Env = []corev1.EnvVar{{Name: "ROUND", Value: "2"}} },
	} {
		update(t, moed, change)
		lowest, maxExisting := 3, 0
		pollEvery(t, 100*time.Millisecond, waitTimeout, fmt.Sprintf("round %d is rolled out", round+1), func() error {
			ready, existing := 0, 0
			for _, pod := range listEnginePods(t, moed) {
				if pod.DeletionTimestamp != nil {
					continue
				}
				existing++
				for _, c := range pod.Status.Conditions {
					if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
						ready++
					}
				}
			}
			lowest, maxExisting = min(lowest, ready), max(maxExisting, existing)
			current := get(t, moed)
			if current.Status.Revision == first || len(listWorkloads(t, moed)) != 1 {
				return errors.New("the old revision still exists")
			}
			return complete(current)
		})
		first = get(t, moed).Status.Revision
		if lowest < 2 {
			t.Errorf("the number of ready replicas fell to %d, want at least 2 with maxUnavailable 1 of 3", lowest)
		}
		if maxExisting > 3 {
			t.Errorf("%d replicas existed at the same time, want at most 3 with maxSurge 0", maxExisting)
		}
	}
	stop()
	clients.Wait()
	t.Logf("%d requests served, %d failed", served.Load(), failed.Load())
	if served.Load() < 100 {
		t.Errorf("only %d requests were answered, too few for steady traffic", served.Load())
	}
}

func TestPauseAndModeNone(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	moed := newDeployment(namespace, "tiny")
	create(t, moed)
	revision := waitComplete(t, moed).Status.Revision

	// While paused, a change is not rolled out, but a lost child is recreated.
	update(t, moed, func(m *semmoev1.MoEDeployment) {
		m.Spec.Reconciliation = semmoev1.ReconciliationPaused
		m.Spec.Engine.Env = []corev1.EnvVar{{Name: "A", Value: "b"}}
	})
	waitCondition(t, moed, semmoev1.ConditionProgressing, metav1.ConditionFalse, "Paused")
	if err := api.Delete(t.Context(), &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "tiny-router"}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, waitTimeout, "the router is recreated", func() error {
		return api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "tiny-router"}, &appsv1.Deployment{})
	})
	if workloads := listWorkloads(t, moed); len(workloads) != 1 || workloads[0].Name != "tiny-"+revision {
		t.Errorf("a change was rolled out while paused")
	}

	// Without a router the Service selects the engines, and the router is deleted.
	update(t, moed, func(m *semmoev1.MoEDeployment) {
		m.Spec.Reconciliation = semmoev1.ReconciliationActive
		m.Spec.Routing.Mode = semmoev1.RoutingModeNone
	})
	waitComplete(t, moed)
	eventually(t, waitTimeout, "the router is deleted", func() error {
		err := api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "tiny-router"}, &appsv1.Deployment{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("the router still exists: %w", err)
	})
	url := serviceURL(t, moed)
	eventually(t, waitTimeout, "the engine answers", func() error { return sendRequest(t.Context(), url, "tiny") })
}
