// SPDX-License-Identifier: Apache-2.0

package pipeline

import (
	"cmp"
	"encoding/xml"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Dimensions of the drawing, in user units.
const (
	ganttWidth, ganttLeft, ganttRight = 1200, 130, 20
	ganttTop, ganttRow, ganttBar      = 96, 56, 40
	ganttTicks                        = 10
)

// ganttStyle follows the reader's light or dark theme. Kinds of tasks differ in lightness as well as in hue.
const ganttStyle = `
svg { --paper: #fbfbf9; --ink: #1b1f24; --soft: #4d5661; --rule: #d9dcd8; --attention: #1f5fae; --shared: #a9c8ee; --dispatch: #8a5a00; --experts: #2f7d5b; --combine: #e3b45c; --dark: #1b1f24; --light: #ffffff; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #14171a; --ink: #e9ebe8; --soft: #a9b1b9; --rule: #363c42; --attention: #3f7fd0; --shared: #b9d3f3; --dispatch: #a9741a; --experts: #3c9a72; --combine: #edc67e; }
}
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; fill: var(--ink); }
.title { font-size: 18px; font-weight: 600; }
.soft { fill: var(--soft); }
.paper { fill: var(--paper); }
.grid { stroke: var(--rule); fill: none; }
.attention { fill: var(--attention); } .shared { fill: var(--shared); } .dispatch { fill: var(--dispatch); } .experts { fill: var(--experts); } .combine { fill: var(--combine); }
.bar { stroke: var(--paper); }
.odd { fill-opacity: .86; }
.on { text-anchor: middle; font-size: 12px; fill: var(--light); } .on.shared, .on.combine { fill: var(--dark); }
.tick { text-anchor: middle; } .row { text-anchor: end; }
`

// kind returns the CSS class of a task and its letter in the drawing.
func (t *Task) kind() (class, letter string) {
	switch {
	case t.Shared:
		return "shared", "S"
	case t.On == AttentionGroup:
		return "attention", "A"
	case t.On == DispatchLink:
		return "dispatch", "D"
	case t.On == ExpertGroup:
		return "experts", "E"
	}
	return "combine", "C"
}

// bar is a rectangle for one task, or for several chunks of a micro-batch that are too narrow to distinguish.
type bar struct {
	Task
	chunks int
}

// gantt draws the first layers of a schedule as SVG: one row per resource, time to the right. all is the number of
// layers in the description. The drawing contains no scripts and no external resources.
func gantt(s *Schedule, title string, layers, all int) []byte {
	end := 0.0
	for i := range s.Tasks {
		if s.Tasks[i].Layer < layers {
			end = max(end, s.Tasks[i].End)
		}
	}
	perUnit := (ganttWidth - ganttLeft - ganttRight) / end
	bottom := ganttTop + int(resources)*ganttRow
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" role="img" aria-labelledby="t d">`+"\n", ganttWidth, bottom+50)
	fmt.Fprintf(&b, "<title id=\"t\">%s</title>\n<desc id=\"d\">%s</desc>\n<style>%s</style>\n", escape(title), escape(ganttDescription(s, layers, all, end)), ganttStyle)
	fmt.Fprintf(&b, "<rect class=\"paper\" width=\"%d\" height=\"%d\"/>\n<text class=\"title\" x=\"20\" y=\"30\">%s</text>\n", ganttWidth, bottom+50, escape(title))
	writeLegend(&b, s.Durations.Shared > 0)
	writeAxis(&b, end, perUnit, bottom)
	for on := range resources {
		fmt.Fprintf(&b, "<text class=\"row\" x=\"%d\" y=\"%d\">%s</text>\n", ganttLeft-10, ganttTop+int(on)*ganttRow+ganttBar/2+5, on)
	}
	for _, bar := range bars(s, end, 3/perUnit) {
		writeBar(&b, bar, end, perUnit)
	}
	b.WriteString("</svg>\n")
	return []byte(b.String())
}

// ganttDescription returns the text alternative of the drawing.
func ganttDescription(s *Schedule, layers, all int, end float64) string {
	busy := [resources]float64{}
	for i := range s.Tasks {
		t := &s.Tasks[i]
		busy[t.On] += max(0, min(t.End, end)-min(t.Start, end))
	}
	words := fmt.Sprintf("The first %d of %d layers, %d micro-batches with %d chunks, order %s.", min(layers, all), all,
		s.Sizes.MicroBatches, s.Sizes.Chunks, s.Order.Name())
	for on := range resources {
		words += fmt.Sprintf(" Busy: %s %.0f%%.", on, 100*busy[on]/end)
	}
	return words
}

// bars returns the tasks that begin before end. Chunks narrower than narrow are merged with an adjacent previous chunk.
func bars(s *Schedule, end, narrow float64) []bar {
	var list []bar
	last := [resources]int{-1, -1, -1, -1}
	for _, t := range s.Tasks {
		if t.Start >= end || t.End == t.Start {
			continue
		}
		if at := last[t.On]; at >= 0 && t.End-t.Start < narrow {
			if b := &list[at]; b.Layer == t.Layer && b.MicroBatch == t.MicroBatch && b.Shared == t.Shared && t.Start-b.End < narrow/6 {
				b.End = t.End
				b.chunks++
				continue
			}
		}
		last[t.On] = len(list)
		list = append(list, bar{t, 1})
	}
	slices.SortStableFunc(list, func(a, b bar) int { return cmp.Compare(a.On, b.On) })
	return list
}

func writeBar(b *strings.Builder, t bar, end, perUnit float64) {
	class, letter := t.kind()
	shade := ""
	if t.MicroBatch%2 == 1 {
		shade = " odd"
	}
	x, width := ganttLeft+t.Start*perUnit, (min(t.End, end)-t.Start)*perUnit
	y := ganttTop + int(t.On)*ganttRow
	chunks := ""
	if t.On != AttentionGroup {
		chunks = fmt.Sprintf(", chunk %d", t.Chunk)
		if t.chunks > 1 {
			chunks = fmt.Sprintf(", chunks %d to %d", t.Chunk, t.Chunk+t.chunks-1)
		}
	}
	fmt.Fprintf(b, "<g><title>%s of micro-batch %d, layer %d%s: %.1f to %.1f µs</title><rect class=\"bar %s%s\" x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\"/>",
		ganttNames[class], t.MicroBatch, t.Layer, chunks, t.Start, t.End, class, shade, x, y, width, ganttBar)
	if label := fmt.Sprintf("%s%d", letter, t.MicroBatch); width > 8*float64(len(label))+2 {
		fmt.Fprintf(b, "<text class=\"on %s\" x=\"%.1f\" y=\"%d\">%s</text>", class, x+width/2, y+ganttBar/2+4, label)
	}
	b.WriteString("</g>\n")
}

var ganttNames = map[string]string{
	"attention": "attention", "shared": "shared experts", "dispatch": "dispatch", "experts": "experts", "combine": "combine",
}

func writeLegend(b *strings.Builder, shared bool) {
	x := 20
	for _, t := range []Task{{}, {Shared: true}, {On: DispatchLink}, {On: ExpertGroup}, {On: CombineLink}} {
		if t.Shared && !shared {
			continue
		}
		class, letter := t.kind()
		fmt.Fprintf(b, "<rect class=\"%s\" x=\"%d\" y=\"52\" width=\"14\" height=\"14\"/><text x=\"%d\" y=\"64\">%s %s</text>\n", class, x, x+20, letter, ganttNames[class])
		x += 48 + 8*(len(ganttNames[class])+2)
	}
	fmt.Fprintf(b, "<text class=\"soft\" x=\"%d\" y=\"64\">the number is the micro-batch</text>\n", x)
}

// writeAxis draws lines at round times, in µs or ms.
func writeAxis(b *strings.Builder, end, perUnit float64, bottom int) {
	unit, name := 1.0, "µs"
	if end >= 5000 {
		unit, name = 1000, "ms"
	}
	step := math.Pow(10, math.Floor(math.Log10(end/ganttTicks)))
	for _, factor := range []float64{1, 2, 5, 10} {
		if end/(factor*step) <= ganttTicks {
			step *= factor
			break
		}
	}
	for i := 0; float64(i)*step <= end; i++ {
		x := ganttLeft + float64(i)*step*perUnit
		fmt.Fprintf(b, "<path class=\"grid\" d=\"M%.1f %dV%d\"/><text class=\"soft tick\" x=\"%.1f\" y=\"%d\">%.4g %s</text>\n",
			x, ganttTop-8, bottom, x, bottom+22, float64(i)*step/unit, name)
	}
}

func escape(text string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(text)) // a Builder never fails
	return b.String()
}
