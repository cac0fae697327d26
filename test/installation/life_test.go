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

// An installation's life, from the first command of docs/install.md to the last. Each step needs those before it.
func TestInstallation(t *testing.T) {
	if !*onCluster {
		t.Skip("only with -args -cluster, on a cluster of test/cluster: make e2e-installation")
	}
	w := newWorld(t)
	for _, step := range []struct {
		name string
		tell func(*world, *testing.T)
	}{
		{"install", (*world).install},
		{"review", (*world).review},
		{"serve", (*world).serve},
		{"upgrade", (*world).upgrade},
		{"lose the leader", (*world).loseLeader},
		{"lose a node", (*world).loseNode},
		{"uninstall", (*world).uninstall},
		{"install again", (*world).installAgain},
		{"delete", (*world).delete},
		{"remove", (*world).remove},
	} {
		if !t.Run(step.name, func(t *testing.T) {
			begin := time.Now()
			step.tell(w, t)
			t.Logf("%s: %s", step.name, seconds(time.Since(begin)))
		}) {
			w.explain(t)
			return
		}
	}
}

// explain logs what a person would look at, the shortest last: the end of a long log is what is read first.
func (w *world) explain(t *testing.T) {
	for _, args := range [][]string{
		{"logs", "-n", system, "-l", "app.kubernetes.io/component=manager", "--tail=30", "--prefix"},
		{"get", "events", "-A", "--sort-by=.metadata.creationTimestamp"},
		{"describe", "moed", "-n", team},
		{"get", "pods", "-A", "-o", "wide"},
	} {
		output, err := kubectl("", args...)
		t.Logf("kubectl %s: %v\n%s", strings.Join(args, " "), err, output)
	}
	now := time.Now()
	_, failed := w.traffic.since(mark{})
	t.Logf("requests that failed in all steps, and when they began:%s", reasons(failed, now))
}

// volumes are those of the artifact store and of the model: the cluster makes none, and its nodes share this machine's directories.
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
  accessModes: [ReadOnlyMany]
  persistentVolumeReclaimPolicy: Retain
  claimRef: {namespace: team, name: models}
  hostPath: {path: DIRECTORY/models, type: Directory}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {namespace: team, name: models}
spec:
  accessModes: [ReadOnlyMany]
  storageClassName: ""
  resources: {requests: {storage: 1Gi}}
