// SPDX-License-Identifier: Apache-2.0

package architecture

import (
	"os"
	"path"
	"regexp"
	"strings"
	"testing"
)

const development = "../../docs/development.md"

var treeLine = regexp.MustCompile(`^( {4,10})(\S+/)(?:\s+(.*))?$`)

// listed returns the directories of an indented tree, with their descriptions. Top-level directories are indented by
// four spaces.
func listed(text string) map[string]string {
	dirs := map[string]string{}
	var above []string // by depth
	for line := range strings.Lines(text) {
		found := treeLine.FindStringSubmatch(strings.TrimRight(line, "\n"))
		if found == nil {
			continue
		}
		depth := (len(found[1]) - 4) / 2
		if depth > len(above) {
			continue // the second line of a description
		}
		above = append(above[:depth], path.Clean(found[2]))
		dirs[path.Join(above...)] = found[3]
	}
	return dirs
}

func TestListed(t *testing.T) {
	got := listed("    a/b/    what\n      c/    which\n        d/\n    e/       who: f/g\n             h/ and so on\n      i/     where\n")
	for dir, want := range map[string]string{"a/b": "what", "a/b/c": "which", "a/b/c/d": "", "e": "who: f/g", "e/i": "where"} {
		if description, known := got[dir]; !known || description != want {
			t.Errorf("%s: description %q, listed %t; want %q", dir, description, known, want)
		}
	}
	if len(got) != 5 {
		t.Errorf("directories = %v, want 5", got)
	}
}

// TestTree checks that the tree in the documentation lists only existing directories, and each package except those of
// tests or a directory above it.
func TestTree(t *testing.T) {
	text, err := os.ReadFile(development)
	if err != nil {
		t.Fatal(err)
	}
	_, tree, _ := strings.Cut(string(text), "\n## The tree\n")
	tree, _, _ = strings.Cut(tree, "\n## ")
	dirs := listed(tree)
	for dir := range dirs {
		if info, err := os.Stat(path.Join("../..", dir)); err != nil || !info.IsDir() {
			t.Errorf("docs/development.md lists %s, which is not a directory", dir)
		}
	}
	for _, p := range packages(t) {
		dir, known := strings.TrimPrefix(p.ImportPath, module+"/"), false
		for above := dir; above != "." && !known; above = path.Dir(above) {
			_, known = dirs[above]
		}
		if level, _ := top(p.ImportPath); level != "test" && !known {
			t.Errorf("docs/development.md does not list %s", dir)
		}
	}
}

// TestPackagesAreDocumented checks that each package has a comment, except generated packages and those of tests. The
// comments replace a list of packages in the documentation.
func TestPackagesAreDocumented(t *testing.T) {
	for _, p := range packages(t) {
		level, _ := top(p.ImportPath)
		if level != "test" && p.Doc == "" && !strings.Contains(p.ImportPath, "/applyconfiguration") {
			t.Errorf("%s has no package comment", p.ImportPath)
		}
	}
}
