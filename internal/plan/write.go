// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/semmoe/operator/internal/files/regularfile"
)

// Write writes a plan and its report (any JSON) to a directory. The directory appears atomically. It replaces an
// existing plan, and returns an error if the directory contains other files.
func Write(dir string, a *Artifact, report []byte) (err error) {
	if err := CheckReplaceable(dir); err != nil {
		return err
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return err
	}
	parent := filepath.Dir(dir)
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return err
	}
	temporary, err := os.MkdirTemp(parent, ".plan-")
	if err != nil {
		return err
	}
	// After the exchange, this removes the old plan.
	defer func() { err = errors.Join(err, os.RemoveAll(temporary)) }()
	if err := os.Chmod(temporary, 0o755); err != nil {
		return err
	}
	if err := writeFiles(temporary, a, report); err != nil {
		return err
	}
	if err := Exchange(temporary, dir); err != nil {
		return err
	}
	return syncDirectory(parent)
}

// CheckDirectory returns an error if Write would reject a directory. It can be called before a plan is solved, and
// leaves no files.
func CheckDirectory(dir string) error {
	if err := CheckReplaceable(dir); err != nil {
		return err
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	parent := filepath.Dir(dir)
	for { // Write creates missing parent directories
		if _, err := os.Stat(parent); !errors.Is(err, os.ErrNotExist) || parent == filepath.Dir(parent) {
			break
		}
		parent = filepath.Dir(parent)
	}
	temporary, err := os.MkdirTemp(parent, ".plan-")
	if err != nil {
		return fmt.Errorf("failed to create a directory next to the plan, which is needed for an atomic replacement: %w", err)
	}
	return errors.Join(movable(dir, temporary), os.RemoveAll(temporary))
}

// movable returns an error if a directory cannot be replaced by another one. It tries to rename the directory to a
// directory that is not empty. Every system rejects this rename; a directory that cannot be renamed at all gives a
// different error.
func movable(dir, temporary string) error {
	if err := os.Mkdir(filepath.Join(temporary, "full"), 0o755); err != nil {
		return err
	}
	err := syscall.Rename(dir, temporary)
	switch {
	case err == nil: // no system allows this rename, but the directory must not be lost
		return syscall.Rename(temporary, dir)
	case errors.Is(err, syscall.EBUSY), errors.Is(err, syscall.EXDEV):
		return fmt.Errorf("%s is the mount point of a volume, or part of a container image: use a directory below it", dir)
	case errors.Is(err, syscall.EPERM), errors.Is(err, syscall.EACCES):
		return fmt.Errorf("%s cannot be replaced: %w", dir, err)
	}
	return nil
}

// CheckReplaceable returns an error if a directory contains files that are not from a plan of Write or package bundle,
// because a replacement removes all files.
func CheckReplaceable(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) || err == nil && len(entries) == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	if !isPlan(dir) {
		return fmt.Errorf("%s is not empty and contains no plan: use another directory", dir)
	}
	return fs.WalkDir(os.DirFS(dir), ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() && (name == "." || name == engineDir) || !entry.IsDir() && isFile(name) {
			return err
		}
		return fmt.Errorf("%s contains %s, which is not a file of a plan: move the file, or use another directory", dir, name)
	})
}

// isPlan reports whether a directory with a manifest.json is a plan. The file name is common, and the manifest of a
// fetched plan may be damaged.
func isPlan(dir string) bool {
	if _, err := os.Stat(filepath.Join(dir, BundleFile)); err == nil {
		return true
	}
	content, err := regularfile.Read(filepath.Join(dir, ManifestFile), maxSmallBytes)
	var manifest struct{ Format string }
	return err == nil && json.Unmarshal(content, &manifest) == nil && strings.HasPrefix(manifest.Format, formatPrefix)
}

// isFile reports whether a directory of a plan may contain a file of that name.
func isFile(name string) bool {
	others := []string{ManifestFile, ReportFile, BundleFile, TokenizerFile}
	return slices.Contains(others, name) || slices.Contains(required(), name) || slices.Contains(optional, name)
}

func writeFiles(dir string, a *Artifact, report []byte) error {
	for name, content := range a.Files {
		if err := writeFile(filepath.Join(dir, name), content); err != nil {
			return err
		}
	}
	if err := writeFile(filepath.Join(dir, ReportFile), report); err != nil {
		return err
	}
	if err := syncDirectory(filepath.Join(dir, "engine")); err != nil {
		return err
	}
	return syncDirectory(dir)
}

func writeFile(path string, content []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	if _, err := file.Write(content); err != nil {
		file.Close()
		return err
	}
	if err := file.Sync(); err != nil {
		file.Close()
		return err
	}
	return file.Close()
}

// syncDirectory flushes the names in a directory to disk. Windows has no such call: its file systems keep a journal of
// names.
func syncDirectory(dir string) error {
	if runtime.GOOS == "windows" {
		return nil
	}
	file, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer file.Close()
	return file.Sync()
}

// Exchange replaces the old directory by the new one. The old directory remains under the name of the new one, or is
// removed.
//
// Where the system and the file system can exchange two directories atomically (Linux and macOS, but not NFS or
// Windows), a reader always finds the complete old plan or the complete new plan. Elsewhere there is a short time
// without a plan, but never a partial plan.
func Exchange(fresh, dir string) error {
	err := os.Rename(fresh, dir)
	if err == nil {
		return nil
	}
	if _, absent := os.Lstat(dir); absent != nil { // the exchange failed because the old directory does not exist
		return err
	}
	if swap(fresh, dir) == nil {
		return nil
	}
	return replace(fresh, dir)
}

// replace does the exchange in two steps. A crash between the steps leaves no plan in the directory; the old plan is
// then next to it.
func replace(fresh, dir string) error {
	old := fresh + ".old"
	if err := os.Rename(dir, old); err != nil {
		return err
	}
	if err := os.Rename(fresh, dir); err != nil {
		return errors.Join(err, os.Rename(old, dir))
	}
	return os.RemoveAll(old)
}
