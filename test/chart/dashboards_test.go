package chart

import (
	"os"
	"path/filepath"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Grafana's sidecar finds the dashboard by its label, and gets the file as it is: Helm has its own use for {{...}}, which legends have too.
func TestDashboard(t *testing.T) {
	want, err := os.ReadFile(filepath.Join(directory, "dashboards", "semmoe.json"))
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, u := range render(t, `{dashboards: {enabled: true, labels: {grafana_dashboard: "1", team: a}, annotations: {grafana_folder: Inference}}}`) {
		if u.GetName() != "semmoe-dashboard" {
			continue
		}
		found++
		if u.GetKind() != "ConfigMap" || u.GetNamespace() != namespace {
			t.Errorf("the dashboard is a %s in namespace %s", u.GetKind(), u.GetNamespace())
		}
		if labels := u.GetLabels(); labels["grafana_dashboard"] != "1" || labels["team"] != "a" || u.GetAnnotations()["grafana_folder"] != "Inference" {
			t.Errorf("labels %v, annotations %v", labels, u.GetAnnotations())
		}
		if got, _, _ := unstructured.NestedString(u.Object, "data", "semmoe.json"); got != string(want) {
			t.Errorf("the ConfigMap has %d bytes that differ from the %d of the file", len(got), len(want))
		}
	}
	if found != 1 {
		t.Errorf("%d dashboards", found)
	}
	for _, u := range render(t, "{}") {
		if u.GetName() == "semmoe-dashboard" {
			t.Error("there is a dashboard without dashboards.enabled")
		}
	}
}
