package wire

import (
	"bytes"
	"strconv"
)

// RankReader finds the values of an integer member in an answer, wherever the member is. The answer may arrive in pieces. A text that an
// engine has generated is not mistaken for the member: within a JSON string the quotes of a name are escaped.
type RankReader struct {
	name []byte // in quotes
	tail []byte // the end of what has come
}

// rankWindow is more than a member takes: its name, a colon, spaces and a number.
const rankWindow = 64

// NewRankReader returns a reader of the member with a name.
func NewRankReader(name string) *RankReader {
	return &RankReader{name: []byte(strconv.Quote(name)), tail: make([]byte, 0, 2*rankWindow)}
}

// Add reads a piece, and calls found with each value that is complete. It may call found more than once with the same value.
func (r *RankReader) Add(piece []byte, found func(rank int)) {
	r.scan(append(r.tail, piece[:min(len(piece), rankWindow)]...), found)
	r.scan(piece, found)
	if n := len(piece); n >= rankWindow {
		r.tail = append(r.tail[:0], piece[n-rankWindow:]...)
		return
	}
	r.tail = append(r.tail, piece...)
	r.tail = append(r.tail[:0], r.tail[max(0, len(r.tail)-rankWindow):]...)
}

func (r *RankReader) scan(data []byte, found func(rank int)) {
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
		if rank, err := strconv.Atoi(string(value[:digits])); err == nil {
			found(rank)
		}
	}
}
