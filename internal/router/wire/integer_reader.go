package wire

import (
	"bytes"
	"strconv"
)

// IntegerReader finds the values of an integer member in an answer, wherever the member is. The answer may arrive in
// pieces. A text that an engine has generated is not mistaken for the member: within a JSON string the quotes of a name
// are escaped.
type IntegerReader struct {
	name []byte // in quotes
	tail []byte // the end of what has come
}

// integerWindow is more than a member takes: its name, a colon, spaces and a number.
const integerWindow = 64

// NewIntegerReader returns a reader of the member with a name.
func NewIntegerReader(name string) *IntegerReader {
	return &IntegerReader{name: []byte(strconv.Quote(name)), tail: make([]byte, 0, 2*integerWindow)}
}

// Add reads a piece, and calls found with each value that is complete. It may call found more than once with the same
// value.
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
		if !isMember || digits == len(value) { // another string, or the number may go on
			continue
		}
		if number, err := strconv.Atoi(string(value[:digits])); err == nil {
			found(number)
		}
	}
}
