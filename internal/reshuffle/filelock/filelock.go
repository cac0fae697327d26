// Package filelock locks files, by which processes and users that share a directory of outputs keep out of one another's way.
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

// interval is how often a taken lock is tried again.
const interval = 50 * time.Millisecond

// mode lets all users of a directory lock, and write, the files beside its outputs.
const mode = 0o666

// maxNumber is the length of the largest number that is reserved.
const maxNumber = int64(len("9223372036854775807"))

// Open opens a file beside an output. One that this user may not write, which earlier versions made for others, is opened for
// reading: that is enough for a lock.
func Open(path string) (file *os.File, writable bool, err error) {
	file, err = open(path, os.O_RDWR)
	if errors.Is(err, fs.ErrPermission) {
		file, err = open(path, os.O_RDONLY)
		return file, false, err
	}
	return file, err == nil, err
}

// open opens files alone. Others may write in the directory: a link of theirs would lead a privileged user to a file that it then empties,
// one to nothing seems to be there and not there for ever, and a pipe is never open.
func open(path string, how int) (*os.File, error) {
	file, err := os.OpenFile(path, how|unix.O_NOFOLLOW|unix.O_NONBLOCK, mode)
	if errors.Is(err, unix.ELOOP) {
		return nil, noFile(path)
	}
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = noFile(path)
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

func noFile(path string) error {
	return fmt.Errorf("%s is a link, or something else that is no file: remove it", path)
}

// Make is Open that makes the file where there is none. It does not open one that another user has made just now with O_CREATE: that one may
// not be open to others yet, and in a directory with the sticky bit the system may refuse it even then.
func Make(path string) (file *os.File, writable bool, err error) {
	for {
		if file, writable, err = Open(path); !errors.Is(err, fs.ErrNotExist) {
			return file, writable, err
		}
		file, err = open(path, os.O_RDWR|os.O_CREATE|os.O_EXCL)
		if err == nil {
			_ = file.Chmod(mode) // whatever the umask
			return file, true, nil
		}
		if !errors.Is(err, fs.ErrExist) {
			return nil, false, err
		}
	}
}

// Lock is an exclusive lock on a file that is there only while it is locked.
type Lock struct{ file *os.File }

// Release ends the lock, if it is one. The file is removed while the lock is held: who waits for it notices, and makes a new one.
func (l Lock) Release() {
	if l.file == nil {
		return
	}
	os.Remove(l.file.Name())
	l.file.Close()
}

// Reserve writes into the lock of a run how many bytes its output will have, for those who count before they are there.
func (l Lock) Reserve(bytes int64) error {
	text := strconv.FormatInt(bytes, 10)
	_, err := l.file.WriteAt([]byte(text), 0)
	return errors.Join(err, l.file.Truncate(int64(len(text))))
}

// Reserved reads what the holder of a lock has reserved; 0 where it has not yet.
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

// Wait waits until no other process has the lock.
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

// Try reports false where somebody else has the lock.
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
		return Lock{}, false, fmt.Errorf("lock %s: %w", path, err)
	}
	held, err := file.Stat()
	if err != nil {
		return Lock{}, false, err
	}
	if named, err := os.Lstat(path); err != nil || !os.SameFile(held, named) {
		return Lock{}, false, nil // the holder before removed it: this lock guards nothing
	}
	if !writable {
		// A run of another user that was killed has left it: the next try makes one in which this run can reserve.
		if err := os.Remove(path); err != nil {
			return Lock{}, false, fmt.Errorf("left by another user: %w", err)
		}
		return Lock{}, false, nil
	}
	// What a run that was killed had reserved counts no more.
	if err := file.Truncate(0); err != nil {
		return Lock{}, false, err
	}
	return Lock{file}, true, nil
}

// Free reports whether nobody holds the lock on a file.
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

// Flock takes a lock at once or fails, with EWOULDBLOCK where somebody else has it.
func Flock(file *os.File, how int) error {
	for {
		if err := unix.Flock(int(file.Fd()), how|unix.LOCK_NB); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
