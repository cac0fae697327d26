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

// TestStructure compares the page's outline, its texts included and its numbers left out, with a golden file.
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
		t.Errorf("the outline differs (go test ./internal/report -args -update writes it anew): %s", diff)
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

// No rule makes the page wider than a narrow screen: columns of grids shrink below their content, and what is taken out of the flow inside
// a region that scrolls, as texts for screen readers are, stays inside the region.
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
					t.Errorf("%s: a column of %q is as wide as its content at least", selector, strings.TrimSpace(columns))
				}
			}
		}
	}
	if !contained {
		t.Error(".scroll does not contain what is positioned inside of it")
	}
}
