// SPDX-License-Identifier: Apache-2.0

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
	// blockBytes is the alignment of clones. The block size of every file system in use is 4096 or a divisor of it.
	blockBytes = 4096
	// chunkBytes bounds one copy_file_range call, so that progress is reported and a cancelled run ends soon.
	chunkBytes = 32 << 20
	// bufferBytes is the size of a copy buffer.
	bufferBytes = 1 << 20
)

var buffers = sync.Pool{New: func() any { b := make([]byte, bufferBytes); return &b }}

// Method is the method by which bytes were copied.
type Method int32

// The methods, in ascending order of cost. A run reports the most expensive method that it used.
const (
	Reflink Method = iota
	CopyFileRange
	Buffered
)

func (m Method) String() string { return [...]string{"reflink", "copy_file_range", "buffered"}[m] }

// copier copies file ranges by the cheapest method that the file systems support. It is safe for concurrent use.
type copier struct {
	// total is the size in bytes of all data sections. done is the number of bytes copied so far.
	total int64
	done  atomic.Int64
	// costliest is the most expensive method used.
	costliest atomic.Int32
	// noClone and noRange record that the file systems do not support the call.
	noClone, noRange atomic.Bool
}

func (c *copier) used(m Method) {
	for {
		old := c.costliest.Load()
		if int32(m) <= old || c.costliest.CompareAndSwap(old, int32(m)) {
			return
		}
	}
}

// clone makes dst share the blocks of src, shifted towards the end of the file by shift bytes, a multiple of the block
// size. The bytes before from+shift are undefined afterwards. It returns false if the file systems do not support
// cloning.
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
		// A file system with larger blocks refuses only the shifted clone.
		c.noClone.Store(shift == 0)
		return false, nil
	}
	return false, fmt.Errorf("failed to clone %s: %w", src.Name(), err)
}

// unsupported reports whether a file system, a pair of file systems, the kernel or a sandbox does not support a call.
func unsupported(err error) bool {
	for _, code := range []error{unix.EOPNOTSUPP, unix.ENOTTY, unix.EINVAL, unix.EXDEV, unix.ENOSYS, unix.EPERM, unix.EBADF, unix.ETXTBSY} {
		if errors.Is(err, code) {
			return true
		}
	}
	return false
}

// span is a range of a source file and its offset in the destination.
type span struct{ to, from, bytes int64 }

func (c *copier) copy(ctx context.Context, dst, src *os.File, s span) error {
	for s.bytes > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := c.copyChunk(dst, src, s)
		if err != nil {
			return fmt.Errorf("failed to copy %s: %w", src.Name(), err)
		}
		if s.bytes > bufferBytes {
			// Start writeback while the next chunk is copied. The final fsync reports its errors.
			_ = unix.SyncFileRange(int(dst.Fd()), s.to, n, unix.SYNC_FILE_RANGE_WRITE)
		}
		s.to, s.from, s.bytes = s.to+n, s.from+n, s.bytes-n
		c.done.Add(n)
	}
	return nil
}

// copyChunk copies the beginning of a span and returns the number of bytes copied.
func (c *copier) copyChunk(dst, src *os.File, s span) (int64, error) {
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
		// Some file systems refuse the call, others copy 0 bytes. Fall back to reading and writing.
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

// readFull reads all of part. It returns io.ErrUnexpectedEOF for a file that was truncated while it was read.
func readFull(file *os.File, part []byte, at int64) error {
	n, err := file.ReadAt(part, at)
	if n == len(part) {
		return nil
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("failed to read %s at offset %d: %w", file.Name(), at, err)
}
