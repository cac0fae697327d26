// SPDX-License-Identifier: Apache-2.0

package pipeline

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
)

// wellFormed parses a drawing and counts its elements.
func wellFormed(t *testing.T, svg []byte) map[string]int {
	t.Helper()
	elements := map[string]int{}
	for d := xml.NewDecoder(bytes.NewReader(svg)); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return elements
		}
		if err != nil {
			t.Fatal(err)
		}
		if start, ok := token.(xml.StartElement); ok {
			elements[start.Name.Local]++
		}
	}
}

func TestGanttDrawsEveryTask(t *testing.T) {
	s, err := simulate(Durations{30, 10, 12, 14, 12}, Sizes{3, 2, 2}, AASS(2))
	if err != nil {
		t.Fatal(err)
	}
	svg := gantt(s, "a <schedule> & more", 3, 3)
	if got := wellFormed(t, svg)["g"]; got != len(s.Tasks) {
		t.Errorf("%d bars are drawn for %d tasks", got, len(s.Tasks))
	}
	for _, want := range []string{
		"a &lt;schedule&gt; &amp; more", "attention of micro-batch 0, layer 0: 0.0 to 30.0 µs", "experts of micro-batch 1, layer 2, chunk 1:", "The first 3 of 3 layers",
		"prefers-color-scheme: dark", "shared experts", fmt.Sprintf("Busy: attention group %.0f%%.", 100*3*2*40/s.Makespan),
	} {
		if !strings.Contains(string(svg), want) {
			t.Errorf("the drawing does not contain %q", want)
		}
	}
	if bytes.Contains(svg, []byte("<script")) || bytes.Contains(svg, []byte("href")) {
		t.Error("the drawing contains scripts or external resources")
	}
}

// Chunks too narrow to distinguish are merged into one bar, and tasks after the drawn layers are cut off.
func TestGanttStaysSmall(t *testing.T) {
	s, err := simulate(Durations{3000, 0, 1, 2, 1}, Sizes{8, 2, 2000}, ASAS(2))
	if err != nil {
		t.Fatal(err)
	}
	svg := gantt(s, "many chunks", 2, 8)
	if bars := wellFormed(t, svg)["g"]; bars > 60 || bars < 4*2*2 {
		t.Errorf("%d bars are drawn", bars)
	}
	for _, no := range []string{"layer 7", "S shared experts"} {
		if strings.Contains(string(svg), no) {
			t.Errorf("the drawing has %q", no)
		}
	}
	if !strings.Contains(string(svg), "chunks 0 to 1999") {
		t.Error("no chunks were merged")
	}
}

// The description mentions the number of all layers, though only the required layers are simulated.
func TestDrawDescribesAllLayers(t *testing.T) {
	for _, c := range []struct {
		of, drawn int
		want      string
	}{{61, 2, "The first 2 of 61 layers"}, {3, 2, "The first 2 of 3 layers"}, {2, 4, "The first 2 of 2 layers"}} {
		p := Plan{Durations: Durations{30, 10, 12, 14, 12}, Sizes: Sizes{c.of, 2, 2}, Order: AASS(2), OrderName: "AASS"}
		svg, err := p.Draw(1024, c.drawn)
		if err != nil || !bytes.Contains(svg, []byte(c.want)) {
			t.Errorf("%d of %d layers: the drawing does not contain %q: %v", c.drawn, c.of, c.want, err)
		}
	}
}
