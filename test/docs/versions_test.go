// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// supportedMinors is the number of consecutive minors of Kubernetes that a release supports: RELEASE.md.
const supportedMinors = 5

// TestSupportedVersions checks that the pinned releases of Kubernetes follow the policy of RELEASE.md, and that the
// chart and the documents state the pinned releases.
func TestSupportedVersions(t *testing.T) {
	newest, oldest := pinned(t, "test/kubernetes", "k8s.io/kubernetes"), pinned(t, "test/kubernetes/oldest", "k8s.io/kubernetes")
	helm := pinned(t, "internal/tools/helm", "helm.sh/helm/v4")
	if got := minor(t, newest) - minor(t, oldest) + 1; got != supportedMinors {
		t.Errorf("the tests run with Kubernetes %s to %s, %d minors; RELEASE.md promises %d", oldest, newest, got, supportedMinors)
	}
	for _, module := range []string{".", "test/leaderworkerset", "test/prometheus"} {
		for _, library := range []string{"k8s.io/api", "k8s.io/apimachinery", "k8s.io/client-go"} {
			if version := pinned(t, module, library); minor(t, version) != minor(t, newest) {
				t.Errorf("%s/go.mod: %s %s is of another minor than the control plane of the tests, %s", module, library, version, newest)
			}
		}
	}

	supported := fmt.Sprintf("1.%d to 1.%d", minor(t, oldest), minor(t, newest))
	for file, statements := range map[string][]string{
		"charts/semmoe-operator/Chart.yaml": {fmt.Sprintf("kubeVersion: \">=1.%d.0-0\"", minor(t, oldest))},
		"RELEASE.md":                        {supported, "four minors below the newest"},
		"docs/install.md":                   {"Kubernetes " + supported, "Helm " + helm, "kubectl " + newest, "API server of " + newest, "kubectl of " + oldest},
	} {
		text, err := os.ReadFile(filepath.Join(repository, filepath.FromSlash(file)))
		if err != nil {
			t.Fatal(err)
		}
		for _, statement := range statements {
			if !strings.Contains(strings.Join(strings.Fields(string(text)), " "), statement) {
				t.Errorf("%s does not state %q", file, statement)
			}
		}
	}
}

// pinned returns the version of a dependency of a module, without the prefix v.
func pinned(t *testing.T, module, dependency string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(repository, filepath.FromSlash(module), "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`(?m)^(?:require )?\t?` + regexp.QuoteMeta(dependency) + ` v(\S+)`).FindSubmatch(text)
	if found == nil {
		t.Fatalf("%s/go.mod does not require %s", module, dependency)
	}
	return string(found[1])
}

// minor returns the second number of a version.
func minor(t *testing.T, version string) int {
	t.Helper()
	_, rest, _ := strings.Cut(version, ".")
	text, _, _ := strings.Cut(rest, ".")
	number, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("version %s has no minor: %v", version, err)
	}
	return number
}
