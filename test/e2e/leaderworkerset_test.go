// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/internal/kube/replicagroup"
	"github.com/semmoe/operator/internal/router"
	"github.com/semmoe/operator/test/tier"
)

const (
	groupsImage     = "leaderworkerset:test"
	groupsNamespace = "lws-system"
	// groupsWebhooks names the webhook configurations that the controllers register when they run.
	groupsWebhooks = "semmoe-test-leaderworkerset"
)

// groupsBinary returns the path of the program with the LeaderWorkerSet controllers. It may not have been built.
func groupsBinary() string { return filepath.Join(repository, "bin", "leaderworkerset") }

// needsGroups skips the test in the commit tier. For the nightly tier the LeaderWorkerSet controllers are built.
func needsGroups(t *testing.T) {
	t.Helper()
	tier.Nightly(t)
	if _, err := os.Stat(groupsBinary()); err != nil {
		t.Fatalf("%v: run test/leaderworkerset/build.sh to build the controllers", err)
	}
}

// installGroups installs the kind LeaderWorkerSet from its release, and its controllers.
func installGroups(t *testing.T) {
	t.Helper()
	file := filepath.Join(moduleDir(t, "leaderworkerset", "sigs.k8s.io/lws"), "config", "crd", "bases", "leaderworkerset.x-k8s.io_leaderworkersets.yaml")
	// The default limit of ten seconds is too short on a loaded machine while the kinds of Kueue are installed too.
	options := envtest.CRDInstallOptions{Paths: []string{file}, ErrorIfPathMissing: true, MaxTime: waitTimeout}
	if _, err := envtest.InstallCRDs(restConfig, options); err != nil {
		t.Fatal(err)
	}
	labels := map[string]string{"app": "leaderworkerset"}
	create(t, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: groupsNamespace}})
	create(t, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: groupsNamespace, Name: "leaderworkerset"}})
	create(t, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "leaderworkerset"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: groupsNamespace, Name: "leaderworkerset"}},
	})
	create(t, &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: groupsNamespace, Name: "leaderworkerset"},
		Spec: appsv1.DeploymentSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{
					ServiceAccountName: "leaderworkerset",
					Containers: []corev1.Container{{
						Name: "manager", Image: groupsImage, Args: []string{"--host=$(POD_IP)"},
						Env:          []corev1.EnvVar{{Name: "POD_IP", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "status.podIP"}}}},
						VolumeMounts: []corev1.VolumeMount{{Name: "tmp", MountPath: "/tmp"}},
					}},
					Volumes: []corev1.Volume{{Name: "tmp", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}},
				},
			},
		},
	})
	eventually(t, waitTimeout, "the LeaderWorkerSet controllers are running", func() error {
		return api.Get(t.Context(), client.ObjectKey{Name: groupsWebhooks}, &admissionv1.ValidatingWebhookConfiguration{})
	})
}

// listGroups returns the LeaderWorkerSets of a MoEDeployment, the oldest first.
func listGroups(t *testing.T, moed *semmoev1.MoEDeployment) []leaderworkersetv1.LeaderWorkerSet {
	t.Helper()
	var sets leaderworkersetv1.LeaderWorkerSetList
	if err := api.List(t.Context(), &sets, client.InNamespace(moed.Namespace), client.MatchingLabels{semmoev1.LabelDeployment: moed.Name}); err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(sets.Items, func(a, b leaderworkersetv1.LeaderWorkerSet) int {
		return a.CreationTimestamp.Compare(b.CreationTimestamp.Time)
	})
	return sets.Items
}

// waitOneSet waits until one LeaderWorkerSet with the given number of ready groups is left. It checks the pods: the
// set's status can lag behind them until another event occurs.
func waitOneSet(t *testing.T, moed *semmoev1.MoEDeployment, groups int32) {
	t.Helper()
	eventually(t, waitTimeout, "one LeaderWorkerSet is left", func() error {
		sets := listGroups(t, moed)
		if len(sets) != 1 || *sets[0].Spec.Replicas != groups {
			return fmt.Errorf("%d LeaderWorkerSets", len(sets))
		}
		leaders := listEnginePods(t, moed)
		if ready := slices.DeleteFunc(slices.Clone(leaders), func(pod corev1.Pod) bool { return !podhealth.Ready(&pod) }); len(leaders) != int(groups) || len(ready) != int(groups) {
			return fmt.Errorf("%d of %d leaders are ready", len(ready), len(leaders))
		}
		return nil
	})
}

func listWorkerPods(ctx context.Context, moed *semmoev1.MoEDeployment) ([]*corev1.Pod, error) {
	var pods corev1.PodList
	err := api.List(ctx, &pods, client.InNamespace(moed.Namespace), client.MatchingLabels{semmoev1.LabelDeployment: moed.Name, semmoev1.LabelComponent: semmoev1.ComponentWorker})
	var workers []*corev1.Pod
	for i := range pods.Items {
		workers = append(workers, &pods.Items[i])
	}
	return workers, err
}

