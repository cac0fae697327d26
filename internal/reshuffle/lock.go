package reshuffle

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"
)

// lockSuffix ends the name of the file that a run on an output locks.
const lockSuffix = ".lock"

// lockInterval is how often a taken lock is tried again.
const lockInterval = 50 * time.Millisecond

// fileLock is an exclusive lock on a file that is there only while it is locked.
type fileLock struct{ file *os.File }

// release ends the lock. The file is removed while the lock is held: who waits for it notices, and makes a new one.
func (l fileLock) release() {
	os.Remove(l.file.Name())
	l.file.Close()
}

// reserve writes into the lock of a run how many bytes its output will have, for those who count before they are there.
func (l fileLock) reserve(bytes int64) error {
	text := strconv.FormatInt(bytes, 10)
	_, err := l.file.WriteAt([]byte(text), 0)
	return errors.Join(err, l.file.Truncate(int64(len(text))))
}

// reserved reads what the holder of a lock has reserved; 0 where it has not yet.
func reserved(path string) (int64, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	bytes, err := strconv.ParseInt(string(text), 10, 64)
	if err != nil {
		return 0, nil
	}
	return bytes, nil
}

// lock waits until no other process has the lock.
func lock(ctx context.Context, path string) (fileLock, error) {
	for waited := false; ; waited = true {
		held, locked, err := tryLock(path)
		if err != nil || locked {
			return held, err
		}
		if !waited {
			logr.FromContextOrDiscard(ctx).Info("Waiting for another run", "lock", path)
		}
		select {
		case <-ctx.Done():
			return fileLock{}, ctx.Err()
		case <-time.After(lockInterval):
		}
	}
}

// tryLock reports false where somebody else has the lock.
func tryLock(path string) (_ fileLock, locked bool, err error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, fileMode)
	if err != nil {
		return fileLock{}, false, err
	}
	defer func() {
		if !locked {
			file.Close()
		}
	}()
	switch err := flock(file, unix.LOCK_EX); {
	case errors.Is(err, unix.EWOULDBLOCK):
		return fileLock{}, false, nil
	case err != nil:
		return fileLock{}, false, fmt.Errorf("lock %s: %w", path, err)
	}
	held, err := file.Stat()
	if err != nil {
		return fileLock{}, false, err
	}
	if named, err := os.Stat(path); err != nil || !os.SameFile(held, named) {
		return fileLock{}, false, nil // the holder before removed it: this lock guards nothing
	}
	// What a run that was killed had reserved counts no more.
	if err := file.Truncate(0); err != nil {
		return fileLock{}, false, err
	}
	return fileLock{file}, true, nil
}
