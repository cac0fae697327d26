// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/test/faults"
	"github.com/semmoe/operator/test/programs"
	"github.com/semmoe/operator/test/tier"
)

const (
	kueueImage     = "kueue:test"
	kueueNamespace = "kueue-system"
	// kueueLabel selects the namespaces whose objects Kueue handles. Its webhooks would delay the other stories.
	kueueLabel = "e2e-kueue"
	// localQueue is the name in config/samples/kueue.yaml.
	localQueue    = "gpus"
	admissionGate = "kueue.x-k8s.io/admission"
)

// kueueBinary returns the path of Kueue's manager. It may not have been built.
func kueueBinary() string { return filepath.Join(repository, "bin", "kueue") }

// needsKueue skips the test in the commit tier. For the nightly tier Kueue's manager is built.
func needsKueue(t *testing.T) {
	t.Helper()
	tier.Nightly(t)
	if _, err := os.Stat(kueueBinary()); err != nil {
		t.Fatalf("%v: run test/kueue/build.sh to build the manager of Kueue", err)
	}
}

// kueueChanges adapt the installation of the release to the local cluster. Programs that listen on all addresses need
// unique ports, because pods of the operator's manager have the same ports. No test needs the visibility API.
var kueueChanges = strings.NewReplacer(
	"port: 9443", "port: 29443", "targetPort: 9443", "targetPort: 29443", "containerPort: 9443", "containerPort: 29443",
	"port: 8081", "port: 28081", "healthProbeBindAddress: :8081", "healthProbeBindAddress: :28081",
	"bindAddress: :8443", `bindAddress: "0"`, "    integrations:\n", "    featureGates: {VisibilityOnDemand: false}\n    integrations:\n",
	"- /manager\n", "- /kueue\n", "us-central1-docker.pkg.dev/k8s-staging-images/kueue/kueue:main", kueueImage,
)

// installKueue installs Kueue from the files of its release, with all of its integrations. It manages the namespaces
// with the label kueueLabel. Several tests may install it.
func installKueue(t *testing.T) {
	t.Helper()
	kubectl, err := programs.Kubectl()
	if err != nil {
		t.Fatal(err)
	}
	rendered, err := programs.Run(kubectl, nil, "", "kustomize", filepath.Join(moduleDir(t, "kueue", "sigs.k8s.io/kueue"), "config", "default"))
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "kueue.yaml")
	if err := os.WriteFile(file, []byte(kueueChanges.Replace(rendered)), 0o600); err != nil {
		t.Fatal(err)
	}
	objects, err := readAll(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := api.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: kueueNamespace}}); client.IgnoreAlreadyExists(err) != nil {
		t.Fatal(err)
	}
	for _, object := range objects {
		if object.GetKind() == "APIService" { // an API without a server blocks the deletion of namespaces
			continue
		}
		if hooks, found, _ := unstructured.NestedSlice(object.Object, "webhooks"); found {
			for _, hook := range hooks {
				hook.(map[string]any)["namespaceSelector"] = map[string]any{"matchLabels": map[string]any{kueueLabel: "true"}}
			}
			if err := unstructured.SetNestedSlice(object.Object, hooks, "webhooks"); err != nil {
				t.Fatal(err)
			}
		}
		if err := api.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(object), client.FieldOwner("e2e"), client.ForceOwnership); err != nil {
			t.Fatalf("%s %s: %v", object.GetKind(), object.GetName(), err)
		}
	}
	waitAvailable(t, kueueNamespace, "kueue-controller-manager")
}

func waitAvailable(t *testing.T, namespace, name string) {
	t.Helper()
	eventually(t, waitTimeout, "Deployment "+name+" is available", func() error {
		deployment := &appsv1.Deployment{}
		if err := api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: name}, deployment); err != nil {
			return err
		}
		if deployment.Status.AvailableReplicas == 0 {
			return fmt.Errorf("status %+v", deployment.Status)
		}
		return nil
	})
}

