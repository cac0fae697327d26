package reshuffle

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// outputBytes is the size of all files that the output will have at most, and how many bytes of that are gathered and so
// are written whatever the file system can share.
func (j *job) outputBytes() (total, gathered int64, err error) {
	// The manifest with every hash has its final length whatever the hashes are.
	m := j.newManifest()
	hash := strings.Repeat("0", len(j.identity.ModelDigest))
	m.ModelDigest = hash
	for _, shard := range j.source.Shards {
		plan, err := planShard(shard, j.mapping)
		if err != nil {
			return 0, 0, err
		}
		total += plan.size()
		gathered += plan.gathered()
		hashes := map[string]string{}
		for _, g := range plan.gathers {
			if g.hashed() {
				hashes[g.tensor] = hash
			}
		}
		m.Shards[shard.Name()] = Shard{plan.size(), hash, hashes, hash}
	}
	for _, name := range j.outputFiles() {
		m.Files[name] = hash
		size, err := j.fileBytes(name)
		if err != nil {
			return 0, 0, err
		}
		total += size
	}
	text, err := m.encode()
	return total + int64(len(text)), gathered, err
}

// fileBytes is the size that a file of the output will have which is no shard.
func (j *job) fileBytes(name string) (int64, error) {
	if text, ok := j.files.rewritten[name]; ok {
		return int64(len(text)), nil
	}
	if name == j.source.IndexName {
		var size byteCounter
		err := j.writeIndex(&size)
		return int64(size), err
	}
	info, err := os.Stat(filepath.Join(j.source.Dir, name))
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// byteCounter counts what is written to it.
type byteCounter int64

func (c *byteCounter) Write(p []byte) (int, error) {
	*c += byteCounter(len(p))
	return len(p), nil
}

// treeBytes is the size of all files below a directory. What vanishes meanwhile, is not there, or may not be looked at, has none.
func treeBytes(dir string) (total int64, err error) {
	err = filepath.WalkDir(dir, func(_ string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			var info fs.FileInfo
			if info, err = entry.Info(); err == nil {
				total += info.Size()
			}
		}
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
			return nil
		}
		return err
	})
	return total, err
}
