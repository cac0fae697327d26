// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/test/programs"
	"github.com/semmoe/operator/test/tier"
)

// TestReleasedChart checks that the chart of a release installs its image, and links to its own documents and icon.
func TestReleasedChart(t *testing.T) {
	path, err := programs.Helm()
	tier.Require(t, err)
	const registry = "registry.example/operator"
	out := t.TempDir()
	script := filepath.Join(repository, "internal", "tools", "release", "chart.sh")
	if _, err := programs.Run(script, []string{"REGISTRY=" + registry}, "", "v1.2.3+build.4", "v1.2.3", out); err != nil {
		t.Fatal(err)
	}
	released := filepath.Join(out, "semmoe-operator-1.2.3+build.4.tgz")
	about, err := programs.Run(path, nil, "", "show", "chart", released)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"appVersion: v1.2.3-build.4", "version: 1.2.3+build.4", "image: " + registry + "/semmoe:v1.2.3-build.4",
		"icon: https://raw.githubusercontent.com/semmoe/operator/v1.2.3/charts/semmoe-operator/icon.svg",
		"url: https://github.com/semmoe/operator/blob/v1.2.3/docs/README.md", "url: https://github.com/semmoe/operator/blob/v1.2.3/CHANGELOG.md",
	} {
		if !strings.Contains(about, want) {
			t.Errorf("the description of the chart lacks %q:\n%s", want, about)
		}
	}
	manifest, err := programs.Run(path, nil, "", "template", "semmoe", released, "--set", "monitoring.enabled=true,dashboards.enabled=true")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"image: " + registry + "/semmoe:v1.2.3-build.4", "/blob/v1.2.3/docs/metrics.md", "runbook_url: https://github.com/semmoe/operator/blob/v1.2.3/docs/runbooks/SemMoE"} {
		if !strings.Contains(manifest, want) {
			t.Errorf("the chart does not render %q", want)
		}
	}
	for _, text := range []string{about, manifest} {
		if strings.Contains(text, "operator/main/") || strings.Contains(text, "blob/main/") {
			t.Error("the chart of a release links to the branch main")
		}
	}
}
