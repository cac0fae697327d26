// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/gitops"
	"github.com/semmoe/operator/test/tier"
)

const (
	// argoManager is the field manager of Argo CD. Argo CD orders objects by the annotation argoWave and marks managed
	// objects with argoTracking.
	argoManager  = "argocd-controller"
	argoWave     = "argocd.argoproj.io/sync-wave"
	argoTracking = "argocd.argoproj.io/tracking-id"
)

// repositoryOf contains the objects of a Git directory that Argo CD synchronizes with a namespace.
type repositoryOf struct {
	namespace string
	objects   []*unstructured.Unstructured
}

// readRepository reads the manifests of a directory and sets their namespace to a test namespace.
func readRepository(t *testing.T, namespace, dir string) *repositoryOf {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%d manifests in %s: %v", len(files), dir, err)
	}
	r := &repositoryOf{namespace: namespace}
	for _, file := range files {
		manifests, err := readAll(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, u := range manifests {
			if u.GetKind() != "PodMonitor" { // the test cluster has no Prometheus operator
				r.add(u)
			}
		}
	}
	return r
}

// add adds an object to the repository.
func (r *repositoryOf) add(u *unstructured.Unstructured) {
	if u.GetKind() == "Namespace" {
		u.SetName(r.namespace)
	} else {
		u.SetNamespace(r.namespace)
	}
	annotations := u.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[argoTracking] = fmt.Sprintf("model:%s/%s:%s/%s", u.GroupVersionKind().Group, u.GetKind(), r.namespace, u.GetName())
	u.SetAnnotations(annotations)
	r.objects = append(r.objects, u)
}

// one returns the only object of a kind.
func (r *repositoryOf) one(t *testing.T, kind string) *unstructured.Unstructured {
	t.Helper()
	var found []*unstructured.Unstructured
	for _, u := range r.objects {
		if u.GetKind() == kind {
			found = append(found, u)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d objects of kind %s", len(found), kind)
	}
	return found[0]
}

// set changes a field of an object in the repository.
func set(t *testing.T, u *unstructured.Unstructured, value any, path ...string) {
	t.Helper()
	if err := unstructured.SetNestedField(u.Object, value, path...); err != nil {
		t.Fatal(err)
	}
}

// sync applies the objects by server-side apply in waves, like Argo CD: the next wave follows when all objects of a
// wave are healthy. Objects of the operator's kinds are healthy when Ready is true for their current generation.
func (r *repositoryOf) sync(t *testing.T) {
	t.Helper()
	waves := map[int][]*unstructured.Unstructured{}
	for _, u := range r.objects {
		wave, err := strconv.Atoi(u.GetAnnotations()[argoWave])
		if err != nil {
			t.Fatalf("%s %s: %v", u.GetKind(), u.GetName(), err)
		}
		waves[wave] = append(waves[wave], u)
	}
	for _, wave := range slices.Sorted(maps.Keys(waves)) {
		for _, u := range waves[wave] {
			r.apply(t, u)
		}
		for _, u := range waves[wave] {
			if u.GroupVersionKind().Group != semmoev1.GroupVersion.Group {
				continue
			}
			eventually(t, waitTimeout, u.GetKind()+" "+u.GetName()+" is healthy", func() error {
				live := live(t, u)
				if c := conditionsOf(live)[semmoev1.ConditionReady]; c.status != "True" || c.generation != live.GetGeneration() {
					return fmt.Errorf("%+v", live.Object["status"])
				}
				return nil
			})
		}
	}
}

// apply applies an object and returns the result.
func (r *repositoryOf) apply(t *testing.T, u *unstructured.Unstructured, options ...client.ApplyOption) *unstructured.Unstructured {
	t.Helper()
	applied := u.DeepCopy()
	options = append(options, client.FieldOwner(argoManager), client.ForceOwnership)
	if err := api.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(applied), options...); err != nil {
		t.Fatalf("%s %s: %v", u.GetKind(), u.GetName(), err)
	}
	return applied
}

