package plan

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// Where directories cannot be swapped the new plan takes the old one's place all the same, and an old one stays where there is no new one.
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
			t.Errorf("beside the plan: %v, error %v", entries, err)
		}
		if got, err := os.ReadFile(filepath.Join(dir, ManifestFile)); err != nil || string(got) != want {
			t.Errorf("%q, error %v; want %q", got, err, want)
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
