// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

// comparedBytes is the maximum size of a file that is compared by content; tokenizers are smaller. Larger files are
// compared only by size, because a run that finds its output should not read gigabytes.
const comparedBytes = 64 << 20

// refresh updates an existing output with those files of the model that its digest does not cover, such as the
// tokenizer, the chat template and code. Readers of the output see either the old file or the new one.
func (j *job) refresh(ctx context.Context, m *Manifest) error {
	changed, removed, err := j.stale(m)
	if err != nil || len(changed)+len(removed) == 0 {
		return err
	}
	logr.FromContextOrDiscard(ctx).Info("Updating files of the output", "output", j.out, "changed", changed, "removed", removed)
	err = j.replace(ctx, m, changed, removed)
	if errors.Is(err, fs.ErrPermission) {
		names := slices.Concat(changed, removed)
		return checkpoint.Invalidf("output %s: failed to update %d files, such as %s, that differ from the model %s: %v: remove the output, or run as its owner",
			j.out, len(names), names[0], j.source.Dir, err)
	}
	return err
}

// stale returns the files with different content in the model and the output, and the files of the output that no
// longer exist in the model.
func (j *job) stale(m *Manifest) (changed, removed []string, err error) {
	made := map[string]bool{}
	for _, name := range j.outputFiles() {
		made[name] = true
		if name == checkpoint.ConfigFile || name == j.source.IndexName {
			continue // the model's digest covers them
		}
		same, err := j.sameContent(m, name)
		if err != nil {
			return nil, nil, err
		}
		if !same {
			changed = append(changed, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(m.Files)) {
		if !made[name] && !j.files.unread(name) {
			removed = append(removed, name)
		}
	}
	slices.Sort(changed)
	return changed, removed, nil
}

// sameContent reports whether the output's file, according to the manifest, has the content that this run would write.
// Whether the manifest is correct is checked later.
func (j *job) sameContent(m *Manifest, name string) (bool, error) {
	if text, ok := j.files.rewritten[name]; ok {
		return m.Files[name] == digest(text), nil
	}
	from, to := filepath.Join(j.source.Dir, name), filepath.Join(j.out, name)
	info, err := os.Stat(from)
	if err != nil {
		return false, err
	}
	if m.Files[name] == "" {
		return false, nil
	}
	if info.Size() > comparedBytes {
		there, err := os.Stat(to)
		return err == nil && there.Size() == info.Size(), missingError(to, err)
	}
	sum, err := hashFile(from)
	return m.Files[name] == sum, err
}

// replace writes the changed files and deletes the removed ones. The manifest contains no hashes of these files until
// all of them are replaced. So after a kill, the next run replaces them again, with the content that the model has at
// that time.
func (j *job) replace(ctx context.Context, m *Manifest, changed, removed []string) error {
	for _, name := range slices.Concat(changed, removed) {
		m.Files[name] = ""
	}
	if err := m.save(j.out); err != nil {
		return err
	}
	j.atStep("refreshing")
	// A removed file may now be a directory, and a removed directory a file.
	for _, name := range removed {
		if err := removeFile(j.out, name); err != nil {
			return err
		}
		j.atStep("gone")
	}
	for _, name := range changed {
		if err := j.writeFile(ctx, j.out, name); err != nil {
			return err
		}
		j.atStep("refreshed")
	}
	if err := syncTree(j.out); err != nil {
		return err
	}
	return j.recordFiles(m, changed, removed)
}

// recordFiles completes the manifest of an output after its files were replaced.
func (j *job) recordFiles(m *Manifest, changed, removed []string) (err error) {
	for _, name := range changed {
		if m.Files[name], err = hashFile(filepath.Join(j.out, name)); err != nil {
			return err
		}
	}
	for _, name := range removed {
		delete(m.Files, name)
	}
	m.LeftOut = j.files.leftOut
	return m.save(j.out)
}

// removeFile removes a file that is listed in a manifest, and the directories that become empty. It never removes a
// file outside of the output.
func removeFile(out, name string) error {
	root, err := os.OpenRoot(out)
	if err != nil {
		return err
	}
	defer root.Close()
	for _, file := range []string{name, name + temporarySuffix} {
		err := root.Remove(file)
		// A killed run may already have removed the file, put a directory in its place, or replaced its parent
		// directory with a file.
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.ENOTDIR) {
			return err
		}
	}
	for dir := path.Dir(name); dir != "." && root.Remove(dir) == nil; {
		dir = path.Dir(dir)
	}
	return nil
}

// unread reports whether a file is below a directory that this user may not read, so that its existence is unknown.
func (f *sourceFiles) unread(name string) bool {
	return slices.ContainsFunc(f.leftOut, func(dir string) bool { return strings.HasPrefix(name, dir+"/") })
}
