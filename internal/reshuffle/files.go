package reshuffle

import (
	"context"
	"errors"
	"io/fs"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/semmoe/operator/internal/checkpoint"
)

// sourceFiles are the files of the input that are no shards, by what becomes of them. Names are relative to the
// checkpoint, with slashes.
type sourceFiles struct {
	// copied come along as they are; rewritten have new content.
	copied    []string
	rewritten map[string][]byte
	leftOut   []string
}

// findFiles sorts the files of a checkpoint, which are those below root, and rewrites those that name experts.
func findFiles(ctx context.Context, root fs.FS, c *checkpoint.Checkpoint, m *mapping) (*sourceFiles, error) {
	files := &sourceFiles{rewritten: map[string][]byte{}}
	shards, mentions := map[string]bool{}, newMentions(c, m)
	for _, shard := range c.Shards {
		shards[shard.Name()] = true
	}
	err := fs.WalkDir(root, ".", func(name string, entry fs.DirEntry, err error) error {
		// A volume's root has a lost+found that its owner alone may read.
		if errors.Is(err, fs.ErrPermission) && name != "." {
			files.leftOut = append(files.leftOut, name)
			return fs.SkipDir
		}
		// An output on the model's volume that is being removed.
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
		info, err := fs.Stat(root, name) // follows links: model caches consist of them
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return checkpoint.Invalidf("%s is a link to nothing", filepath.Join(c.Dir, name))
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
		case shards[name] || name == ManifestFile:
			return nil
		case name == c.IndexName:
			return checkIndex(c)
		}
		return files.add(ctx, root, mentions, name)
	})
	if at := (*fs.PathError)(nil); errors.Is(err, fs.ErrPermission) && errors.As(err, &at) {
		return nil, checkpoint.Invalidf("%s is not readable by this user: check its permissions", filepath.Join(c.Dir, at.Path))
	}
	return files, err
}

// skipDirectory skips what is no part of the model: hidden directories hold the state of download and version control tools, which is
// about the original files, and the unfinished outputs of this package; its finished ones have a manifest, but so may the model.
func skipDirectory(root fs.FS, name string) error {
	if name == "." {
		return nil
	}
	_, err := fs.Stat(root, path.Join(name, ManifestFile))
	if err == nil || strings.HasPrefix(path.Base(name), ".") {
		return fs.SkipDir
	}
	return nil
}

// addCopied requires that the file can be opened: it is copied last, when all shards are written.
func (f *sourceFiles) addCopied(root fs.FS, name string) error {
	file, err := root.Open(name)
	if err != nil {
		return err
	}
	f.copied = append(f.copied, name)
	return file.Close()
}

// names lists every file that the output has besides the shards.
func (f *sourceFiles) names() []string {
	names := slices.Clone(f.copied)
	for name := range f.rewritten {
		names = append(names, name)
	}
	return names
}
