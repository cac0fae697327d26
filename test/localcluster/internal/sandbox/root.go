// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// devices lists the device files that every container runtime provides.
var devices = []string{"null", "zero", "full", "random", "urandom", "tty"}

// buildRoot assembles the container's root on spec.MountPoint and makes it the root of this mount namespace.
func buildRoot(spec Spec) error {
	// With private propagation, later mounts are not visible outside.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("failed to make mounts private: %w", err)
	}
	root := spec.MountPoint
	if err := unix.Mount("tmpfs", root, "tmpfs", unix.MS_NOSUID, "mode=0755"); err != nil {
		return fmt.Errorf("failed to mount the root: %w", err)
	}
	if err := populate(root, spec); err != nil {
		return err
	}
	if err := mountAll(root, spec.Mounts); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(root, spec.workingDir()), 0o755); err != nil {
		return fmt.Errorf("failed to create working directory %s: %w", spec.WorkingDir, err)
	}
	if spec.ReadOnlyRoot {
		if err := unix.MountSetattr(unix.AT_FDCWD, root, 0, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
			return fmt.Errorf("failed to make the root read-only: %w", err)
		}
	}
	return pivot(root)
}

func (s Spec) workingDir() string {
	if s.WorkingDir == "" {
		return "/"
	}
	return s.WorkingDir
}

// populate creates the files that an image with a single binary and a container runtime provide.
func populate(root string, spec Spec) error {
	for _, dir := range []string{"dev/shm", "etc", "proc"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			return err
		}
	}
	tmp := filepath.Join(root, "tmp")
	if err := os.Mkdir(tmp, 0o755); err != nil {
		return err
	}
	if err := os.Chmod(tmp, 0o777|fs.ModeSticky); err != nil {
		return err
	}
	for name, content := range map[string]string{
		"hostname":    spec.Hostname + "\n",
		"resolv.conf": "",
		"passwd":      "root:x:0:0:root:/:/\n",
		"group":       "root:x:0:\n",
	} {
		if err := os.WriteFile(filepath.Join(root, "etc", name), []byte(content), 0o644); err != nil {
			return err
		}
	}
	if err := mountProc(filepath.Join(root, "proc")); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", filepath.Join(root, "dev/shm"), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777,size=64m"); err != nil {
		return fmt.Errorf("failed to mount /dev/shm: %w", err)
	}
	for _, name := range devices {
		if err := bind(root, Mount{Source: "/dev/" + name, Target: "/dev/" + name}); err != nil {
			return err
		}
	}
	for _, l := range append(spec.Links,
		Link{"/dev/fd", "/proc/self/fd"}, Link{"/dev/stdin", "/proc/self/fd/0"},
		Link{"/dev/stdout", "/proc/self/fd/1"}, Link{"/dev/stderr", "/proc/self/fd/2"}) {
		if err := os.Symlink(l.Target, filepath.Join(root, l.Path)); err != nil {
			return err
		}
	}
	return bind(root, Mount{Source: spec.Binary, Target: "/" + filepath.Base(spec.Binary), ReadOnly: true})
}

// mountProc mounts a proc file system of the container's PID namespace. The kernel refuses this mount if an outer
// container hides parts of /proc. In this case mountProc binds the outer proc, in which /proc/self is still correct.
func mountProc(target string) error {
	err := unix.Mount("proc", target, "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	if errors.Is(err, unix.EPERM) {
		err = unix.Mount("/proc", target, "", unix.MS_BIND|unix.MS_REC, "")
	}
	if err != nil {
		return fmt.Errorf("failed to mount /proc: %w", err)
	}
	return nil
}

// mountAll binds the mounts, parent paths before the paths below them.
func mountAll(root string, mounts []Mount) error {
	sorted := slices.Clone(mounts)
	slices.SortStableFunc(sorted, func(a, b Mount) int {
		return strings.Count(filepath.Clean(a.Target), "/") - strings.Count(filepath.Clean(b.Target), "/")
	})
	for _, m := range sorted {
		if err := bind(root, m); err != nil {
			return err
		}
	}
	return nil
}

func bind(root string, m Mount) error {
	info, err := os.Stat(m.Source)
	if err != nil {
		return fmt.Errorf("failed to mount %s: %w", m.Target, err)
	}
	target := filepath.Join(root, m.Target)
	if err := makeMountPoint(target, info.IsDir()); err != nil {
		return fmt.Errorf("failed to create mount point %s: %w", m.Target, err)
	}
	// A user namespace may bind a tree only together with the mounts below it, so the bind is recursive.
	if err := unix.Mount(m.Source, target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("failed to mount %s on %s: %w", m.Source, m.Target, err)
	}
	if !m.ReadOnly {
		return nil
	}
	// mount_setattr adds the flag and keeps the others. The kernel would refuse a remount that drops an inherited
	// nosuid.
	attr := &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
	if err := unix.MountSetattr(unix.AT_FDCWD, target, unix.AT_RECURSIVE, attr); err != nil {
		return fmt.Errorf("failed to make %s read-only: %w", m.Target, err)
	}
	return nil
}

func makeMountPoint(path string, isDir bool) error {
	if isDir {
		return os.MkdirAll(path, 0o755)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	return f.Close()
}

// pivot makes root the root directory and unmounts the old root.
func pivot(root string) error {
	if err := os.Chdir(root); err != nil {
		return err
	}
	// The old root is stacked on the new one, so it needs no separate directory.
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("failed to change the root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("failed to detach the old root: %w", err)
	}
	return os.Chdir("/")
}

// lookPath finds a command in the container's root like a container runtime: a name without a slash is resolved through
// PATH.
func lookPath(name string, env []string) (string, error) {
	if strings.Contains(name, "/") {
		if _, err := os.Stat(name); err != nil {
			return "", fmt.Errorf("exec: %q: %w", name, err)
		}
		return name, nil
	}
	path := ""
	for _, e := range env {
		if value, ok := strings.CutPrefix(e, "PATH="); ok {
			path = value
		}
	}
	for dir := range strings.SplitSeq(path, ":") {
		candidate := filepath.Join("/", dir, name)
		if info, err := os.Stat(candidate); err == nil && !info.IsDir() && info.Mode()&0o111 != 0 {
			return candidate, nil
		}
	}
	return "", fmt.Errorf("exec: %q: executable file not found in $PATH", name)
}
