package gitops

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/semmoe/operator/test/apiserver"
	"github.com/semmoe/operator/test/localcluster"
)

// waitCondition is what people wait for in an object.
func waitCondition(u *unstructured.Unstructured) string {
	if u.GetKind() == "LeaderWorkerSet" {
		return "Available"
	}
	return "Ready"
}

// waits tells whether `kubectl wait` for that condition would go on: TestKubectlWait compares it with kubectl.
func waits(u *unstructured.Unstructured) bool { return holds(u, waitCondition(u)) }

// holds tells that a condition is True for the present generation.
func holds(u *unstructured.Unstructured, kind string) bool {
	conditions, _, _ := unstructured.NestedSlice(u.Object, "status", "conditions")
	for _, item := range conditions {
		condition, _ := item.(map[string]any)
		if condition["type"] == kind {
			observed, found, _ := unstructured.NestedInt64(condition, "observedGeneration")
			if !found {
				observed, found, _ = unstructured.NestedInt64(u.Object, "status", "observedGeneration")
			}
			return condition["status"] == "True" && (!found || observed >= u.GetGeneration())
		}
	}
	return false
}

// kubectl itself, asked of every state at a real API server, goes on where the other tests say that it does.
func TestKubectlWait(t *testing.T) {
	binaries, err := localcluster.FindBinaries()
	if err != nil {
		t.Fatal(err)
	}
	server, err := apiserver.Start(&envtest.Environment{
		ErrorIfCRDPathMissing: true, CRDDirectoryPaths: []string{filepath.Join("..", "..", "config", "crd"), groupsDefinition(t)},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	config := server.Config
	config.QPS, config.Burst = 1000, 1000
	api, err := client.New(config, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, server.KubeConfig, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, k := range kinds(t) {
		paths := map[string]string{} // by the names of what was made
		var sample *unstructured.Unstructured
		for path, u := range k.States {
			if u.GetDeletionTimestamp() != nil {
				continue // it cannot be made
			}
			name := fmt.Sprintf("state-%d", len(paths))
			if err := recreate(t.Context(), api, u, name); err != nil {
				t.Fatalf("%s %s: %v", k.Name, path, err)
			}
			paths[name], sample = path, u
		}
		output := kubectlWait(t, filepath.Join(binaries, "kubectl"), kubeconfig, sample)
		for name, path := range paths {
			if got, want := strings.Contains(output, "/"+name+" condition met"), waits(k.States[path]); got != want {
				t.Errorf("kubectl wait for %s of %s %s: %v, want %v\n%s", waitCondition(sample), k.Name, path, got, want, output)
			}
		}
	}
}

// kubectlWait asks kubectl, once, which objects of a kind are what is waited for.
func kubectlWait(t *testing.T, kubectl, kubeconfig string, sample *unstructured.Unstructured) string {
	t.Helper()
	resource := strings.ToLower(sample.GetKind()) + "s." + sample.GroupVersionKind().Group
	command := exec.CommandContext(t.Context(), kubectl, "wait", "--for=condition="+waitCondition(sample), "--timeout=0", "--all", resource)
	command.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig)
	output, err := command.CombinedOutput()
	var ended *exec.ExitError
	if err != nil && !errors.As(err, &ended) { // it fails where the condition of one is not met
		t.Fatal(err)
	}
	return string(output)
}

// groupsDefinition is the definition of LeaderWorkerSet, of the release whose controllers the end-to-end suite runs.
func groupsDefinition(t *testing.T) string {
	t.Helper()
	command := exec.CommandContext(t.Context(), "go", "mod", "download", "-json", "sigs.k8s.io/lws")
	command.Dir = filepath.Join("..", "leaderworkerset")
	output, err := command.Output()
	var found struct{ Dir string }
	if err := errors.Join(err, json.Unmarshal(output, &found)); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	return filepath.Join(found.Dir, "config", "crd", "bases", "leaderworkerset.x-k8s.io_leaderworkersets.yaml")
}

// recreate brings an object of that state into being, under a name of its own. Its generation begins at 1 there, so what it tells of
// generations is told of as much later, or earlier, ones.
func recreate(ctx context.Context, api client.Client, u *unstructured.Unstructured, name string) error {
	state := u.DeepCopy()
	made := &unstructured.Unstructured{Object: map[string]any{"apiVersion": u.GetAPIVersion(), "kind": u.GetKind(), "spec": state.Object["spec"]}}
	made.SetName(name)
	made.SetNamespace("default")
	if err := api.Create(ctx, made); err != nil {
		return err
	}
	if state.Object["status"] == nil {
		return nil
	}
	shift := made.GetGeneration() - u.GetGeneration()
	shiftGeneration(state.Object["status"].(map[string]any), shift)
	conditions, _, _ := unstructured.NestedSlice(state.Object, "status", "conditions")
	for _, condition := range conditions {
		shiftGeneration(condition.(map[string]any), shift)
	}
	if len(conditions) > 0 {
		if err := unstructured.SetNestedSlice(state.Object, conditions, "status", "conditions"); err != nil {
			return err
		}
	}
	made.Object["status"] = state.Object["status"]
	return api.Status().Update(ctx, made)
}

// shiftGeneration changes an observedGeneration, where there is one.
func shiftGeneration(object map[string]any, by int64) {
	if observed, found := object["observedGeneration"].(int64); found {
		object["observedGeneration"] = max(0, observed+by)
	}
}
