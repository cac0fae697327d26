// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/semmoe/operator/internal/model/reshuffle/filelock"
)

// usedSuffix ends the name of the use file of an output. The file exists as long as the output does.
const usedSuffix = ".used"

// Lease is a lease on an output: the output is not removed while the lease exists. A lease is a shared lock on the use
// file next to the output. The modification time of the use file is the time of the output's last use. A lease is taken
// only by a run that has the output's lock, and removal requires the same lock. So the use file is never removed
// between opening and locking it.
type Lease struct {
	file *os.File
	// created reports whether this lease created the use file.
	created bool
}

func newLease(out string) (*Lease, error) {
	path := hidden(out, usedSuffix)
	_, err := os.Lstat(path)
	created := errors.Is(err, os.ErrNotExist)
	file, err := openUse(path)
	if err != nil {
		return nil, err
	}
	if err := filelock.Flock(file, unix.LOCK_SH); err != nil {
		file.Close()
		return nil, fmt.Errorf("failed to lock %s: %w", path, err)
	}
	return &Lease{file, created}, nil
}

// openUse opens the use file, creating it if necessary. A use file on which this user cannot set the time of use is
// replaced, unless it is locked, or only another user may remove it. In both cases it still serves as a lock.
func openUse(path string) (*os.File, error) {
	file, writable, err := filelock.Make(path)
	if err != nil || writable || filelock.Flock(file, unix.LOCK_EX) != nil || os.Remove(path) != nil {
		return file, err
	}
	file.Close()
	file, _, err = filelock.Make(path)
	return file, err
}

// touch sets the time of the last use to now. UTIME_NOW requires write permission; any other time requires ownership.
// Without permission, only the output's place in the order of removal is lost.
func (h *Lease) touch() error {
	now := unix.Timespec{Nsec: unix.UTIME_NOW}
	err := unix.UtimesNanoAt(unix.AT_FDCWD, h.file.Name(), []unix.Timespec{now, now}, 0)
	if err == nil || errors.Is(err, fs.ErrPermission) {
		return nil
	}
	return &fs.PathError{Op: "touch", Path: h.file.Name(), Err: err}
}

// Release ends the lease. The output counts as used until now.
func (h *Lease) Release() {
	_ = h.touch() // on failure, only the output's place in the order of removal is lost
	h.file.Close()
}

// abandon ends the lease of a run that failed.
func (h *Lease) abandon() {
	if h.created {
		os.Remove(h.file.Name())
	}
	h.file.Close()
}
