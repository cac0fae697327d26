// SPDX-License-Identifier: Apache-2.0

package filelock

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// TestMain runs the test binary as a process of another user, if requested by the environment.
func TestMain(m *testing.M) {
	if path := os.Getenv("FILELOCK_TEST_CHILD"); path != "" {
		contend(path)
	}
	os.Exit(m.Run())
}

// contend repeatedly takes and releases a lock, as runs do with the lock that they share.
func contend(path string) {
	syscall.Umask(0o022)
	for range 20_000 {
		held, _, err := Try(path)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		held.Release()
	}
	os.Exit(0)
}

// TestLockByUsers has processes of several users that create and remove one lock file. None of them is refused a file
// that another user has just created.
func TestLockByUsers(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can become other users")
	}
	dir := t.TempDir()
	// Temporary directories are not accessible to other users.
	if err := errors.Join(os.Chmod(filepath.Dir(dir), 0o755), os.Chmod(dir, 0o777)); err != nil {
		t.Fatal(err)
	}
	var users sync.WaitGroup
	for _, user := range []uint32{60001, 60002, 60001, 60002} {
		users.Go(func() {
			// The binary's path may contain directories that another user may not enter.
			cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^$")
			cmd.Env = append(os.Environ(), "FILELOCK_TEST_CHILD="+filepath.Join(dir, "lock"))
			cmd.Dir = "/"
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
			if said, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("user %d: %v: %s", user, err, said)
			}
		})
	}
	users.Wait()
}

// TestLock checks that a lock has one owner, contains the reservation of its owner, is writable by all users regardless
// of the umask, and leaves no file.
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

// TestLockOfKilledProcess checks that the lock of a killed process is free and that its reservation does not apply to
// the next owner.
func TestLockOfKilledProcess(t *testing.T) {
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

// TestIrregularLockFile checks that a link or a FIFO in place of a lock file is refused. The target of a link is not
// changed, and opening a FIFO does not block.
func TestIrregularLockFile(t *testing.T) {
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
			if err == nil || errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), path+" is not a regular file") {
				t.Errorf("%s of %s: %v", name, path, err)
			}
		}
	}
	if text, err := os.ReadFile(victim); string(text) != "7" {
		t.Errorf("the target of a link has %q, %v", text, err)
	}
	if _, err := os.Lstat(nothing); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the target of a dangling link was created: %v", err)
	}
}