// TestMultiPodReplicas creates replicas of two pods each, which wait until the kind LeaderWorkerSet is installed. Like
// replicas of one pod they serve, are profiled, test a plan on a canary, roll it out, and roll back a worse plan. No
// request fails.
func TestMultiPodReplicas(t *testing.T) {
	needsGroups(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	create(t, dataset(t, namespace, 8))
	storedProfileOf(t, namespace, "scrambled", "others", scrambled(t, 1))
	moed := profiledDeployment(namespace, func(m *semmoev1.MoEDeployment) {
		m.Spec.Parallelism.PodsPerReplica = ptr.To[int32](2)
		m.Spec.Rollout.SoakSeconds = ptr.To[int32](5)
	})
	create(t, moed)
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionDegraded, metav1.ConditionTrue, "LeaderWorkerSetMissing", "leaderworkerset.x-k8s.io/v1")

	installGroups(t)
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionReady, metav1.ConditionTrue, "Serving")
	url := serviceURL(t, moed)
	eventually(t, waitTimeout, "the first request is answered", func() error { return sendRequest(t.Context(), url, "tiny") })
	checkGroups(t, moed)
	stop := sendAllKinds(t, url)

	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionRolledOut, metav1.ConditionFalse, "Canary", "1 of 2 replicas")
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionRolledOut, metav1.ConditionTrue, "RolledOut")
	waitOneSet(t, moed, 2)
	good := waitComplete(t, moed).Status.PlanDigest
	eventually(t, waitTimeout, "requests are routed by the plan", func() error { return sentBy(t.Context(), url, good) })
	if jobs := profilingJobs(t, namespace); len(jobs) != 1 {
		t.Errorf("%d profiling Jobs, want one", len(jobs))
	}

	update(t, moed, func(m *semmoev1.MoEDeployment) {
		m.Spec.Profiling = &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "scrambled"}}
	})
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionRolledOut, metav1.ConditionFalse, "RolledBack", "LocalityWorse")
	waitOneSet(t, moed, 2)
	if kept := waitComplete(t, moed); kept.Status.PlanDigest != good {
		t.Errorf("the serving plan is %s, want %s", kept.Status.PlanDigest, good)
	}
	replaceGroup(t, moed)
	scaleGroups(t, moed)
	breakGroups(t, moed)
	stop()
	t.Run("vLLM on four pods", spreadVLLM)
	t.Run("in a queue", queueGroups)
}

const (
	// doubleImage is the image of the test double of all engines.
	doubleImage = "engines:test"
	// vllmRelease is the vLLM release that the test double simulates.
	vllmRelease = "0.22.0"
)

// buildDouble builds the test double of the engines and returns its path.
func buildDouble() (string, error) {
	path := filepath.Join(repository, "bin", "engines")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", path, "./test/engines")
	build.Dir, build.Env = repository, append(os.Environ(), "CGO_ENABLED=0")
	if output, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("failed to build the double of the engines: %w: %s", err, output)
	}
	return path, nil
}

// spreadVLLM serves 32 ranks on four pods with eight ranks each. Their command lines differ only in the index that
// LeaderWorkerSet sets. Requests are pinned to ranks of every pod. Loss of a pod restarts its whole replica, which
// recovers.
func spreadVLLM(t *testing.T) {
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	moed := newDeployment(namespace, "vllm", func(m *semmoev1.MoEDeployment) {
		m.Spec.Model.Name = "tiny"
		m.Spec.Engine = semmoev1.EngineSpec{Type: semmoev1.EngineVLLM, Image: doubleImage, Command: []string{"/engines", "vllm-" + vllmRelease, "vllm", "serve"}, Args: []string{"--all2all-backend", "deepep_low_latency"}}
		m.Spec.Parallelism = semmoev1.ParallelismSpec{ExpertParallelSize: 32, PodsPerReplica: ptr.To[int32](4)}
	})
	create(t, moed)
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionReady, metav1.ConditionTrue, "Serving")
	eventually(t, waitTimeout, "status.serving contains the release of the engine", func() error {
		if serving := get(t, moed).Status.Serving; serving == nil || serving.EngineRelease != vllmRelease || serving.Ranks != 32 {
			return fmt.Errorf("status.serving is %+v", serving)
		}
		return nil
	})
	url := serviceURL(t, moed)
	everyRank := func() {
		t.Helper()
		eventually(t, waitTimeout, "every rank of the four pods has answered", func() error {
			ranks := map[string]bool{}
			for range 256 {
				rank, err := rankOf(t.Context(), url)
				if err != nil {
					return err
				}
				if ranks[rank] = true; len(ranks) == 32 {
					return nil
				}
			}
			return fmt.Errorf("only %d ranks have answered", len(ranks))
		})
	}
	everyRank()
	workers, err := listWorkerPods(t.Context(), moed)
	if err != nil || len(workers) != 3 {
		t.Fatalf("%d workers, want 3: %v", len(workers), err)
	}
	before := podUIDs(t, moed)
	if err := api.Delete(t.Context(), workers[2]); err != nil {
		t.Fatal(err)
	}
	eventually(t, waitTimeout, "the replica recovers", func() error {
		after := podUIDs(t, moed)
		workers, err := listWorkerPods(t.Context(), moed)
		if err != nil || len(workers) != 3 || len(after) != 1 || slices.Equal(before, after) {
			return fmt.Errorf("%d workers, leaders %v (were %v), error %v", len(workers), after, before, err)
		}
		return complete(get(t, moed))
	})
	everyRank()
}