// newQueue creates a namespace with the queue of the sample, and sets the quota of devices. The ClusterQueue has the
// name of the namespace.
func newQueue(t *testing.T, devices int) (namespace string) {
	t.Helper()
	namespace = newNamespace(t)
	label := fmt.Appendf(nil, `{"metadata":{"labels":{%q:"true"}}}`, kueueLabel)
	if err := api.Patch(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, client.RawPatch(types.MergePatchType, label)); err != nil {
		t.Fatal(err)
	}
	sample, err := readAll(filepath.Join(repository, "config", "samples", "kueue.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, object := range sample {
		switch object.GetKind() {
		case "ClusterQueue":
			object.SetName(namespace)
		case "LocalQueue":
			object.SetNamespace(namespace)
			if err := unstructured.SetNestedField(object.Object, namespace, "spec", "clusterQueue"); err != nil {
				t.Fatal(err)
			}
		}
		// The API server calls the webhooks once their certificates are published.
		eventually(t, waitTimeout, object.GetKind()+" is applied", func() error {
			return api.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(object), client.FieldOwner("e2e"), client.ForceOwnership)
		})
	}
	setQuota(t, namespace, devices)
	return namespace
}

// patchQueue changes the ClusterQueue of a namespace.
func patchQueue(t *testing.T, namespace string, kind types.PatchType, patch string) {
	t.Helper()
	queue := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ClusterQueue"}}
	queue.SetName(namespace)
	if err := api.Patch(t.Context(), queue, client.RawPatch(kind, []byte(patch))); err != nil {
		t.Fatal(err)
	}
}

// setQuota sets the quota of devices of a namespace.
func setQuota(t *testing.T, namespace string, devices int) {
	t.Helper()
	const resource = "/spec/resourceGroups/0/flavors/0/resources/0"
	patchQueue(t, namespace, types.JSONPatchType, fmt.Sprintf(`[{"op":"test","path":"%s/name","value":"nvidia.com/gpu"},{"op":"replace","path":"%s/nominalQuota","value":"%d"}]`,
		resource, resource, devices))
}

// setStopPolicy sets the stop policy of the queue of a namespace. HoldAndDrain evicts all admitted Workloads.
func setStopPolicy(t *testing.T, namespace, policy string) {
	t.Helper()
	patchQueue(t, namespace, types.MergePatchType, fmt.Sprintf(`{"spec":{"stopPolicy":%q}}`, policy))
}

// setActive activates or deactivates the Workload of a Job. Kueue evicts an admitted Workload that is deactivated.
func setActive(t *testing.T, job *batchv1.Job, active bool) {
	t.Helper()
	var workloads unstructured.UnstructuredList
	workloads.SetAPIVersion("kueue.x-k8s.io/v1beta2")
	workloads.SetKind("WorkloadList")
	if err := api.List(t.Context(), &workloads, client.InNamespace(job.Namespace)); err != nil {
		t.Fatal(err)
	}
	for i := range workloads.Items {
		if metav1.IsControlledBy(&workloads.Items[i], job) {
			patch := fmt.Appendf(nil, `{"spec":{"active":%t}}`, active)
			if err := api.Patch(t.Context(), &workloads.Items[i], client.RawPatch(types.MergePatchType, patch)); err != nil {
				t.Fatal(err)
			}
			return
		}
	}
	t.Fatalf("Job %s has no Workload among %d", job.Name, len(workloads.Items))
}

// checkSteady checks that a manager that has just started writes nothing and reports no failure, although Kueue changes
// pods, Jobs and workloads. While pods wait, the manager's clock may jump by hours: no time limit may apply.
func checkSteady(t *testing.T, moed *semmoev1.MoEDeployment, jump time.Duration) {
	t.Helper()
	counting := faults.New(faults.Schedule{ClockBehind: -jump})
	stop := startManager(t, moed.Namespace, counting)
	reconcileSteadily(t, counting, 10*time.Second, func() int { return touchPodsOnce(t, moed) })
	stop()
	if writes := counting.Writes(); writes != 0 {
		t.Errorf("%d writes in steady state, want none:\n%s", writes, strings.Join(counting.LastWrites(), "\n"))
	}
	checkNotDegraded(t, get(t, moed).Status.Conditions)
}

