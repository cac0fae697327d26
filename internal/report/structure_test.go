package report

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
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
