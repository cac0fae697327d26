// SPDX-License-Identifier: Apache-2.0

package gitops

import (
	"bytes"
	"flag"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "rewrite the expected results of all states, and argocd-cm.yaml")

// customizations is the directory with a health check, and objects in every state, for each kind. It has the layout of
// Argo CD's repository.
var customizations = filepath.Join("..", "..", "config", "argocd", "resource_customizations")

// kind is one of the kinds that have a health check.
type kind struct {
	// Name is group/Kind, like the name of the directory in Argo CD's repository.
	Name   string
	Script string
	// States are recorded objects, by their file relative to the directory of the kind.
	States map[string]*unstructured.Unstructured
}

// verdict contains the evaluations of an object: its health in Argo CD, its status by kstatus, and whether `kubectl
// wait` would succeed. Test files in Argo CD's repository have the first two fields.
type verdict struct {
	InputPath    string        `json:"inputPath"`
	HealthStatus health        `json:"healthStatus"`
	Kstatus      status.Status `json:"kstatus"`
	// Waited is true if the condition of waitCondition is met.
	Waited bool `json:"waited"`
}

// verdicts is the content of health_test.yaml.
type verdicts struct {
	Tests []verdict `json:"tests"`
}

// kinds returns the kinds that have a health check, with the recorded objects of each state.
func kinds(t *testing.T) []kind {
	t.Helper()
	scripts, err := filepath.Glob(filepath.Join(customizations, "*", "*", "health.lua"))
	if err != nil || len(scripts) != 4 {
		t.Fatalf("found %d health checks (error %v), want 4", len(scripts), err)
	}
	var all []kind
	for _, file := range scripts {
		dir := filepath.Dir(file)
		name, err := filepath.Rel(customizations, dir)
		if err != nil {
			t.Fatal(err)
		}
		k := kind{Name: filepath.ToSlash(name), Script: string(read(t, file)), States: map[string]*unstructured.Unstructured{}}
		states, err := filepath.Glob(filepath.Join(dir, "testdata", "*.yaml"))
		if err != nil || len(states) == 0 {
			t.Fatalf("found %d states of %s (error %v), want at least 1", len(states), k.Name, err)
		}
		for _, file := range states {
			// Decode integers as int64, like objects from the API server.
			text, err := yaml.YAMLToJSON(read(t, file))
			if err != nil {
				t.Fatal(err)
			}
			u := &unstructured.Unstructured{}
			if err := u.UnmarshalJSON(text); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			k.States["testdata/"+filepath.Base(file)] = u
		}
		all = append(all, k)
	}
	return all
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// golden compares a text with a file. With -update it first writes the text to the file.
func golden(t *testing.T, file string, got []byte) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(string(read(t, file)), string(got)); diff != "" {
		t.Errorf("%s differs (-want +got); go test ./test/gitops -args -update accepts it:\n%s", file, diff)
	}
}

// judge returns all evaluations of an object.
func (k kind) judge(t *testing.T, u *unstructured.Unstructured) verdict {
	t.Helper()
	h, err := runScript(t.Context(), k.Script, u.Object)
	if err != nil {
		t.Fatal(err)
	}
	computed, err := status.Compute(u)
	if err != nil {
		t.Fatal(err)
	}
	return verdict{HealthStatus: h, Kstatus: computed.Status, Waited: waits(u)}
}

// TestHealth compares the evaluations of each state with golden files, which reviewers read, and checks that the three
// evaluations of a state agree.
func TestHealth(t *testing.T) {
	for _, k := range kinds(t) {
		t.Run(k.Name, func(t *testing.T) {
			var all verdicts
			seen := map[string]bool{}
			for _, path := range slices.Sorted(maps.Keys(k.States)) {
				v := k.judge(t, k.States[path])
				v.InputPath = path
				seen[v.HealthStatus.Status] = true
				checkAgreement(t, k, path, v, k.States[path])
				all.Tests = append(all.Tests, v)
			}
			text, err := yaml.Marshal(all)
			if err != nil {
				t.Fatal(err)
			}
			golden(t, filepath.Join(customizations, filepath.FromSlash(k.Name), "health_test.yaml"), text)
			for _, want := range wantedHealth[k.Name] {
				if !seen[want] {
					t.Errorf("no recorded state has health %s", want)
				}
			}
		})
	}
}

// wantedHealth lists the healths that the recorded states of each kind must include.
var wantedHealth = map[string][]string{
	"semmoe.io/MoEDeployment":                  {"Healthy", "Progressing", "Degraded", "Suspended"},
	"semmoe.io/AffinityProfile":                {"Healthy", "Progressing", "Degraded"},
	"semmoe.io/PlacementPlan":                  {"Healthy", "Progressing", "Degraded"},
	"leaderworkerset.x-k8s.io/LeaderWorkerSet": {"Healthy", "Progressing"},
}

