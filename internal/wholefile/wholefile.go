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
)

// Write gives a file the content that a function writes, in place of what it had. It is made beside the file under a hidden name, which is
// removed again where anything fails. Two at once do not mix: the last one stays. A symbolic link stays, and what it leads to is replaced; a
// device or a pipe is written to as it is.
func Write(path string, mode os.FileMode, write func(io.Writer) error) (err error) {
	path, replaced, err := place(path)
	if err != nil {
		return err
	}
	if !replaced {
		return writeThrough(path, write)
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

// Check tells why Write would refuse a path, before there is any content; it leaves nothing behind. A device or a pipe is not opened:
// a pipe would wait for its reader.
func Check(path string) error {
	path, replaced, err := place(path)
	if err != nil || !replaced {
		return err
	}
	file, err := fresh(path)
	if err != nil {
		return err
	}
	return errors.Join(file.Close(), os.Remove(file.Name()))
}

// place is where a path leads to, and whether what is there is replaced.
func place(path string) (real string, replaced bool, err error) {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return path, true, nil
	case err != nil:
		return "", false, err
	case info.IsDir():
		return "", false, fmt.Errorf("%s is a directory: name a file", path)
	case !info.Mode().IsRegular():
		return path, false, nil
	}
	real, err = filepath.EvalSymlinks(path)
	return real, true, err
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

func writeThrough(path string, write func(io.Writer) error) error {
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	return errors.Join(write(file), file.Close())
}
