package filelock

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// A lock is had once, tells what its holder reserves, is open to all whatever the umask, and leaves no file.
func TestLock(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o077))
	path := filepath.Join(t.TempDir(), "lock")
	first, err := Wait(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(first.Reserve(12345), first.Reserve(67)); err != nil {
		t.Fatal(err)
	}
	if bytes, err := Reserved(path); bytes != 67 || err != nil {
		t.Errorf("%d bytes are reserved, %v", bytes, err)
	}
	if _, locked, err := Try(path); locked || err != nil {
		t.Errorf("a second lock: %v, %v", locked, err)
	}
	if idle, err := Free(path); idle || err != nil {
		t.Errorf("a locked file is free: %v, %v", idle, err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != mode {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	first.Release()
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a released lock left its file: %v", err)
	}
	Lock{}.Release()
}

// What a process that was killed has left is free, and reserves nothing for the next.
func TestLeftLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	if err := os.WriteFile(path, []byte("99"), 0o600); err != nil {
		t.Fatal(err)
	}
	if idle, err := Free(path); !idle || err != nil {
		t.Errorf("free: %v, %v", idle, err)
	}
	held, locked, err := Try(path)
	if !locked || err != nil {
		t.Fatalf("%v, %v", locked, err)
	}
	defer held.Release()
	if bytes, err := Reserved(path); bytes != 0 || err != nil {
		t.Errorf("%d bytes are reserved, %v", bytes, err)
	}
}

// A link or a pipe in the place of a lock is refused by name: what a link leads to stays as it is, and nobody waits for a pipe.
func TestNoFile(t *testing.T) {
	dir := t.TempDir()
	victim, nothing := filepath.Join(dir, "victim"), filepath.Join(dir, "nothing")
	link, dangling, pipe := filepath.Join(dir, "link"), filepath.Join(dir, "dangling"), filepath.Join(dir, "pipe")
	err := errors.Join(os.WriteFile(victim, []byte("7"), 0o600), os.Symlink(victim, link), os.Symlink(nothing, dangling), syscall.Mkfifo(pipe, 0o666))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{link, dangling, pipe} {
		_, _, tried := Try(path)
		_, free := Free(path)
		_, reserved := Reserved(path)
		_, _, opened := Open(path)
		for name, err := range map[string]error{"Try": tried, "Free": free, "Reserved": reserved, "Open": opened} {
			if err == nil || errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), path+" is a link, or something else") {
				t.Errorf("%s of %s: %v", name, path, err)
			}
		}
	}
	if text, err := os.ReadFile(victim); string(text) != "7" {
		t.Errorf("what a link leads to has %q, %v", text, err)
	}
	if _, err := os.Lstat(nothing); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a link to nothing leads to something now: %v", err)
	}
}
