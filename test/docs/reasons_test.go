// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/semmoe/operator/test/markdown"
	source "github.com/semmoe/operator/test/reasons"
)

// guide is the page that lists the condition reasons, with a section for each kind.
const guide = "docs/troubleshooting.md"

var (
	reasonRow      = regexp.MustCompile("^\\| (`[^|]*`) \\|")
	recordedReason = regexp.MustCompile(`(?m)^\s+(?:- )?reason: ([A-Za-z]+)$`)
	reasonSpan     = regexp.MustCompile("`([A-Z][A-Za-z]+)`")
)

// TestReasonsAreDocumented compares the sections of the troubleshooting page with the reasons in the source code. A
// missing, an outdated and a repeated reason fail.
func TestReasonsAreDocumented(t *testing.T) {
	text := documents(t)[guide]
	for _, kind := range source.Kinds {
		t.Run(kind, func(t *testing.T) {
			declared, err := source.Of(repository, kind)
			if err != nil {
				t.Fatal(err)
			}
			listed := map[string]int{}
			for line := range strings.Lines(section(text, "## "+kind)) {
				if row := reasonRow.FindStringSubmatch(line); row != nil {
					for _, match := range reasonSpan.FindAllStringSubmatch(row[1], -1) {
						listed[match[1]]++
					}
				}
			}
			known := sets.KeySet(listed)
			if missing := sets.List(declared.Difference(known)); len(missing) > 0 {
				t.Errorf("%s does not list the reasons %v of %s", guide, missing, kind)
			}
			for _, name := range slices.Sorted(maps.Keys(listed)) {
				if listed[name] > 1 {
					t.Errorf("%s lists %s of %s %d times", guide, name, kind, listed[name])
				}
			}
			if outdated := sets.List(known.Difference(declared).Difference(engineFindings(t)).Difference(observed(t, kind))); len(outdated) > 0 {
				t.Errorf("%s lists the reasons %v of %s, which the source code does not set", guide, outdated, kind)
			}
		})
	}
}

// engineFindings returns the reasons that docs/engine-plans.md explains. Packages of engines declare them, and conditions of
// every kind may have them.
func engineFindings(t *testing.T) sets.Set[string] {
	t.Helper()
	found := sets.New[string]()
	for _, span := range markdown.Spans(documents(t)["docs/engine-plans.md"]) {
		found.Insert(span)
	}
	return found
}

// observed returns the reasons in the recorded states of a kind. Some of them are computed, so the source code has no
// literal for them.
func observed(t *testing.T, kind string) sets.Set[string] {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(repository, "config", "argocd", "resource_customizations", "semmoe.io", kind, "testdata", "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%d recorded states of %s: %v", len(files), kind, err)
	}
	found := sets.New[string]()
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range recordedReason.FindAllStringSubmatch(string(text), -1) {
			found.Insert(match[1])
		}
	}
	return found
}

// section returns the part of a document from a heading to the next one of the same level.
func section(text, heading string) string {
	_, after, found := strings.Cut(text, "\n"+heading+"\n")
	if !found {
		return ""
	}
	body, _, _ := strings.Cut(after, "\n## ")
	return body
}
