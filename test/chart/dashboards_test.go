// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// TestDashboard checks that the ConfigMap of the dashboard has the label that Grafana's sidecar selects, and the
// unchanged file: Helm must not evaluate the {{...}} of legends.
func TestDashboard(t *testing.T) {
	want, err := os.ReadFile(filepath.Join(directory, "dashboards", "semmoe.json"))
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, u := range render(t, `{dashboards: {enabled: true, labels: {grafana_dashboard: "1", team: a}, annotations: {grafana_folder: Inference}}}`, withoutCRDs...) {
		if u.GetName() != "semmoe-dashboard" {
			continue
		}
		found++
		if u.GetKind() != "ConfigMap" || u.GetNamespace() != namespace {
			t.Errorf("the dashboard is a %s in namespace %s, want a ConfigMap in the release namespace", u.GetKind(), u.GetNamespace())
		}
		if labels := u.GetLabels(); labels["grafana_dashboard"] != "1" || labels["team"] != "a" || u.GetAnnotations()["grafana_folder"] != "Inference" {
			t.Errorf("labels %v or annotations %v are wrong", labels, u.GetAnnotations())
		}
		if got, _, _ := unstructured.NestedString(u.Object, "data", "semmoe.json"); got != string(want) {
			t.Errorf("the content of the ConfigMap (%d bytes) differs from the file (%d bytes)", len(got), len(want))
		}
	}
	if found != 1 {
		t.Errorf("found %d dashboards, want 1", found)
	}
	// The Grafana operator reads the same ConfigMap, which has no label for a sidecar.
	found = 0
	for _, u := range render(t, `{dashboards: {grafanaOperator: {enabled: true, folder: Inference}}}`, withoutCRDs...) {
		if u.GetKind() == "GrafanaDashboard" {
			found++
			spec := map[string]any{
				"allowCrossNamespaceImport": true, "folder": "Inference", "instanceSelector": map[string]any{"matchLabels": map[string]any{"dashboards": "grafana"}},
				"configMapRef": map[string]any{"name": "semmoe-dashboard", "key": "semmoe.json"},
			}
			if diff := cmp.Diff(spec, u.Object["spec"]); diff != "" {
				t.Errorf("GrafanaDashboard (-want +got):\n%s", diff)
			}
		}
		if u.GetName() == "semmoe-dashboard" {
			found++
			if content, _, _ := unstructured.NestedString(u.Object, "data", "semmoe.json"); content != string(want) || u.GetLabels()["grafana_dashboard"] != "" {
				t.Errorf("the ConfigMap for the Grafana operator has labels %v and %d bytes", u.GetLabels(), len(content))
			}
		}
	}
	if found != 2 {
		t.Errorf("found %d objects for the Grafana operator, want 2", found)
	}
	for _, u := range render(t, "{}", withoutCRDs...) {
		if u.GetName() == "semmoe-dashboard" {
			t.Error("a dashboard is rendered without dashboards.enabled")
		}
	}
}
