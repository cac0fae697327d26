package jsonscan

import (
	"bytes"
	"strings"
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

// unquote decodes the escapes of a valid string. Invalid UTF-8 and unpaired surrogates become U+FFFD.
func unquote(inner []byte) string {
	valid := utf8.Valid(inner)
	var out strings.Builder
	out.Grow(len(inner))
	for {
		at := bytes.IndexByte(inner, '\\')
		if at < 0 {
			at = len(inner)
		}
		if valid {
			out.Write(inner[:at])
		} else {
			writeValid(&out, inner[:at])
		}
		if inner = inner[at:]; len(inner) == 0 {
			return out.String()
		}
		if inner[1] != 'u' {
			out.WriteByte(escaped[inner[1]])
			inner = inner[2:]
			continue
		}
		r, size := escapedRune(inner)
		out.WriteRune(r)
		inner = inner[size:]
	}
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

// writeValid writes text with each byte that is not valid UTF-8 replaced by U+FFFD.
func writeValid(out *strings.Builder, text []byte) {
	for len(text) > 0 {
		r, size := utf8.DecodeRune(text)
		out.WriteRune(r)
		text = text[size:]
	}
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