// checkAgreement checks that Argo CD, kstatus and kubectl wait for the same state of an object. The permitted
// differences are in this function and in docs/gitops.md: Argo CD also reports errors of an object that serves or that
// the operator retries, and paused objects.
func checkAgreement(t *testing.T, k kind, path string, v verdict, u *unstructured.Unstructured) {
	t.Helper()
	complain := func(rule string) { t.Errorf("%s %s: %s: %+v", k.Name, path, rule, v) }
	h := v.HealthStatus
	if !slices.Contains(statuses, h.Status) || len(h.Message) < 10 {
		complain("the health is unknown to Argo CD, or the message is shorter than 10 characters")
	}
	if strings.HasPrefix(k.Name, "leaderworkerset") {
		// kstatus does not evaluate the conditions of this kind: an object that has observed its generation is Current.
		if (h.Status == "Healthy") != v.Waited {
			complain("Healthy and the condition Available differ")
		}
		return
	}
	paused, _, _ := unstructured.NestedString(u.Object, "spec", "reconciliation")
	switch h.Status {
	case "Healthy":
		if v.Kstatus != status.CurrentStatus || !v.Waited {
			complain("a Healthy object must be Current and Ready")
		}
	case "Suspended":
		if paused != "Paused" && (v.Kstatus != status.CurrentStatus || !v.Waited) {
			complain("a Suspended object that is not paused waits for approval, and must be Current and Ready")
		}
	case "Degraded":
		if !holds(u, "Degraded") && !holds(u, "Stalled") {
			complain("a Degraded object must have condition Degraded or Stalled")
		}
	case "Progressing":
		// To kstatus, an object without a status is Current, regardless of its kind.
		if v.Kstatus != status.InProgressStatus && v.Kstatus != status.TerminatingStatus && u.Object["status"] != nil {
			complain("a Progressing object must be InProgress or Terminating")
		}
	}
	if v.Kstatus == status.FailedStatus && h.Status != "Degraded" {
		complain("a Failed object must be Degraded")
	}
}

// TestStaleAndDeleting checks, for every state, that an object is Progressing while it is deleted, and after a change
// of its spec until the operator has observed the new generation. No evaluation uses the status of an earlier
// generation.
func TestStaleAndDeleting(t *testing.T) {
	for _, k := range kinds(t) {
		t.Run(k.Name, func(t *testing.T) {
			for path, u := range k.States {
				if u.GetDeletionTimestamp() == nil {
					changed := u.DeepCopy()
					changed.SetGeneration(u.GetGeneration() + 1)
					if v := k.judge(t, changed); v.HealthStatus.Status != "Progressing" || v.Kstatus == status.FailedStatus || v.Waited {
						t.Errorf("%s after a change of the spec: %+v, want Progressing, not failed and not ready", path, v)
					}
				}
				deleted := u.DeepCopy()
				if err := unstructured.SetNestedField(deleted.Object, "2026-01-01T00:00:00Z", "metadata", "deletionTimestamp"); err != nil {
					t.Fatal(err)
				}
				if v := k.judge(t, deleted); v.HealthStatus.Status != "Progressing" || v.Kstatus != status.TerminatingStatus {
					t.Errorf("%s while it is deleted: %+v, want Progressing and Terminating", path, v)
				}
			}
		})
	}
}

// TestNoStatus checks that a script returns Progressing for an object without a status or with an incomplete one.
func TestNoStatus(t *testing.T) {
	for _, k := range kinds(t) {
		for name, given := range map[string]map[string]any{
			"none":             nil,
			"no conditions":    {"observedGeneration": int64(1)},
			"empty conditions": {"observedGeneration": int64(1), "conditions": []any{}},
			"unknown condition": {"observedGeneration": int64(1), "conditions": []any{
				map[string]any{"type": "Other", "status": "True", "reason": "R", "message": "m"},
			}},
		} {
			object := map[string]any{"metadata": map[string]any{"generation": int64(1)}, "spec": map[string]any{}}
			if given != nil {
				object["status"] = given
			}
			h, err := runScript(t.Context(), k.Script, object)
			if err != nil || h.Status != "Progressing" {
				t.Errorf("%s with status %q: health %+v, error %v; want Progressing", k.Name, name, h, err)
			}
		}
	}
}

// TestKindsAgree checks that the scripts of the operator's kinds agree. Argo CD runs one script per kind, and
// scripts cannot import each other. The kinds have the same conditions: the scripts of AffinityProfile and
// PlacementPlan are equal. The script of MoEDeployment, which can also be paused or wait for approval, contains all
// lines of the other scripts in the same order.
func TestKindsAgree(t *testing.T) {
	script := func(kind string) []string {
		return strings.Split(string(read(t, filepath.Join(customizations, "semmoe.io", kind, "health.lua"))), "\n")
	}
	profile := script("AffinityProfile")
	if diff := cmp.Diff(profile, script("PlacementPlan")); diff != "" {
		t.Errorf("the health checks of PlacementPlan and AffinityProfile differ:\n%s", diff)
	}
	rest := script("MoEDeployment")
	for _, line := range profile {
		at := slices.Index(rest, line)
		if at < 0 {
			t.Fatalf("the health check of MoEDeployment lacks this line, or has it in another order: %s", line)
		}
		rest = rest[at+1:]
	}
}

// TestConfigMap checks that the ConfigMap for Argo CD contains the scripts unchanged.
func TestConfigMap(t *testing.T) {
	data := map[string]string{}
	for _, k := range kinds(t) {
		data["resource.customizations.health."+strings.ReplaceAll(k.Name, "/", "_")] = k.Script
	}
	data[actionsKey] = actionsOf(t)
	text, err := yaml.Marshal(map[string]any{"data": data})
	if err != nil {
		t.Fatal(err)
	}
	const comment = "# Health checks and actions for Argo CD, of the scripts below resource_customizations:\n" +
		"#   kubectl patch configmap argocd-cm --namespace argocd --patch-file config/argocd/argocd-cm.yaml\n"
	golden(t, filepath.Join(customizations, "..", "argocd-cm.yaml"), slices.Concat([]byte(comment), bytes.TrimSpace(text), []byte("\n")))
}
