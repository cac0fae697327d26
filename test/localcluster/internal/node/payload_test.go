// SPDX-License-Identifier: Apache-2.0

package node

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestWritePayload(t *testing.T) {
	dir := t.TempDir()
	for i, files := range []map[string]file{
		{"a": {[]byte("1"), 0o644}, "sub/b": {[]byte("2"), 0o600}, "sub/c": {[]byte("3"), 0o444}},
		{"a": {[]byte("new"), 0o644}, "d": {[]byte("4"), 0o400}},
		{},
	} {
		if err := writePayload(dir, files); err != nil {
			t.Fatal(err)
		}
		want := map[string]string{}
		for path, f := range files {
			want[path] = f.mode.String() + " " + string(f.data)
		}
		if diff := cmp.Diff(want, visible(t, dir)); diff != "" {
			t.Errorf("step %d: %s", i, diff)
		}
		if hidden, _ := filepath.Glob(filepath.Join(dir, "..*")); len(hidden) != 2 {
			t.Errorf("step %d: hidden files are %v, want ..data and its target", i, hidden)
		}
	}
}

// visible reads all files of a volume through the links, as a container does.
func visible(t *testing.T, dir string) map[string]string {
	t.Helper()
	result := map[string]string{}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "..") {
			continue
		}
		root, err := filepath.EvalSymlinks(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		err = filepath.WalkDir(root, func(path string, e2 fs.DirEntry, err error) error {
			if err != nil || e2.IsDir() {
				return err
			}
			info, err := e2.Info()
			if err != nil {
				return err
			}
			data, err := os.ReadFile(path)
			rest, _ := filepath.Rel(root, path)
			result[filepath.Join(e.Name(), rest)] = info.Mode().String() + " " + string(data)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return result
}

func TestSubPathStaysInside(t *testing.T) {
	dir := t.TempDir()
	outside := t.TempDir()
	if err := os.Symlink(outside, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	v := &volume{path: dir}
	for path, ok := range map[string]bool{"new/dir": true, ".": true, "../x": false, "link": false, "/abs": false} {
		if got, err := resolveSubPath(v, path); (err == nil) != ok {
			t.Errorf("subPath %q: %q, %v, want success %v", path, got, err, ok)
		}
	}
	if _, err := resolveSubPath(&volume{path: dir, readOnly: true}, "absent"); err == nil {
		t.Error("a directory was created in a read-only volume")
	}
}
