// SPDX-License-Identifier: Apache-2.0

// Package atomicfile writes files atomically: a reader sees either the previous content or the complete new content,
// which is already on disk.
package atomicfile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/semmoe/operator/internal/files/regularfile"
)

// Write replaces the content of a file with the content that a function writes. It writes to a hidden file in the same
// directory and renames it. After an error, the hidden file is removed. Of two concurrent calls, the last one wins.
// Write replaces the target of a symbolic link and keeps the link. It refuses an existing directory, device, named pipe
// or socket, because opening a pipe without a reader blocks.
func Write(path string, mode os.FileMode, write func(io.Writer) error) (err error) {
	path, err = target(path)
	if err != nil {
		return err
	}
	file, err := createTemp(path)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			file.Close()
			os.Remove(file.Name()) // the first error is returned
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

// WriteBytes is like Write, with content that is in memory.
func WriteBytes(path string, mode os.FileMode, content []byte) error {
	return Write(path, mode, func(w io.Writer) error {
		_, err := w.Write(content)
		return err
	})
}

// Check returns the error with which Write would refuse a path. It leaves no file behind.
func Check(path string) error {
	path, err := target(path)
	if err != nil {
		return err
	}
	file, err := createTemp(path)
	if err != nil {
		return err
	}
	return errors.Join(file.Close(), os.Remove(file.Name()))
}

// target returns the path of the file that Write replaces. Symbolic links are resolved.
func target(path string) (string, error) {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return path, nil
	case err != nil:
		return "", err
	case !info.Mode().IsRegular():
		return "", fmt.Errorf("%s is %s: use the path of a file", path, regularfile.Kind(info.Mode()))
	}
	return filepath.EvalSymlinks(path)
}

// createTemp creates a hidden file next to a path. Errors name the requested path.
func createTemp(path string) (*os.File, error) {
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	var failed *fs.PathError
	if errors.As(err, &failed) {
		return nil, fmt.Errorf("failed to create %s: %w", path, failed.Err)
	}
	return file, err
}
