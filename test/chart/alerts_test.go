// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/yaml"
)

// rule is an alert of the chart.
type rule struct {
	Alert       string            `json:"alert"`
	Expr        string            `json:"expr"`
	For         string            `json:"for"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

func alerts(t *testing.T) []rule {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(directory, "files", "alerts.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Groups []struct {
			Name     string `json:"name"`
			Interval string `json:"interval"`
			Rules    []rule `json:"rules"`
		} `json:"groups"`
	}
	if err := yaml.UnmarshalStrict(text, &file); err != nil {
		t.Fatal(err)
	}
	var all []rule
	for _, group := range file.Groups {
		all = append(all, group.Rules...)
	}
	if len(all) == 0 {
		t.Fatal("the chart has no alerts")
	}
	return all
}

// TestAlertsHavePages checks that each alert has a runbook page with the user's actions, and that each page has an
// alert.
func TestAlertsHavePages(t *testing.T) {
	runbooks := filepath.Join(repository, "docs", "runbooks")
	guide, err := os.ReadFile(filepath.Join(repository, "docs", "install.md"))
	if err != nil {
		t.Fatal(err)
	}
	known := sets.New[string]()
	for _, r := range alerts(t) {
		known.Insert(r.Alert)
		if severity := r.Labels["severity"]; severity != "critical" && severity != "warning" && severity != "info" {
			t.Errorf("%s: invalid severity %q", r.Alert, severity)
		}
		if r.Annotations["summary"] == "" || r.Annotations["description"] == "" || r.For == "" {
			t.Errorf("%s has no summary, description or duration", r.Alert)
		}
		if want := "https://github.com/semmoe/operator/blob/main/docs/runbooks/" + r.Alert + ".md"; r.Annotations["runbook_url"] != want {
			t.Errorf("%s: runbook_url is %q, want %q", r.Alert, r.Annotations["runbook_url"], want)
		}
		page, err := os.ReadFile(filepath.Join(runbooks, r.Alert+".md"))
		if err != nil {
			t.Error(err)
			continue
		}
		for _, part := range []string{"# " + r.Alert + "\n", "\n**Meaning.** ", "\n**Impact.** ", "\n**Diagnosis.**", "\nkubectl ", "\n**Mitigation.** "} {
			if !strings.Contains(string(page), part) {
				t.Errorf("the runbook of %s lacks %q", r.Alert, strings.TrimSpace(part))
			}
		}
		if !strings.Contains(string(guide), "(runbooks/"+r.Alert+".md)") {
			t.Errorf("docs/install.md does not list %s", r.Alert)
		}
	}
	pages, err := os.ReadDir(runbooks)
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range pages {
		if !known.Has(strings.TrimSuffix(page.Name(), ".md")) {
			t.Errorf("docs/runbooks/%s belongs to no alert", page.Name())
		}
	}
}