// rankOf sends a small request and returns the rank to which it was pinned.
func rankOf(ctx context.Context, url string) (string, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", strings.NewReader(`{"model": "tiny", "prompt": "func", "max_tokens": 1}`))
	if err != nil {
		return "", err
	}
	response, err := http.DefaultClient.Do(request)
	if err := answered(response, err); err != nil {
		return "", err
	}
	return response.Header.Get(router.HeaderRank), nil
}

// checkGroups checks the pods of two replicas with two pods each.
func checkGroups(t *testing.T, moed *semmoev1.MoEDeployment) {
	t.Helper()
	workers, err := listWorkerPods(t.Context(), moed)
	if err != nil {
		t.Fatal(err)
	}
	leaders := listEnginePods(t, moed)
	if len(leaders) != 2 || len(workers) != 2 {
		t.Errorf("%d leaders and %d workers, want 2 of each", len(leaders), len(workers))
	}
	for i := range leaders {
		if devices := leaders[i].Spec.Containers[0].Resources.Limits["nvidia.com/gpu"]; devices.Value() != 2 || len(replicagroup.Workers(&leaders[i], workers)) != 1 {
			t.Errorf("leader %s has %v devices and %d workers", leaders[i].Name, devices.Value(), len(replicagroup.Workers(&leaders[i], workers)))
		}
	}
	if workloads := listWorkloads(t, moed); len(workloads) != 0 {
		t.Errorf("%d operator-managed StatefulSets, want none", len(workloads))
	}
	if current := get(t, moed); current.Status.Replicas != 2 {
		t.Errorf("status.replicas is %d, want the number of replicas, not of pods", current.Status.Replicas)
	}
}

// replaceGroup deletes a worker. Its whole replica is recreated, and requests go to the other replica.
func replaceGroup(t *testing.T, moed *semmoev1.MoEDeployment) {
	t.Helper()
	before := podUIDs(t, moed)
	workers, err := listWorkerPods(t.Context(), moed)
	if err != nil || len(workers) == 0 {
		t.Fatalf("%d workers: %v", len(workers), err)
	}
	if err := api.Delete(t.Context(), workers[0]); err != nil {
		t.Fatal(err)
	}
	eventually(t, waitTimeout, "the replica is recreated", func() error {
		after := podUIDs(t, moed)
		workers, err := listWorkerPods(t.Context(), moed)
		if err != nil {
			return err
		}
		for _, worker := range workers {
			if !podhealth.Ready(worker) {
				return fmt.Errorf("worker %s is not ready", worker.Name)
			}
		}
		if len(workers) != 2 || len(after) != 2 || slices.Equal(before, after) || slices.Contains(after, before[0]) == slices.Contains(after, before[1]) {
			return fmt.Errorf("%d workers, leaders %v (were %v)", len(workers), after, before)
		}
		return complete(get(t, moed))
	})
}

// scaleGroups scales up and down by one replica.
func scaleGroups(t *testing.T, moed *semmoev1.MoEDeployment) {
	t.Helper()
	for _, replicas := range []int32{3, 2} {
		update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = &replicas })
		waitOneSet(t, moed, replicas)
		waitComplete(t, moed)
		eventually(t, waitTimeout, "the number of workers follows the replicas", func() error {
			workers, err := listWorkerPods(t.Context(), moed)
			if err != nil || len(workers) != int(replicas) {
				return fmt.Errorf("%d workers: %v", len(workers), err)
			}
			return nil
		})
	}
}

// breakGroups makes a change with which every engine exits at start. The replica with the change is recreated
// repeatedly. The condition reports this although no pod lives long enough to report an error, and the other replica
// serves until the change is reverted.
func breakGroups(t *testing.T, moed *semmoev1.MoEDeployment) {
	t.Helper()
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = []string{"--no-such-flag"} })
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionDegraded, metav1.ConditionTrue, "ContainerCrashing", "recreated repeatedly", "--no-such-flag")
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = nil })
	waitOneSet(t, moed, 2)
	waitComplete(t, moed)
}
