package reshuffle

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const (
	// blockBytes is the alignment of clones; every file system in use has blocks of this size or a divisor of it.
	blockBytes = 4096
	// chunkBytes bounds one copy_file_range call, so that progress is seen and a cancelled run ends soon.
	chunkBytes = 32 << 20
	// bufferBytes is the size of a copy buffer.
	bufferBytes = 1 << 20
)

var buffers = sync.Pool{New: func() any { b := make([]byte, bufferBytes); return &b }}

// Method is how bytes were copied.
type Method int32

// The methods, from the cheapest; a run reports the dearest that it needed.
const (
	Reflink Method = iota
	CopyFileRange
	Buffered
)

func (m Method) String() string { return [...]string{"reflink", "copy_file_range", "buffered"}[m] }

// copier copies file ranges by the cheapest means that the file systems offer. It is safe for concurrent use.
type copier struct {
	// total is the number of bytes of all data sections, done how many of them have been copied.
	total int64
	done  atomic.Int64
	// worst is the dearest method used.
	worst atomic.Int32
	// noClone and noRange remember what the file systems refused.
	noClone, noRange atomic.Bool
}

func (c *copier) used(m Method) {
	for {
		old := c.worst.Load()
		if int32(m) <= old || c.worst.CompareAndSwap(old, int32(m)) {
			return
		}
	}
}

// clone makes dst share the blocks of src, moved towards the end by shift, a multiple of the block size; bytes before
// from+shift are undefined afterwards. It reports false where that is not possible.
func (c *copier) clone(dst, src *os.File, from, shift int64) (bool, error) {
	if c.noClone.Load() {
		return false, nil
	}
	var err error
	if shift == 0 {
		err = unix.IoctlFileClone(int(dst.Fd()), int(src.Fd()))
	} else {
		first := from - from%blockBytes
		err = unix.IoctlFileCloneRange(int(dst.Fd()), &unix.FileCloneRange{
			Src_fd: int64(src.Fd()), Src_offset: uint64(first), Dest_offset: uint64(first + shift),
		})
	}
	switch {
	case err == nil:
		return true, nil
	case unsupported(err):
		// Larger blocks refuse the shift alone.
		c.noClone.Store(shift == 0)
		return false, nil
	}
	return false, fmt.Errorf("clone %s: %w", src.Name(), err)
}

// unsupported tells that a file system, a pair of them, a kernel or a sandbox does not offer a call.
func unsupported(err error) bool {
	for _, code := range []error{unix.EOPNOTSUPP, unix.ENOTTY, unix.EINVAL, unix.EXDEV, unix.ENOSYS, unix.EPERM, unix.EBADF, unix.ETXTBSY} {
		if errors.Is(err, code) {
			return true
		}
	}
	return false
}

// span is a range of a source file and where it goes.
type span struct{ to, from, bytes int64 }

func (c *copier) copy(ctx context.Context, dst, src *os.File, s span) error {
	for s.bytes > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := c.some(dst, src, s)
		if err != nil {
			return fmt.Errorf("copy %s: %w", src.Name(), err)
		}
		if s.bytes > bufferBytes {
			// Let the disk write while the next chunk is copied; the final fsync reports its errors.
			_ = unix.SyncFileRange(int(dst.Fd()), s.to, n, unix.SYNC_FILE_RANGE_WRITE)
		}
		s.to, s.from, s.bytes = s.to+n, s.from+n, s.bytes-n
		c.done.Add(n)
	}
	return nil
}

// some copies the beginning of a span.
func (c *copier) some(dst, src *os.File, s span) (int64, error) {
	if !c.noRange.Load() {
		to, from := s.to, s.from
		n, err := unix.CopyFileRange(int(src.Fd()), &from, int(dst.Fd()), &to, int(min(s.bytes, chunkBytes)), 0)
		switch {
		case err == nil && n > 0:
			c.used(CopyFileRange)
			return int64(n), nil
		case errors.Is(err, unix.EINTR):
			return 0, nil
		case err != nil && !unsupported(err):
			return 0, err
		}
		// Some file systems refuse the call, others copy nothing: then read and write.
		c.noRange.Store(true)
	}
	c.used(Buffered)
	buffer := *buffers.Get().(*[]byte)
	defer buffers.Put(&buffer)
	part := buffer[:min(s.bytes, bufferBytes)]
	if err := readFull(src, part, s.from); err != nil {
		return 0, err
	}
	n, err := dst.WriteAt(part, s.to)
	return int64(n), err
}

// readFull reads all of part; a file that ends before was cut while it was read.
func readFull(file *os.File, part []byte, at int64) error {
	n, err := file.ReadAt(part, at)
	if n == len(part) {
		return nil
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("%s at %d: %w", file.Name(), at, err)
}
