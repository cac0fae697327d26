// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestMountPointIsRefused checks that the mount point of a volume cannot be replaced, with any content, and that a
// directory below it can.
func TestMountPointIsRefused(t *testing.T) {
	dir := t.TempDir()
	allowed := make(chan bool, 1)
	go func() {
		defer close(allowed)
		runtime.LockOSThread() // never unlocked: the thread ends with its mounts
		if err := unix.Unshare(unix.CLONE_NEWNS); errors.Is(err, unix.EPERM) {
			return
		} else if err != nil {
			t.Error(err)
			return
		}
		if err := errors.Join(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""), unix.Mount("tmpfs", dir, "tmpfs", 0, "")); err != nil {
			t.Error(err)
			return
		}
		allowed <- true
		for _, content := range []string{"", ManifestFile} {
			if content != "" {
				if err := os.WriteFile(filepath.Join(dir, content), []byte(`{"format":"semmoe-plan/1"}`), 0o644); err != nil {
					t.Error(err)
				}
			}
			if err := CheckDirectory(dir); err == nil || !strings.Contains(err.Error(), dir+" is the mount point of a volume") {
				t.Errorf("with content %q: error %v", content, err)
			}
		}
		if err := CheckDirectory(filepath.Join(dir, "plan")); err != nil {
			t.Error(err)
		}
	}()
	if !<-allowed {
		t.Skip("not allowed to mount")
	}
	for range allowed {
	}
}
