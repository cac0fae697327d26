// SPDX-License-Identifier: Apache-2.0

package gitops

import (
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/yaml"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// actions are the actions of a MoEDeployment in Argo CD.
var actions = []string{"approve", "pause", "resume", "roll-back"}

func actionScript(t *testing.T, name string) string {
	t.Helper()
	return string(read(t, filepath.Join(customizations, "semmoe.io", "MoEDeployment", "actions", name)))
}

// available runs the discovery of actions, and returns the names of the enabled ones.
func available(t *testing.T, u *unstructured.Unstructured) map[string]bool {
	t.Helper()
	enabled, err := (&Actions{Discovery: actionScript(t, "discovery.lua")}).Enabled(t.Context(), u)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(actions, slices.Sorted(maps.Keys(enabled))); diff != "" {
		t.Errorf("discovered actions (-want +got):\n%s", diff)
	}
	return enabled
}

// approves matches the digest in the command that a condition shows.
const approves = semmoev1.AnnotationApprove + "="

// pendingOf returns the digest that the condition RolledOut shows for an approval.
func pendingOf(u *unstructured.Unstructured) string {
	conditions, _, _ := unstructured.NestedSlice(u.Object, "status", "conditions")
	for _, item := range conditions {
		condition := item.(map[string]any)
		if _, rest, ok := strings.Cut(condition["message"].(string), approves); ok && condition["type"] == semmoev1.ConditionRolledOut {
			digest, _, _ := strings.Cut(rest, " ")
			return digest
		}
	}
	return ""
}

// TestActionsOfChange approves and rolls back a change of the spec by its revision, also if it has a new plan.
func TestActionsOfChange(t *testing.T) {
	state := func(rollout map[string]any, pending string) *unstructured.Unstructured {
		status := map[string]any{"revision": "new", "rollout": rollout}
		if pending != "" {
			status["pendingPlan"] = pending
		}
		return &unstructured.Unstructured{Object: map[string]any{"metadata": map[string]any{"name": "m"}, "spec": map[string]any{}, "status": status}}
	}
	for name, tc := range map[string]struct {
		state       *unstructured.Unstructured
		action, key string
		want        string
	}{
		"roll a change back":             {state(map[string]any{"candidateRevision": "new"}, ""), "roll-back", semmoev1.AnnotationRollBack, "new"},
		"roll a change with a plan back": {state(map[string]any{"candidateRevision": "new", "candidatePlan": "p"}, ""), "roll-back", semmoev1.AnnotationRollBack, "new"},
		"roll a plan back":               {state(map[string]any{"candidateRevision": "other", "candidatePlan": "p"}, ""), "roll-back", semmoev1.AnnotationRollBack, "p"},
		"approve a change":               {state(map[string]any{"candidateRevision": "new"}, "new"), "approve", semmoev1.AnnotationApprove, "new"},
	} {
		if !available(t, tc.state)[tc.action] {
			t.Errorf("%s: %s is disabled", name, tc.action)
		}
		changed, err := Act(t.Context(), actionScript(t, filepath.Join(tc.action, "action.lua")), tc.state)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got := changed.GetAnnotations()[tc.key]; got != tc.want {
			t.Errorf("%s: %s is %q, want %q", name, tc.key, got, tc.want)
		}
		if available(t, changed)[tc.action] {
			t.Errorf("%s: %s is enabled after it ran", name, tc.action)
		}
	}
}

// TestActions runs every action on every recorded state of a MoEDeployment. An enabled action changes one field, and is
// disabled afterwards. An action without a plan or change to act on is disabled, and returns an error if it is run anyway.
func TestActions(t *testing.T) {
	ran := map[string]int{}
	for _, k := range kinds(t) {
		if k.Name != "semmoe.io/MoEDeployment" {
			continue
		}
		for path, u := range k.States {
			paused, _, _ := unstructured.NestedString(u.Object, "spec", "reconciliation")
			candidate, _, _ := unstructured.NestedString(u.Object, "status", "rollout", "candidatePlan")
			revision, _, _ := unstructured.NestedString(u.Object, "status", "revision")
			if changed, _, _ := unstructured.NestedString(u.Object, "status", "rollout", "candidateRevision"); changed != "" && changed == revision {
				candidate = changed
			}
			want := map[string]string{"approve": pendingOf(u), "roll-back": candidate, "pause": "Paused", "resume": "Active"}
			wantEnabled := map[string]bool{"approve": want["approve"] != "", "roll-back": candidate != "", "pause": paused != "Paused", "resume": paused == "Paused"}
			if diff := cmp.Diff(wantEnabled, available(t, u)); diff != "" {
				t.Errorf("%s: enabled actions (-want +got):\n%s", path, diff)
			}
			for _, name := range actions {
				before := u.DeepCopy()
				changed, err := Act(t.Context(), actionScript(t, filepath.Join(name, "action.lua")), u)
				if diff := cmp.Diff(before, u); diff != "" {
					t.Fatalf("%s: %s changes its input:\n%s", path, name, diff)
				}
				if want[name] == "" {
					if err == nil || !strings.Contains(err.Error(), "nothing ") {
						t.Errorf("%s: %s without a plan: error %v", path, name, err)
					}
					continue
				}
				if err != nil {
					t.Errorf("%s: %s: %v", path, name, err)
					continue
				}
				field := map[string][]string{
					"approve": {"metadata", "annotations", semmoev1.AnnotationApprove}, "roll-back": {"metadata", "annotations", semmoev1.AnnotationRollBack},
				}[name]
				if field == nil {
					field = []string{"spec", "reconciliation"}
				}
				if err := unstructured.SetNestedField(before.Object, want[name], field...); err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(before.Object, changed.Object); diff != "" {
					t.Errorf("%s: %s changes (-want +got):\n%s", path, name, diff)
				}
				if wantEnabled[name] {
					if ran[name]++; available(t, changed)[name] {
						t.Errorf("%s: %s is still enabled after it ran", path, name)
					}
				}
			}
		}
	}
	for _, name := range actions {
		if ran[name] < 2 {
			t.Errorf("%s is enabled in %d recorded states, want at least 2", name, ran[name])
		}
	}
}

// TestRun runs actions of argocd-cm on an object of a cluster. An action that is disabled, or unknown, changes nothing.
func TestRun(t *testing.T) {
	settings := &corev1.ConfigMap{}
	if err := yaml.Unmarshal(read(t, filepath.Join(customizations, "..", "argocd-cm.yaml")), settings); err != nil {
		t.Fatal(err)
	}
	parsed, err := ParseActions(settings.Data)
	if err != nil {
		t.Fatal(err)
	}
	scheme := runtime.NewScheme()
	if err := semmoev1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	moed := &semmoev1.MoEDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "m"}, Status: semmoev1.MoEDeploymentStatus{PendingPlan: "p"}}
	api := fake.NewClientBuilder().WithScheme(scheme).WithObjects(moed).WithReturnManagedFields().Build()
	key := client.ObjectKeyFromObject(moed)
	for _, name := range []string{"roll-back", "unknown"} {
		if err := parsed.Run(t.Context(), api, key, name); err == nil || !strings.Contains(err.Error(), "action "+name+" is not enabled") {
			t.Errorf("%s: error %v", name, err)
		}
	}
	if err := parsed.Run(t.Context(), api, key, "approve"); err != nil {
		t.Fatal(err)
	}
	if err := api.Get(t.Context(), key, moed); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{semmoev1.AnnotationApprove: "p"}, moed.Annotations); diff != "" {
		t.Errorf("annotations (-want +got):\n%s", diff)
	}
	if !slices.ContainsFunc(moed.ManagedFields, func(entry metav1.ManagedFieldsEntry) bool { return entry.Manager == fieldManager }) {
		t.Errorf("no field belongs to %s: %v", fieldManager, moed.ManagedFields)
	}
	if err := parsed.Run(t.Context(), api, key, "approve"); err == nil {
		t.Error("an approved plan is approved again")
	}
}

// actionsOf returns the actions of MoEDeployment as a value in argocd-cm.
func actionsOf(t *testing.T) string {
	t.Helper()
	value := Actions{Discovery: actionScript(t, "discovery.lua")}
	files, err := filepath.Glob(filepath.Join(customizations, "semmoe.io", "MoEDeployment", "actions", "*", "action.lua"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		name := filepath.Base(filepath.Dir(file))
		if !slices.Contains(actions, name) {
			t.Errorf("action %s is not tested", name)
		}
		value.Definitions = append(value.Definitions, Definition{name, string(read(t, file))})
	}
	text, err := yaml.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
