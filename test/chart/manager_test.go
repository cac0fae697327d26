// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/ports"
	"github.com/semmoe/operator/test/processes"
	"github.com/semmoe/operator/test/programs"
	"github.com/semmoe/operator/test/tier"
)

// TestManagerOfOneNamespace checks that a manager for one namespace has the rights that it needs there and none in
// other namespaces, and that only authorized users can read its metrics.
func TestManagerOfOneNamespace(t *testing.T) {
	a := startedAPI(t)
	const values = "{namespaces: [team-a], image: {repository: registry.example/semmoe}}"
	a.install(t, values)
	t.Cleanup(func() { a.helm(t, "", "uninstall") })
	metrics := ports.Address(t)
	manager := a.startManager(t, render(t, values, withoutCRDs...), metrics)

	theirs := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "m"}, Spec: policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{}}}
	if err := a.Create(t.Context(), theirs); err != nil {
		t.Fatal(err)
	}
	ours, others := moedeployment("team-a"), moedeployment("team-c")
	for _, moed := range []*semmoev1.MoEDeployment{ours, others} {
		if err := a.Create(t.Context(), moed); err != nil {
			t.Fatal(err)
		}
	}
	a.waitFor(t, manager, "an inspection by the chart's image", func(ctx context.Context) (bool, error) {
		jobs := &batchv1.JobList{}
		err := a.List(ctx, jobs, client.InNamespace("team-a"))
		return len(jobs.Items) == 1 && jobs.Items[0].Spec.Template.Spec.Containers[0].Image == "registry.example/semmoe:dev", err
	})
	// The manager binds the role of request routers to their ServiceAccount first. This requires the right to bind the
	// role, or all rights of the role.
	a.waitFor(t, manager, "a request router by the chart's image", func(ctx context.Context) (bool, error) {
		routers := &appsv1.DeploymentList{}
		err := a.List(ctx, routers, client.InNamespace("team-a"))
		return len(routers.Items) == 1 && routers.Items[0].Spec.Template.Spec.Containers[0].Image == "registry.example/semmoe:dev", err
	})
	a.waitFor(t, manager, "a status", func(ctx context.Context) (bool, error) {
		err := a.Get(ctx, client.ObjectKeyFromObject(ours), ours)
		return len(ours.Status.Conditions) > 0, err
	})
	// The manager is allowed to read an object of another owner that has the name of one of its objects.
	a.waitFor(t, manager, "a condition that reports the conflicting object", func(ctx context.Context) (bool, error) {
		err := a.Get(ctx, client.ObjectKeyFromObject(ours), ours)
		degraded := meta.FindStatusCondition(ours.Status.Conditions, semmoev1.ConditionDegraded)
		return degraded != nil && strings.Contains(degraded.Message, "PodDisruptionBudget m exists and belongs to another owner"), err
	})
	found := &policyv1.PodDisruptionBudget{}
	if err := a.Get(t.Context(), client.ObjectKeyFromObject(theirs), found); err != nil || found.ResourceVersion != theirs.ResourceVersion {
		t.Errorf("an object of another owner was changed: error %v, %v", err, found)
	}
	if err := a.Delete(t.Context(), theirs); err != nil {
		t.Error(err)
	}
	if err := a.Get(t.Context(), client.ObjectKeyFromObject(others), others); err != nil || len(others.Status.Conditions) > 0 {
		t.Errorf("the MoEDeployment of an unwatched namespace has a status: error %v, %+v", err, others.Status)
	}
	// The metrics server starts independently of the controllers, possibly later.
	a.waitFor(t, manager, "metrics", func(ctx context.Context) (bool, error) {
		_, _, err := get(ctx, "https://"+metrics+"/metrics", "")
		return err == nil, nil
	})
	a.checkMetrics(t, "https://"+metrics+"/metrics")
	a.checkRights(t)

	for _, moed := range []*semmoev1.MoEDeployment{ours, others} {
		if err := a.Delete(t.Context(), moed); err != nil {
			t.Error(err)
		}
	}
	log, err := os.ReadFile(manager.Log())
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(log)) {
		if strings.Contains(line, "forbidden") {
			t.Errorf("the manager lacks a right: %s", line)
		}
	}
}

func moedeployment(namespace string) *semmoev1.MoEDeployment {
	return &semmoev1.MoEDeployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "m"},
		Spec: semmoev1.MoEDeploymentSpec{
			Model:       semmoev1.ModelSpec{Volume: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
			Engine:      semmoev1.EngineSpec{Image: "engine:1"},
			Parallelism: semmoev1.ParallelismSpec{ExpertParallelSize: 4},
		},
	}
}

