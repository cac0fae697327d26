// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/placement"
)

// TestStructure compares the outline of the page, with texts but without numbers, with a golden file.
func TestStructure(t *testing.T) {
	got := outline(t, rendered(t, built(t, solved(t, generated(), placement.DataParallel, 4, 0))))
	const golden = "testdata/structure.txt"
	if *update {
		if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("the outline differs (go test ./internal/report -args -update rewrites it): %s", diff)
	}
}

func outline(t *testing.T, page []byte) string {
	t.Helper()
	shown := []string{"header", "main", "footer", "section", "h1", "h2", "h3", "h4", "figure", "figcaption", "details", "summary", "table", "th", "dt", "img"}
	var b strings.Builder
	decoder := xml.NewDecoder(bytes.NewReader(page))
	depth, inside := 0, ""
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			return b.String()
		}
		if err != nil {
			t.Fatal(err)
		}
		switch token := token.(type) {
		case xml.StartElement:
			if inside = token.Name.Local; slices.Contains(shown, inside) {
				b.WriteString("\n" + strings.Repeat(" ", depth) + inside)
			}
			depth++
		case xml.EndElement:
			depth--
			inside = ""
		case xml.CharData:
			if slices.Contains(shown, inside) && strings.TrimSpace(string(token)) != "" {
				b.WriteString(": " + withoutNumbers(strings.Join(strings.Fields(string(token)), " ")))
			}
		}
	}
}

func withoutNumbers(text string) string {
	var b strings.Builder
	for i, r := range text {
		digit := r >= '0' && r <= '9' || r == '.' && i > 0 && i+1 < len(text) && text[i+1] >= '0' && text[i+1] <= '9'
		if !digit {
			b.WriteRune(r)
		} else if !strings.HasSuffix(b.String(), "#") {
			b.WriteByte('#')
		}
	}
	return b.String()
}

// TestStyleFitsNarrowScreens verifies that no rule makes the page wider than a narrow screen. Grid columns must be able
// to shrink below the width of their content. Absolutely positioned elements inside a scrolling region, such as texts
// for screen readers, must stay inside the region.
func TestStyleFitsNarrowScreens(t *testing.T) {
	rules := regexp.MustCompile(`(?s)([^{}]+)\{([^{}]*)\}`).FindAllStringSubmatch(styleText, -1)
	contained := false
	for _, rule := range rules {
		selector, body := strings.TrimSpace(rule[1]), rule[2]
		contained = contained || selector == ".scroll" && strings.Contains(body, "position: relative") && strings.Contains(body, "overflow-x: auto")
		if _, columns, grid := strings.Cut(body, "grid-template-columns:"); grid {
			columns, _, _ = strings.Cut(columns, ";")
			for _, flexible := range regexp.MustCompile(`(minmax\((0|min\([^)]*100%\)), )?1fr`).FindAllStringSubmatch(columns, -1) {
				if flexible[1] == "" {
					t.Errorf("%s: a column of %q cannot shrink below the width of its content", selector, strings.TrimSpace(columns))
				}
			}
		}
	}
	if !contained {
		t.Error(".scroll does not contain its positioned descendants")
	}
}
