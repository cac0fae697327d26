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

	"github.com/semmoe/operator/internal/checkpoint"
)

// comparedBytes is the size up to which the content of a file tells whether it changed; tokenizers are below. Of a larger one the size
// does: a run that finds its output should not read gigabytes.
const comparedBytes = 64 << 20

// refresh brings an existing output up to date with those files of the model that its digest does not cover, such as the tokenizer, its
// chat template and code. Readers of the output see the old file or the new one.
func (j *job) refresh(ctx context.Context, m *Manifest) error {
	changed, gone, err := j.stale(m)
	if err != nil || len(changed)+len(gone) == 0 {
		return err
	}
	logr.FromContextOrDiscard(ctx).Info("Refreshing", "output", j.out, "changed", changed, "gone", gone)
	err = j.replace(ctx, m, changed, gone)
	if errors.Is(err, fs.ErrPermission) {
		names := slices.Concat(changed, gone)
		return checkpoint.Invalidf("output %s: %d files, such as %s, are not as the model %s has them now, and this user may not change them (%v): remove the output, or run as its owner",
			j.out, len(names), names[0], j.source.Dir, err)
	}
	return err
}

// stale names the files that the model has with other content than the output, and those of the output that the model has no more.
func (j *job) stale(m *Manifest) (changed, gone []string, err error) {
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
			gone = append(gone, name)
		}
	}
	slices.Sort(changed)
	return changed, gone, nil
}

// sameContent reports whether an output has a file as this run would make it, by the manifest: whether that is right is checked later.
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
		return err == nil && there.Size() == info.Size(), damaged(to, err)
	}
	sum, err := hashFile(from)
	return m.Files[name] == sum, err
}

// replace writes the files that changed and removes those that are gone. Until that is done the manifest has no hash of them: so the next
// run after a kill does it again, whatever the model has by then.
func (j *job) replace(ctx context.Context, m *Manifest, changed, gone []string) error {
	for _, name := range slices.Concat(changed, gone) {
		m.Files[name] = ""
	}
	if err := m.save(j.out); err != nil {
		return err
	}
	j.atStep("refreshing")
	// What is gone may be a file where there is a directory now, or the other way round.
	for _, name := range gone {
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
	return j.recordFiles(m, changed, gone)
}

// recordFiles completes the manifest of an output whose files have been replaced.
func (j *job) recordFiles(m *Manifest, changed, gone []string) (err error) {
	for _, name := range changed {
		if m.Files[name], err = hashFile(filepath.Join(j.out, name)); err != nil {
			return err
		}
	}
	for _, name := range gone {
		delete(m.Files, name)
	}
	m.LeftOut = j.files.leftOut
	return m.save(j.out)
}

// removeFile removes a file that a manifest names, with the directories that are empty then; never one outside of the output.
func removeFile(out, name string) error {
	root, err := os.OpenRoot(out)
	if err != nil {
		return err
	}
	defer root.Close()
	for _, file := range []string{name, name + temporarySuffix} {
		err := root.Remove(file)
		// A run that was killed has removed it already, and may have put a directory in its place, or a file in that of its directory.
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.ENOTDIR) {
			return err
		}
	}
	for dir := path.Dir(name); dir != "." && root.Remove(dir) == nil; {
		dir = path.Dir(dir)
	}
	return nil
}

// unread tells that a file lies below a directory that this user may not read: so it is not known whether it is there.
func (f *sourceFiles) unread(name string) bool {
	return slices.ContainsFunc(f.leftOut, func(dir string) bool { return strings.HasPrefix(name, dir+"/") })
}
