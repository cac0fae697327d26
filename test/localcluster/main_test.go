// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/semmoe/operator/test/load"
	"github.com/semmoe/operator/test/tier"
)

// parentDir is the environment variable with the state directory for a copy of this test program that only starts a
// cluster and waits to be killed.
const parentDir = "LOCALCLUSTER_TEST_PARENT_DIR"

// refusedDir is the environment variable with the state directory for a copy of this test program that tries to start a
// cluster where no user namespace is allowed.
const refusedDir = "LOCALCLUSTER_TEST_REFUSED_DIR"

// testImage is the image of the test program; see internal/testapp.
const testImage = "test.local/app:1"

const testGPUs = 8

// shared is the cluster that all tests use, each test in its own namespace.
var shared struct {
	cluster *Cluster
	client  kubernetes.Interface
	app     string
	err     error
}

func TestMain(m *testing.M) {
	RunChildIfAsked()
	if dir := os.Getenv(parentDir); dir != "" {
		startAndWait(dir)
	}
	if dir := os.Getenv(refusedDir); dir != "" {
		startRefused(dir)
	}
	os.Exit(runTests(m))
}

func runTests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "localcluster-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	shared.err = startShared(dir)
	code := m.Run()
	if shared.cluster == nil {
		return code
	}
	start := time.Now()
	if err := shared.cluster.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, "stop:", err)
		return 1
	}
	if took := time.Since(start); took > 3*time.Second {
		fmt.Fprintf(os.Stderr, "stop took %s, want 3 s at most\n", took)
		return 1
	}
	return code
}

func startShared(dir string) error {
	binaries, err := FindBinaries()
	if err != nil {
		return err
	}
	if shared.app, err = buildApp(dir); err != nil {
		return err
	}
	shared.cluster, err = Start(context.Background(), Options{
		Binaries: binaries, Images: map[string]string{testImage: shared.app}, GPUs: testGPUs, Forward: 32, Log: os.Stderr,
	})
	if err != nil {
		return err
	}
	shared.client, err = kubernetes.NewForConfig(shared.cluster.RESTConfig())
	return err
}

func buildApp(dir string) (string, error) {
	path := filepath.Join(dir, "testapp")
	build := exec.Command("go", "build", "-o", path, "./internal/testapp")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("failed to build testapp: %w: %s", err, out)
	}
	return path, nil
}

// startAndWait runs the parent process that TestKilledParent kills.
func startAndWait(dir string) {
	binaries, err := FindBinaries()
	if err == nil {
		_, err = Start(context.Background(), Options{Binaries: binaries, Dir: dir})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("up")
	select {}
}

// startRefused runs the process of TestRefusedNamespaces. It is root in a separate user namespace, so it may set the
// namespace limit.
func startRefused(dir string) {
	err := os.WriteFile("/proc/sys/user/max_user_namespaces", []byte("0"), 0o644)
	var binaries string
	if err == nil {
		binaries, err = FindBinaries()
	}
	if err == nil {
		_, err = Start(context.Background(), Options{Binaries: binaries, Dir: dir})
	}
	fmt.Println(errors.Is(err, ErrNamespacesRefused), err)
	os.Exit(0)
}

// sandboxed returns a client and a new namespace. It skips the test if the machine cannot run a cluster.
func sandboxed(t *testing.T) (kubernetes.Interface, string) {
	t.Helper()
	needCluster(t)
	t.Parallel()
	ctx := t.Context()
	ns, err := shared.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: strings.ToLower(strings.ReplaceAll(t.Name(), "/", "-")) + "-"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, 20*time.Second, func() error {
		_, err := shared.client.CoreV1().ServiceAccounts(ns.Name).Get(ctx, "default", metav1.GetOptions{})
		return err
	})
	t.Cleanup(func() {
		if t.Failed() {
			dumpPods(t, ns.Name)
		}
		_ = shared.client.CoreV1().Namespaces().Delete(context.Background(), ns.Name, metav1.DeleteOptions{})
	})
	return shared.client, ns.Name
}

func needCluster(t *testing.T) {
	t.Helper()
	if errors.Is(shared.err, ErrNamespacesRefused) {
		t.Skip(shared.err)
	}
	tier.Require(t, shared.err)
}

// dumpPods logs the pods of a namespace after a failure.
func dumpPods(t *testing.T, namespace string) {
	pods, err := shared.client.CoreV1().Pods(namespace).List(context.Background(), metav1.ListOptions{})
	if err != nil {
		t.Log(err)
		return
	}
	for _, p := range pods.Items {
		t.Logf("pod %s: %s", p.Name, p.Status.String())
		for _, c := range append(p.Spec.InitContainers, p.Spec.Containers...) {
			log, _ := os.ReadFile(shared.cluster.Logs(namespace, p.Name, c.Name))
			t.Logf("log of %s: %s", c.Name, log)
		}
	}
}

