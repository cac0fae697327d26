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

var update = flag.Bool("update", false, "write what is said of each state, and argocd-cm.yaml, anew")

// customizations holds a health check and objects of every state for each kind, as Argo CD's own repository has them.
var customizations = filepath.Join("..", "..", "config", "argocd", "resource_customizations")

// kind is one of the kinds that have a health check.
type kind struct {
	// Name is group/Kind, as Argo CD names its directory.
	Name   string
	Script string
	// States are real objects by the file that holds them, relative to the kind's directory.
	States map[string]*unstructured.Unstructured
}

// verdict is what is said of an object: its health in Argo CD, its status by kstatus, and whether `kubectl wait` would go on. Argo CD's
// repository has files of the first two fields.
type verdict struct {
	InputPath    string        `json:"inputPath"`
	HealthStatus health        `json:"healthStatus"`
	Kstatus      status.Status `json:"kstatus"`
	// Waited tells that the condition of waitCondition is met.
	Waited bool `json:"waited"`
}

// verdicts is the content of health_test.yaml.
type verdicts struct {
	Tests []verdict `json:"tests"`
}

// kinds are all of them, the objects of a state as the suite has seen them.
func kinds(t *testing.T) []kind {
	t.Helper()
	scripts, err := filepath.Glob(filepath.Join(customizations, "*", "*", "health.lua"))
	if err != nil || len(scripts) != 4 {
		t.Fatalf("%d health checks, %v", len(scripts), err)
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
			t.Fatalf("%d states of %s, %v", len(states), k.Name, err)
		}
		for _, file := range states {
			// JSON as the API server's: whole numbers are int64.
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

// golden compares a text with a file, or writes it there where that is asked for.
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

// judge says all that is said of an object.
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

// What is said of each state is written down, and read in review; whatever the state, the three do not contradict each other.
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
					t.Errorf("no state is %s", want)
				}
			}
		})
	}
}

// wantedHealth are the healths of each kind that there must be a state of.
var wantedHealth = map[string][]string{
	"semmoe.io/MoEDeployment":                  {"Healthy", "Progressing", "Degraded", "Suspended"},
	"semmoe.io/AffinityProfile":                {"Healthy", "Progressing", "Degraded"},
	"semmoe.io/PlacementPlan":                  {"Healthy", "Progressing", "Degraded"},
	"leaderworkerset.x-k8s.io/LeaderWorkerSet": {"Healthy", "Progressing"},
}

// checkAgreement: who waits for an object by one of the three gets what the others would wait for. Where they may differ is written here
// and in docs/gitops.md: Argo CD tells also what is wrong with an object that serves, or that is tried again by itself, and what
// somebody has paused.
func checkAgreement(t *testing.T, k kind, path string, v verdict, u *unstructured.Unstructured) {
	t.Helper()
	complain := func(rule string) { t.Errorf("%s %s: %s: %+v", k.Name, path, rule, v) }
	h := v.HealthStatus
	if !slices.Contains(statuses, h.Status) || len(h.Message) < 10 {
		complain("Argo CD knows no such health, or nobody learns from the message")
	}
	if strings.HasPrefix(k.Name, "leaderworkerset") {
		// kstatus knows none of its conditions, and takes each for Current that has observed the generation.
		if (h.Status == "Healthy") != v.Waited {
			complain("Healthy, and waited for by Available, are not the same")
		}
		return
	}
	paused, _, _ := unstructured.NestedString(u.Object, "spec", "reconciliation")
	switch h.Status {
	case "Healthy":
		if v.Kstatus != status.CurrentStatus || !v.Waited {
			complain("Healthy is what is Current and Ready")
		}
	case "Suspended":
		if paused != "Paused" && (v.Kstatus != status.CurrentStatus || !v.Waited) {
			complain("what waits for somebody's word, and is not paused, serves")
		}
	case "Degraded":
		if !holds(u, "Degraded") && !holds(u, "Stalled") {
			complain("Degraded without a condition that says so")
		}
	case "Progressing":
		// What nobody has looked at yet, kstatus takes for Current, of any kind.
		if v.Kstatus != status.InProgressStatus && v.Kstatus != status.TerminatingStatus && u.Object["status"] != nil {
			complain("Progressing is what is InProgress")
		}
	}
	if v.Kstatus == status.FailedStatus && h.Status != "Degraded" {
		complain("Failed is Degraded")
	}
}

