// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// byteAlphabet maps the printable characters of byte-level tokenizers to bytes. Printable Latin-1 characters represent
// themselves. The other bytes are represented by consecutive characters from U+0100.
var byteAlphabet = func() map[rune]byte {
	alphabet := make(map[rune]byte, 256)
	next := rune(0x100)
	for b := range rune(256) {
		switch {
		case b >= '!' && b <= '~', b >= 0xa1 && b <= 0xac, b >= 0xae:
			alphabet[b] = byte(b)
		default:
			alphabet[next] = byte(b)
			next++
		}
	}
	return alphabet
}()

// toByteAlphabet encodes bytes as a vocabulary entry.
func toByteAlphabet(raw []byte) string {
	var written strings.Builder
	for _, b := range raw {
		written.WriteRune(byteCharacters[b])
	}
	return written.String()
}

// byteCharacters maps each byte to its character in byteAlphabet.
var byteCharacters = func() (characters [256]rune) {
	for written, b := range byteAlphabet {
		characters[b] = written
	}
	return characters
}()

// fromByteAlphabet decodes a vocabulary entry to bytes.
func fromByteAlphabet(written string) (string, error) {
	raw := make([]byte, 0, len(written))
	for _, r := range written {
		b, ok := byteAlphabet[r]
		if !ok {
			return "", fmt.Errorf("vocabulary entry %q contains %q, which is not in the byte-level alphabet", written, r)
		}
		raw = append(raw, b)
	}
	return string(raw), nil
}

// appendValidUTF8 appends raw to dst, with each maximal invalid part replaced by U+FFFD, and returns the number of
// bytes of raw consumed. Unless final is set, it leaves a trailing incomplete character that more bytes could complete.
func appendValidUTF8(dst, raw []byte, final bool) (result []byte, taken int) {
	for taken < len(raw) {
		rest := raw[taken:]
		r, size := utf8.DecodeRune(rest)
		if r == utf8.RuneError && size == 1 {
			size = invalidPrefix(rest)
			if size == len(rest) && !final && !utf8.FullRune(rest) {
				return dst, taken
			}
		}
		dst = utf8.AppendRune(dst, r)
		taken += size
	}
	return dst, taken
}

// invalidPrefix returns the length of the longest prefix of rest, at least 1, that could be the beginning of a
// character. It is the "maximal subpart" for which the Unicode standard recommends one replacement character.
func invalidPrefix(rest []byte) int {
	size := 1
	for size < len(rest) && size < utf8.UTFMax && !utf8.FullRune(rest[:size]) {
		if utf8.FullRune(rest[:size+1]) {
			if r, n := utf8.DecodeRune(rest[:size+1]); r == utf8.RuneError && n == 1 {
				break
			}
		}
		size++
	}
	return size
}
