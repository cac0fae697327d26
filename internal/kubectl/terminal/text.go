// SPDX-License-Identifier: Apache-2.0

package terminal

import (
	"strings"
	"unicode/utf8"
)

// Span is a part of a text with one tone.
type Span struct {
	Text string
	Tone Tone
}

// Text is a sequence of spans. It is wrapped into several lines if needed.
type Text []Span

// Words returns a text of one tone.
func Words(text string, tone Tone) Text { return Text{{text, tone}} }

// wrapped splits a text into lines. first is the maximum width of the first line and rest that of the other lines; 0
// means unlimited. Lines break at spaces. A word is split only if it is wider than a line.
func (s Style) wrapped(text Text, first, rest int) []string {
	var lines []string
	var line strings.Builder
	used, bound := 0, first
	newLine := func() {
		lines = append(lines, strings.TrimRight(line.String(), " "))
		line.Reset()
		used, bound = 0, rest
	}
	write := func(word string, tone Tone) {
		line.WriteString(s.paint(word, tone))
		used += utf8.RuneCountInString(word)
	}
	for _, span := range text {
		for i, word := range strings.Split(span.Text, " ") {
			space := i > 0
			width := utf8.RuneCountInString(word)
			switch {
			case bound > 0 && used > 0 && used+width+1 > bound && (space || used+width > bound):
				newLine()
			case space && used > 0:
				write(" ", Plain)
			}
			for bound > 0 && used+width > bound {
				cut := byteOf(word, max(bound-used, 1))
				write(word[:cut], span.Tone)
				newLine()
				word = word[cut:]
				width = utf8.RuneCountInString(word)
			}
			write(word, span.Tone)
		}
	}
	return append(lines, line.String())
}

// byteOf returns the byte index of the n-th rune, or the length of the text if it has fewer runes.
func byteOf(text string, n int) int {
	for i := range text {
		if n == 0 {
			return i
		}
		n--
	}
	return len(text)
}

// Paragraph wraps a text and indents its lines by a margin in columns. Each line ends with a newline.
func (s Style) Paragraph(text Text, margin int) string {
	indent := strings.Repeat(" ", margin)
	var out strings.Builder
	for _, line := range s.wrapped(text, s.within(margin), s.within(margin)) {
		out.WriteString(strings.TrimRight(indent+line, " ") + "\n")
	}
	return out.String()
}

// within returns the width without a margin; 0 means unlimited.
func (s Style) within(margin int) int {
	if s.Width == 0 {
		return 0
	}
	return max(s.Width-margin, 1)
}
