// SPDX-License-Identifier: Apache-2.0

package jsonscan

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"sync"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// String decodes a value that is a JSON string, as found by Object and Array. It returns false for a value of another
// type.
func String(value []byte) (string, bool) {
	if len(value) < 2 || value[0] != '"' {
		return "", false
	}
	inner := value[1 : len(value)-1]
	if bytes.IndexByte(inner, '\\') < 0 && utf8.Valid(inner) {
		return string(inner), true
	}
	return unquote(inner), true
}

// keyOf decodes a key with its quotes.
func keyOf(quoted []byte) []byte {
	inner := quoted[1 : len(quoted)-1]
	if bytes.IndexByte(inner, '\\') < 0 && utf8.Valid(inner) {
		return inner
	}
	return []byte(unquote(inner))
}

// escaped maps the characters after a backslash to the characters that they represent.
var escaped = [256]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// decoded holds buffers for the decoding of strings. keptDecoded is the maximum size of a buffer that is reused.
var decoded = sync.Pool{New: func() any { return new([]byte) }}

const keptDecoded = 64 << 10

// unquote decodes the escapes of a valid string. Invalid UTF-8 and unpaired surrogates become U+FFFD.
func unquote(inner []byte) string {
	if !utf8.Valid(inner) {
		inner = valid(inner)
	}
	buffer := decoded.Get().(*[]byte)
	if cap(*buffer) < len(inner)+8 {
		*buffer = make([]byte, len(inner)+8)
	}
	text := string(unescape((*buffer)[:cap(*buffer)], inner))
	if cap(*buffer) <= keptDecoded {
		decoded.Put(buffer)
	}
	return text
}

// unescape decodes valid UTF-8 into out, which must have eight bytes more. An escape is never shorter than its
// character. It copies eight bytes at a time, because most of a long body is text.
func unescape(out, inner []byte) []byte {
	const each, high, backslashes = 0x01_01_01_01_01_01_01_01, 0x80_80_80_80_80_80_80_80, '\\' * 0x01_01_01_01_01_01_01_01
	at, n := 0, 0
	for at < len(inner) {
		if at+8 <= len(inner) {
			word := binary.LittleEndian.Uint64(inner[at:])
			binary.LittleEndian.PutUint64(out[n:], word)
			word ^= backslashes
			found := (word - each) &^ word & high
			if found == 0 {
				at, n = at+8, n+8
				continue
			}
			plain := bits.TrailingZeros64(found) / 8
			at, n = at+plain, n+plain
		} else if inner[at] != '\\' {
			out[n] = inner[at]
			at, n = at+1, n+1
			continue
		}
		if c := inner[at+1]; c != 'u' {
			out[n] = escaped[c]
			at, n = at+2, n+1
			continue
		}
		r, size := escapedRune(inner[at:])
		n += utf8.EncodeRune(out[n:], r)
		at += size
	}
	return out[:n]
}

// escapedRune decodes a \u escape, or two of them if they are a surrogate pair. It returns the rune and the length of
// the escapes.
func escapedRune(inner []byte) (rune, int) {
	first, _ := hex(inner[2:])
	if !utf16.IsSurrogate(first) {
		return first, 6
	}
	if len(inner) >= 12 && inner[6] == '\\' && inner[7] == 'u' {
		second, _ := hex(inner[8:])
		if r := utf16.DecodeRune(first, second); r != unicode.ReplacementChar {
			return r, 12
		}
	}
	return unicode.ReplacementChar, 6
}

// valid returns text with each byte that is not valid UTF-8 replaced by U+FFFD.
func valid(text []byte) []byte {
	out := make([]byte, 0, 3*len(text))
	for len(text) > 0 {
		r, size := utf8.DecodeRune(text)
		out = utf8.AppendRune(out, r)
		text = text[size:]
	}
	return out
}

// hex parses four hexadecimal digits.
func hex(data []byte) (rune, bool) {
	if len(data) < 4 {
		return 0, false
	}
	var r rune
	for _, c := range data[:4] {
		switch {
		case c >= '0' && c <= '9':
			r = r<<4 | rune(c-'0')
		case c|0x20 >= 'a' && c|0x20 <= 'f':
			r = r<<4 | rune(c|0x20-'a'+10)
		default:
			return 0, false
		}
	}
	return r, true
}
