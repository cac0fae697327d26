// Package architecture holds the tree against the rules that its rooms keep to.
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

// layers are the top levels of the module in the order of its arrows: each may import what comes after it, and itself.
var layers = []string{"cmd", "webhook", "controllers", "internal", "solver"}

// beside are top levels that no arrow of the layers leads to or from but to these: what the API is made of, and what tests are.
var beside = map[string][]string{
	"api":  {},
	"test": append(slices.Clone(layers), "api"),
}

// foreign are all that a top level may import from other modules, where that is little: by the beginnings of their paths.
var foreign = map[string][]string{
	"api":    {"k8s.io/api/", "k8s.io/apimachinery/", "k8s.io/client-go/", "sigs.k8s.io/structured-merge-diff/"},
	"solver": {"golang.org/x/", "github.com/klauspost/compress/"},
}

type goPackage struct {
	ImportPath string
	Imports    []string
}

// packages are those of the module, as the go command builds them, without their tests.
func packages(t *testing.T) []goPackage {
	t.Helper()
	command := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Imports", "./...")
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

// top is the top level that a package of the module belongs to: what is named after tests is of them, wherever it stands.
func top(path string) (string, bool) {
	inside, ours := strings.CutPrefix(path, module+"/")
	level, _, _ := strings.Cut(inside, "/")
	if ours && strings.HasSuffix(path, "test") {
		return "test", true
	}
	return level, ours
}

// allowed tells whether a package of one top level may import another of the module.
func allowed(from, to string) bool {
	if others, ok := beside[from]; ok {
		return from == to || slices.Contains(others, to)
	}
	at, other := slices.Index(layers, from), slices.Index(layers, to)
	if to == "api" {
		other = slices.Index(layers, "solver")
	}
	return at >= 0 && (from == to || other > at)
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
			t.Errorf("%s imports %s: allowed %t, want %t", c.from, c.to, got, c.want)
		}
	}
}

// Imports point one way, and the solver and the API stand alone.
func TestImports(t *testing.T) {
	found := packages(t)
	if len(found) < 50 {
		t.Fatalf("only %d packages", len(found))
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
				t.Errorf("%s imports %s: %s may import of others only %v", p.ImportPath, imported, from, few)
			}
		}
	}
}
