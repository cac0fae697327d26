// SPDX-License-Identifier: Apache-2.0

package hub

import (
	"io/fs"
	"os"
	"path/filepath"
)

// AddDirectory adds the files of a directory to a repository.
func AddDirectory(repo *Repo, dir string) error {
	return filepath.WalkDir(dir, func(name string, item fs.DirEntry, err error) error {
		if err != nil || !item.Type().IsRegular() {
			return err
		}
		relative, err := filepath.Rel(dir, name)
		if err != nil {
			return err
		}
		return repo.Add(filepath.ToSlash(relative), func() (Content, error) {
			file, err := os.Open(name)
			if err != nil {
				return nil, err
			}
			info, err := file.Stat()
			if err != nil {
				file.Close()
				return nil, err
			}
			return onDisk{file, info.Size()}, nil
		})
	})
}

type onDisk struct {
	*os.File
	size int64
}

func (f onDisk) Size() int64 { return f.size }
