package report

import (
	"fmt"
	"math"
	"strings"
)

// chart is a drawing of numbers over places of equal width. It is stretched to the width of the page: its lines keep their width, and its
// labels are text beside it, so that it is legible at any width.
type chart struct {
	// Alternative says in words what is to be seen.
	Alternative string
	Y, X        []tick
	Marks       []mark
	Legend      []legend
	// least and most are the values at the lower and the upper edge, places the number of places.
	least, most float64
	places      int
}

// tick is a label at a part of an axis, in percent.
type tick struct {
	At   float64
	Text string
}

// mark is a path with a class of the style sheet.
type mark struct{ Class, Path string }

type legend struct{ Class, Text string }

// The drawing's own units.
const chartWidth, chartHeight = 1000, 400

// newChart has room for values between least and most, and lines at round values.
func newChart(alternative string, places int, least, most float64, y func(v float64) string) *chart {
	step := roundStep((most - least) / 4)
	c := &chart{
		Alternative: alternative, places: places, least: math.Floor(least/step+1e-9) * step, most: math.Ceil(most/step-1e-9) * step,
	}
	var grid strings.Builder
	for i := 0; ; i++ {
		v := c.least + float64(i)*step
		if v > c.most+step/2 {
			break
		}
		c.Y = append(c.Y, tick{round(100 * (v - c.least) / (c.most - c.least)), y(v)})
		fmt.Fprintf(&grid, "M0 %sH%d", number(c.y(v)), chartWidth)
	}
	c.Marks = append(c.Marks, mark{"grid", grid.String()})
	return c
}

// roundStep is the next of 1, 2, 5, 10 … (and their tenths) that is not below a step.
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

// label names places below the drawing; where there are many, some of them.
func (c *chart) label(name func(place int) string) {
	const most = 12
	every := (c.places + most - 1) / most
	for place := 0; place < c.places; place += every {
		c.X = append(c.X, tick{round(c.x(place) * 100 / chartWidth), name(place)})
	}
}

func (c *chart) x(place int) float64 { return (float64(place) + 0.5) * chartWidth / float64(c.places) }

func (c *chart) y(v float64) float64 { return chartHeight * (c.most - v) / (c.most - c.least) }

// line draws a value for each place.
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
		path.WriteString("h0") // a point, by its round ends
	}
	c.Marks = append(c.Marks, mark{class, path.String()})
	c.Legend = append(c.Legend, legend{class, name})
}

// band fills what lies between two values at each place.
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

// level draws one value across all places.
func (c *chart) level(class, name string, v float64) {
	c.Marks = append(c.Marks, mark{class, fmt.Sprintf("M0 %sH%d", number(c.y(v)), chartWidth)})
	c.Legend = append(c.Legend, legend{class, name})
}

// bars draws one of several bars at each place: number i of n, from the lower edge.
func (c *chart) bars(class, name string, i, n int, value func(place int) float64) {
	var path strings.Builder
	width := 0.7 * chartWidth / float64(c.places) / float64(n)
	for place := range c.places {
		left := c.x(place) + (float64(i)-float64(n)/2)*width
		top := c.y(max(value(place), c.least))
		path.WriteString("M" + number(left) + " " + number(chartHeight) + "V" + number(top) + "h" + number(0.9*width) + "V" + number(chartHeight) + "Z")
	}
	c.Marks = append(c.Marks, mark{class, path.String()})
	c.Legend = append(c.Legend, legend{class, name})
}

func round(v float64) float64 { return math.Round(10*v) / 10 }

// number writes a coordinate to a tenth of a unit.
func number(v float64) string { return strings.TrimSuffix(fmt.Sprintf("%.1f", v), ".0") }

// blocks outlines, on a square of chartWidth, the squares of pairs of slots that share a rank.
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

// lines are drawn, on the same square, where a rank ends.
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
