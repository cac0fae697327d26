// SPDX-License-Identifier: Apache-2.0

// Package regularfile opens and reads files that a user names. It refuses everything that is not a regular file before
// it opens the path: a named pipe or a socket blocks its reader, and opening a device can have effects. A symbolic link
// to a regular file is followed.
package regularfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
)

var (
	// ErrTooLarge matches the error of Read for a file above the limit.
	ErrTooLarge = errors.New("file is too large")
	// ErrIrregular matches the errors for directories, named pipes, sockets and devices.
	ErrIrregular = errors.New("not a regular file")
)

// Open opens a regular file for reading. The error of any other kind of file names the kind.
func Open(path string) (*os.File, error) {
	if err := Check(path); err != nil {
		return nil, err
	}
	// The file can change between the check and the call: without O_NONBLOCK, opening a named pipe waits for a writer.
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil {
		err = checkMode("open", path, info.Mode())
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// Read returns the content of a regular file of at most maxBytes. A larger file is an ErrTooLarge, and is not read.
func Read(path string, maxBytes int64) ([]byte, error) {
	file, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	tooLarge := &fs.PathError{Op: "read", Path: path, Err: fmt.Errorf("%w: at most %d bytes are read", ErrTooLarge, maxBytes)}
	if info.Size() > maxBytes {
		return nil, tooLarge
	}
	// A file can grow after its size is known, and files of /proc have the size 0.
	content := make([]byte, 0, info.Size()+1)
	limited := io.LimitReader(file, maxBytes+1)
	for {
		n, err := limited.Read(content[len(content):cap(content)])
		content = content[:len(content)+n]
		switch {
		case int64(len(content)) > maxBytes:
			return nil, tooLarge
		case errors.Is(err, io.EOF):
			return content, nil
		case err != nil:
			return nil, err
		case len(content) == cap(content):
			content = append(content, 0)[:len(content)]
		}
	}
}

// Check returns an ErrIrregular for a path that is not a regular file, without opening it. It returns nil for a path
// that does not exist or cannot be examined: the caller that opens the path gets the cause.
func Check(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return nil
	}
	return checkMode("open", path, info.Mode())
}

func checkMode(op, path string, mode fs.FileMode) error {
	if mode.IsRegular() {
		return nil
	}
	return &fs.PathError{Op: op, Path: path, Err: fmt.Errorf("is %s, %w", Kind(mode), ErrIrregular)}
}

// Kind names what a file is in a message: "a named pipe".
func Kind(mode fs.FileMode) string {
	switch {
	case mode.IsRegular():
		return "a regular file"
	case mode.IsDir():
		return "a directory"
	case mode&fs.ModeNamedPipe != 0:
		return "a named pipe"
	case mode&fs.ModeSocket != 0:
		return "a socket"
	case mode&fs.ModeDevice != 0:
		return "a device"
	}
	return "a special file"
}

// Placeholder names what a download left in place of a file, from the beginning of its content, and the repair. It
// returns "" for any other content.
func Placeholder(content []byte) string {
	begin := bytes.ToLower(bytes.TrimSpace(content[:min(len(content), 512)]))
	switch {
	case bytes.HasPrefix(begin, []byte("version https://git-lfs.github.com/spec/")):
		return "is a Git LFS pointer, not the file that it points to: run git lfs pull, or download the file"
	case bytes.HasPrefix(begin, []byte("<!doctype html")), bytes.HasPrefix(begin, []byte("<html")):
		return "is an HTML page, not the file: download the file again"
	}
	return ""
}
