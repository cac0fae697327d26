// Package docs tries what the documentation says: its commands are run, its links followed, and the metrics, flags and targets that it
// names looked up. Blocks in YAML are tried by test/api.
//
// A block of commands runs, in the order of its document, or has a mark in the line before it that says why it does not:
//
//	<!-- not run: REASON -->
//
// with one of the reasons in reasons, or of the test that runs what it says:
//
//	<!-- run by test/installation -->
package docs

import (
	"os"
	"path/filepath"
	"testing"
)

var repository = filepath.Join("..", "..")

// documents are all texts of the documentation by their paths in the repository.
func documents(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md", "charts/*/README.md", "test/*/README.md"} {
		files, err := filepath.Glob(filepath.Join(repository, filepath.FromSlash(pattern)))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			path, err := filepath.Rel(repository, file)
			if err != nil {
				t.Fatal(err)
			}
			all[filepath.ToSlash(path)] = string(text)
		}
	}
	if len(all) < 30 {
		t.Fatalf("only %d documents are found", len(all))
	}
	return all
}
