// SPDX-License-Identifier: Apache-2.0

package regularfile

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestRefusesIrregularFiles(t *testing.T) {
	dir := t.TempDir()
	pipe, socket, link := filepath.Join(dir, "pipe"), filepath.Join(dir, "socket"), filepath.Join(dir, "link")
	if err := errors.Join(syscall.Mkfifo(pipe, 0o600), os.Symlink(pipe, link)); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	for path, want := range map[string]string{
		pipe:        "is a named pipe, not a regular file",
		link:        "is a named pipe, not a regular file",
		socket:      "is a socket, not a regular file",
		dir:         "is a directory, not a regular file",
		"/dev/zero": "is a device, not a regular file",
	} {
		want = "open " + path + ": " + want
		if _, err := Open(path); err == nil || err.Error() != want {
			t.Errorf("Open: %v, want %s", err, want)
		}
		if _, err := Read(path, 1); err == nil || err.Error() != want {
			t.Errorf("Read: %v, want %s", err, want)
		}
		if err := Check(path); err == nil || err.Error() != want {
			t.Errorf("Check: %v, want %s", err, want)
		}
	}
}

func TestRead(t *testing.T) {
	dir := t.TempDir()
	file, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	if err := errors.Join(os.WriteFile(file, []byte("12345"), 0o600), os.Symlink(file, link)); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, link} {
		for maxBytes, fits := range map[int64]bool{4: false, 5: true, 6: true} {
			content, err := Read(path, maxBytes)
			if fits && (err != nil || string(content) != "12345") || !fits && !errors.Is(err, ErrTooLarge) {
				t.Errorf("%s, at most %d: %q, %v", path, maxBytes, content, err)
			}
		}
	}
	if _, err := Read(filepath.Join(dir, "none"), 1); !errors.Is(err, fs.ErrNotExist) || !strings.HasPrefix(err.Error(), "open ") {
		t.Errorf("a missing file: %v", err)
	}
	if _, err := os.Stat("/proc/self/status"); err == nil { // such a file has size 0
		if content, err := Read("/proc/self/status", 1<<20); err != nil || len(content) < 100 {
			t.Errorf("%d bytes, %v", len(content), err)
		}
		if _, err := Read("/proc/self/status", 10); !errors.Is(err, ErrTooLarge) {
			t.Errorf("a file of unknown size above the limit: %v", err)
		}
	}
}

func TestPlaceholder(t *testing.T) {
	for content, want := range map[string]string{
		"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 9\n": "is a Git LFS pointer",
		"<!DOCTYPE html>\n<title>404</title>":                                   "is an HTML page",
		"\n  <HTML lang=en>":                                                    "is an HTML page",
		"":                                                                      "", "{}": "", "version 1": "", "<|endoftext|>": "", "IQ== 0\n": "",
	} {
		if got := Placeholder([]byte(content)); !strings.HasPrefix(got, want) || want == "" && got != "" {
			t.Errorf("%q: %q, want %q", content, got, want)
		}
	}
}
