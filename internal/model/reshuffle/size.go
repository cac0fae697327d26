// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// outputBytes returns the maximum total size of the output's files. gathered is the part that is gathered and so must
// be written even if the file system shares blocks.
func (j *job) outputBytes() (total, gathered int64, err error) {
	// The length of a manifest with all hashes does not depend on the hashes.
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

// fileBytes returns the size of an output file that is not a shard.
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

// byteCounter counts the bytes written to it.
type byteCounter int64

func (c *byteCounter) Write(p []byte) (int, error) {
	*c += byteCounter(len(p))
	return len(p), nil
}

// treeBytes returns the total size of all files below a directory. Files that vanish during the walk, or that this user
// may not read, count as 0 bytes. So does a missing directory.
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
