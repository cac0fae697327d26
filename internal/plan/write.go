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

	"github.com/semmoe/operator/internal/regularfile"
)

// Write puts a plan and its report (any JSON) into a directory, which appears complete or not at all. A plan that is
// already there is replaced; a directory that holds anything else is refused.
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
	// After the exchange this removes the old plan.
	defer func() { err = errors.Join(err, os.RemoveAll(temporary)) }()
	if err := os.Chmod(temporary, 0o755); err != nil {
		return err
	}
	if err := writeFiles(temporary, a, report); err != nil {
		return err
	}
	if err := exchange(temporary, dir); err != nil {
		return err
	}
	return syncDirectory(parent)
}

// CheckDirectory tells why Write would refuse a directory, before there is a plan; it leaves nothing behind.
func CheckDirectory(dir string) error {
	if err := CheckReplaceable(dir); err != nil {
		return err
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	parent := filepath.Dir(dir)
	for { // Write makes what is missing
		if _, err := os.Stat(parent); !errors.Is(err, os.ErrNotExist) || parent == filepath.Dir(parent) {
			break
		}
		parent = filepath.Dir(parent)
	}
	temporary, err := os.MkdirTemp(parent, ".plan-")
	if err != nil {
		return fmt.Errorf("the plan takes its place at once, from a directory beside it: %w", err)
	}
	return errors.Join(movable(dir, temporary), os.RemoveAll(temporary))
}

// movable refuses what another directory cannot take the place of. It tries to rename it to one that is not empty, which no system
// does: what cannot be renamed at all fails in another way.
func movable(dir, temporary string) error {
	if err := os.Mkdir(filepath.Join(temporary, "full"), 0o755); err != nil {
		return err
	}
	err := syscall.Rename(dir, temporary)
	switch {
	case err == nil: // no system does, but what was there is not to be lost
		return syscall.Rename(temporary, dir)
	case errors.Is(err, syscall.EBUSY), errors.Is(err, syscall.EXDEV):
		return fmt.Errorf("%s is where a volume is mounted, or part of a container image: name a directory below it", dir)
	case errors.Is(err, syscall.EPERM), errors.Is(err, syscall.EACCES):
		return fmt.Errorf("%s cannot be replaced: %w", dir, err)
	}
	return nil
}

// CheckReplaceable refuses a directory that holds anything but a plan, as Write or package bundle has made it: what takes its place
// removes all of it.
func CheckReplaceable(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) || err == nil && len(entries) == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	if !isPlan(dir) {
		return fmt.Errorf("%s is not empty and holds no plan: name another directory", dir)
	}
	return fs.WalkDir(os.DirFS(dir), ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() && (name == "." || name == engineDir) || !entry.IsDir() && isFile(name) {
			return err
		}
		return fmt.Errorf("%s holds %s, which is no file of a plan: move it away, or name another directory", dir, name)
	})
}

// isPlan tells a plan's directory from another that holds a manifest.json, which is a common name. The manifest of a fetched plan may be
// damaged.
func isPlan(dir string) bool {
	if _, err := os.Stat(filepath.Join(dir, BundleFile)); err == nil {
		return true
	}
	content, err := regularfile.Read(filepath.Join(dir, ManifestFile), maxSmallBytes)
	var manifest struct{ Format string }
	return err == nil && json.Unmarshal(content, &manifest) == nil && strings.HasPrefix(manifest.Format, formatPrefix)
}

// isFile reports whether a plan's directory may hold a file of that name.
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

// syncDirectory puts the names in a directory on disk. Windows has no such call: its file systems keep a journal of names.
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

// exchange puts the new directory in the old one's place; what was there is left under the new one's name, or removed.
//
// A reader finds the old plan or the new one, complete, wherever the system and the file system can swap two directories (Linux and
// macOS; not NFS, not Windows). Elsewhere there is a moment without a plan, and never a part of one.
func exchange(fresh, dir string) error {
	err := os.Rename(fresh, dir)
	if err == nil {
		return nil
	}
	if _, absent := os.Lstat(dir); absent != nil { // it was not for what is there that it failed
		return err
	}
	if swap(fresh, dir) == nil {
		return nil
	}
	return replace(fresh, dir)
}

// replace is exchange in two steps: a crash between them leaves no plan at the old one's place, but the old one beside it.
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
