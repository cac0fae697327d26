package wholefile

import (
	"errors"
	"fmt"
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

// What fails leaves the old content, and nothing beside it.
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
		t.Errorf("a directory that is not there: %v", err)
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

// What a symbolic link leads to is replaced, not the link; a pipe is written to, and a directory refused by its name.
func TestWriteTo(t *testing.T) {
	dir := t.TempDir()
	file, link, pipe := filepath.Join(dir, "a", "file"), filepath.Join(dir, "link"), filepath.Join(dir, "pipe")
	if err := errors.Join(os.Mkdir(filepath.Dir(file), 0o700), os.WriteFile(file, []byte("old"), 0o600), os.Symlink(file, link)); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	read := make(chan string)
	go func() {
		content, err := os.ReadFile(pipe)
		read <- fmt.Sprintf("%s, %v", content, err)
	}()
	for _, path := range []string{link, pipe, os.DevNull} {
		if err := errors.Join(Check(path), WriteBytes(path, 0o640, []byte("new"))); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
	if got := <-read; got != "new, <nil>" {
		t.Errorf("through the pipe came %s", got)
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != "new" {
		t.Errorf("behind the link is %q, %v", got, err)
	}
	for path, want := range map[string]os.FileMode{link: os.ModeSymlink, pipe: os.ModeNamedPipe, os.DevNull: os.ModeDevice | os.ModeCharDevice} {
		if info, err := os.Lstat(path); err != nil || info.Mode().Type() != want {
			t.Errorf("%s is now %v, %v; want %v", path, info, err, want)
		}
	}
	if err := WriteBytes(dir, 0o600, nil); err == nil || !strings.Contains(err.Error(), dir+" is a directory: name a file") {
		t.Errorf("a directory: %v", err)
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
		os.DevNull:                      "",
		dir:                             "is a directory: name a file",
		filepath.Join(dir, "none", "f"): filepath.Join(dir, "none", "f") + " cannot be made: no such file or directory",
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
