// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"io"
	"net/http"
)

// MemoryBudget is the memory budget for a response that is buffered until it is edited.
type MemoryBudget interface {
	// Reserve requests memory for bytes in total. It reports false and changes nothing if the budget is exhausted.
	Reserve(bytes int64) bool
	// GiveUp is called when the budget is exhausted: the rest of the response is not edited.
	GiveUp()
	// Release returns the memory once the buffered data has been forwarded.
	Release()
}

const (
	// minPartBytes and maxPartBytes are the buffer sizes for a response of unknown length. A list of parts avoids
	// copies when more data arrives.
	minPartBytes, maxPartBytes = 4 << 10, 256 << 10
)

// readBuffered reads a response within the budget, and reports whether it is complete. It counts the bytes that arrive,
// regardless of the declared length.
func readBuffered(response *http.Response, budget MemoryBudget) (parts [][]byte, whole bool, err error) {
	held := int64(0)
	// One byte more than the declared length reaches the end of the response, which then fits in one part.
	size := max(Length(response)+1, minPartBytes)
	if size > maxPartBytes && !budget.Reserve(size) {
		size = maxPartBytes
	}
	for ; ; size = min(2*size, maxPartBytes) {
		if held += size; !budget.Reserve(held) {
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

// unedited is a response that was partly buffered and is forwarded unchanged.
type unedited struct {
	parts [][]byte
	rest  io.ReadCloser
	// passed is called once when no part is buffered any more; nil after that.
	passed func()
}

func (p *unedited) Read(into []byte) (int, error) {
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

func (p *unedited) Close() error {
	p.release()
	return p.rest.Close()
}

func (p *unedited) release() {
	p.parts = nil
	if p.passed != nil {
		p.passed()
		p.passed = nil
	}
}