// Whatever an object's state is: after a change of its spec it is Progressing until the operator has looked, and so it is while it is
// deleted. None of the three takes what was said of the generation before for the present one's.
func TestStaleAndDeleting(t *testing.T) {
	for _, k := range kinds(t) {
		t.Run(k.Name, func(t *testing.T) {
			for path, u := range k.States {
				if u.GetDeletionTimestamp() == nil {
					changed := u.DeepCopy()
					changed.SetGeneration(u.GetGeneration() + 1)
					if v := k.judge(t, changed); v.HealthStatus.Status != "Progressing" || v.Kstatus == status.FailedStatus || v.Waited {
						t.Errorf("%s after a change: %+v", path, v)
					}
				}
				deleted := u.DeepCopy()
				if err := unstructured.SetNestedField(deleted.Object, "2026-01-01T00:00:00Z", "metadata", "deletionTimestamp"); err != nil {
					t.Fatal(err)
				}
				if v := k.judge(t, deleted); v.HealthStatus.Status != "Progressing" || v.Kstatus != status.TerminatingStatus {
					t.Errorf("%s being deleted: %+v", path, v)
				}
			}
		})
	}
}

// A script without the operator's status, or with half of it, has an answer all the same.
func TestNoStatus(t *testing.T) {
	for _, k := range kinds(t) {
		for name, given := range map[string]map[string]any{
			"none":               nil,
			"no conditions":      {"observedGeneration": int64(1)},
			"conditions of none": {"observedGeneration": int64(1), "conditions": []any{}},
			"another's": {"observedGeneration": int64(1), "conditions": []any{
				map[string]any{"type": "Other", "status": "True", "reason": "R", "message": "m"},
			}},
		} {
			object := map[string]any{"metadata": map[string]any{"generation": int64(1)}, "spec": map[string]any{}}
			if given != nil {
				object["status"] = given
			}
			h, err := runScript(t.Context(), k.Script, object)
			if err != nil || h.Status != "Progressing" {
				t.Errorf("%s with status %s: %+v, %v", k.Name, name, h, err)
			}
		}
	}
}

// Argo CD takes one script for each kind, and none can take from another. The operator's kinds have the same conditions: the scripts of
// two are the same, and the third, which can also be paused and wait for a person, judges by each line of theirs, in their order.
func TestKindsAreJudgedAlike(t *testing.T) {
	script := func(kind string) []string {
		return strings.Split(string(read(t, filepath.Join(customizations, "semmoe.io", kind, "health.lua"))), "\n")
	}
	profile := script("AffinityProfile")
	if diff := cmp.Diff(profile, script("PlacementPlan")); diff != "" {
		t.Errorf("a PlacementPlan is judged otherwise than an AffinityProfile:\n%s", diff)
	}
	rest := script("MoEDeployment")
	for _, line := range profile {
		at := slices.Index(rest, line)
		if at < 0 {
			t.Fatalf("a MoEDeployment is not judged by, or not in this order: %s", line)
		}
		rest = rest[at+1:]
	}
}

// The ConfigMap for Argo CD has the scripts as they are.
func TestConfigMap(t *testing.T) {
	data := map[string]string{}
	for _, k := range kinds(t) {
		data["resource.customizations.health."+strings.ReplaceAll(k.Name, "/", "_")] = k.Script
	}
	text, err := yaml.Marshal(map[string]any{"data": data})
	if err != nil {
		t.Fatal(err)
	}
	const comment = "# Health checks for Argo CD, of the scripts below resource_customizations:\n" +
		"#   kubectl patch configmap argocd-cm --namespace argocd --patch-file config/argocd/argocd-cm.yaml\n"
	golden(t, filepath.Join(customizations, "..", "argocd-cm.yaml"), slices.Concat([]byte(comment), bytes.TrimSpace(text), []byte("\n")))
}
