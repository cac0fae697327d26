// SPDX-License-Identifier: Apache-2.0

package installation

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/test/corpus"
)

// TestInstallation follows docs/install.md from the first to the last command. Each step requires the earlier steps.
func TestInstallation(t *testing.T) {
	w := newWorld(t)
	w.run(t, []step{
		{"install", w.install},
		{"review", w.review},
		{"serve", w.serve},
		{"upgrade", w.upgrade},
		{"lose the leader", w.loseLeader},
		{"lose a node", w.loseNode},
		{"uninstall", w.uninstall},
		{"install again", w.installAgain},
		{"delete", w.delete},
		{"remove", w.remove},
	})
}

// volumes are the volumes of the artifact store and of the model. The cluster has no dynamic provisioning, and its
// nodes share the directories of this machine. DIRECTORY and ACCESS are placeholders.
const volumes = `
apiVersion: v1
kind: PersistentVolume
metadata: {name: semmoe-store}
spec:
  capacity: {storage: 20Gi}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Retain
  claimRef: {namespace: semmoe-system, name: semmoe-store}
  hostPath: {path: DIRECTORY/store, type: Directory}
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: models}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ACCESS]
  persistentVolumeReclaimPolicy: Retain
  claimRef: {namespace: team, name: models}
  hostPath: {path: DIRECTORY/models, type: Directory}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {namespace: team, name: models}
spec:
  accessModes: [ACCESS]
  storageClassName: ""
  resources: {requests: {storage: 1Gi}}
`

