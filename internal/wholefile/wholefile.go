// Package wholefile writes files that appear complete, with their content on disk, or not at all: a reader sees what was there before or
// all of the new content.
package wholefile

import (
	"errors"
	"io"
	"os"
	"path/filepath"
)

// Write gives a file the content that a function writes, in place of what it had. It is made beside the path under a hidden name, which is
// removed again where anything fails. Two at once do not mix: the last one stays.
func Write(path string, mode os.FileMode, write func(io.Writer) error) (err error) {
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			file.Close()
			os.Remove(file.Name()) // what matters has been reported
		}
	}()
	if err := write(file); err != nil {
		return err
	}
	if err := errors.Join(file.Chmod(mode), file.Sync(), file.Close()); err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}

// WriteBytes is Write of content that is in memory.
func WriteBytes(path string, mode os.FileMode, content []byte) error {
	return Write(path, mode, func(w io.Writer) error {
		_, err := w.Write(content)
		return err
	})
}
