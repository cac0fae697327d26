// SPDX-License-Identifier: Apache-2.0

package atomicfile

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	for _, content := range []string{"first", "second, which is longer", ""} {
		if err := WriteBytes(path, 0o640, []byte(content)); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != content || info.Mode() != 0o640 {
			t.Errorf("%q, %v, mode %v; want %q", got, err, info.Mode(), content)
		}
	}
}

// TestWriteFails checks that a failed write leaves the old content and no other file.
func TestWriteFails(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	if err := WriteBytes(path, 0o600, []byte("old")); err != nil {
		t.Fatal(err)
	}
	full := errors.New("no space left on device")
	err := Write(path, 0o600, func(w io.Writer) error {
		if _, err := w.Write([]byte("ne")); err != nil {
			t.Fatal(err)
		}
		return full
	})
	if !errors.Is(err, full) {
		t.Errorf("%v, want %v", err, full)
	}
	if err := WriteBytes(filepath.Join(dir, "none", "f"), 0o600, nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing directory: %v", err)
	}
	if err := os.Mkdir(filepath.Join(dir, "taken"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := WriteBytes(filepath.Join(dir, "taken"), 0o600, nil); err == nil {
		t.Error("a directory was replaced")
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != "old" || len(entries) != 2 {
		t.Errorf("%q, %v, and %v", got, err, entries)
	}
}

func TestWriteFollowsLinks(t *testing.T) {
	dir := t.TempDir()
	file, link := filepath.Join(dir, "a", "file"), filepath.Join(dir, "link")
	if err := errors.Join(os.Mkdir(filepath.Dir(file), 0o700), os.WriteFile(file, []byte("old"), 0o600), os.Symlink(file, link)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(Check(link), WriteBytes(link, 0o640, []byte("new"))); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != "new" {
		t.Errorf("the target of the link holds %q, %v", got, err)
	}
	if info, err := os.Lstat(link); err != nil || info.Mode().Type() != os.ModeSymlink {
		t.Errorf("the link is now %v, %v", info, err)
	}
}

// TestWriteRefusesIrregularFiles covers pipes, among others: opening a pipe without a reader blocks.
func TestWriteRefusesIrregularFiles(t *testing.T) {
	dir := t.TempDir()
	pipe, link := filepath.Join(dir, "pipe"), filepath.Join(dir, "link")
	if err := errors.Join(syscall.Mkfifo(pipe, 0o600), os.Symlink(pipe, link)); err != nil {
		t.Fatal(err)
	}
	for path, kind := range map[string]string{dir: "a directory", pipe: "a named pipe", link: "a named pipe", os.DevNull: "a device"} {
		want := path + " is " + kind + ": use the path of a file"
		for _, err := range []error{Check(path), WriteBytes(path, 0o640, []byte("new"))} {
			if err == nil || err.Error() != want {
				t.Errorf("%v, want %s", err, want)
			}
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 2 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

func TestCheck(t *testing.T) {
	dir := t.TempDir()
	taken := filepath.Join(dir, "taken")
	if err := os.WriteFile(taken, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		taken:                           "",
		filepath.Join(dir, "new"):       "",
		dir:                             "is a directory: use the path of a file",
		filepath.Join(dir, "none", "f"): "failed to create " + filepath.Join(dir, "none", "f") + ": no such file or directory",
		filepath.Join(taken, "f"):       "not a directory",
	} {
		if err := Check(path); want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}
