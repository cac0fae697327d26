// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"strconv"
)

// IntegerReader finds the values of an integer member at any path of a response, which may arrive in pieces. Generated
// text cannot be mistaken for the member: quotes in a JSON string are escaped.
type IntegerReader struct {
	name []byte // with quotes
	tail []byte // the end of the data read so far
}

// integerWindow exceeds the size of a member: its name, a colon, spaces and a number.
const integerWindow = 64

// NewIntegerReader returns a reader for the member with this name.
func NewIntegerReader(name string) *IntegerReader {
	return &IntegerReader{name: []byte(strconv.Quote(name)), tail: make([]byte, 0, 2*integerWindow)}
}

// Add reads a piece and calls found with each complete value. It may report a value more than once.
func (r *IntegerReader) Add(piece []byte, found func(value int)) {
	r.scan(append(r.tail, piece[:min(len(piece), integerWindow)]...), found)
	r.scan(piece, found)
	if n := len(piece); n >= integerWindow {
		r.tail = append(r.tail[:0], piece[n-integerWindow:]...)
		return
	}
	r.tail = append(r.tail, piece...)
	r.tail = append(r.tail[:0], r.tail[max(0, len(r.tail)-integerWindow):]...)
}

func (r *IntegerReader) scan(data []byte, found func(value int)) {
	for {
		_, rest, ok := bytes.Cut(data, r.name)
		if !ok {
			return
		}
		data = rest
		value, isMember := bytes.CutPrefix(bytes.TrimLeft(data, " \t\r\n"), []byte{':'})
		value = bytes.TrimLeft(value, " \t\r\n")
		digits := 0
		for digits < len(value) && value[digits] >= '0' && value[digits] <= '9' {
			digits++
		}
		if !isMember || digits == len(value) { // another string, or an incomplete number
			continue
		}
		if number, err := strconv.Atoi(string(value[:digits])); err == nil {
			found(number)
		}
	}
}