// prepare creates namespaces that enforce the restricted standard, and the volumes, with an access mode of the model's
// volume. Both directories are empty, and pods with other users may write to them.
func (w *world) prepare(t *testing.T, access corev1.PersistentVolumeAccessMode) {
	t.Helper()
	w.initialCluster = everything(t, "")
	for _, name := range []string{"store", "models"} {
		directory := filepath.Join(w.directory, name)
		if err := errors.Join(os.Mkdir(directory, 0o777), os.Chmod(directory, 0o777)); err != nil { // umask limits Mkdir
			t.Fatal(err)
		}
	}
	for _, namespace := range []string{system, team} {
		w.kubectl(t, "", "create", "namespace", namespace)
		w.kubectl(t, "", "label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
	}
	w.kubectl(t, strings.NewReplacer("DIRECTORY", w.directory, "ACCESS", string(access)).Replace(volumes), "apply", "-f", "-")
}

// install prepares the cluster, with the model on its volume, and installs the chart.
func (w *world) install(t *testing.T) {
	w.prepare(t, corev1.ReadOnlyMany)
	if err := os.CopyFS(filepath.Join(w.directory, "models", "Qwen3-30B-A3B"), os.DirFS(checkpoint)); err != nil {
		t.Fatal(err)
	}
	// A second tag of the same image simulates the next release.
	for _, node := range []string{"1", "2"} {
		script(t, "in-node.sh", node, "ctr", "-n", "k8s.io", "images", "tag", "--force", "docker.io/library/semmoe:dev", "docker.io/library/semmoe:next")
	}
	begin := time.Now()
	w.helm(t, "install", chart, "--set", "image.repository=semmoe")
	w.waitInstalled(t)
	t.Logf("installed, with both managers and the store available, after %s", seconds(time.Since(begin)))
	nodes := map[string]bool{}
	for _, pod := range w.managers(t) {
		nodes[pod.Spec.NodeName] = true
	}
	if len(nodes) != 2 {
		t.Errorf("the managers are on %v, want both nodes", slices.Sorted(maps.Keys(nodes)))
	}
}

// waitInstalled waits for the rollouts that the chart's notes list.
func (w *world) waitInstalled(t *testing.T) {
	t.Helper()
	for _, deployment := range []string{"deployment/semmoe-manager", "deployment/semmoe-store"} {
		w.kubectl(t, "", "rollout", "status", "-n", system, deployment, "--timeout=120s")
	}
}

func (w *world) managers(t *testing.T) []corev1.Pod {
	t.Helper()
	return w.pods(t, system, client.MatchingLabels{"app.kubernetes.io/component": "manager"})
}

// review verifies that the webhook rejects an invalid sample and accepts the valid one.
func (w *world) review(t *testing.T) {
	waitRefused(t)
	w.kubectl(t, sample(t), "create", "-n", team, "--dry-run=server", "-f", "-")
}

// waitRefused waits until the webhook rejects an object that the CRD schema accepts. The API server calls a manager
// through its Service.
func waitRefused(t *testing.T) {
	t.Helper()
	const contradicting = `{"spec": {"engine": {"args": ["--ep-size", "2"]}}}`
	var refusal error
	took := eventually(t, waitTimeout, "rejection by the webhook", func() error {
		_, refusal = kubectl(sample(t, "--patch", contradicting), "create", "-n", team, "--dry-run=server", "-f", "-")
		if refusal == nil || !strings.Contains(refusal.Error(), `admission webhook "moedeployments.semmoe.io" denied the request`) {
			return fmt.Errorf("the error is %v", refusal)
		}
		return nil
	})
	if !strings.Contains(refusal.Error(), "spec.engine.args") || !strings.Contains(refusal.Error(), "--ep-size") {
		t.Errorf("the rejection does not name spec.engine.args and --ep-size: %v", refusal)
	}
	t.Logf("rejected after %s", seconds(took))
}

// sample returns the sample of the README with the patch testdata/sample.yaml for this cluster, and with a further
// patch if there is one.
func sample(t *testing.T, further ...string) string {
	t.Helper()
	patched, err := kubectl("", "patch", "--local", "--type=merge", "-o", "yaml",
		"-f", filepath.Join(repository, "config", "samples", "moedeployment.yaml"), "--patch-file", filepath.Join("testdata", "sample.yaml"))
	if err == nil && len(further) > 0 {
		patched, err = kubectl(patched, append([]string{"patch", "--local", "--type=merge", "-o", "yaml", "-f", "-"}, further...)...)
	}
	if err != nil {
		t.Fatal(err)
	}
	return patched
}

// createDataset creates the data set of the sample.
func (w *world) createDataset(t *testing.T) {
	t.Helper()
	known, _ := texts()
	lines, err := corpus.JSONL(known)
	if err != nil {
		t.Fatal(err)
	}
	dataset := filepath.Join(t.TempDir(), "dataset.jsonl")
	if err := os.WriteFile(dataset, lines, 0o600); err != nil {
		t.Fatal(err)
	}
	w.kubectl(t, "", "create", "configmap", "requests", "-n", team, "--from-file="+dataset)
	w.initialTeam = everything(t, team)
}

// serve applies the sample. It waits until a plan from a profile of the sample is rolled out, and until the share of
// local activations is larger than before.
func (w *world) serve(t *testing.T) {
	w.createDataset(t)
	begin := time.Now()
	w.kubectl(t, sample(t), "apply", "-n", team, "-f", "-")
	w.kubectl(t, "", "wait", "-n", team, "--for=condition=Ready", "moed/"+model, "--timeout=120s")
	t.Logf("Ready after %s", seconds(time.Since(begin)))
	w.traffic.start(w.parent)
	w.kubectl(t, "", "wait", "-n", team, "--for=condition=RolledOut", "moed/"+model, "--timeout=240s")
	t.Logf("RolledOut after %s", seconds(time.Since(begin)))
	w.waitLocality(t)
	w.waitHealthy(t)
	w.traffic.expectHealthy(t, mark{}, 10)
}

// waitLocality waits until the status has the local activation rate of the current revision. It fails the test unless
// the rate exceeds the rate of the default placement.
func (w *world) waitLocality(t *testing.T) {
	t.Helper()
	var status semmoev1.MoEDeploymentStatus
	took := eventually(t, 3*time.Minute, "local activation rate in the status", func() error {
		moed, err := w.moedeployment(t.Context())
		if err != nil {
			return err
		}
		status = moed.Status
		if lar := status.LAR; lar == nil || lar.BaselineMilli == nil || lar.PredictedMilli == nil || lar.ObservedMilli == nil || lar.ObservedRevision != status.Revision {
			return fmt.Errorf("status.lar is %+v of revision %s", lar, status.Revision)
		}
		return nil
	})
	t.Logf("observed local activation rate %s, predicted %.1f%%, baseline %s, after %s", status.LAR.Summary, float64(*status.LAR.PredictedMilli)/10, status.LAR.BaselineSummary, seconds(took))
	if *status.LAR.ObservedMilli <= *status.LAR.BaselineMilli {
		t.Error("the observed local activation rate does not exceed the baseline")
	}
}

// waitHealthy waits until all replicas of the MoEDeployment are ready and no condition reports a problem. It returns the
// elapsed time.
func (w *world) waitHealthy(t *testing.T) time.Duration {
	t.Helper()
	return eventually(t, waitTimeout, "all replicas ready and conditions healthy", func() error {
		moed, err := w.moedeployment(t.Context())
		if err != nil {
			return err
		}
		for kind, want := range map[string]metav1.ConditionStatus{
			semmoev1.ConditionReady: metav1.ConditionTrue, semmoev1.ConditionProgressing: metav1.ConditionFalse,
			semmoev1.ConditionDegraded: metav1.ConditionFalse, semmoev1.ConditionRolledOut: metav1.ConditionTrue,
		} {
			if c := meta.FindStatusCondition(moed.Status.Conditions, kind); c == nil || c.Status != want || c.ObservedGeneration != moed.Generation {
				return fmt.Errorf("condition %s is %+v", kind, c)
			}
		}
		if moed.Status.ReadyReplicas != *moed.Spec.Replicas {
			return fmt.Errorf("%d of %d replicas are ready", moed.Status.ReadyReplicas, *moed.Spec.Replicas)
		}
		if pods := w.enginePods(t); len(pods) != int(*moed.Spec.Replicas) {
			return fmt.Errorf("%d engine pods, want %d", len(pods), *moed.Spec.Replicas)
		}
		return nil
	})
}

// waitLeaderActs deletes an object that only the leader recreates, waits until it is recreated, and returns the elapsed
// time.
func (w *world) waitLeaderActs(t *testing.T) time.Duration {
	t.Helper()
	key := client.ObjectKey{Namespace: team, Name: model + "-router"}
	budget := &policyv1.PodDisruptionBudget{}
	if err := w.Get(t.Context(), key, budget); err != nil {
		t.Fatal(err)
	}
	before := budget.UID
	if err := w.Delete(t.Context(), budget); err != nil {
		t.Fatal(err)
	}
	return eventually(t, waitTimeout, "object recreated by the leader", func() error {
		budget := &policyv1.PodDisruptionBudget{}
		if err := w.Get(t.Context(), key, budget); err != nil {
			return err
		}
		if budget.UID == before {
			return errors.New("the old PodDisruptionBudget still exists")
		}
		return nil
	})
}

// jobs returns the UIDs of the Jobs in the model's namespace by name, to verify that no Job is created again.
func (w *world) jobs(t *testing.T) map[string]types.UID {
	t.Helper()
	list := &batchv1.JobList{}
	if err := w.List(t.Context(), list, client.InNamespace(team)); err != nil {
		t.Fatal(err)
	}
	jobs := map[string]types.UID{}
	for _, job := range list.Items {
		jobs[job.Name] = job.UID
	}
	return jobs
}

// upgrade switches to another image and other values. Managers, store and request routers are replaced, but no pod that
// holds the model.
func (w *world) upgrade(t *testing.T) {
	engines, jobs, from := podIdentities(w.enginePods(t)), w.jobs(t), w.traffic.mark()
	begin := time.Now()
	w.helm(t, "upgrade", chart, "--reset-then-reuse-values", "--set", "image.tag=next", "--set", "manager.solverWorkers=2")
	w.waitInstalled(t)
	t.Logf("upgraded after %s", seconds(time.Since(begin)))
	w.waitOnly(t, "manager", "semmoe:next", w.managers)
	w.waitLeaderActs(t)
	t.Logf("a manager of the new release acted %s after the start of the upgrade", seconds(time.Since(begin)))
	w.waitOnly(t, "request router", "semmoe:next", w.routerPods)
	t.Logf("all request routers were of the new release %s after the start of the upgrade", seconds(time.Since(begin)))
	nodes := map[string]bool{}
	for _, pod := range w.routerPods(t) {
		nodes[pod.Spec.NodeName] = true
	}
	if len(nodes) != 2 {
		t.Errorf("after the upgrade the request routers run on %v, want both nodes", slices.Collect(maps.Keys(nodes)))
	}
	w.waitHealthy(t)
	if diff := cmp.Diff(engines, podIdentities(w.enginePods(t))); diff != "" {
		t.Errorf("engine pods (-before +after):\n%s", diff)
	}
	if diff := cmp.Diff(jobs, w.jobs(t)); diff != "" {
		t.Errorf("Jobs (-before +after):\n%s", diff)
	}
	w.traffic.expectHealthy(t, from, 20)
}

// waitOnly waits until there are exactly two pods, both ready and with the image.
func (w *world) waitOnly(t *testing.T, what, image string, pods func(*testing.T) []corev1.Pod) {
	t.Helper()
	eventually(t, waitTimeout, what+"s of image "+image, func() error {
		all := pods(t)
		for _, pod := range all {
			if pod.Spec.Containers[0].Image != image || !podhealth.Ready(&pod) {
				return fmt.Errorf("pod %s has image %s, ready %v", pod.Name, pod.Spec.Containers[0].Image, podhealth.Ready(&pod))
			}
		}
		if len(all) != 2 {
			return fmt.Errorf("%d pods, want 2", len(all))
		}
		return nil
	})
}

// uninstall removes the operator. User objects, and the pods that serve the model, must remain.
func (w *world) uninstall(t *testing.T) {
	before, from := w.identities(t), w.traffic.mark()
	begin := time.Now()
	w.helm(t, "uninstall")
	eventually(t, waitTimeout, "no pods in the operator's namespace", func() error {
		if left := w.pods(t, system, nil); len(left) > 0 {
			return fmt.Errorf("%d pods", len(left))
		}
		return nil
	})
	t.Logf("managers and store were removed after %s", seconds(time.Since(begin)))
	if diff := cmp.Diff(before, w.identities(t)); diff != "" {
		t.Errorf("user objects (-before +after):\n%s", diff)
	}
	eventually(t, waitTimeout, "objects kept in the operator's namespace", func() error { return same(keptInSystem, everything(t, system)) })
	left := slices.DeleteFunc(everything(t, ""), func(name string) bool { return slices.Contains(w.initialCluster, name) })
	if err := same(keptInCluster, left); err != nil {
		t.Errorf("objects kept in the cluster: %v", err)
	}
	w.traffic.expectHealthy(t, from, 100)
}

// The objects that, according to docs/install.md, remain after the chart is uninstalled, in addition to the default
// objects of a namespace and the objects of the test.
var (
	keptInSystem = []string{
		"configmap/kube-root-ca.crt", "configmap/semmoe-store-ca", "persistentvolumeclaim/semmoe-store",
		"secret/semmoe-manager-ca", "secret/semmoe-store-ca", "secret/semmoe-webhook-ca", "serviceaccount/default",
	}
	keptInCluster = []string{
		"clusterrole.rbac.authorization.k8s.io/semmoe-router",
		"customresourcedefinition.apiextensions.k8s.io/affinityprofiles.semmoe.io",
		"customresourcedefinition.apiextensions.k8s.io/moedeployments.semmoe.io",
		"customresourcedefinition.apiextensions.k8s.io/placementplans.semmoe.io",
		"namespace/semmoe-system", "namespace/team", "persistentvolume/models", "persistentvolume/semmoe-store",
	}
)

// installAgain installs the chart again. The operator adopts all existing objects unchanged, and creates a plan for
// another number of devices from the stored profile.
func (w *world) installAgain(t *testing.T) {
	before, from := w.identities(t), w.traffic.mark()
	begin := time.Now()
	w.helm(t, "install", chart, "--set", "image.repository=semmoe,image.tag=next")
	w.waitInstalled(t)
	w.waitLeaderActs(t)
	t.Logf("a manager acted %s after the start of the installation", seconds(time.Since(begin)))
	w.waitHealthy(t)
	after := w.identities(t)
	delete(before, "PodDisruptionBudget/"+model+"-router") // waitLeaderActs has deleted it
	delete(after, "PodDisruptionBudget/"+model+"-router")
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("user objects (-before +after):\n%s", diff)
	}
	waitRefused(t)
	w.planAgain(t)
	w.traffic.expectHealthy(t, from, 20)
}

