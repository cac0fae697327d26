// SPDX-License-Identifier: Apache-2.0

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
	"github.com/semmoe/operator/test/tier"
)

// waitCondition returns the condition that users wait for.
func waitCondition(u *unstructured.Unstructured) string {
	if u.GetKind() == "LeaderWorkerSet" {
		return "Available"
	}
	return "Ready"
}

// waits reports whether `kubectl wait` for that condition would succeed. TestKubectlWait compares the result with
// kubectl.
func waits(u *unstructured.Unstructured) bool { return holds(u, waitCondition(u)) }

// holds reports whether a condition is True for the current generation.
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

// TestKubectlWait creates an object in every state at a real API server, and checks that kubectl wait agrees with
// waits.
func TestKubectlWait(t *testing.T) {
	binaries, err := localcluster.FindBinaries()
	tier.Require(t, err)
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
		paths := map[string]string{} // by the names of the created objects
		var sample *unstructured.Unstructured
		for path, u := range k.States {
			if u.GetDeletionTimestamp() != nil {
				continue // an object cannot be created with a deletion timestamp
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

// kubectlWait runs kubectl wait without a timeout for all objects of a kind, and returns its output.
func kubectlWait(t *testing.T, kubectl, kubeconfig string, sample *unstructured.Unstructured) string {
	t.Helper()
	resource := strings.ToLower(sample.GetKind()) + "s." + sample.GroupVersionKind().Group
	command := exec.CommandContext(t.Context(), kubectl, "wait", "--for=condition="+waitCondition(sample), "--timeout=0", "--all", resource)
	command.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig)
	output, err := command.CombinedOutput()
	var ended *exec.ExitError
	if err != nil && !errors.As(err, &ended) { // kubectl fails if the condition of an object is not met
		t.Fatal(err)
	}
	return string(output)
}

// groupsDefinition returns the path of the CRD of LeaderWorkerSet, of the release whose controllers the end-to-end
// suite runs.
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

// recreate creates an object with the spec and the status of a recorded object, under the given name. The generation of
// the new object starts at 1, so the observed generations in the status are shifted by the difference.
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

// shiftGeneration adds to an observedGeneration, if the object has one.
func shiftGeneration(object map[string]any, by int64) {
	if observed, found := object["observedGeneration"].(int64); found {
		object["observedGeneration"] = max(0, observed+by)
	}
}