`

// install makes namespaces that enforce the restricted standard, and installs the chart into one of them.
func (w *world) install(t *testing.T) {
	w.bare = everything(t, "")
	checkpoint := filepath.Join(repository, "internal", "refengine", "testdata", "tiny-qwen3moe")
	if err := errors.Join(
		os.Mkdir(filepath.Join(w.directory, "store"), 0o777), os.Chmod(filepath.Join(w.directory, "store"), 0o777), // for user 65532
		os.CopyFS(filepath.Join(w.directory, "models", "Qwen3-30B-A3B"), os.DirFS(checkpoint)),
	); err != nil {
		t.Fatal(err)
	}
	for _, namespace := range []string{system, team} {
		w.kubectl(t, "", "create", "namespace", namespace)
		w.kubectl(t, "", "label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
	}
	w.kubectl(t, strings.ReplaceAll(volumes, "DIRECTORY", w.directory), "apply", "-f", "-")
	// The same bytes by another name are another release.
	for _, node := range []string{"1", "2"} {
		script(t, "in-node.sh", node, "ctr", "-n", "k8s.io", "images", "tag", "--force", "docker.io/library/semmoe:dev", "docker.io/library/semmoe:next")
	}
	begin := time.Now()
	w.helm(t, "install", chart)
	w.waitInstalled(t)
	t.Logf("installed, and both managers and the store available, after %s", seconds(time.Since(begin)))
	nodes := map[string]bool{}
	for _, pod := range w.managers(t) {
		nodes[pod.Spec.NodeName] = true
	}
	if len(nodes) != 2 {
		t.Errorf("the managers are on %v, want both nodes", slices.Sorted(maps.Keys(nodes)))
	}
}

// waitInstalled waits as the chart's notes say.
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

// review tries the sample with and without what a manager must refuse.
func (w *world) review(t *testing.T) {
	waitRefused(t)
	w.kubectl(t, sample(t), "create", "-n", team, "--dry-run=server", "-f", "-")
}

// waitRefused tries an object that no schema can refuse: the API server asks a manager through its Service.
func waitRefused(t *testing.T) {
	t.Helper()
	const contradicting = `{"spec": {"engine": {"args": ["--ep-size", "2"]}}}`
	var refusal error
	took := eventually(t, patience, "a refusal", func() error {
		_, refusal = kubectl(sample(t, "--patch", contradicting), "create", "-n", team, "--dry-run=server", "-f", "-")
		if refusal == nil || !strings.Contains(refusal.Error(), `admission webhook "moedeployments.semmoe.io" denied the request`) {
			return fmt.Errorf("the answer is %v", refusal)
		}
		return nil
	})
	if !strings.Contains(refusal.Error(), "spec.engine.args") || !strings.Contains(refusal.Error(), "--ep-size") {
		t.Errorf("the refusal does not say what is wrong: %v", refusal)
	}
	t.Logf("refused after %s", seconds(took))
}

// sample is the sample of the README, as testdata/sample.yaml fits it to this cluster, with a further patch where one is given.
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

// serve applies the sample, and waits until a plan made from a profile of it is in service, and more activations are local than before.
func (w *world) serve(t *testing.T) {
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
	w.home = everything(t, team)

	begin := time.Now()
	w.kubectl(t, sample(t), "apply", "-n", team, "-f", "-")
	w.kubectl(t, "", "wait", "-n", team, "--for=condition=Ready", "moed/"+model, "--timeout=120s")
	t.Logf("Ready after %s", seconds(time.Since(begin)))
	w.traffic.start(w.whole, fmt.Sprintf("http://%s.%s.svc.cluster.local:8000", model, team))
	w.kubectl(t, "", "wait", "-n", team, "--for=condition=RolledOut", "moed/"+model, "--timeout=240s")
	t.Logf("RolledOut after %s", seconds(time.Since(begin)))

	var status semmoev1.MoEDeploymentStatus
	eventually(t, 3*time.Minute, "a local activation rate", func() error {
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
	t.Logf("observed local activation rate %s, predicted %.1f%%, baseline %s, after %s", status.LAR.Summary, float64(*status.LAR.PredictedMilli)/10, status.LAR.BaselineSummary, seconds(time.Since(begin)))
	if *status.LAR.ObservedMilli <= *status.LAR.BaselineMilli {
		t.Error("the plan has not made more activations local")
	}
	w.waitWhole(t)
	w.traffic.expectUnharmed(t, mark{}, 10)
}

// waitWhole waits until all that the MoEDeployment asks for is there, and nothing is wrong, and returns how long that took.
func (w *world) waitWhole(t *testing.T) time.Duration {
	t.Helper()
	return eventually(t, patience, "all replicas serve, and nothing is wrong", func() error {
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
			return fmt.Errorf("%d engine pods", len(pods))
		}
		return nil
	})
}

// waitActs takes away what the leader alone puts back, waits until it has, and returns how long that took.
func (w *world) waitActs(t *testing.T) time.Duration {
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
	return eventually(t, patience, "the leader acts", func() error {
		budget := &policyv1.PodDisruptionBudget{}
		if err := w.Get(t.Context(), key, budget); err != nil {
			return err
		}
		if budget.UID == before {
			return errors.New("the old one is there")
		}
		return nil
	})
}

// jobs are the Jobs of the namespace: none may be made again.
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

// upgrade goes to another image and other values: managers, store and request routers are replaced, and no pod that holds the model.
func (w *world) upgrade(t *testing.T) {
	engines, jobs, from := lives(w.enginePods(t)), w.jobs(t), w.traffic.mark()
	begin := time.Now()
	w.helm(t, "upgrade", chart, "--reset-then-reuse-values", "--set", "image.tag=next", "--set", "manager.solverWorkers=2")
	w.waitInstalled(t)
	t.Logf("upgraded after %s", seconds(time.Since(begin)))
	w.waitOnly(t, "manager", "semmoe:next", w.managers)
	w.waitActs(t)
	t.Logf("a manager of the new release acted %s after the upgrade began", seconds(time.Since(begin)))
	w.waitOnly(t, "request router", "semmoe:next", w.routerPods)
	t.Logf("request routers of the new release alone %s after the upgrade began", seconds(time.Since(begin)))
	w.waitWhole(t)
	if diff := cmp.Diff(engines, lives(w.enginePods(t))); diff != "" {
		t.Errorf("engine pods (-before +after):\n%s", diff)
	}
	if diff := cmp.Diff(jobs, w.jobs(t)); diff != "" {
		t.Errorf("Jobs (-before +after):\n%s", diff)
	}
	w.traffic.expectUnharmed(t, from, 20)
}

// waitOnly waits until two ready pods are there, both of the image.
func (w *world) waitOnly(t *testing.T, what, image string, pods func(*testing.T) []corev1.Pod) {
	t.Helper()
	eventually(t, patience, what+"s of image "+image, func() error {
		all := pods(t)
		for _, pod := range all {
			if pod.Spec.Containers[0].Image != image || !podhealth.Ready(&pod) {
				return fmt.Errorf("pod %s is of image %s, and ready is %v", pod.Name, pod.Spec.Containers[0].Image, podhealth.Ready(&pod))
			}
		}
		if len(all) != 2 {
			return fmt.Errorf("%d pods, want 2", len(all))
		}
		return nil
	})
}

// uninstall leaves users what is theirs, and what serves.
func (w *world) uninstall(t *testing.T) {
	before, from := w.identities(t), w.traffic.mark()
	begin := time.Now()
	w.helm(t, "uninstall")
	eventually(t, patience, "the operator is gone", func() error {
		if left := w.pods(t, system, nil); len(left) > 0 {
			return fmt.Errorf("%d pods", len(left))
		}
		return nil
	})
	t.Logf("managers and store were gone after %s", seconds(time.Since(begin)))
	if diff := cmp.Diff(before, w.identities(t)); diff != "" {
		t.Errorf("what users have (-before +after):\n%s", diff)
	}
	eventually(t, patience, "what is kept in the operator's namespace", func() error { return same(keptInSystem, everything(t, system)) })
	left := slices.DeleteFunc(everything(t, ""), func(name string) bool { return slices.Contains(w.bare, name) })
	if err := same(keptInCluster, left); err != nil {
		t.Errorf("what is kept in the cluster: %v", err)
	}
	w.traffic.expectUnharmed(t, from, 100)
}

// What docs/install.md says is kept when the chart is uninstalled, beside what every namespace has and what the test has made.
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

// installAgain finds everything: what serves is taken over as it is, and a plan for other devices is made from the profile that was
// stored before.
func (w *world) installAgain(t *testing.T) {
	before, from := w.identities(t), w.traffic.mark()
	begin := time.Now()
	w.helm(t, "install", chart, "--set", "image.tag=next")
	w.waitInstalled(t)
	w.waitActs(t)
	t.Logf("a manager acted %s after the installation began", seconds(time.Since(begin)))
	w.waitWhole(t)
	after := w.identities(t)
	delete(before, "PodDisruptionBudget/"+model+"-router") // waitActs has deleted it
	delete(after, "PodDisruptionBudget/"+model+"-router")
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("what users have (-before +after):\n%s", diff)
	}
	waitRefused(t)
	w.planAgain(t)
	w.traffic.expectUnharmed(t, from, 20)
}

// planAgain has another plan made from the profile, of which only the artifact store has the trace.
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
	took := eventually(t, patience, "another plan", func() error {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(plan), plan); err != nil {
			return err
		}
		if !meta.IsStatusConditionTrue(plan.Status.Conditions, semmoev1.ConditionReady) {
			return fmt.Errorf("its conditions are %+v", plan.Status.Conditions)
		}
		return nil
	})
	if diff := cmp.Diff(jobs, w.jobs(t)); diff != "" {
		t.Errorf("Jobs (-before +after):\n%s", diff)
	}
	t.Logf("another plan from the stored profile after %s", seconds(took))
}

// delete leaves nothing in the model's namespace but what was there before.
func (w *world) delete(t *testing.T) {
	begin := time.Now()
	w.kubectl(t, "", "delete", "moed,aprof,pplan", "--all", "--all-namespaces")
	eventually(t, patience, "nothing is left", func() error {
		return same(w.home, everything(t, team))
	})
	t.Logf("nothing was left after %s", seconds(time.Since(begin)))
}

// remove is the end of docs/install.md: nothing is left in the cluster.
func (w *world) remove(t *testing.T) {
	w.helm(t, "uninstall")
	w.kubectl(t, "", "delete", "crd", "moedeployments.semmoe.io", "affinityprofiles.semmoe.io", "placementplans.semmoe.io")
	w.kubectl(t, "", "delete", "clusterrole", "semmoe-router")
	w.kubectl(t, "", "delete", "namespace", system, team)
	w.kubectl(t, "", "delete", "persistentvolume", "semmoe-store", "models")
	if err := same(w.bare, everything(t, "")); err != nil {
		t.Error(err)
	}
}

func same(want, got []string) error {
	if diff := cmp.Diff(want, got); diff != "" {
		return fmt.Errorf("(-want +got):\n%s", diff)
	}
	return nil
}
