package terminal

import (
	"strings"
	"unicode/utf8"
)

// Span is a part of a text that has one tone.
type Span struct {
	Text string
	Tone Tone
}

// Text is a line, or what is to become several.
type Text []Span

// Words is a text of one tone.
func Words(text string, tone Tone) Text { return Text{{text, tone}} }

// wrapped are the lines of a text that are at most as wide as given: the first one, and those that follow. Lines are broken at spaces,
// and within words only where one is wider than a whole line. 0 is without bound.
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

// byteOf is the index of the byte with which the n-th rune begins; the length where there are fewer.
func byteOf(text string, n int) int {
	for i := range text {
		if n == 0 {
			return i
		}
		n--
	}
	return len(text)
}

// Paragraph is a text below a margin of so many columns, each line of it ended.
func (s Style) Paragraph(text Text, margin int) string {
	indent := strings.Repeat(" ", margin)
	var out strings.Builder
	for _, line := range s.wrapped(text, s.within(margin), s.within(margin)) {
		out.WriteString(strings.TrimRight(indent+line, " ") + "\n")
	}
	return out.String()
}

// within is the width that a margin leaves; 0 is without bound.
func (s Style) within(margin int) int {
	if s.Width == 0 {
		return 0
	}
	return max(s.Width-margin, 1)
}
