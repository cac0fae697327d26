// SPDX-License-Identifier: Apache-2.0

package terminal

import (
	"io"
	"os"
	"strconv"

	"golang.org/x/term"

	"github.com/semmoe/operator/internal/kube/printable"
)

// Style selects the format of text.
type Style struct {
	// Color enables colors.
	Color bool
	// Width is the number of columns; 0 means unlimited.
	Width int
}

// minWidth is the minimum width in columns. In a narrower terminal most words would be split.
const minWidth = 20

// Of returns the style for a writer. COLUMNS overrides the width, also if the writer is not a terminal. Colors are
// enabled only for terminals, and disabled if NO_COLOR is set (https://no-color.org) or TERM is dumb.
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
		style.Width = max(style.Width, minWidth)
	}
	return style
}

// Tone classifies a text for coloring.
type Tone int

// Plain is neutral text, Good a state as intended, Busy work in progress, Bad an error, Faint secondary text, and
// Strong emphasized text.
const (
	Plain Tone = iota
	Good
	Busy
	Bad
	Faint
	Strong
)

// codes are the SGR parameters of the tones, in the order of their constants.
var codes = [...]string{"", "32", "33", "31", "2", "1"}

// paint returns a text with the color of its tone. All output passes through paint, which replaces control characters,
// escape sequences and invisible characters, because conditions quote text of engines and servers. The number of
// characters stays the same.
func (s Style) paint(text string, tone Tone) string {
	text = printable.Runes(text)
	if !s.Color || tone == Plain || text == "" {
		return text
	}
	return "\x1b[" + codes[tone] + "m" + text + "\x1b[0m"
}
