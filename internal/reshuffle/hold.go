package reshuffle

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
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
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, fileMode)
	if err != nil {
		return nil, err
	}
	if err := flock(file, unix.LOCK_SH); err != nil {
		file.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return &Hold{file, created}, nil
}

// flock takes a lock at once or fails, with EWOULDBLOCK where somebody else has it.
func flock(file *os.File, how int) error {
	for {
		if err := unix.Flock(int(file.Fd()), how|unix.LOCK_NB); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// touch makes now the time of the last use.
func (h *Hold) touch() error {
	now := time.Now()
	return os.Chtimes(h.file.Name(), now, now)
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
