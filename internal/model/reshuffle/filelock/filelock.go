// SPDX-License-Identifier: Apache-2.0

// Package filelock implements file locks. Processes and users that share a directory of outputs use them to exclude
// each other.
package filelock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"
)

// interval is the polling interval for a lock that another process has.
const interval = 50 * time.Millisecond

// mode lets all users of a directory lock and write the lock files.
const mode = 0o666

// maxNumber is the number of digits of the largest number of bytes that can be reserved.
const maxNumber = int64(len("9223372036854775807"))

// Open opens a lock file. A file that this user may not write, created by an earlier version of another user, is opened
// read-only, which is enough for a lock. writable reports whether the file was opened for writing.
func Open(path string) (file *os.File, writable bool, err error) {
	file, err = open(path, os.O_RDWR)
	if errors.Is(err, fs.ErrPermission) {
		file, err = open(path, os.O_RDONLY)
		return file, false, err
	}
	return file, err == nil, err
}

// open opens only regular files. Other users may write to the directory. Their symbolic link could lead a privileged
// user to a file that this package then truncates, a dangling link would exist for Lstat and not for open in an endless
// retry, and opening a FIFO would block.
func open(path string, how int) (*os.File, error) {
	file, err := os.OpenFile(path, how|unix.O_NOFOLLOW|unix.O_NONBLOCK, mode)
	if errors.Is(err, unix.ELOOP) {
		return nil, irregularFileError(path)
	}
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = irregularFileError(path)
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

func irregularFileError(path string) error {
	return fmt.Errorf("%s is not a regular file: remove it", path)
}

// Make opens a lock file like Open and creates it if it does not exist. It does not use O_CREATE on an existing file
// that another user has just created: the mode of such a file may not be set yet, and in a directory with the sticky
// bit the system may refuse O_CREATE even later.
func Make(path string) (file *os.File, writable bool, err error) {
	for {
		if file, writable, err = Open(path); !errors.Is(err, fs.ErrNotExist) {
			return file, writable, err
		}
		file, err = open(path, os.O_RDWR|os.O_CREATE|os.O_EXCL)
		if err == nil {
			_ = file.Chmod(mode) // regardless of the umask
			return file, true, nil
		}
		if !errors.Is(err, fs.ErrExist) {
			return nil, false, err
		}
	}
}

// Lock is an exclusive lock on a file that exists only while it is locked.
type Lock struct{ file *os.File }

// Release releases the lock; the zero value has none. The file is removed before the lock is released. A process that
// waits for the lock detects the removal and creates a new file.
func (l Lock) Release() {
	if l.file == nil {
		return
	}
	os.Remove(l.file.Name())
	l.file.Close()
}

// Reserve writes the size in bytes of the run's future output to its lock file. Other runs read it to compute the disk
// usage.
func (l Lock) Reserve(bytes int64) error {
	text := strconv.FormatInt(bytes, 10)
	_, err := l.file.WriteAt([]byte(text), 0)
	return errors.Join(err, l.file.Truncate(int64(len(text))))
}

// Reserved returns the number of bytes reserved in a lock file, or 0 if nothing has been reserved yet.
func Reserved(path string) (int64, error) {
	file, err := open(path, os.O_RDONLY)
	if err != nil {
		return 0, err
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, maxNumber))
	if err != nil {
		return 0, err
	}
	bytes, err := strconv.ParseInt(string(text), 10, 64)
	if err != nil {
		return 0, nil
	}
	return bytes, nil
}

// Wait waits until it gets the lock or ctx is done.
func Wait(ctx context.Context, path string) (Lock, error) {
	for waited := false; ; waited = true {
		held, locked, err := Try(path)
		if err != nil || locked {
			return held, err
		}
		if !waited {
			logr.FromContextOrDiscard(ctx).Info("Waiting for another run", "lock", path)
		}
		select {
		case <-ctx.Done():
			return Lock{}, ctx.Err()
		case <-time.After(interval):
		}
	}
}

// Try tries to lock once. locked is false if another process has the lock.
func Try(path string) (_ Lock, locked bool, err error) {
	file, writable, err := Make(path)
	if err != nil {
		return Lock{}, false, err
	}
	defer func() {
		if !locked {
			file.Close()
		}
	}()
	switch err := Flock(file, unix.LOCK_EX); {
	case errors.Is(err, unix.EWOULDBLOCK):
		return Lock{}, false, nil
	case err != nil:
		return Lock{}, false, fmt.Errorf("failed to lock %s: %w", path, err)
	}
	held, err := file.Stat()
	if err != nil {
		return Lock{}, false, err
	}
	if named, err := os.Lstat(path); err != nil || !os.SameFile(held, named) {
		return Lock{}, false, nil // the previous owner removed the file: this lock protects nothing
	}
	if !writable {
		// A killed run of another user has left the file. The next attempt creates a file that this run can write its
		// reservation to.
		if err := os.Remove(path); err != nil {
			return Lock{}, false, fmt.Errorf("failed to remove a lock file left by another user: %w", err)
		}
		return Lock{}, false, nil
	}
	// Clear the reservation of a killed run.
	if err := file.Truncate(0); err != nil {
		return Lock{}, false, err
	}
	return Lock{file}, true, nil
}

// Free reports whether no process has an exclusive lock on a file.
func Free(path string) (bool, error) {
	file, err := open(path, os.O_RDONLY)
	if err != nil {
		return false, err
	}
	defer file.Close()
	err = Flock(file, unix.LOCK_SH)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return false, nil
	}
	return err == nil, err
}

// Flock locks a file without waiting. It returns EWOULDBLOCK if another process has the lock.
func Flock(file *os.File, how int) error {
	for {
		if err := unix.Flock(int(file.Fd()), how|unix.LOCK_NB); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
