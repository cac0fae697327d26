// SPDX-License-Identifier: Apache-2.0

package client

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/semmoe/operator/internal/httpserver"
	"github.com/semmoe/operator/internal/router/wire"
)

// ErrNoMemory is returned if a body was not read because other requests use all request memory.
var ErrNoMemory = httpserver.ErrNoMemory

const (
	// DefaultMemory bounds the memory of all requests. Together with the memory for routed experts (128 MiB, and about
	// twice as much while they are counted) it is below the memory limit of 1 GiB of a router.
	DefaultMemory = 384 << 20
	// DefaultArriving bounds the memory of incomplete requests, which an unknown client could fill at no cost.
	DefaultArriving = 64 << 20
)

// promptBytes is the maximum size of the parsed prompt, which is stored in addition to the body.
const promptBytes = wire.ReadTokens * wire.BytesPerToken

// NewMemory returns the memory budget for requests with a maximum body size: the default, or more if one body would not
// fit.
func NewMemory(maxBody int64) *httpserver.Memory {
	return &httpserver.Memory{Max: max(DefaultMemory, memoryFor(maxBody)), MaxArriving: max(DefaultArriving, arriving(maxBody))}
}

// memoryFor returns the maximum memory of a body while it is read: a large body is copied from its chunks once it is
// complete.
func memoryFor(size int64) int64 { return arriving(size) + size + 1 }

// arriving returns the maximum memory of an incomplete body, of which one byte more than size may be read. The buffer
// of a small one is copied as it grows.
func arriving(size int64) int64 { return taken((size/chunkBytes+1)*chunkBytes) + taken(chunkBytes/2) }

// taken returns the memory of a body of this size, including its parsed prompt.
func taken(bytes int64) int64 { return bytes + min(bytes, promptBytes) }

// Body is the body of a client request. It can be dropped early, because references to it (such as the request context)
// may live as long as a long response. A Body is used by one goroutine; its readers may be used by others.
type Body struct {
	data []byte
	// share is the part of the memory budget that the body uses; nil if the body is not counted.
	share *httpserver.Share
	takes int64
}

// NewBody returns a body that is kept until it is dropped and does not count against the memory budget.
func NewBody(data []byte) *Body { return &Body{data: data} }

// Keep returns a body that has arrived in one piece, and counts it.
func Keep(memory *httpserver.Memory, data []byte) (*Body, error) {
	body := &Body{share: memory.Open(nil)}
	if err := body.share.Finish(); err != nil {
		return nil, err
	}
	if err := body.take(taken(int64(len(data)))); err != nil {
		return nil, err
	}
	body.data = data
	return body, nil
}

// chunkBytes is the size of the buffers for incomplete bodies. Up to this size, memory is allocated for a declared
// length before any of the body has arrived.
const chunkBytes = 64 << 10

// chunks are the buffers of incomplete large bodies. They are reused: bodies that never end, and are dropped in favour
// of others, would otherwise leave garbage faster than the garbage collector frees it.
var chunks = sync.Pool{New: func() any { return new([chunkBytes]byte) }}

// Read reads a body like io.ReadAll, but at most one byte more than largest; a body of that length is too large. length
// is -1 if it is not known. A body counts as it arrives: a client that only declares a length does not block others. If
// other requests need the memory of a large incomplete body, interrupt is called; it must end the blocked Read.
func Read(memory *httpserver.Memory, from io.Reader, length, largest int64, interrupt func()) (*Body, error) {
	body := &Body{share: memory.Open(interrupt)}
	if !memory.Fits(length) {
		return nil, fmt.Errorf("%w: all requests may take %d bytes", ErrNoMemory, memory.Max)
	}
	from = io.LimitReader(from, largest+1)
	complete, err := false, error(nil)
	if length < chunkBytes {
		complete, err = body.readSmall(from, length)
	}
	if err == nil && !complete {
		err = body.readChunks(from)
	}
	// An interrupted read fails with the error of the connection.
	if finishErr := body.share.Finish(); finishErr != nil {
		err = finishErr
	}
	if err != nil {
		body.Drop()
		return nil, err
	}
	return body, nil
}

// readSmall reads until the body ends or fills a buffer of chunkBytes, and reports whether it is complete. If the length
// is known, the first buffer has one byte more, so that the end is met without growing it.
func (b *Body) readSmall(from io.Reader, length int64) (complete bool, err error) {
	for size := max(512, length+1); ; size = min(2*size, chunkBytes) {
		before := b.takes
		if err := b.take(taken(size)); err != nil {
			return false, err
		}
		b.data = append(make([]byte, 0, size), b.data...)
		b.give(before)
		n, complete, err := fill(b.data[len(b.data):size], from)
		b.data = b.data[:len(b.data)+n]
		switch {
		case err != nil:
			return false, err
		case complete:
			return true, nil
		case size == chunkBytes:
			return false, nil
		}
	}
}

// readChunks reads the rest of a body in chunks, and copies them to one buffer. The share is finished before, because
// the copy does not count as arriving.
func (b *Body) readChunks(from io.Reader) error {
	var parts [][]byte
	if b.data != nil {
		parts = append(parts, b.data)
	}
	defer func() {
		for _, part := range parts {
			chunks.Put((*[chunkBytes]byte)(part[:chunkBytes]))
		}
	}()
	for complete := false; !complete; {
		if err := b.take(taken(int64(len(parts)+1)*chunkBytes) - b.takes); err != nil {
			return err
		}
		chunk := chunks.Get().(*[chunkBytes]byte)
		n, end, err := fill(chunk[:], from)
		parts = append(parts, chunk[:n])
		if err != nil {
			return err
		}
		complete = end
	}
	if err := b.share.Finish(); err != nil {
		return err
	}
	size := int64(len(parts)-1)*chunkBytes + int64(len(parts[len(parts)-1]))
	if err := b.take(size); err != nil {
		return err
	}
	b.data = slices.Concat(parts...)
	b.give(b.takes - taken(size))
	return nil
}

// fill reads until the buffer is full or the source ends, and returns the number of bytes and whether it ended. Unlike
// io.ReadFull it distinguishes the end from a broken connection, which net/http reports as io.ErrUnexpectedEOF.
func fill(buffer []byte, from io.Reader) (n int, end bool, err error) {
	for n < len(buffer) && err == nil {
		var read int
		read, err = from.Read(buffer[n:])
		n += read
	}
	if err == io.EOF {
		return n, true, nil
	}
	return n, false, err
}

// take counts more memory for the body.
func (b *Body) take(bytes int64) error {
	if err := b.share.Take(bytes); err != nil {
		return err
	}
	b.takes += bytes
	return nil
}

func (b *Body) give(bytes int64) {
	b.takes -= bytes
	b.share.Give(bytes)
}

// Bytes returns the body; nil once it was dropped.
func (b *Body) Bytes() []byte { return b.data }

// Drop releases the body. Further calls do nothing.
func (b *Body) Drop() {
	b.data = nil
	if b.share != nil {
		b.give(b.takes)
	}
}

// Reader returns a reader of the body, which references the body until it is closed.
func (b *Body) Reader() io.ReadCloser {
	r := &bodyReader{}
	r.from.Store(bytes.NewReader(b.data))
	return r
}

// bodyReader may be closed during a Read: a transport does so if the response arrives before the request is sent
// completely.
type bodyReader struct{ from atomic.Pointer[bytes.Reader] }

func (r *bodyReader) Read(p []byte) (int, error) {
	if from := r.from.Load(); from != nil {
		return from.Read(p)
	}
	return 0, os.ErrClosed
}

func (r *bodyReader) Close() error {
	r.from.Store(nil)
	return nil
}