// checkNotDegraded requires that no failure is reported.
func checkNotDegraded(t *testing.T, conditions []metav1.Condition) {
	t.Helper()
	if !meta.IsStatusConditionFalse(conditions, semmoev1.ConditionDegraded) {
		t.Errorf("waiting counts as a failure: %+v", conditions)
	}
}

// TestKueue queues a profiling Job, and serving pods, with the manager of Kueue. Both wait for a quota, run once Kueue
// admits them, wait again when they are evicted, and resume. No wait is reported as a failure.
func TestKueue(t *testing.T) {
	needsKueue(t)
	t.Parallel()
	installKueue(t)
	t.Run("profiling Job", queueProfilingJob)
	t.Run("serving pods", queueServingPods)
}

func queueProfilingJob(t *testing.T) {
	t.Parallel()
	namespace := newQueue(t, 0)
	stop := startManager(t, namespace, nil)
	create(t, dataset(t, namespace, 8))
	moed := profiledDeployment(namespace, func(m *semmoev1.MoEDeployment) {
		m.Labels = map[string]string{semmoev1.LabelQueue: localQueue}
		m.Spec.Profiling.Target = semmoev1.ProfilingTargetDedicated
	})
	create(t, moed)
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionProfiled, metav1.ConditionFalse, "Queued", "is suspended")
	p := &semmoev1.AffinityProfile{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: get(t, moed).Status.Profile}}
	job := waitProfilingJob(t, p)
	waitComplete(t, moed) // serves, and is not degraded
	waitReleases(t, moed)
	stop()
	checkSteady(t, moed, 3*time.Hour)
	startManager(t, namespace, nil)
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](3) })
	waitComplete(t, moed)
	queued := func() {
		t.Helper()
		waitProfile(t, waitTimeout, p, semmoev1.ConditionReady, metav1.ConditionFalse, "Queued", job.Name, "is suspended")
		waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionProfiled, metav1.ConditionFalse, "Queued")
		eventually(t, waitTimeout, "the Job has no pods", func() error {
			if err := api.Get(t.Context(), client.ObjectKeyFromObject(job), job); err != nil {
				return err
			}
			if job.Status.Active > 0 || !ptr.Deref(job.Spec.Suspend, false) {
				return fmt.Errorf("status %+v", job.Status)
			}
			return nil
		})
		checkNotDegraded(t, getProfile(t, p).Status.Conditions)
		checkNotDegraded(t, get(t, moed).Status.Conditions)
		if job.Status.Failed > 0 {
			t.Errorf("a suspended pod counts as failed: %+v", job.Status)
		}
	}
	queued()

	setQuota(t, namespace, 4)
	waitProfilingPod(t, job)
	setActive(t, job, false)
	queued()
	setQuota(t, namespace, 0)
	setActive(t, job, true)
	queued()
	setQuota(t, namespace, 4)
	waitProfiled(t, p)
	if jobs := listProfilingJobs(t, p); len(jobs) != 1 || jobs[0].UID != job.UID {
		t.Errorf("%d Jobs recorded the profile, want the queued one", len(jobs))
	}
	waitPlanned(t, moed)
}

