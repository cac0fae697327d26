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

// ErrNoRoom is the error of a body that was not read because others take all the memory that there is for requests.
var ErrNoRoom = httpserver.ErrNoMemory

const (
	// DefaultMemory bounds what all requests hold. With what is kept for routed experts (128 MiB, and about twice as much while they are
	// counted) it is below the 1 GiB that a router has.
	DefaultMemory = 384 << 20
	// DefaultArriving bounds what requests hold that are not whole, which an unknown client fills at no cost.
	DefaultArriving = 64 << 20
)

// promptBytes is the maximum that is read of a prompt, next to the body that contains it.
const promptBytes = wire.ReadTokens * wire.BytesPerToken

// NewMemory returns the memory of requests whose bodies have a maximum size: the default, or more where one body would not fit.
func NewMemory(maxBody int64) *httpserver.Memory {
	room := roomFor(maxBody)
	return &httpserver.Memory{Max: max(DefaultMemory, room), MaxArriving: max(DefaultArriving, room)}
}

// roomFor is the maximum that a body of a size takes while it is read: its length may not be known before its end, so that it grows from all
// of its bytes to one more.
func roomFor(size int64) int64 { return taken(size) + taken(size+1) }

// taken is what so many bytes of a body take, with what is read of a prompt in them.
func taken(bytes int64) int64 { return bytes + min(bytes, promptBytes) }

// Body is a client's body. A reference to it may outlive its use, as a request's context does, by all of a long answer: so it can be
// dropped. It is used by one goroutine; its readers may be by others.
type Body struct {
	data []byte
	// share is what the body takes of the memory; nil where it is not counted.
	share *httpserver.Share
	takes int64
}

// NewBody returns a body that is kept until it is dropped, and is not counted.
func NewBody(data []byte) *Body { return &Body{data: data} }

// Keep counts and returns a body that has come in one piece.
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

// trustedBytes is how much memory is made ready for a body because its header says so, before any of it has come.
const trustedBytes = 64 << 10

// Read reads a body as io.ReadAll does, but at most one byte more than the largest accepted size: a body of that many bytes is too large.
// The length is -1 where it is not known. A body counts as it arrives: a client that only promises bytes keeps nobody out. Where others
// need the memory of a large body that is not whole, interrupt is called, and must end the Read that waits.
func Read(memory *httpserver.Memory, from io.Reader, length, largest int64, interrupt func()) (*Body, error) {
	body := &Body{share: memory.Open(interrupt)}
	if !memory.HasRoom(length) {
		return nil, fmt.Errorf("%w: all requests may take %d bytes", ErrNoRoom, memory.Max)
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

// nextSize is the room for a body of which so many bytes have come, and more may. Where its length is known it is one more than that at
// most, to meet the end without growing.
func nextSize(size, length int64) int64 {
	switch {
	case size == 0:
		return max(512, min(length, trustedBytes)+1)
	case size <= length:
		return min(2*size, length+1)
	}
	return 2 * size
}

// grow makes room for so many bytes in all. The bytes that have come are held twice meanwhile.
func (b *Body) grow(size int64) error {
	before := b.takes
	if err := b.take(size); err != nil {
		return err
	}
	b.data = append(make([]byte, 0, size), b.data...)
	b.give(before)
	return nil
}

// take counts a body of so many bytes in addition to what it takes already, and what is read of a prompt in it.
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

// Bytes are those of the body; nil once it was dropped.
func (b *Body) Bytes() []byte { return b.data }

// Drop forgets the body. Further calls do nothing.
func (b *Body) Drop() {
	b.data = nil
	if b.share != nil {
		b.give(b.takes)
	}
}

// Reader returns a reader of the body, which keeps it until it is closed.
func (b *Body) Reader() io.ReadCloser {
	r := &bodyReader{}
	r.from.Store(bytes.NewReader(b.data))
	return r
}

// bodyReader may be closed while it is read: a transport does that where the answer comes before all was sent.
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
