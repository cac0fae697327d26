// SPDX-License-Identifier: Apache-2.0

package installation

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/clientcmd"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers"
	"github.com/semmoe/operator/test/load"
	"github.com/semmoe/operator/test/programs"
)

var onCluster = flag.Bool("cluster", false, "run the installation tests on the test/cluster cluster in KUBECONFIG")

const (
	release = "semmoe"
	// system is the operator's namespace, team is the model's. Both enforce the restricted pod security standard.
	system = "semmoe-system"
	team   = "team"
	// model is the MoEDeployment of config/samples/moedeployment.yaml.
	model = "qwen3-30b"
	// waitTimeout bounds every wait. It is long enough for a loaded machine; a wait ends as soon as its condition holds.
	waitTimeout = 2 * time.Minute
)

var (
	repository = filepath.Join("..", "..")
	chart      = filepath.Join(repository, "charts", "semmoe-operator")
	// checkpoint is a small model that the reference engine serves.
	checkpoint = filepath.Join(repository, "internal", "refengine", "testdata", "tiny-qwen3moe")
)

// world contains the cluster client and the state that the steps share.
type world struct {
	client.Client
	parent  *testing.T // the parent test of all steps
	traffic traffic
	// directory contains the directories of the hostPath volumes.
	directory string
	// initialCluster and initialTeam list the objects of the cluster, and of the model's namespace, before the test
	// creates its own.
	initialCluster, initialTeam []string
}

