// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"context"
	"errors"
	"io/fs"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

// sourceFiles lists the files of the input that are not shards, by their treatment. Names are relative to the
// checkpoint, with slashes.
type sourceFiles struct {
	// copied files are copied unchanged. rewritten maps the other files to their new content.
	copied    []string
	rewritten map[string][]byte
	leftOut   []string
}

// findFiles classifies the files of a checkpoint, which are the files below root, and rewrites the files that name
// experts.
func findFiles(ctx context.Context, root fs.FS, c *checkpoint.Checkpoint, m *mapping) (*sourceFiles, error) {
	files := &sourceFiles{rewritten: map[string][]byte{}}
	shards, renamer := map[string]bool{}, newExpertRenamer(c, m)
	for _, shard := range c.Shards {
		shards[shard.Name()] = true
	}
	err := fs.WalkDir(root, ".", func(name string, entry fs.DirEntry, err error) error {
		// The root of a volume may have a lost+found directory that only its owner can read.
		if errors.Is(err, fs.ErrPermission) && name != "." {
			files.leftOut = append(files.leftOut, name)
			return fs.SkipDir
		}
		// An output on the model's volume is being removed.
		if errors.Is(err, fs.ErrNotExist) && name != "." {
			return fs.SkipDir
		}
		if err != nil {
			return err
		}
		if entry.IsDir() {
			return skipDirectory(root, name)
		}
		if guardName.MatchString(entry.Name()) {
			return nil
		}
		info, err := fs.Stat(root, name) // follows links: model caches consist of links
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return checkpoint.Invalidf("%s is a dangling symbolic link", filepath.Join(c.Dir, name))
		case errors.Is(err, unix.ELOOP):
			return checkpoint.Invalidf("%s is a loop of symbolic links", filepath.Join(c.Dir, name))
		case err != nil:
			return err
		case !info.Mode().IsRegular():
			files.leftOut = append(files.leftOut, name)
			return nil
		}
		if err := checkLink(c.Dir, name, entry); err != nil {
			return err
		}
		switch {
		case shards[name] || name == manifestFile:
			return nil
		case name == c.IndexName:
			return checkIndex(c)
		}
		return files.add(ctx, root, renamer, name)
	})
	if at := (*fs.PathError)(nil); errors.Is(err, fs.ErrPermission) && errors.As(err, &at) {
		return nil, checkpoint.Invalidf("%s is not readable by this user: check its permissions", filepath.Join(c.Dir, at.Path))
	}
	return files, err
}

// skipDirectory skips directories that are not part of the model. Hidden directories contain the state of download and
// version control tools, which describes the original files, and the staging directories of this package. Finished
// outputs of this package contain a manifest, but so may the model itself.
func skipDirectory(root fs.FS, name string) error {
	if name == "." {
		return nil
	}
	_, err := fs.Stat(root, path.Join(name, manifestFile))
	if err == nil || strings.HasPrefix(path.Base(name), ".") {
		return fs.SkipDir
	}
	return nil
}

// addCopied adds a file to copy. It checks that the file can be opened, because files are copied last, after all
// shards.
func (f *sourceFiles) addCopied(root fs.FS, name string) error {
	file, err := root.Open(name)
	if err != nil {
		return err
	}
	f.copied = append(f.copied, name)
	return file.Close()
}

// names lists every file of the output other than the shards.
func (f *sourceFiles) names() []string {
	names := slices.Clone(f.copied)
	for name := range f.rewritten {
		names = append(names, name)
	}
	return names
}
