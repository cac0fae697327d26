// SPDX-License-Identifier: Apache-2.0

package jsonscan

import (
	"bytes"
	"encoding/binary"
	"math/bits"
)

// maxDepth is the maximum nesting depth of arrays and objects, as in encoding/json.
const maxDepth = 10_000

// Member is one member of an object. Key is the key without quotes and escapes. data[At:] begins with the key's opening
// quote, and data[Start:End] is the value.
type Member struct {
	Key            []byte
	At, Start, End int
}

// Span is a part of a text, data[Start:End].
type Span struct{ Start, End int }

// Object appends the members of a text that is one JSON object, in order. For any other text, it returns false, and the
// members before the error.
func Object(data []byte, members []Member) ([]Member, bool) {
	at := space(data, 0)
	if at == len(data) || data[at] != '{' {
		return members, false
	}
	end := object(data, at, 1, func(m Member) { members = append(members, m) })
	return members, end >= 0 && space(data, end) == len(data)
}

// Array appends the elements of a text that is one JSON array. For any other text, it returns false.
func Array(data []byte, elements []Span) ([]Span, bool) {
	at := space(data, 0)
	if at == len(data) || data[at] != '[' {
		return elements, false
	}
	end := array(data, at, 1, func(s Span) { elements = append(elements, s) })
	return elements, end >= 0 && space(data, end) == len(data)
}

// Get returns the value of the last member with the name, which takes precedence, or nil if there is none.
func Get(data []byte, members []Member, name string) []byte {
	for i := len(members) - 1; i >= 0; i-- {
		if string(members[i].Key) == name {
			return data[members[i].Start:members[i].End]
		}
	}
	return nil
}

// The functions below parse a construct at a position. They return the end of the construct, or -1 for invalid JSON.

func space(data []byte, at int) int {
	for at < len(data) && (data[at] == ' ' || data[at] == '\n' || data[at] == '\t' || data[at] == '\r') {
		at++
	}
	return at
}

func value(data []byte, at, depth int) int {
	if at == len(data) {
		return -1
	}
	switch data[at] {
	case '"':
		return text(data, at)
	case '{':
		return object(data, at, depth+1, nil)
	case '[':
		return array(data, at, depth+1, nil)
	case 't':
		return literal(data, at, "true")
	case 'f':
		return literal(data, at, "false")
	case 'n':
		return literal(data, at, "null")
	}
	return number(data, at)
}

// object calls emit, unless it is nil, for each member.
func object(data []byte, at, depth int, emit func(Member)) int {
	if depth > maxDepth {
		return -1
	}
	if at = space(data, at+1); at < len(data) && data[at] == '}' {
		return at + 1
	}
	for {
		if at == len(data) || data[at] != '"' {
			return -1
		}
		key := at
		if at = text(data, at); at < 0 {
			return -1
		}
		keyEnd := at
		if at = space(data, at); at == len(data) || data[at] != ':' {
			return -1
		}
		start := space(data, at+1)
		end := value(data, start, depth)
		if end < 0 {
			return -1
		}
		if emit != nil {
			emit(Member{Key: keyOf(data[key:keyEnd]), At: key, Start: start, End: end})
		}
		if at = space(data, end); at == len(data) {
			return -1
		}
		switch data[at] {
		case '}':
			return at + 1
		case ',':
			at = space(data, at+1)
		default:
			return -1
		}
	}
}

// array calls emit, unless it is nil, for each element.
func array(data []byte, at, depth int, emit func(Span)) int {
	if depth > maxDepth {
		return -1
	}
	if at = space(data, at+1); at < len(data) && data[at] == ']' {
		return at + 1
	}
	for {
		end := value(data, at, depth)
		if end < 0 {
			return -1
		}
		if emit != nil {
			emit(Span{at, end})
		}
		if at = space(data, end); at == len(data) {
			return -1
		}
		switch data[at] {
		case ']':
			return at + 1
		case ',':
			at = space(data, at+1)
		default:
			return -1
		}
	}
}

func literal(data []byte, at int, want string) int {
	if !bytes.HasPrefix(data[at:], []byte(want)) {
		return -1
	}
	return at + len(want)
}

func number(data []byte, at int) int {
	if data[at] == '-' {
		at++
	}
	if at < len(data) && data[at] == '0' {
		at++
	} else if at = digits(data, at); at < 0 {
		return -1
	}
	if at < len(data) && data[at] == '.' {
		if at = digits(data, at+1); at < 0 {
			return -1
		}
	}
	if at < len(data) && data[at]|0x20 == 'e' {
		if at++; at < len(data) && (data[at] == '+' || data[at] == '-') {
			at++
		}
		return digits(data, at)
	}
	return at
}

// digits parses one or more digits.
func digits(data []byte, at int) int {
	start := at
	for at < len(data) && data[at] >= '0' && data[at] <= '9' {
		at++
	}
	if at == start {
		return -1
	}
	return at
}

// text parses a string from its opening quote on.
func text(data []byte, at int) int {
	at++
	for {
		if at = plain(data, at); at == len(data) {
			return -1
		}
		switch data[at] {
		case '"':
			return at + 1
		case '\\':
			if at = escape(data, at); at < 0 {
				return -1
			}
		default: // a control character
			return -1
		}
	}
}

// plain returns the position of the next quote, backslash or control character, or the end of the data. It tests eight
// bytes at a time, because most of a long body is text.
func plain(data []byte, at int) int {
	const each, high = 0x01_01_01_01_01_01_01_01, 0x80_80_80_80_80_80_80_80
	for ; at+8 <= len(data); at += 8 {
		word := binary.LittleEndian.Uint64(data[at:])
		quote, backslash := word^'"'*each, word^'\\'*each
		// The highest bit of a byte is set here if the byte is below 0x20, or is zero after the exclusive or. Bytes
		// after the first match may be marked wrongly, so only the lowest mark is used.
		if found := ((word-0x20*each)&^word | (quote-each)&^quote | (backslash-each)&^backslash) & high; found != 0 {
			return at + bits.TrailingZeros64(found)/8
		}
	}
	for at < len(data) && data[at] >= 0x20 && data[at] != '"' && data[at] != '\\' {
		at++
	}
	return at
}

// escape parses an escape sequence from its backslash on. Of a surrogate pair, it parses only the first half.
func escape(data []byte, at int) int {
	if at+1 >= len(data) {
		return -1
	}
	switch data[at+1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return at + 2
	case 'u':
		if _, ok := hex(data[at+2:]); ok {
			return at + 6
		}
	}
	return -1
}