// live returns the object in the API server.
func live(t *testing.T, u *unstructured.Unstructured) *unstructured.Unstructured {
	t.Helper()
	found := &unstructured.Unstructured{}
	found.SetGroupVersionKind(u.GroupVersionKind())
	if err := api.Get(t.Context(), client.ObjectKeyFromObject(u), found); err != nil {
		t.Fatal(err)
	}
	return found
}

// checkSynced fails the test if the repository differs from the cluster. Applying the repository must predict and cause
// no change except in status, and no other field manager may own spec fields or labels.
func (r *repositoryOf) checkSynced(t *testing.T, when string) {
	t.Helper()
	for _, u := range r.objects {
		before := live(t, u)
		if diff := cmp.Diff(declared(before), declared(r.apply(t, u, client.DryRunAll))); diff != "" {
			t.Errorf("%s: %s %s is out of sync (-live +predicted):\n%s", when, u.GetKind(), u.GetName(), diff)
		}
		if after := r.apply(t, u); after.GetGeneration() != before.GetGeneration() {
			t.Errorf("%s: applying %s %s again changed the generation from %d to %d", when, u.GetKind(), u.GetName(), before.GetGeneration(), after.GetGeneration())
		}
		if u.GroupVersionKind().Group != semmoev1.GroupVersion.Group {
			continue
		}
		for _, owner := range before.GetManagedFields() {
			foreign := owner.Manager != argoManager && owner.Subresource == ""
			if foreign && (bytes.Contains(owner.FieldsV1.GetRawBytes(), []byte(`"f:spec"`)) || bytes.Contains(owner.FieldsV1.GetRawBytes(), []byte(`"f:labels"`))) {
				t.Errorf("%s: field manager %s owns fields of %s %s: %s", when, owner.Manager, u.GetKind(), u.GetName(), owner.FieldsV1.GetRawBytes())
			}
		}
	}
}

// declared returns the fields that a user can declare: all except the status and the fields that the API server
// maintains.
func declared(u *unstructured.Unstructured) map[string]any {
	object := runtime.DeepCopyJSON(u.Object)
	delete(object, "status")
	for _, field := range []string{"managedFields", "resourceVersion", "generation"} {
		unstructured.RemoveNestedField(object, "metadata", field)
	}
	return object
}

// TestGitOps applies the sample for Argo CD with a small model on the reference engine. Each wave becomes healthy, the
// model is served under the pinned plan, an autoscaler scales it, another plan is pinned, and the pin is rolled back.
// The cluster stays in sync at each of these steps.
func TestGitOps(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	sample := readRepository(t, namespace, filepath.Join(repository, "config", "samples", "argocd", "model"))
	profile, moed := sample.one(t, "AffinityProfile"), sample.one(t, "MoEDeployment")
	first := sample.one(t, "PlacementPlan")
	spec := specOf(t, publishedProfile(t, namespace, profile.GetName(), "texts", filepath.Join(repository, "solver", "testdata", "tiny-32e-top4.safetensors.zst")))
	set(t, profile, spec, "spec")
	set(t, first, int64(4), "spec", "expertParallelSize")
	// With the usual batch sizes, latency is most of the layer time of a model this small.
	set(t, first, int64(1<<20), "spec", "batchTokens")
	set(t, first, int64(0), "spec", "minimumGainPercent")
	for _, field := range []string{"model", "engine", "parallelism"} {
		set(t, moed, spec[field], "spec", field)
	}
	set(t, moed, map[string]any{"soakSeconds": int64(0)}, "spec", "rollout") // no clients send requests, so there is nothing to compare
	sample.sync(t)
	typed := &semmoev1.MoEDeployment{}
	typed.Namespace, typed.Name = namespace, moed.GetName()
	inService := func(plan *unstructured.Unstructured) {
		t.Helper()
		planned := waitPlanned(t, typed)
		if want, _, _ := unstructured.NestedString(live(t, plan).Object, "status", "plan"); planned.Status.PlanDigest != want {
			t.Fatalf("the serving plan is %s, want %s", planned.Status.PlanDigest, want)
		}
	}
	inService(first)
	sample.checkSynced(t, "in service")

	eventually(t, waitTimeout, "the autoscaler has scaled to its minimum", func() error {
		if current := get(t, typed); *current.Spec.Replicas != 2 || current.Status.ReadyReplicas != 2 {
			return fmt.Errorf("%d of %d replicas are ready", current.Status.ReadyReplicas, *current.Spec.Replicas)
		}
		return nil
	})
	sample.checkSynced(t, "scaled by an autoscaler")
	if replicas := *get(t, typed).Spec.Replicas; replicas != 2 {
		t.Errorf("%d replicas after the manifest was applied again, want the autoscaler's number", replicas)
	}

	others := publishedProfile(t, namespace, "others", "others", scrambled(t, 1))
	create(t, others)
	second := first.DeepCopy()
	second.SetName("another")
	set(t, second, others.Name, "spec", "profileRef", "name")
	sample.add(second)
	for _, plan := range []*unstructured.Unstructured{second, first} {
		set(t, moed, plan.GetName(), "spec", "placement", "planRef", "name")
		sample.sync(t)
		inService(plan)
		sample.checkSynced(t, "pinned to "+plan.GetName())
	}
}

