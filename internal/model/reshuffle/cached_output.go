// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/semmoe/operator/internal/model/reshuffle/filelock"
)

// cachedOutput describes an output of earlier runs: the complete output, or the parts that a run has left. Directories
// that this package did not create are never included.
type cachedOutput struct {
	// out is the output's path.
	out string
	// bytes is the size of the output, or for an output that is being written, at least its reserved size. If the
	// output can be removed, othersBytes is the size of the parts that another user has left and that cannot be
	// removed.
	bytes, othersBytes int64
	// complete reports whether the output is published. identity is then the identity of its inputs.
	complete bool
	identity string
	lastUse  time.Time
	// keepReason is the reason why the output cannot be removed now. It is empty if the output can be removed; then
	// this process has both of its locks.
	keepReason string
	lock       filelock.Lock
	used       *os.File
}

// release releases the locks, if any.
func (t *cachedOutput) release() {
	if t.used != nil {
		t.used.Close()
		t.used = nil
	}
	t.lock.Release()
	t.lock = filelock.Lock{}
}

// findCachedOutputs inspects all outputs in a directory except out. It locks the outputs that may be removed. The model
// is kept, even if it is an output itself. The caller must have the admission lock. Then every other run has either
// reserved its space already, or will count the reservation of this run.
func findCachedOutputs(out, model string, grace time.Duration) (cached []*cachedOutput, err error) {
	defer func() {
		if err != nil {
			for _, t := range cached {
				t.release()
			}
			cached = nil
		}
	}()
	source, err := os.Stat(model)
	if err != nil {
		return nil, err
	}
	names, err := cachedOutputNames(filepath.Dir(out))
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		path := filepath.Join(filepath.Dir(out), name)
		if path == out {
			continue
		}
		t, err := inspectOutput(path, grace)
		if err != nil {
			return cached, err
		}
		if t == nil {
			continue
		}
		cached = append(cached, t)
		if info, err := os.Stat(path); err == nil && os.SameFile(info, source) {
			t.keepReason = "the model"
			t.release()
		}
		if t.othersBytes > 0 {
			cached = append(cached, &cachedOutput{out: path, bytes: t.othersBytes, keepReason: leftByOther})
		}
	}
	return cached, nil
}

