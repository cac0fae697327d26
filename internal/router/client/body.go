package client

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"

	"github.com/semmoe/operator/internal/router/wire"
)

// ErrNoRoom says that a body was not read because those of others take all the memory that there is for bodies.
var ErrNoRoom = errors.New("the request router has no memory left for another body")

// DefaultBodies is what the bodies of all requests may take at once: with what is kept for routed experts, which is 256 MiB and twice
// that while they are counted, less than the 1 GiB that a router has.
const DefaultBodies = 384 << 20

// promptBytes is how much is read of a prompt at most, beside the body that it stands in.
const promptBytes = wire.ReadTokens * wire.BytesPerToken

// Bodies bounds the memory of the bodies that are held at once. It is safe for concurrent use.
type Bodies struct {
	// Most is how many bytes they may take in all.
	Most int64
	held atomic.Int64
}

// NewBodies returns the bound for bodies of which each has at most so many bytes: the default, or more where one of them would not fit.
func NewBodies(largest int64) *Bodies {
	return &Bodies{Most: max(DefaultBodies, roomFor(largest))}
}

// roomFor is what a body of so many bytes takes at most: its length may not be known before its end, so that it grows from all of its bytes
// to one more.
func roomFor(largest int64) int64 { return taken(largest) + taken(largest+1) }

// taken is what so many bytes of a body take, with what is read of a prompt in them.
func taken(bytes int64) int64 { return bytes + min(bytes, promptBytes) }

// Held is how many bytes are held.
func (b *Bodies) Held() int64 { return b.held.Load() }

// take holds so many bytes more. It reports false, and holds no more, where that is too much.
func (b *Bodies) take(bytes int64) bool {
	if b.held.Add(bytes) <= b.Most {
		return true
	}
	b.held.Add(-bytes)
	return false
}

// noRoom is ErrNoRoom in words.
func (b *Bodies) noRoom() error {
	return fmt.Errorf("%w: they may take %d bytes in all", ErrNoRoom, b.Most)
}

// Body is a client's body. What holds it may outlive its use, as a request's context does, by all of a long answer: so it can be
// dropped. It is used by one goroutine; its readers may be by others.
type Body struct {
	data []byte
	// of is where the body counts, with what it takes; nil where it does not.
	of    *Bodies
	takes int64
}

// NewBody returns a body that is kept until it is dropped, and counts nowhere.
func NewBody(data []byte) *Body { return &Body{data: data} }

// Keep returns a body that has come in one piece.
func (b *Bodies) Keep(data []byte) (*Body, error) {
	body := &Body{of: b}
	if err := body.take(int64(len(data))); err != nil {
		return nil, err
	}
	body.data = data
	return body, nil
}

// trustedBytes is how much memory is made ready for a body because its header says so, before any of it has come.
const trustedBytes = 64 << 10

// Read reads a body as io.ReadAll does, but no more than a byte beyond the largest that is accepted: one that has come so far is too large.
// Its length is probably known; -1 where it is not. What a body takes counts as it comes: what a client only promises to send keeps nobody
// out.
func (b *Bodies) Read(from io.Reader, length, largest int64) (*Body, error) {
	body := &Body{of: b}
	if length > b.Most-b.Held() {
		return nil, b.noRoom()
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

// grow makes room for so many bytes in all. What has come is held twice meanwhile.
func (b *Body) grow(size int64) error {
	before := b.takes
	if err := b.take(size); err != nil {
		return err
	}
	b.data = append(make([]byte, 0, size), b.data...)
	b.give(before)
	return nil
}

// take counts a body of so many bytes beside what it takes already, and what is read of a prompt in it.
func (b *Body) take(size int64) error {
	bytes := taken(size)
	if !b.of.take(bytes) {
		return b.of.noRoom()
	}
	b.takes += bytes
	return nil
}

func (b *Body) give(bytes int64) {
	b.takes -= bytes
	b.of.held.Add(-bytes)
}

// Bytes are those of the body; nil once it was dropped.
func (b *Body) Bytes() []byte { return b.data }

// Drop forgets the body. Further calls do nothing.
func (b *Body) Drop() {
	b.data = nil
	if b.of != nil {
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
