package terminal

import (
	"io"
	"os"
	"strconv"

	"golang.org/x/term"

	"github.com/semmoe/operator/internal/printable"
)

// Style is how text is written.
type Style struct {
	// Color allows colours.
	Color bool
	// Width is the number of columns; 0 is without bound.
	Width int
}

// leastWidth is the narrowest terminal that is written for: below it words would be broken all the time.
const leastWidth = 20

// Of is the style for a writer. COLUMNS says how wide a terminal is, also where the writer is none; colours are for terminals alone, unless
// NO_COLOR is set (https://no-color.org) or TERM is dumb.
func Of(w io.Writer, getenv func(string) string) Style {
	var style Style
	if file, ok := w.(*os.File); ok && term.IsTerminal(int(file.Fd())) {
		style.Color = getenv("NO_COLOR") == "" && getenv("TERM") != "dumb"
		if width, _, err := term.GetSize(int(file.Fd())); err == nil {
			style.Width = max(width, 0)
		}
	}
	if columns, err := strconv.Atoi(getenv("COLUMNS")); err == nil && columns > 0 {
		style.Width = columns
	}
	if style.Width > 0 {
		style.Width = max(style.Width, leastWidth)
	}
	return style
}

// Tone is what a text says about what it names.
type Tone int

// Plain is a text without a tone, Good what is as it should be, Busy what is under way, Bad what is wrong, Faint what matters less, and
// Strong what the eye is to find first.
const (
	Plain Tone = iota
	Good
	Busy
	Bad
	Faint
	Strong
)

// codes are the SGR parameters of tones, in their order.
var codes = [...]string{"", "32", "33", "31", "2", "1"}

// paint returns a text in its tone. All that is written passes through it, and conditions quote engines and servers: no
// control character, escape sequence or invisible character of a text reaches the terminal. The number of characters
// stays the same.
func (s Style) paint(text string, tone Tone) string {
	text = printable.Runes(text)
	if !s.Color || tone == Plain || text == "" {
		return text
	}
	return "\x1b[" + codes[tone] + "m" + text + "\x1b[0m"
}
