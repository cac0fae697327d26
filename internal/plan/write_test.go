// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// TestReplaceWithoutSwap checks that a plan is also replaced where directories cannot be exchanged atomically, and that
// the old plan stays if there is no new one.
func TestReplaceWithoutSwap(t *testing.T) {
	parent := t.TempDir()
	fresh, dir := filepath.Join(parent, "fresh"), filepath.Join(parent, "plan")
	for path, content := range map[string]string{fresh: "new", dir: "old"} {
		if err := writeFile(filepath.Join(path, ManifestFile), []byte(content)); err != nil {
			t.Fatal(err)
		}
	}
	holds := func(want string) {
		t.Helper()
		entries, err := os.ReadDir(parent)
		if err != nil || len(entries) != 1 {
			t.Errorf("files next to the plan: %v, error %v", entries, err)
		}
		if got, err := os.ReadFile(filepath.Join(dir, ManifestFile)); err != nil || string(got) != want {
			t.Errorf("content %q, error %v; want %q", got, err, want)
		}
	}
	if err := replace(fresh, dir); err != nil {
		t.Fatal(err)
	}
	holds("new")
	if err := replace(fresh, dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v", err)
	}
	holds("new")
}
