// SPDX-License-Identifier: Apache-2.0

package client

import (
	"bytes"
	"fmt"
	"io"
	"os"
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
	room := memoryFor(maxBody)
	return &httpserver.Memory{Max: max(DefaultMemory, room), MaxArriving: max(DefaultArriving, room)}
}

// memoryFor returns the maximum memory of a body while it is read. The length may not be known before the end, so a
// body of size bytes may be copied to a buffer that is one byte larger.
func memoryFor(size int64) int64 { return taken(size) + taken(size+1) }

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
	if err := body.take(int64(len(data))); err != nil {
		return nil, err
	}
	body.data = data
	return body, nil
}

// maxPreallocated is the maximum memory that is allocated for a declared body length before any of the body has
// arrived.
const maxPreallocated = 64 << 10

// Read reads a body like io.ReadAll, but at most one byte more than largest; a body of that length is too large. length
// is -1 if it is not known. A body counts as it arrives: a client that only declares a length does not block others. If
// other requests need the memory of a large incomplete body, interrupt is called; it must end the blocked Read.
func Read(memory *httpserver.Memory, from io.Reader, length, largest int64, interrupt func()) (*Body, error) {
	body := &Body{share: memory.Open(interrupt)}
	if !memory.Fits(length) {
		return nil, fmt.Errorf("%w: all requests may take %d bytes", ErrNoMemory, memory.Max)
	}
	var err error
	for err == nil && int64(len(body.data)) <= largest {
		if len(body.data) == cap(body.data) {
			err = body.grow(min(nextSize(int64(len(body.data)), length), largest+1))
			continue
		}
		var n int
		n, err = from.Read(body.data[len(body.data):cap(body.data)])
		body.data = body.data[:len(body.data)+n]
	}
	if finishErr := body.share.Finish(); finishErr != nil {
		err = finishErr
	}
	if err != nil && err != io.EOF {
		body.Drop()
		return nil, err
	}
	return body, nil
}

// nextSize returns the next buffer size for a body of which size bytes have arrived. If the length is known, the buffer
// has at most one byte more, so that Read meets the end without growing it.
func nextSize(size, length int64) int64 {
	switch {
	case size == 0:
		return max(512, min(length, maxPreallocated)+1)
	case size <= length:
		return min(2*size, length+1)
	}
	return 2 * size
}

// grow enlarges the buffer to size bytes. Old and new buffer count until the data is copied.
func (b *Body) grow(size int64) error {
	before := b.takes
	if err := b.take(size); err != nil {
		return err
	}
	b.data = append(make([]byte, 0, size), b.data...)
	b.give(before)
	return nil
}

// take counts the memory of a body of this size and of its parsed prompt, in addition to the memory that is counted
// already.
func (b *Body) take(size int64) error {
	bytes := taken(size)
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
