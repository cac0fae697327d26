// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
)

// named matches the names of engine mechanisms in the text of a literal.
var named = regexp.MustCompile(`--[a-z][a-z0-9_-]+[a-z0-9]|\b(?:sglang|vllm):[a-z_]+|\bX-[A-Za-z-]+[a-z]\b|\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b`)

// whole matches a literal that is the name of a mechanism: a route, a short flag, a member or a value.
var whole = regexp.MustCompile(`^(?:/[a-z][a-z0-9_/]*|-[a-z]{1,3}|[a-z][a-z0-9]*(?:_[a-z0-9]+)+)$`)

// otherNames lists names that do not belong to an engine.
var otherNames = []string{
	"-m",                    // Python
	"--lora-target-modules", // any engine: CheckExternalExperts
	"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "dp_rank", "data_parallel_rank",
}

// TestEveryMechanismHasASource checks that every flag, variable, route, header, member, metric and value in the code of
// an engine is listed in the engine's table with a source and a release.
func TestEveryMechanismHasASource(t *testing.T) {
	all := map[string]bool{}
	packages := map[string][]engine.Adapter{}
	for _, adapter := range registry.All() {
		name := strings.ToLower(adapter.Type)
		if name == "tensorrtllm" {
			name = "trtllm"
		}
		packages[name] = append(packages[name], adapter)
		for _, m := range adapter.Mechanisms {
			later := adapter.Newest.Before(m.First) && m.Kind != engine.FlagKind // plug-ins have the flags of vLLM's later releases
			if len(m.Names) == 0 || !m.First.Known() || m.Source == "" || m.Evidence != engine.Read && m.Evidence != engine.Run || m.Last.Known() && m.Last.Before(m.First) || later {
				t.Errorf("%s: %+v lacks a name, a release, a source or evidence", adapter.Type, m)
			}
			for _, name := range m.Names {
				all[name] = true
			}
		}
		if adapter.ReleasePath == "" || len(adapter.Images) == 0 || !adapter.Oldest.Before(adapter.Newest) {
			t.Errorf("%s has no releases", adapter.Type)
		}
	}
	literals := 0
	err := filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.HasSuffix(path, "mechanisms.go") || strings.HasSuffix(path, "routes.go") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		known := all
		if adapters := packages[filepath.Dir(path)]; len(adapters) > 0 {
			known = map[string]bool{}
			for _, m := range adapters[0].Mechanisms {
				for _, name := range m.Names {
					known[name] = true
				}
			}
		}
		skipped := map[*ast.BasicLit]bool{}
		ast.Inspect(file, func(node ast.Node) bool {
			switch node := node.(type) {
			case *ast.ImportSpec:
				skipped[node.Path] = true
			case *ast.Field:
				if node.Tag != nil {
					skipped[node.Tag] = true
					name, _, _ := strings.Cut(reflectTag(node.Tag.Value), ",")
					if name != "" && whole.MatchString(name) && !known[name] {
						t.Errorf("%s: member %q is in no table", path, name)
					}
				}
			case *ast.CallExpr:
				if called, ok := node.Fun.(*ast.SelectorExpr); ok && called.Sel.Name == "NewMechanisms" { // a table of mechanisms
					for _, arg := range node.Args {
						if literal, ok := arg.(*ast.BasicLit); ok {
							skipped[literal] = true
						}
					}
				}
			case *ast.BasicLit:
				if node.Kind != token.STRING || skipped[node] {
					return true
				}
				text, err := strconv.Unquote(node.Value)
				if err != nil {
					t.Fatal(err)
				}
				found := named.FindAllString(text, -1)
				if whole.MatchString(text) {
					found = append(found, text)
				}
				literals += len(found)
				for _, name := range found {
					if !known[name] && !slices.Contains(otherNames, name) {
						t.Errorf("%s: %q is in no table", path, name)
					}
				}
			}
			return true
		})
		return nil
	})
	if err != nil || literals < 200 {
		t.Fatalf("%v; found %d mechanisms in the code", err, literals)
	}
}

// reflectTag returns the json part of a field's tag.
func reflectTag(literal string) string {
	_, after, _ := strings.Cut(literal, `json:"`)
	name, _, _ := strings.Cut(after, `"`)
	return name
}

// TestFlagsHaveReleases compares the flags that adapters set and refuse with their tables, independently of literals.
func TestFlagsHaveReleases(t *testing.T) {
	launch := engine.Launch{
		ModelPath: "/m", Ranks: 8, AttentionDP: true, Nodes: 2, NodeRank: "$(R)", LeaderAddress: "l", Worker: true, RoutedExperts: true, ExpertMap: "/map", RedundantExperts: 8, OptionsFile: "/o",
	}
	for _, adapter := range registry.All() {
		var names []string
		for _, m := range adapter.Mechanisms {
			names = append(names, m.Names...)
		}
		for _, flag := range adapter.Flags(launch) {
			for _, name := range flag.Names {
				if !slices.Contains(names, name) {
					t.Errorf("%s: %s is in no table", adapter.Type, name)
				}
			}
		}
		for _, name := range []string{adapter.RankHeader, adapter.RoutingKeyHeader, adapter.HealthPath, adapter.ReleasePath, adapter.RoutedExperts.RequestField, adapter.RoutedExperts.StartField, adapter.RankRoutes.Field} {
			if name != "" && !slices.Contains(names, name) {
				t.Errorf("%s: %s is in no table", adapter.Type, name)
			}
		}
	}
}