// startManager runs the manager until the test ends, with the arguments and the ServiceAccount from the chart. Leader
// election is disabled, because no other manager runs.
func (a *apiServer) startManager(t *testing.T, rendered []*unstructured.Unstructured, metrics string) *processes.Process {
	t.Helper()
	args := slices.DeleteFunc(managerArguments(t, rendered), func(arg string) bool { return arg == "--leader-elect" })
	for i, arg := range args {
		arg = strings.Replace(arg, "[$(POD_IP)]:8443", metrics, 1)
		arg = strings.Replace(arg, "[$(POD_IP)]:9443", ports.Address(t), 1)
		args[i] = strings.Replace(arg, "[$(POD_IP)]:8081", "127.0.0.1:0", 1)
	}
	env := []string{"KUBECONFIG=" + a.kubeconfigOf(t, namespace, "semmoe-manager"), "POD_NAMESPACE=" + namespace, "POD_NAME=none"}
	semmoe, err := programs.Built("semmoe")
	tier.Require(t, err)
	manager, err := processes.Spawn(filepath.Join(t.TempDir(), "manager.log"), env, semmoe, args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := manager.Stop(); err != nil {
			t.Error(err)
		}
	})
	return manager
}

func managerArguments(t *testing.T, rendered []*unstructured.Unstructured) []string {
	t.Helper()
	for _, u := range rendered {
		if pod := podOf(t, u); pod != nil && u.GetName() == "semmoe-manager" {
			return pod.Spec.Containers[0].Args
		}
	}
	t.Fatal("the chart has no manager")
	return nil
}

// token returns a token of a ServiceAccount.
func (a *apiServer) token(t *testing.T, namespace, name string) string {
	t.Helper()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	request := &authenticationv1.TokenRequest{}
	if err := a.SubResource("token").Create(t.Context(), account, request); err != nil {
		t.Fatal(err)
	}
	return request.Status.Token
}

// kubeconfigOf returns the path of a kubeconfig with the token of a ServiceAccount.
func (a *apiServer) kubeconfigOf(t *testing.T, namespace, name string) string {
	t.Helper()
	config, err := clientcmd.Load(a.server.KubeConfig)
	if err != nil {
		t.Fatal(err)
	}
	user := config.Contexts[config.CurrentContext].AuthInfo
	config.AuthInfos = map[string]*clientcmdapi.AuthInfo{user: {Token: a.token(t, namespace, name)}}
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*config, file); err != nil {
		t.Fatal(err)
	}
	return file
}

func (a *apiServer) waitFor(t *testing.T, manager *processes.Process, what string, done wait.ConditionWithContextFunc) {
	t.Helper()
	if err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, time.Minute, true, done); err != nil {
		log, _ := os.ReadFile(manager.Log())
		t.Fatalf("%s: %v\n%s", what, err, log)
	}
}

// checkMetrics reads the metrics without authentication, as a user without rights, and as a user who is allowed to read
// them.
func (a *apiServer) checkMetrics(t *testing.T, url string) {
	t.Helper()
	for _, name := range []string{"unprivileged", "prometheus"} {
		if err := a.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "team-c", Name: name}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "prometheus"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "semmoe-metrics-reader"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "team-c", Name: "prometheus"}},
	}); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		who, token string
		status     int
	}{
		{"anonymous", "", http.StatusUnauthorized},
		{"unprivileged", a.token(t, "team-c", "unprivileged"), http.StatusForbidden},
		{"prometheus", a.token(t, "team-c", "prometheus"), http.StatusOK},
	} {
		status, body, err := get(t.Context(), url, tc.token)
		if err != nil || status != tc.status {
			t.Errorf("metrics for user %s: status %d, want %d (error %v)", tc.who, status, tc.status, err)
		}
		if has := strings.Contains(body, "controller_runtime_reconcile_total"); has != (tc.status == http.StatusOK) {
			t.Errorf("unexpected metrics for user %s: %.200s", tc.who, body)
		}
	}
}

func get(ctx context.Context, url, token string) (int, string, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	// The manager signs its own certificate.
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}} //nolint:gosec // on the loopback interface
	defer transport.CloseIdleConnections()
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return 0, "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return response.StatusCode, string(body), err
}

// checkRights checks the rights of the ServiceAccounts of an installation for team-a, in team-a and in other
// namespaces.
func (a *apiServer) checkRights(t *testing.T) {
	t.Helper()
	for _, tc := range []struct {
		account, verb, resource, namespace string
		allowed                            bool
	}{
		{"semmoe-manager", "list", "moedeployments.semmoe.io", "team-a", true},
		{"semmoe-manager", "create", "jobs.batch", "team-a", true},
		{"semmoe-manager", "list", "moedeployments.semmoe.io", "team-c", false},
		{"semmoe-manager", "create", "jobs.batch", "team-c", false},
		{"semmoe-manager", "create", "jobs.batch", namespace, false},
		{"semmoe-manager", "get", "secrets", "team-a", false},
		{"semmoe-manager", "update", "leases.coordination.k8s.io", namespace, true},
		{"semmoe-store", "get", "pods", "team-a", true},
		{"semmoe-store", "get", "pods", "team-c", false},
		{"semmoe-store", "create", "tokenreviews.authentication.k8s.io", "", true},
	} {
		output, err := a.kubectl("", "auth", "can-i", tc.verb, tc.resource, "--namespace", tc.namespace, "--as", fmt.Sprintf("system:serviceaccount:%s:%s", namespace, tc.account))
		if want := map[bool]string{true: "yes", false: "no"}[tc.allowed]; strings.TrimSpace(output) != want {
			t.Errorf("can-i as %s: %s %s in namespace %q: %s (error %v), want %s", tc.account, tc.verb, tc.resource, tc.namespace, output, err, want)
		}
	}
}
