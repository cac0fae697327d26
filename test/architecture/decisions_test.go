// SPDX-License-Identifier: Apache-2.0

package architecture

import (
	"slices"
	"strings"
	"testing"
)

// decisions are the packages of controllers that decide. They and all packages of the module that they import read and
// write neither objects nor HTTP.
var decisions = []string{"controllers/moedeployment/decision"}

// effect reports whether an import reads or writes: a Kubernetes client, or HTTP. The apply configurations of client-go
// are values.
func effect(path string) bool {
	return path == "net/http" || strings.HasPrefix(path, "sigs.k8s.io/controller-runtime") ||
		strings.HasPrefix(path, "k8s.io/client-go/") && !strings.HasPrefix(path, "k8s.io/client-go/applyconfigurations/")
}

// TestDecisionsArePure checks the imports of the packages that decide, and of all packages of the module below them.
func TestDecisionsArePure(t *testing.T) {
	imports := map[string][]string{}
	for _, p := range packages(t) {
		imports[p.ImportPath] = p.Imports
	}
	var seen []string
	for _, name := range decisions {
		seen = append(seen, module+"/"+name)
	}
	for i := 0; i < len(seen); i++ {
		list, known := imports[seen[i]]
		if !known {
			t.Fatalf("there is no package %s", seen[i])
		}
		for _, path := range list {
			if effect(path) {
				t.Errorf("%s imports %s: decisions read and write nothing", seen[i], path)
			}
			if strings.HasPrefix(path, module+"/") && !slices.Contains(seen, path) {
				seen = append(seen, path)
			}
		}
	}
	if len(seen) < 40 {
		t.Errorf("checked only %v, want at least 40 packages", seen)
	}
}
