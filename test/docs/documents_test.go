// SPDX-License-Identifier: Apache-2.0

// Package docs tests the documentation: it runs the commands, follows the links, and checks that the named metrics,
// flags and Makefile targets exist. test/api tests the blocks in YAML.
//
// A block of commands is run in the order of its document, or has a mark in the preceding line. The mark contains a
// reason from the list reasons:
//
//	<!-- not run: REASON -->
//
// or the test that runs the commands:
//
//	<!-- run by test/installation -->
package docs

import (
	"os"
	"path/filepath"
	"testing"
)

var repository = filepath.Join("..", "..")

// documents returns all documents by their paths in the repository.
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
		t.Fatalf("found only %d documents", len(all))
	}
	return all
}
