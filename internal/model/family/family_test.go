// SPDX-License-Identifier: Apache-2.0

package family

import (
	"encoding/json"
	"flag"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/trace"
)

var update = flag.Bool("update", false, "write the table of docs/model-families.md anew")

// TestTable checks that every entry is complete, and that no model type is listed twice.
func TestTable(t *testing.T) {
	release := regexp.MustCompile(`^(\d+\.\d+\.\d+)?$`)
	seen := map[string]bool{}
	for _, f := range All {
		if seen[f.Type] || f.Type == "" {
			t.Errorf("model type %q is empty or listed twice", f.Type)
		}
		seen[f.Type] = true
		if f.Gate == "" || f.Source == "" || len(f.Fused) == 0 {
			t.Errorf("%s: an entry needs a gate, experts and a source", f.Type)
		}
		for _, text := range []string{f.SGLang.ReadsMap, f.SGLang.MicroBatches, f.TensorRTLLMMap} {
			if !release.MatchString(text) {
				t.Errorf("%s: %q is not a release", f.Type, text)
			}
		}
		if Lookup(f.Type).Type != f.Type || CheckLayout(f.Type) != nil {
			t.Errorf("%s is not found", f.Type)
		}
	}
	for _, wrappers := range []map[string]string{SGLangWrappers, TensorRTLLMWrappers} {
		for wrapper, text := range wrappers {
			if seen[wrapper] || text == "" || !release.MatchString(text) {
				t.Errorf("%s: a wrapper needs a release, here %q, and is no family", wrapper, text)
			}
		}
	}
	if Lookup("qwen9") != nil || CheckLayout("qwen9") == nil || CheckLayout("") != nil {
		t.Error("an unknown model type is found, or no layout is refused")
	}
}

// TestGroupsOfTraces checks that the solver, which reads the configuration in a trace, has the same defaults.
func TestGroupsOfTraces(t *testing.T) {
	for _, f := range All {
		config, err := json.Marshal(map[string]any{"model_type": f.Type, "num_hidden_layers": 2})
		if err != nil {
			t.Fatal(err)
		}
		m := &trace.Model{Type: f.Type, Config: string(config), Experts: 64}
		if groups, err := m.Groups(); err != nil || groups != max(f.Groups, 1) {
			t.Errorf("%s: a trace has %d groups, the table %d (error %v)", f.Type, groups, f.Groups, err)
		}
	}
}

// TestDocument compares the tables of docs/model-families.md with the data.
func TestDocument(t *testing.T) {
	for name, document := range map[string]string{"families": familiesDocument(), "forms": formsDocument()} {
		t.Run(name, func(t *testing.T) { compareTable(t, name, document) })
	}
}

func compareTable(t *testing.T, name, document string) {
	path, begin, end := "../../../docs/model-families.md", "<!-- "+name+": begin -->\n", "<!-- "+name+": end -->"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(text), begin)
	table, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("%s lacks the marks of the table", path)
	}
	if *update {
		if err := os.WriteFile(path, []byte(before+begin+"\n"+document+"\n"+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(strings.TrimSpace(document), strings.TrimSpace(table)); diff != "" {
		t.Errorf("%s differs; go test ./internal/model/family -args -update writes it: %s", path, diff)
	}
}