func queueServingPods(t *testing.T) {
	t.Parallel()
	namespace := newQueue(t, 0)
	stop := startManager(t, namespace, nil)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) {
		m.Spec.Replicas = ptr.To[int32](2)
		m.Spec.Template = &corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{semmoev1.LabelQueue: localQueue}}}
	})
	create(t, moed)
	queued := func(pods int, text string) {
		t.Helper()
		waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionProgressing, metav1.ConditionTrue, "Queued", text, admissionGate)
		waiting := 0
		for _, pod := range listEnginePods(t, moed) {
			if podhealth.Gate(&pod) == admissionGate {
				waiting++
			}
		}
		if waiting != pods {
			t.Errorf("%d pods have the gate, want %d", waiting, pods)
		}
	}
	queued(2, "2 pods wait")
	waitCondition(t, moed, semmoev1.ConditionReady, metav1.ConditionFalse, "Queued", "0 of 2 replicas", admissionGate)
	waitAvailable(t, namespace, "tiny-router") // after the jump of the clock, a router that starts would be late
	stop()
	checkSteady(t, moed, 3*time.Hour)
	stop = startManager(t, namespace, nil)

	setQuota(t, namespace, 4)
	queued(1, "1 pod waits")
	setQuota(t, namespace, 8)
	first := waitComplete(t, moed)
	url := serviceURL(t, moed)
	eventually(t, waitTimeout, "a request is answered", func() error { return sendRequest(t.Context(), url, "tiny") })

	// All quota is used: each pod of the new revision is admitted when one of the former revision is gone.
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Env = []corev1.EnvVar{{Name: "CHANGED", Value: "1"}} })
	eventually(t, waitTimeout, "another revision serves", func() error {
		current := get(t, moed)
		if current.Status.Revision == first.Status.Revision {
			return errors.New("the revision is the former one")
		}
		return complete(current)
	})

	setStopPolicy(t, namespace, "HoldAndDrain")
	queued(2, "2 pods wait")
	waitCondition(t, moed, semmoev1.ConditionReady, metav1.ConditionFalse, "Queued", "0 of 2 replicas")
	checkNotDegraded(t, get(t, moed).Status.Conditions)
	setStopPolicy(t, namespace, "None")
	waitComplete(t, moed)
	waitReleases(t, moed)
	stop()
	checkSteady(t, moed, 0)
	startManager(t, namespace, nil)
	deleteAndWait(t, moed)
	eventually(t, waitTimeout, "the pods are deleted", func() error {
		if pods := listEnginePods(t, moed); len(pods) > 0 {
			return fmt.Errorf("%d pods", len(pods))
		}
		return nil
	})
}

// queueGroups queues replicas of two pods: Kueue admits all pods of a replica together, or none of them.
func queueGroups(t *testing.T) {
	needsKueue(t)
	installKueue(t)
	namespace := newQueue(t, 3) // a replica needs 4
	stop := startManager(t, namespace, nil)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) {
		m.Spec.Parallelism.PodsPerReplica = ptr.To[int32](2)
		m.Spec.Template = &corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{semmoev1.LabelQueue: localQueue}}}
	})
	create(t, moed)
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionReady, metav1.ConditionFalse, "Queued", "2 pods wait", admissionGate)
	setQuota(t, namespace, 4)
	waitComplete(t, moed)
	if sets := listGroups(t, moed); len(sets) != 1 || sets[0].Labels[semmoev1.LabelQueue] != localQueue {
		t.Errorf("%d LeaderWorkerSets, want one in the queue", len(sets))
	}
	setQuota(t, namespace, 8)
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](2) })
	waitOneSet(t, moed, 2)
	waitComplete(t, moed)
	setStopPolicy(t, namespace, "HoldAndDrain")
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionReady, metav1.ConditionFalse, "Queued", "4 pods wait", admissionGate)
	setStopPolicy(t, namespace, "None")
	waitComplete(t, moed)
	if sets := listGroups(t, moed); sets[0].Annotations[semmoev1.AnnotationRecreatedReplicas] != "" {
		t.Errorf("the eviction counts as a failure: %s", sets[0].Annotations[semmoev1.AnnotationRecreatedReplicas])
	}
	eventually(t, waitTimeout, "the engine's release is recorded", func() error {
		if sets := listGroups(t, moed); sets[0].Annotations[semmoev1.AnnotationEngineRelease] == "" {
			return fmt.Errorf("LeaderWorkerSet %s has no release", sets[0].Name)
		}
		return nil
	})
	stop()
	checkSteady(t, moed, 0)
}
