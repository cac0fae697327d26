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

// listed are the directories of a tree that is drawn by indentation, four spaces for those of the module, and what is said of each.
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
			continue // the second line of what is said of a directory
		}
		above = append(above[:depth], path.Clean(found[2]))
		dirs[path.Join(above...)] = found[3]
	}
	return dirs
}

func TestListed(t *testing.T) {
	got := listed("    a/b/    what\n      c/    which\n        d/\n    e/       who: f/g\n             h/ and so on\n      i/     where\n")
	for dir, want := range map[string]string{"a/b": "what", "a/b/c": "which", "a/b/c/d": "", "e": "who: f/g", "e/i": "where"} {
		if said, known := got[dir]; !known || said != want {
			t.Errorf("%s: %q, %t; want %q", dir, said, known, want)
		}
	}
	if len(got) != 5 {
		t.Errorf("%v", got)
	}
}

// The tree in the documentation names every package but those of tests, and no directory that is not there. A line that ends with
// "a package for each" stands for all below it.
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
			t.Errorf("%s is no directory", dir)
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
