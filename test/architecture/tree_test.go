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

// TestTree checks that the tree in the documentation lists every package except those of tests, and only existing
// directories. A line that ends with "a package for each" includes all packages below its directory.
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
		dir := strings.TrimPrefix(p.ImportPath, module+"/")
		level, _ := top(p.ImportPath)
		_, known := dirs[dir]
		for above := path.Dir(dir); above != "."; above = path.Dir(above) {
			known = known || strings.HasSuffix(dirs[above], "a package for each")
		}
		if level != "test" && !known {
			t.Errorf("docs/development.md does not list %s", dir)
		}
	}
}