// cachedOutputNames lists the outputs with files in a directory. Each run creates its use file before it is admitted.
// So no output is missed while its staging directory is renamed.
func cachedOutputNames(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, entry := range entries {
		name := entry.Name()
		if match := stagingName.FindStringSubmatch(name); match != nil && entry.IsDir() {
			names = append(names, match[1])
		} else if used, ok := strings.CutSuffix(name, usedSuffix); ok && len(used) > 1 && used[0] == '.' && entry.Type().IsRegular() {
			names = append(names, used[1:])
		} else if _, ok := completeOutput(filepath.Join(dir, name)); ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// completeOutput returns the manifest of an output of this format version. A symbolic link to an output does not count:
// its target is counted in its own directory.
func completeOutput(dir string) (*Manifest, bool) {
	if info, err := os.Lstat(dir); err != nil || !info.IsDir() {
		return nil, false
	}
	m, found, err := readManifest(dir)
	return m, err == nil && found && m.Format == Format
}

const (
	// ownedByOther is the reason to keep an output that this user may not lock or remove.
	ownedByOther = "of another user"
	// leftByOther is the reason to keep the unfinished parts of an output.
	leftByOther = "left by another user"
)

// inspectOutput inspects one output and returns nil if there is none. It retries if a run ended during the inspection.
func inspectOutput(out string, grace time.Duration) (*cachedOutput, error) {
	for {
		t, err := inspectOnce(out, grace)
		if errors.Is(err, fs.ErrPermission) {
			size, err := outputBytesOnDisk(out)
			return &cachedOutput{out: out, bytes: size, keepReason: ownedByOther}, err
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return t, err
		}
	}
}

// inspectOnce makes one attempt to inspect an output. It returns fs.ErrNotExist if a run ended during the inspection.
func inspectOnce(out string, grace time.Duration) (*cachedOutput, error) {
	path := hidden(out, lockSuffix)
	// Check the lock before the directories. A run without a lock at this point writes no more files.
	_, noLock := os.Lstat(path)
	if exists, err := outputExists(out); err != nil {
		return nil, err
	} else if !exists {
		// No run has left anything here. A file of this name was not created by this package; do not create or remove
		// it.
		if errors.Is(noLock, fs.ErrNotExist) {
			return nil, nil
		}
		if idle, err := filelock.Free(path); err != nil {
			return nil, err
		} else if !idle {
			return activeOutput(out)
		}
		if exists, err = outputExists(out); !exists || err != nil {
			return nil, err
		}
	}
	lock, locked, err := filelock.Try(path)
	switch {
	case err != nil:
		return nil, err
	case locked:
		return idleOutput(out, lock, grace)
	}
	return activeOutput(out)
}

// outputExists reports whether an output, or a part of it, exists.
func outputExists(out string) (bool, error) {
	parts, err := outputParts(out)
	return len(parts) > 0, err
}

// outputParts lists the directories of an output: the staging directories, then the output itself if it is complete.
func outputParts(out string) ([]string, error) {
	paths, err := stagingDirs(out)
	if _, complete := completeOutput(out); complete {
		paths = append(paths, out)
	}
	return paths, err
}

// activeOutput describes an output that another run is writing. It returns fs.ErrNotExist if the run ended during the
// inspection.
func activeOutput(out string) (*cachedOutput, error) {
	// Read the reservation before the directories. A run that has reserved nothing by now waits for the admission lock.
	bytes, err := filelock.Reserved(hidden(out, lockSuffix))
	if err != nil {
		return nil, err
	}
	size, err := outputBytesOnDisk(out)
	return &cachedOutput{out: out, bytes: max(size, bytes), keepReason: "being made"}, err
}

// outputBytesOnDisk returns the total size of an output and its staging directories.
func outputBytesOnDisk(out string) (int64, error) {
	paths, err := outputParts(out)
	if err != nil {
		return 0, err
	}
	var total int64
	for _, part := range paths {
		size, err := treeBytes(part)
		if err != nil {
			return 0, err
		}
		total += size
	}
	return total, nil
}

// idleOutput describes an output that no run is writing. The caller has the output's lock. It returns nil if the output
// no longer exists.
func idleOutput(out string, lock filelock.Lock, grace time.Duration) (_ *cachedOutput, err error) {
	t := &cachedOutput{out: out, lock: lock}
	defer func() {
		if err != nil || t.bytes == 0 || t.keepReason != "" {
			t.release()
		}
	}()
	if t.bytes, err = outputBytesOnDisk(out); err != nil || t.bytes == 0 {
		return nil, err
	}
	if err := t.checkOwner(); err != nil {
		return nil, err
	}
	m, complete := completeOutput(out)
	if !complete {
		return t, nil
	}
	t.complete, t.identity = true, identity(m.Source, m.PermutationDigest)
	info, err := os.Stat(filepath.Join(out, manifestFile))
	if err != nil {
		return nil, err
	}
	t.lastUse = info.ModTime()
	if err := t.lockUse(); err != nil {
		return nil, err
	}
	if since := time.Since(t.lastUse); t.keepReason == "" && since < grace {
		t.keepReason = fmt.Sprintf("used %d s ago", max(0, int64(since.Seconds())))
	}
	return t, nil
}

// checkOwner determines which parts this user may remove, before the output is renamed.
func (t *cachedOutput) checkOwner() error {
	paths, err := outputParts(t.out)
	if err != nil {
		return err
	}
	var othersBytes int64
	for _, part := range paths {
		if !closedDirectory(part) {
			continue
		}
		size, err := treeBytes(part)
		if err != nil {
			return err
		}
		othersBytes += size
		if part == t.out {
			t.keepReason = ownedByOther
		}
	}
	switch {
	case othersBytes == t.bytes:
		t.keepReason = ownedByOther
	case t.keepReason == "":
		t.bytes, t.othersBytes = t.bytes-othersBytes, othersBytes
	}
	return nil
}

// lockUse locks the use file, if there is one. An output without a use file has never been leased.
func (t *cachedOutput) lockUse() (err error) {
	t.used, _, err = filelock.Open(hidden(t.out, usedSuffix))
	if errors.Is(err, fs.ErrNotExist) {
		t.used = nil
		return nil
	}
	if err != nil {
		return err
	}
	info, err := t.used.Stat()
	if err != nil {
		return err
	}
	t.lastUse = info.ModTime()
	if err = filelock.Flock(t.used, unix.LOCK_EX); errors.Is(err, unix.EWOULDBLOCK) {
		t.keepReason = "in use"
		return nil
	}
	return err
}

// remove removes an output. The caller must have both of its locks. It first renames the output to a staging directory,
// so that a reader sees either the whole output or nothing. After a kill, a run on the same output resumes from the
// staging directory, or another run removes it.
func (t *cachedOutput) remove() error {
	if t.complete {
		staging := stagingDir(t.out, t.identity)
		if err := os.RemoveAll(staging); err != nil {
			return err
		}
		if err := os.Rename(t.out, staging); err != nil {
			return err
		}
		if err := syncDirectory(filepath.Dir(t.out)); err != nil {
			return err
		}
	}
	left, err := stagingDirs(t.out)
	if err != nil {
		return err
	}
	for _, part := range left {
		if closedDirectory(part) {
			continue
		}
		if err := os.RemoveAll(part); err != nil {
			return err
		}
	}
	// Another user may have created the use file without creating the output. It is then reused by the next run.
	err = os.Remove(hidden(t.out, usedSuffix))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return nil
	}
	return err
}
