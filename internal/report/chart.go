// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"math"
	"strings"
)

// chart draws numbers over places of equal width. The SVG is stretched to the width of the page. Lines keep their
// width, and labels are HTML text next to the SVG, so that the chart is legible at any width.
type chart struct {
	// Alternative is the text alternative of the chart.
	Alternative string
	Y, X        []tick
	Marks       []mark
	Legend      []legend
	// low and high are the values at the lower and the upper edge. places is the number of places.
	low, high float64
	places    int
}

// tick is a label at a position of an axis, in percent.
type tick struct {
	At   float64
	Text string
}

// mark is an SVG path with a class of the style sheet.
type mark struct{ Class, Path string }

type legend struct{ Class, Text string }

// chartWidth and chartHeight are the size of the SVG view box.
const chartWidth, chartHeight = 1000, 400

// newChart returns a chart for values between low and high, with grid lines at round values. y formats the labels of
// the grid lines.
func newChart(alternative string, places int, low, high float64, y func(v float64) string) *chart {
	step := roundStep((high - low) / 4)
	c := &chart{
		Alternative: alternative, places: places, low: math.Floor(low/step+1e-9) * step, high: math.Ceil(high/step-1e-9) * step,
	}
	var grid strings.Builder
	for i := 0; ; i++ {
		v := c.low + float64(i)*step
		if v > c.high+step/2 {
			break
		}
		c.Y = append(c.Y, tick{round(100 * (v - c.low) / (c.high - c.low)), y(v)})
		fmt.Fprintf(&grid, "M0 %sH%d", number(c.y(v)), chartWidth)
	}
	c.Marks = append(c.Marks, mark{"grid", grid.String()})
	return c
}

// roundStep returns the smallest of the numbers 1, 2 and 5 times a power of ten that is at least the given step.
func roundStep(step float64) float64 {
	if !(step > 0) {
		return 1
	}
	power := math.Pow(10, math.Floor(math.Log10(step)))
	for _, factor := range []float64{1, 2, 5} {
		if factor*power >= step*(1-1e-9) {
			return factor * power
		}
	}
	return 10 * power
}

// label adds the labels of places below the chart. At most maxLabels places have labels.
func (c *chart) label(name func(place int) string) {
	const maxLabels = 12
	every := (c.places + maxLabels - 1) / maxLabels
	for place := 0; place < c.places; place += every {
		c.X = append(c.X, tick{round(c.x(place) * 100 / chartWidth), name(place)})
	}
}

func (c *chart) x(place int) float64 { return (float64(place) + 0.5) * chartWidth / float64(c.places) }

func (c *chart) y(v float64) float64 { return chartHeight * (c.high - v) / (c.high - c.low) }

// line draws a line through one value per place.
func (c *chart) line(class, name string, value func(place int) float64) {
	var path strings.Builder
	for place := range c.places {
		verb := "L"
		if place == 0 {
			verb = "M"
		}
		path.WriteString(verb + number(c.x(place)) + " " + number(c.y(value(place))))
	}
	if c.places == 1 {
		path.WriteString("h0") // round line ends make it a point
	}
	c.Marks = append(c.Marks, mark{class, path.String()})
	c.Legend = append(c.Legend, legend{class, name})
}

// band fills the area between two values per place.
func (c *chart) band(class, name string, low, high func(place int) float64) {
	var path strings.Builder
	for place := range c.places {
		verb := "L"
		if place == 0 {
			verb = "M"
		}
		path.WriteString(verb + number(c.x(place)) + " " + number(c.y(high(place))))
	}
	for place := c.places - 1; place >= 0; place-- {
		path.WriteString("L" + number(c.x(place)) + " " + number(c.y(low(place))))
	}
	c.Marks = append(c.Marks, mark{class, path.String() + "Z"})
	c.Legend = append(c.Legend, legend{class, name})
}

// level draws a horizontal line.
func (c *chart) level(class, name string, v float64) {
	c.Marks = append(c.Marks, mark{class, fmt.Sprintf("M0 %sH%d", number(c.y(v)), chartWidth)})
	c.Legend = append(c.Legend, legend{class, name})
}

// bars draws the i-th of n bars at each place, from the lower edge to the value.
func (c *chart) bars(class, name string, i, n int, value func(place int) float64) {
	var path strings.Builder
	width := 0.7 * chartWidth / float64(c.places) / float64(n)
	for place := range c.places {
		left := c.x(place) + (float64(i)-float64(n)/2)*width
		top := c.y(max(value(place), c.low))
		path.WriteString("M" + number(left) + " " + number(chartHeight) + "V" + number(top) + "h" + number(0.9*width) + "V" + number(chartHeight) + "Z")
	}
	c.Marks = append(c.Marks, mark{class, path.String()})
	c.Legend = append(c.Legend, legend{class, name})
}

func round(v float64) float64 { return math.Round(10*v) / 10 }

// number formats a coordinate with one decimal.
func number(v float64) string { return strings.TrimSuffix(fmt.Sprintf("%.1f", v), ".0") }

// blocks returns the outlines of the pairs of slots that share a rank, on a square of side chartWidth.
func (h *Heat) blocks() string {
	var path strings.Builder
	from := 0.0
	for _, to := range append(h.ColumnBounds[:len(h.ColumnBounds):len(h.ColumnBounds)], 1) {
		side := number(chartWidth * (to - from))
		path.WriteString("M" + number(chartWidth*from) + " " + number(chartWidth*from) + "h" + side + "v" + side + "h-" + side + "Z")
		from = to
	}
	return path.String()
}

// lines returns lines at the rank boundaries, on the same square.
func (h *Heat) lines() string {
	var path strings.Builder
	for _, at := range h.ColumnBounds {
		fmt.Fprintf(&path, "M%s 0V%d", number(chartWidth*at), chartWidth)
	}
	for _, at := range h.RowBounds {
		fmt.Fprintf(&path, "M0 %sH%d", number(chartWidth*at), chartWidth)
	}
	return path.String()
}
