package reshuffle

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/semmoe/operator/internal/reshuffle/filelock"
)

// usedSuffix ends the name of the file that tells of an output's use. It stays as long as the output does.
const usedSuffix = ".used"

// Hold keeps an output from being removed: a shared lock on a file beside it, whose modification time is when the output
// was last in use. A hold begins only while its run has the output's lock, and whoever removes the output has that lock
// too: so the file is never removed between being opened and being locked.
type Hold struct {
	file *os.File
	// created is true where the output had no such file.
	created bool
}

func newHold(out string) (*Hold, error) {
	path := hidden(out, usedSuffix)
	_, err := os.Lstat(path)
	created := errors.Is(err, os.ErrNotExist)
	file, err := openUse(path)
	if err != nil {
		return nil, err
	}
	if err := filelock.Flock(file, unix.LOCK_SH); err != nil {
		file.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return &Hold{file, created}, nil
}

// openUse opens the file of use, or makes it. One in which this user cannot tell the time of use is replaced, unless it is held, or is
// another user's to remove: then it still serves for a lock.
func openUse(path string) (*os.File, error) {
	file, writable, err := filelock.Make(path)
	if err != nil || writable || filelock.Flock(file, unix.LOCK_EX) != nil || os.Remove(path) != nil {
		return file, err
	}
	file.Close()
	file, _, err = filelock.Make(path)
	return file, err
}

// touch makes now the time of the last use. The system's own now asks for leave to write, any other time for ownership. Without leave
// the output loses its place in the order of removal alone.
func (h *Hold) touch() error {
	now := unix.Timespec{Nsec: unix.UTIME_NOW}
	err := unix.UtimesNanoAt(unix.AT_FDCWD, h.file.Name(), []unix.Timespec{now, now}, 0)
	if err == nil || errors.Is(err, fs.ErrPermission) {
		return nil
	}
	return &fs.PathError{Op: "touch", Path: h.file.Name(), Err: err}
}

// Release ends the hold. The output was in use until now.
func (h *Hold) Release() {
	_ = h.touch() // what is lost is the output's place in the order of removal
	h.file.Close()
}

// abandon ends the hold of a run that failed.
func (h *Hold) abandon() {
	if h.created {
		os.Remove(h.file.Name())
	}
	h.file.Close()
}