// specOf returns the spec of an object in manifest form.
func specOf(t *testing.T, object client.Object) map[string]any {
	t.Helper()
	u, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err != nil {
		t.Fatal(err)
	}
	spec, _, err := unstructured.NestedMap(u, "spec")
	if err != nil {
		t.Fatal(err)
	}
	return spec
}

// TestArgoActions approves a plan, rolls it back, pauses and resumes by the actions for Argo CD.
func TestArgoActions(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	storedProfile(t, namespace)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) {
		m.Spec.Replicas = ptr.To[int32](2)
		m.Spec.Placement.Approval = semmoev1.ApprovalManual
		m.Spec.Rollout.SoakSeconds = ptr.To[int32](600) // the canary outlives the test
		m.Spec.Profiling = &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "tiny"}}
	})
	create(t, moed)
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionRolledOut, metav1.ConditionFalse, "AwaitingApproval")
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionReady, metav1.ConditionTrue, "Serving")
	pending := get(t, moed).Status.PendingPlan

	act(t, moed, "approve")
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionRolledOut, metav1.ConditionFalse, "Canary")
	if current := get(t, moed); current.Status.PendingPlan != "" || phaseOf(current) != semmoev1.RolloutPhaseCanary || current.Status.Rollout.CandidatePlan != pending {
		t.Errorf("after the approval of %s: pending plan %q, rollout %+v", pending, current.Status.PendingPlan, current.Status.Rollout)
	}
	act(t, moed, "roll-back")
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionRolledOut, metav1.ConditionFalse, "RolledBack", "RollbackRequested")
	eventually(t, waitTimeout, "only the stable revision is left", func() error {
		if workloads := listWorkloads(t, moed); len(workloads) != 1 {
			return fmt.Errorf("%d workloads", len(workloads))
		}
		return complete(get(t, moed))
	})
	for action, want := range map[string]semmoev1.ReconciliationMode{"pause": semmoev1.ReconciliationPaused, "resume": semmoev1.ReconciliationActive} {
		if act(t, moed, action); get(t, moed).Spec.Reconciliation != want {
			t.Errorf("%s: spec.reconciliation is %s, want %s", action, get(t, moed).Spec.Reconciliation, want)
		}
	}
}

// act runs an action of config/argocd like Argo CD.
func act(t *testing.T, moed *semmoev1.MoEDeployment, action string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(repository, "config", "argocd", "argocd-cm.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	settings := &corev1.ConfigMap{}
	if err := yaml.Unmarshal(text, settings); err != nil {
		t.Fatal(err)
	}
	actions, err := gitops.ParseActions(settings.Data)
	if err == nil {
		err = actions.Run(t.Context(), api, client.ObjectKeyFromObject(moed), action)
	}
	if err != nil {
		t.Fatal(err)
	}
}
