package wire

import (
	"io"
	"net/http"
)

// Room is the memory in which a response may be held until it is edited.
type Room interface {
	// Hold asks for so many bytes in all of the response. It reports false, and changes nothing, where there is no room for them.
	Hold(bytes int64) bool
	// GiveUp is called where there was no room: nothing of the response is edited from then on.
	GiveUp()
	// Release gives all of the room back, once what was held has been passed on.
	Release()
}

const (
	// firstPart and longestPart are the sizes of what is held of a response of unknown length: parts are not moved when more comes.
	firstPart, longestPart = 4 << 10, 256 << 10
)

// readWithin reads a response as far as there is room, and reports whether that is all of it. Bytes count as they come, whatever the header
// says of their number.
func readWithin(response *http.Response, room Room) (parts [][]byte, whole bool, err error) {
	held := int64(0)
	// One byte more than its length meets the end of a response, which is then in one part.
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

// passedOn is a response of which parts were held.
type passedOn struct {
	parts [][]byte
	rest  io.ReadCloser
	// passed is called once none of the parts is held any more; nil after that.
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