// planAgain creates another plan from the profile. Only the artifact store has the trace of the profile.
func (w *world) planAgain(t *testing.T) {
	t.Helper()
	moed, err := w.moedeployment(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	jobs := w.jobs(t)
	plan := &semmoev1.PlacementPlan{
		ObjectMeta: metav1.ObjectMeta{Namespace: team, Name: "another"},
		Spec: semmoev1.PlacementPlanSpec{
			ProfileRef: semmoev1.ProfileReference{Name: moed.Status.Profile}, ExpertParallelSize: 4,
		},
	}
	if err := w.Create(t.Context(), plan); err != nil {
		t.Fatal(err)
	}
	took := eventually(t, waitTimeout, "second plan Ready", func() error {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(plan), plan); err != nil {
			return err
		}
		if !meta.IsStatusConditionTrue(plan.Status.Conditions, semmoev1.ConditionReady) {
			return fmt.Errorf("the plan's conditions are %+v", plan.Status.Conditions)
		}
		return nil
	})
	if diff := cmp.Diff(jobs, w.jobs(t)); diff != "" {
		t.Errorf("Jobs (-before +after):\n%s", diff)
	}
	t.Logf("a second plan from the stored profile was ready after %s", seconds(took))
}

// delete deletes all Sem-MoE objects. Only the objects from before the sample must remain in the model's namespace.
func (w *world) delete(t *testing.T) {
	begin := time.Now()
	w.kubectl(t, "", "delete", "moed,aprof,pplan", "--all", "--all-namespaces")
	eventually(t, waitTimeout, "only the initial objects in the model's namespace", func() error {
		return same(w.initialTeam, everything(t, team))
	})
	t.Logf("all objects were removed after %s", seconds(time.Since(begin)))
}

// remove follows the last section of docs/install.md. Afterwards the cluster contains only its initial objects.
func (w *world) remove(t *testing.T) {
	w.helm(t, "uninstall")
	w.kubectl(t, "", "delete", "crd", "moedeployments.semmoe.io", "affinityprofiles.semmoe.io", "placementplans.semmoe.io")
	w.kubectl(t, "", "delete", "clusterrole", "semmoe-router")
	w.kubectl(t, "", "delete", "namespace", system, team)
	w.kubectl(t, "", "delete", "persistentvolume", "semmoe-store", "models")
	if err := same(w.initialCluster, everything(t, "")); err != nil {
		t.Error(err)
	}
}

func same(want, got []string) error {
	if diff := cmp.Diff(want, got); diff != "" {
		return fmt.Errorf("(-want +got):\n%s", diff)
	}
	return nil
}
