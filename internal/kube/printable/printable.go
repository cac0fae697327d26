// SPDX-License-Identifier: Apache-2.0

// Package printable makes text from engines, servers, files and users safe to display in conditions, events, logs and
// terminals.
//
// Invariants:
//   - The result has no control character (C0, DEL, C1), no escape sequence, no character that changes the direction of
//     text, no invisible character, no line break and no invalid UTF-8.
//   - A replaced character stays visible, as U+FFFD. A name with an invisible character does not look like the name
//     without that character.
package printable

import (
	"fmt"
	"io"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

const ellipsis = "..."

// Line returns a text as one line of at most limit bytes, and marks truncation by "...". White space collapses to
// single spaces, and terminal colours are removed. Line is idempotent. The limit must be at least 3.
func Line(text string, limit int) string {
	var line strings.Builder
	space := false
	for text != "" {
		if code := colour(text); code > 0 {
			text = text[code:]
			continue
		}
		r, size := utf8.DecodeRuneInString(text)
		text = text[size:]
		if r = visible(r); r == ' ' {
			space = line.Len() > 0
			continue
		}
		if space {
			line.WriteByte(' ')
			space = false
		}
		line.WriteRune(r)
		if line.Len() > limit {
			cut := line.String()[:limit-len(ellipsis)]
			for !utf8.ValidString(cut) {
				cut = cut[:len(cut)-1]
			}
			return cut + ellipsis
		}
	}
	return line.String()
}

var (
	localAddress = regexp.MustCompile(`\b(tcp|udp)([46]?) \S+->`)
	checkedAt    = regexp.MustCompile(`: current time \S+ is (after|before) (\S)`)
)

// Steady returns the message of an error without the parts that differ at each attempt, in the formats of Go's net
// (OpError) and crypto/x509: the local address of a connection, and the time at which a certificate was checked. Who
// reports an error when it changes would otherwise report a lasting one at each attempt.
func Steady(message string) string {
	return checkedAt.ReplaceAllString(localAddress.ReplaceAllString(message, "$1$2 "), ": now is $1 $2")
}

// Runes returns a text in which each unsafe character is replaced. The number of characters stays the same, so that
// columns stay aligned.
func Runes(text string) string { return strings.Map(visible, text) }

// visible returns a safe character unchanged, a space for white space, and U+FFFD for an unsafe character.
func visible(r rune) rune {
	switch {
	case unicode.IsSpace(r):
		return ' '
	case !unicode.IsPrint(r), unicode.In(r, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector):
		return utf8.RuneError
	}
	return r
}

// colour returns the length of the SGR sequence at the start of a text, such as "\x1b[31m", or 0. The logs of engines
// contain many of them.
func colour(text string) int {
	rest, found := strings.CutPrefix(text, "\x1b[")
	if !found {
		return 0
	}
	parameters := len(rest) - len(strings.TrimLeft(rest, "0123456789;:"))
	if parameters < len(rest) && rest[parameters] == 'm' {
		return len(text) - len(rest) + parameters + 1
	}
	return 0
}

// JSON returns a writer that escapes each unsafe character in the JSON that is written to it. A character must not be
// split over two calls of Write.
func JSON(w io.Writer) io.Writer { return escaper{w} }

type escaper struct{ io.Writer }

// Write escapes unsafe characters outside of ASCII, and DEL. Encoders have escaped the other control characters, and
// line breaks only separate values.
func (e escaper) Write(text []byte) (int, error) {
	var out []byte
	for i := 0; i < len(text); {
		r, size := utf8.DecodeRune(text[i:])
		switch {
		case r < 0x7f || r == visible(r) && r != utf8.RuneError:
			out = append(out, text[i:i+size]...)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			out = fmt.Appendf(out, `\u%04x\u%04x`, high, low)
		default:
			out = fmt.Appendf(out, `\u%04x`, r)
		}
		i += size
	}
	if _, err := e.Writer.Write(out); err != nil {
		return 0, err
	}
	return len(text), nil
}