// newWorld returns the world of a test of the cluster. It skips the test without -args -cluster.
func newWorld(t *testing.T) *world {
	t.Helper()
	if !*onCluster {
		t.Skip("requires -args -cluster and a cluster of test/cluster; run make e2e-installation")
	}
	file := os.Getenv("KUBECONFIG")
	if file == "" {
		t.Fatal("KUBECONFIG is empty; set it to the file that test/cluster/up.sh prints")
	}
	config, err := clientcmd.BuildConfigFromFlags("", file)
	if err != nil {
		t.Fatal(err)
	}
	config.QPS, config.Burst = 200, 400
	ctrl.SetLogger(logr.Discard())
	scheme, err := controllers.Scheme()
	if err != nil {
		t.Fatal(err)
	}
	w := &world{parent: t, directory: t.TempDir()}
	if w.Client, err = client.New(config, client.Options{Scheme: scheme}); err != nil {
		t.Fatal(err)
	}
	// Only the current user can read the parents of TempDir, but pods with other users must read the volumes.
	for directory := w.directory; directory != os.TempDir() && directory != "/"; directory = filepath.Dir(directory) {
		if err := os.Chmod(directory, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	nodes := &corev1.NodeList{}
	if err := w.List(t.Context(), nodes); err != nil || len(nodes.Items) != 2 {
		t.Fatalf("the cluster has %d nodes, want 2; error %v", len(nodes.Items), err)
	}
	return w
}

// step is a part of a test that requires the earlier parts.
type step struct {
	name string
	run  func(*testing.T)
}

// run runs the steps until one fails, and logs how long each takes.
func (w *world) run(t *testing.T, steps []step) {
	t.Helper()
	for _, step := range steps {
		if !t.Run(step.name, func(t *testing.T) {
			begin := time.Now()
			step.run(t)
			t.Logf("%s: %s", step.name, seconds(time.Since(begin)))
		}) {
			w.explain(t)
			return
		}
	}
}

// explain logs the state of the cluster after a failure. The shortest output is last, because the end of a long log is
// read first.
func (w *world) explain(t *testing.T) {
	t.Helper()
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
	t.Logf("failed requests of all steps, with their start times:%s", reasons(failed, now))
}

// kubectl runs kubectl and fails the test on error.
func (w *world) kubectl(t *testing.T, stdin string, args ...string) string {
	t.Helper()
	output, err := kubectl(stdin, args...)
	if err != nil {
		t.Fatal(err)
	}
	return output
}

func kubectl(stdin string, args ...string) (string, error) {
	path, err := programs.Kubectl()
	if err != nil {
		return "", err
	}
	return programs.Run(path, nil, stdin, args...)
}

// helm runs Helm on the release.
func (w *world) helm(t *testing.T, command string, args ...string) {
	t.Helper()
	path, err := programs.Helm()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := programs.Run(path, nil, "", append([]string{command, release, "--namespace", system}, args...)...); err != nil {
		t.Fatal(err)
	}
}

// script runs a script of test/cluster.
func script(t *testing.T, name string, args ...string) {
	t.Helper()
	if _, err := programs.Run(filepath.Join(repository, "test", "cluster", name), nil, "", args...); err != nil {
		t.Fatal(err)
	}
}

// eventually polls until the function returns no error, and returns the elapsed time. After the limit, scaled by the
// load of the machine, it fails the test with the last error.
func eventually(t *testing.T, within time.Duration, what string, f func() error) time.Duration {
	t.Helper()
	begin := time.Now()
	var clock load.Clock
	for {
		late := clock.Elapsed() > within
		err := f()
		if err == nil {
			return time.Since(begin)
		}
		if late {
			t.Fatalf("%s: timed out after %v (scaled by machine load): %v", what, within, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func (w *world) moedeployment(ctx context.Context) (*semmoev1.MoEDeployment, error) {
	moed := &semmoev1.MoEDeployment{}
	return moed, w.Get(ctx, client.ObjectKey{Namespace: team, Name: model}, moed)
}

// pods returns the pods of a namespace with the labels, sorted by name.
func (w *world) pods(t *testing.T, namespace string, labels client.MatchingLabels) []corev1.Pod {
	t.Helper()
	list := &corev1.PodList{}
	if err := w.List(t.Context(), list, client.InNamespace(namespace), labels); err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(list.Items, func(a, b corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
	return list.Items
}

func (w *world) enginePods(t *testing.T) []corev1.Pod {
	t.Helper()
	return w.pods(t, team, client.MatchingLabels{semmoev1.LabelDeployment: model, semmoev1.LabelComponent: semmoev1.ComponentEngine})
}

func (w *world) routerPods(t *testing.T) []corev1.Pod {
	t.Helper()
	return w.pods(t, team, client.MatchingLabels{semmoev1.LabelDeployment: model, semmoev1.LabelComponent: semmoev1.ComponentRouter})
}

// serving returns the UID and the number of container restarts of each engine pod and request router pod, by pod name.
func (w *world) serving(t *testing.T) map[string]string {
	t.Helper()
	return podIdentities(append(w.enginePods(t), w.routerPods(t)...))
}

func podIdentities(all []corev1.Pod) map[string]string {
	pods := map[string]string{}
	for _, pod := range all {
		restarts := int32(0)
		for _, status := range append(slices.Clone(pod.Status.InitContainerStatuses), pod.Status.ContainerStatuses...) {
			restarts += status.RestartCount
		}
		pods[pod.Name] = fmt.Sprintf("%s, %d restarts", pod.UID, restarts)
	}
	return pods
}

// everything lists the objects of a namespace, or the cluster-scoped objects if the namespace is empty, by kind and
// name. It omits kinds that other components create, or that change without the test.
func everything(t *testing.T, namespace string) []string {
	t.Helper()
	scope := []string{"--namespaced=false"}
	if namespace != "" {
		scope = []string{"--namespaced=true"}
	}
	kinds, err := kubectl("", append([]string{"api-resources", "--verbs=list,delete", "-o", "name"}, scope...)...)
	if err != nil {
		t.Fatal(err)
	}
	passing := []string{"events", "events.events.k8s.io", "nodes", "leases.coordination.k8s.io", "csinodes.storage.k8s.io", "ipaddresses.networking.k8s.io", "apiservices.apiregistration.k8s.io"}
	wanted := slices.DeleteFunc(strings.Fields(kinds), func(kind string) bool { return slices.Contains(passing, kind) })
	args := []string{"get", strings.Join(wanted, ","), "-o", "name", "--ignore-not-found"}
	if namespace != "" {
		args = append(args, "--namespace", namespace)
	}
	names, err := kubectl("", args...)
	if err != nil {
		t.Fatal(err)
	}
	list := strings.Fields(names)
	slices.Sort(list)
	return list
}

// seconds formats a duration for messages.
func seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }

// identities returns the UIDs of all Sem-MoE objects and of all objects created for them, by kind and name. Of the pods
// it contains only those that serve the model.
func (w *world) identities(t *testing.T) map[string]string {
	t.Helper()
	found := w.serving(t)
	const format = `jsonpath={range .items[*]}{.kind}/{.metadata.name} {.metadata.uid}{"\n"}{end}`
	const kinds = "moedeployments,affinityprofiles,placementplans,statefulsets,deployments,jobs,configmaps,services,serviceaccounts,rolebindings,poddisruptionbudgets"
	for line := range strings.Lines(w.kubectl(t, "", "get", kinds, "--namespace", team, "-o", format)) {
		name, uid, _ := strings.Cut(strings.TrimSpace(line), " ")
		found[name] = uid
	}
	return found
}
