package wire

import (
	"io"
	"net/http"
)

// Room is the memory budget for a response that is buffered until it is edited.
type Room interface {
	// Hold requests memory for bytes in total. It reports false and changes nothing if the budget is exhausted.
	Hold(bytes int64) bool
	// GiveUp is called when the budget is exhausted: the rest of the response is not edited.
	GiveUp()
	// Release returns the memory once the buffered data has been forwarded.
	Release()
}

const (
	// firstPart and longestPart are the buffer sizes for a response of unknown length. A list of parts avoids copies
	// when more data arrives.
	firstPart, longestPart = 4 << 10, 256 << 10
)

// readWithin reads a response within the budget, and reports whether it is complete. It counts the bytes that arrive,
// regardless of the declared length.
func readWithin(response *http.Response, room Room) (parts [][]byte, whole bool, err error) {
	held := int64(0)
	// One byte more than the declared length reaches the end of the response, which then fits in one part.
	size := max(Length(response)+1, firstPart)
	if size > longestPart && !room.Hold(size) {
		size = longestPart
	}
	for ; ; size = min(2*size, longestPart) {
		if held += size; !room.Hold(held) {
			return parts, false, nil
		}
		part := make([]byte, 0, size)
		for err == nil && len(part) < cap(part) {
			var n int
			n, err = response.Body.Read(part[len(part):cap(part)])
			part = part[:len(part)+n]
		}
		parts = append(parts, part)
		switch err {
		case nil:
		case io.EOF:
			return parts, true, nil
		default:
			return nil, false, err
		}
	}
}

// passedOn is a response that was partly buffered and is forwarded unchanged.
type passedOn struct {
	parts [][]byte
	rest  io.ReadCloser
	// passed is called once when no part is buffered any more; nil after that.
	passed func()
}

func (p *passedOn) Read(into []byte) (int, error) {
	for len(p.parts) > 0 {
		n := copy(into, p.parts[0])
		if p.parts[0] = p.parts[0][n:]; len(p.parts[0]) == 0 {
			p.parts[0] = nil
			p.parts = p.parts[1:]
		}
		if n > 0 || len(into) == 0 {
			return n, nil
		}
	}
	p.release()
	return p.rest.Read(into)
}

func (p *passedOn) Close() error {
	p.release()
	return p.rest.Close()
}

func (p *passedOn) release() {
	p.parts = nil
	if p.passed != nil {
		p.passed()
		p.passed = nil
	}
}
