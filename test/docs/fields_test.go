// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"regexp"
	"strings"
	"testing"

	"github.com/semmoe/operator/test/markdown"
)

var (
	kindHeading = regexp.MustCompile(`^### \w+: (spec|status)$`)
	fieldRow    = regexp.MustCompile("^\\| \\**`([A-Za-z0-9.\\[\\]]+)`\\** \\| ([^|]*) \\|")
	fileName    = regexp.MustCompile(`\.(json|bin|yaml|safetensors)$`)
	fieldPath   = regexp.MustCompile(`^(?:(spec|status)\.)?([a-z][A-Za-z0-9]*(?:\.[a-z][A-Za-z0-9]*)+)(?:[:= ].*)?$`)
)

// fields returns the paths of all fields in docs/api.md, without brackets. The value is true if the field is of a
// Kubernetes type, whose fields are not listed.
func fields(t *testing.T) map[string]bool {
	t.Helper()
	all, part := map[string]bool{}, ""
	for line := range strings.Lines(documents(t)["docs/api.md"]) {
		line = strings.TrimSpace(line)
		if match := kindHeading.FindStringSubmatch(line); match != nil {
			part = match[1]
		} else if match := fieldRow.FindStringSubmatch(line); match != nil {
			all[part+"."+strings.ReplaceAll(match[1], "[]", "")] = strings.HasSuffix(strings.TrimSpace(match[2]), "object")
		}
	}
	for path := range all { // an object with listed fields is not of a Kubernetes type
		if above := path[:strings.LastIndex(path, ".")]; all[above] {
			all[above] = false
		}
	}
	if len(all) < 150 {
		t.Fatalf("docs/api.md has only %d fields", len(all))
	}
	return all
}

// TestFields checks that every field path in the documents exists.
func TestFields(t *testing.T) {
	known, named := fields(t), 0
	sections := map[string]bool{} // the first parts of paths, which distinguish paths from other words with dots
	for path := range known {
		parts := strings.Split(path, ".")
		sections[parts[0]+"."+parts[1]] = true
	}
	for file, text := range documents(t) {
		if strings.HasPrefix(file, "charts/") || file == "docs/install.md" || file == "docs/api.md" {
			continue // these documents also name values of the chart
		}
		for _, span := range markdown.Spans(text) {
			match := fieldPath.FindStringSubmatch(span)
			if match == nil || fileName.MatchString(span) || match[1] == "" && !sections["spec."+strings.Split(match[2], ".")[0]] {
				continue
			}
			part := match[1]
			if part == "" {
				part = "spec"
			}
			named++
			if path := part + "." + match[2]; !exists(known, path) {
				t.Errorf("%s names the field %s, which docs/api.md does not have", file, path)
			}
		}
	}
	if named < 100 {
		t.Errorf("found only %d field paths", named)
	}
}

// exists reports whether a path is known, or is a field of a Kubernetes type.
func exists(known map[string]bool, path string) bool {
	if _, ok := known[path]; ok {
		return true
	}
	for above := path; strings.Contains(above, "."); {
		above = above[:strings.LastIndex(above, ".")]
		if known[above] {
			return true
		}
	}
	return false
}
