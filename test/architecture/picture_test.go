// SPDX-License-Identifier: Apache-2.0

package architecture

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const document = "../../docs/architecture.md"

var (
	roomRow   = regexp.MustCompile("(?m)^\\| (\\w+) \\| (`[^|]+`) \\|")
	arrowLine = regexp.MustCompile(`(?m)^  (\w+) --> (\w+)$`)
)

// graph contains the successors of each room.
type graph map[string][]string

func (g graph) add(from, to string) {
	if from != to && !slices.Contains(g[from], to) {
		g[from] = append(g[from], to)
	}
}

// leads reports whether a path of at least the given number of arrows leads from one room to another.
func (g graph) leads(from, to string, arrows int) bool {
	return slices.ContainsFunc(g[from], func(next string) bool {
		return next == to && arrows <= 1 || g.leads(next, to, max(1, arrows-1))
	})
}

// TestPicture checks that the documented picture is the transitive reduction of the imports between rooms, and that
// each package is listed in one room.
func TestPicture(t *testing.T) {
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	rooms := map[string]string{} // by the directory of a package
	for _, row := range roomRow.FindAllStringSubmatch(string(text), -1) {
		for _, dir := range strings.Split(row[2], ", ") {
			dir = strings.Trim(dir, "`")
			if rooms[dir] != "" {
				t.Errorf("%s is listed in rooms %s and %s, want one room", dir, rooms[dir], row[1])
			}
			rooms[dir] = row[1]
		}
	}
	seen := map[string]bool{}
	room := func(path string) string {
		for dir := strings.TrimPrefix(path, module+"/"); dir != ""; dir = dir[:max(0, strings.LastIndex(dir, "/"))] {
			if rooms[dir] != "" {
				seen[dir] = true
				return rooms[dir]
			}
		}
		t.Errorf("%s is listed in no room", path)
		return ""
	}
	imports := graph{}
	for _, p := range packages(t) {
		if level, _ := top(p.ImportPath); level == "test" {
			continue
		}
		from := room(p.ImportPath)
		for _, imported := range p.Imports {
			if level, ours := top(imported); ours && level != "test" {
				imports.add(from, room(imported))
			}
		}
	}
	picture := graph{}
	for _, arrow := range arrowLine.FindAllStringSubmatch(string(text), -1) {
		picture.add(arrow[1], arrow[2])
	}
	for dir := range rooms {
		if !seen[dir] {
			t.Errorf("%s has no packages", dir)
		}
	}
	for from, all := range imports {
		if imports.leads(from, from, 2) {
			t.Fatalf("%s is in an import cycle", from)
		}
		for _, to := range all {
			if !picture.leads(from, to, 1) {
				t.Errorf("%s imports %s, but the picture has no path between them", from, to)
			}
		}
	}
	for from, all := range picture {
		for _, to := range all {
			if !slices.Contains(imports[from], to) {
				t.Errorf("the picture has an arrow from %s to %s, but the first does not import the second", from, to)
			}
			if imports.leads(from, to, 2) {
				t.Errorf("the arrow from %s to %s is redundant: a longer path exists", from, to)
			}
		}
	}
}