// eventually polls until check succeeds. It fails after limit, scaled by the load of the machine.
func eventually(t *testing.T, limit time.Duration, check func() error) {
	t.Helper()
	var clock load.Clock
	for {
		late := clock.Elapsed() > limit
		err := check()
		if err == nil {
			return
		}
		if late {
			t.Fatalf("after %s: %v", limit, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// podOf returns a pod with one container "main" that runs testapp.
func podOf(name string, args ...string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}},
		Spec: corev1.PodSpec{
			RestartPolicy:                 corev1.RestartPolicyNever,
			TerminationGracePeriodSeconds: ptr(int64(5)),
			Containers:                    []corev1.Container{appContainer("main", args...)},
		},
	}
}

// serverOf returns a pod that runs the test server on port 80 of the pod's address.
func serverOf(name string, flags ...string) *corev1.Pod {
	pod := podOf(name, append([]string{"serve", "--address=$(POD_IP):80", "--text=" + name}, flags...)...)
	pod.Spec.RestartPolicy = corev1.RestartPolicyAlways
	return pod
}

func appContainer(name string, args ...string) corev1.Container {
	return corev1.Container{
		Name: name, Image: testImage, Args: args,
		Env: []corev1.EnvVar{{Name: "POD_IP", ValueFrom: &corev1.EnvVarSource{
			FieldRef: &corev1.ObjectFieldSelector{FieldPath: "status.podIP"},
		}}},
	}
}

func ptr[T any](v T) *T { return &v }

func create(t *testing.T, client kubernetes.Interface, namespace string, pod *corev1.Pod) *corev1.Pod {
	t.Helper()
	created, err := client.CoreV1().Pods(namespace).Create(t.Context(), pod, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return created
}

// waitPod polls until check accepts the pod, and returns it.
func waitPod(t *testing.T, client kubernetes.Interface, namespace, name string, check func(*corev1.Pod) error) *corev1.Pod {
	t.Helper()
	var pod *corev1.Pod
	eventually(t, 30*time.Second, func() error {
		var err error
		if pod, err = client.CoreV1().Pods(namespace).Get(t.Context(), name, metav1.GetOptions{}); err != nil {
			return err
		}
		return check(pod)
	})
	return pod
}

func inPhase(phase corev1.PodPhase) func(*corev1.Pod) error {
	return func(p *corev1.Pod) error {
		if p.Status.Phase != phase {
			return fmt.Errorf("pod %s is %s, want %s", p.Name, p.Status.Phase, phase)
		}
		return nil
	}
}

func isReady(p *corev1.Pod) error {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
			return nil
		}
	}
	return fmt.Errorf("pod %s is not ready: %s", p.Name, p.Status.String())
}

// waitGone polls until the pod's object no longer exists.
func waitGone(t *testing.T, client kubernetes.Interface, namespace, name string) {
	t.Helper()
	eventually(t, 30*time.Second, func() error {
		_, err := client.CoreV1().Pods(namespace).Get(t.Context(), name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("pod %s still exists (%v)", name, err)
	})
}

// logOf returns the log of a container's last run.
func logOf(t *testing.T, namespace, pod, container string) string {
	t.Helper()
	data, err := os.ReadFile(shared.cluster.Logs(namespace, pod, container))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// runToEnd runs a pod until it reaches the given terminal phase, and returns its log.
func runToEnd(t *testing.T, client kubernetes.Interface, namespace string, pod *corev1.Pod, phase corev1.PodPhase) string {
	t.Helper()
	create(t, client, namespace, pod)
	waitPod(t, client, namespace, pod.Name, inPhase(phase))
	return logOf(t, namespace, pod.Name, "main")
}

// waitJob polls until the job has the condition.
func waitJob(t *testing.T, client kubernetes.Interface, namespace, name string, kind batchv1.JobConditionType) *batchv1.Job {
	t.Helper()
	var job *batchv1.Job
	eventually(t, 30*time.Second, func() error {
		var err error
		if job, err = client.BatchV1().Jobs(namespace).Get(t.Context(), name, metav1.GetOptions{}); err != nil {
			return err
		}
		for _, c := range job.Status.Conditions {
			if c.Type == kind && c.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("job %s is not %s: %s", name, kind, job.Status.String())
	})
	return job
}
