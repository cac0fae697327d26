package reshuffle

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"
)

// lockSuffix ends the name of the file that a run on an output locks.
const lockSuffix = ".lock"

// lockInterval is how often a taken lock is tried again.
const lockInterval = 500 * time.Millisecond

// lock waits until no other process works on the same output. The returned function ends the lock and removes its file.
func lock(ctx context.Context, path string) (release func(), err error) {
	for waited := false; ; waited = true {
		file, err := tryLock(path)
		if err != nil {
			return nil, err
		}
		if file != nil {
			// The file is removed while the lock is held: who waits for it notices, and makes a new one.
			return func() { os.Remove(path); file.Close() }, nil
		}
		if !waited {
			logr.FromContextOrDiscard(ctx).Info("Waiting for another run on the same output", "lock", path)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(lockInterval):
		}
	}
}

// tryLock returns no file where somebody else has the lock.
func tryLock(path string) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	if err := flock(file, unix.LOCK_EX); err != nil {
		file.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, nil
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	held, err := file.Stat()
	if err != nil {
		file.Close()
		return nil, err
	}
	if named, err := os.Stat(path); err != nil || !os.SameFile(held, named) {
		file.Close()
		return nil, nil // the holder before removed it: this lock guards nothing
	}
	return file, nil
}
