// Package wholefile writes files that appear complete, with their content on disk, or not at all: a reader sees what was there before or
// all of the new content.
package wholefile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/semmoe/operator/internal/regularfile"
)

// Write replaces the content of a file with the content that a function writes. It writes a hidden file in the same directory, renames the
// hidden file, and removes it after an error. Of two concurrent calls the last one wins. Write replaces the target of a symbolic link and
// keeps the link. It refuses an existing directory, device, named pipe or socket: a pipe without a reader blocks its writer.
func Write(path string, mode os.FileMode, write func(io.Writer) error) (err error) {
	path, err = target(path)
	if err != nil {
		return err
	}
	file, err := fresh(path)
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

// Check reports why Write would refuse a path. It leaves nothing behind.
func Check(path string) error {
	path, err := target(path)
	if err != nil {
		return err
	}
	file, err := fresh(path)
	if err != nil {
		return err
	}
	return errors.Join(file.Close(), os.Remove(file.Name()))
}

// target returns the path that Write replaces: that of the file that a symbolic link leads to.
func target(path string) (string, error) {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return path, nil
	case err != nil:
		return "", err
	case !info.Mode().IsRegular():
		return "", fmt.Errorf("%s is %s: name a file", path, regularfile.Kind(info.Mode()))
	}
	return filepath.EvalSymlinks(path)
}

// fresh makes a file beside a path. Its errors name the path, which is what somebody has asked for.
func fresh(path string) (*os.File, error) {
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	var failed *fs.PathError
	if errors.As(err, &failed) {
		return nil, fmt.Errorf("%s cannot be made: %w", path, failed.Err)
	}
	return file, err
}
