// SPDX-License-Identifier: Apache-2.0

// Package architecture checks the imports, the directories and the documented structure of the module.
package architecture

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/semmoe/operator"

// layers are the top-level directories of the module in the order of imports. Packages of a layer may import packages
// of the same layer and of later ones.
var layers = []string{"cmd", "webhook", "controllers", "internal", "solver"}

// exempt are top-level directories that are not layers, with the directories that their packages may import.
var exempt = map[string][]string{
	"api":  {},
	"test": append(slices.Clone(layers), "api"),
}

// foreign limits the imports of a top-level directory from other modules, by path prefix. Other directories have no
// limit.
var foreign = map[string][]string{
	"api":    {"k8s.io/api/", "k8s.io/apimachinery/", "k8s.io/client-go/", "sigs.k8s.io/structured-merge-diff/"},
	"solver": {"golang.org/x/", "github.com/klauspost/compress/"},
}

type goPackage struct {
	ImportPath string
	// Doc is the first sentence of the package comment.
	Doc     string
	Imports []string
}

// packages returns the packages of the module that the go command builds, without their tests.
func packages(t *testing.T) []goPackage {
	t.Helper()
	command := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Doc,Imports", "./...")
	command.Dir = "../.."
	output, err := command.Output()
	if err != nil {
		t.Fatal(err)
	}
	var all []goPackage
	for decoder := json.NewDecoder(strings.NewReader(string(output))); ; {
		var p goPackage
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}

// top returns the top-level directory of a package, and whether the package belongs to the module. Packages whose name
// ends with "test" belong to "test" in any directory.
func top(path string) (string, bool) {
	inside, ours := strings.CutPrefix(path, module+"/")
	level, _, _ := strings.Cut(inside, "/")
	if ours && strings.HasSuffix(path, "test") {
		return "test", true
	}
	return level, ours
}

// allowed reports whether packages of one top-level directory may import packages of another.
func allowed(from, to string) bool {
	if others, ok := exempt[from]; ok {
		return from == to || slices.Contains(others, to)
	}
	at, other := slices.Index(layers, from), slices.Index(layers, to)
	if to == "api" {
		other = slices.Index(layers, "solver")
	}
	return at >= 0 && (from == to || other > at)
}

// TestStudiesAreSeparate checks that only semmoe-lab and tests import the packages of studies.
func TestStudiesAreSeparate(t *testing.T) {
	const lab, program = module + "/solver/lab", module + "/cmd/semmoe-lab"
	study := func(path string) bool { return path == lab || strings.HasPrefix(path, lab+"/") }
	for _, p := range packages(t) {
		if level, _ := top(p.ImportPath); level == "test" || study(p.ImportPath) || p.ImportPath == program {
			continue
		}
		for _, imported := range p.Imports {
			if study(imported) {
				t.Errorf("%s imports %s: only %s may import studies", p.ImportPath, imported, program)
			}
		}
	}
}

func TestAllowed(t *testing.T) {
	for _, c := range []struct {
		from, to string
		want     bool
	}{
		{"cmd", "solver", true}, {"solver", "internal", false}, {"internal", "controllers", false}, {"controllers", "webhook", false}, {"solver", "api", false},
		{"api", "solver", false}, {"internal", "api", true}, {"internal", "test", false}, {"test", "cmd", true}, {"test", "api", true}, {"test", "test", true}, {"solver", "solver", true}, {"charts", "api", false}, {"internal", "charts", false},
	} {
		if got := allowed(c.from, c.to); got != c.want {
			t.Errorf("import of %[2]s by %[1]s: allowed = %[3]t, want %[4]t", c.from, c.to, got, c.want)
		}
	}
}

// TestImports checks that packages import only packages of the same or of later layers, and that the solver and the API
// import only the listed packages of other modules.
func TestImports(t *testing.T) {
	found := packages(t)
	if len(found) < 50 {
		t.Fatalf("found %d packages, want at least 50", len(found))
	}
	for _, p := range found {
		from, ours := top(p.ImportPath)
		if !ours {
			t.Errorf("%s is not below %s", p.ImportPath, module)
		}
		for _, imported := range p.Imports {
			if to, ours := top(imported); ours {
				if !allowed(from, to) {
					t.Errorf("%s imports %s: %s may not import %s", p.ImportPath, imported, from, to)
				}
				continue
			}
			few, limited := foreign[from]
			host, _, _ := strings.Cut(imported, "/")
			if limited && strings.Contains(host, ".") && !slices.ContainsFunc(few, func(prefix string) bool { return strings.HasPrefix(imported, prefix) }) {
				t.Errorf("%s imports %s: from other modules %s may import only %v", p.ImportPath, imported, from, few)
			}
		}
	}
}
