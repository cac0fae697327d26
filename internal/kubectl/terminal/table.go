// SPDX-License-Identifier: Apache-2.0

package terminal

import (
	"strings"
	"unicode/utf8"
)

const (
	// gap is the number of spaces between two columns.
	gap = 2
	// minLastWidth is the minimum width of a last column with sentences, in columns. A narrower last column moves below
	// its row.
	minLastWidth = 32
)

// Cell is an entry of a table. Only cells of the last column are wrapped.
type Cell = Span

// Table returns rows below a header. Each column is as wide as its longest cell. If the last column does not fit:
//   - A last column without a name is omitted, because such a column repeats other columns as bars.
//   - A last column with sentences moves below its row.
//   - Otherwise, or if the other columns do not fit either, each row becomes a list of names and values.
func (s Style) Table(header []string, rows [][]Cell) string {
	last := len(header) - 1
	widths := make([]int, last)
	for column := range widths {
		widths[column] = utf8.RuneCountInString(header[column])
		for _, row := range rows {
			widths[column] = max(widths[column], utf8.RuneCountInString(row[column].Text))
		}
	}
	used, longest := 0, utf8.RuneCountInString(header[last])
	for _, width := range widths {
		used += width + gap
	}
	for _, row := range rows {
		longest = max(longest, utf8.RuneCountInString(row[last].Text))
	}
	t := table{s, header, widths, used}
	switch {
	case s.Width == 0 || used+min(longest, minLastWidth) <= s.Width:
		return t.wide(rows)
	case used-gap <= s.Width && (header[last] == "" || longest > minLastWidth):
		return t.stacked(rows)
	}
	return t.list(rows)
}

// table is a table with computed column widths.
type table struct {
	Style
	header []string
	// widths are the widths of all columns except the last one. used is their sum, including gaps.
	widths []int
	used   int
}

// columns formats all cells of a row except the last one.
func (t table) columns(row []Cell) string {
	var line strings.Builder
	for column, width := range t.widths {
		cell := row[column]
		line.WriteString(t.paint(cell.Text, cell.Tone))
		line.WriteString(strings.Repeat(" ", width-utf8.RuneCountInString(cell.Text)+gap))
	}
	return line.String()
}

func (t table) head() []Cell {
	cells := make([]Cell, len(t.header))
	for column, name := range t.header {
		cells[column] = Cell{name, Faint}
	}
	return cells
}

func (t table) wide(rows [][]Cell) string {
	var out strings.Builder
	for _, row := range append([][]Cell{t.head()}, rows...) {
		width := t.within(t.used)
		for i, line := range t.wrapped(Text{row[len(row)-1]}, width, width) {
			lead := strings.Repeat(" ", t.used)
			if i == 0 {
				lead = t.columns(row)
			}
			out.WriteString(strings.TrimRight(lead+line, " ") + "\n")
		}
	}
	return out.String()
}

func (t table) stacked(rows [][]Cell) string {
	var out strings.Builder
	out.WriteString(strings.TrimRight(t.columns(t.head()), " ") + "\n")
	for _, row := range rows {
		out.WriteString(strings.TrimRight(t.columns(row), " ") + "\n")
		if sentence := row[len(row)-1]; sentence.Text != "" && t.header[len(row)-1] != "" {
			out.WriteString(t.Paragraph(Text{sentence}, hanging))
		}
	}
	return out.String()
}

func (t table) list(rows [][]Cell) string {
	var out strings.Builder
	for _, row := range rows {
		for column, cell := range row {
			if cell.Text == "" || column > 0 && t.header[column] == "" {
				continue
			}
			margin := 0
			if column > 0 {
				margin = gap
			}
			text := Text{cell}
			if column > 0 {
				text = Text{{t.header[column] + ": ", Faint}, cell}
			}
			out.WriteString(t.Paragraph(text, margin))
		}
	}
	return out.String()
}
