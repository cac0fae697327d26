// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestPictures checks that every picture is well-formed SVG with a title and a description, loads no other resource,
// and is in a document.
func TestPictures(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(repository, "docs", "images", "*"))
	if err != nil || len(files) == 0 {
		t.Fatalf("found %d pictures (error %v)", len(files), err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		elements := map[string]int{}
		for decoder := xml.NewDecoder(strings.NewReader(string(text))); ; {
			token, err := decoder.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			if start, ok := token.(xml.StartElement); ok {
				elements[start.Name.Local]++
				for _, attribute := range start.Attr {
					if attribute.Name.Local == "href" || attribute.Name.Local == "src" {
						t.Errorf("%s loads the resource %s", file, attribute.Value)
					}
				}
			}
		}
		if elements["svg"] != 1 || elements["title"] != 1 || elements["desc"] != 1 || elements["script"] != 0 {
			t.Errorf("%s has elements %v, want one svg, title and desc each, and no script", file, elements)
		}
		shown := false
		for _, document := range documents(t) {
			shown = shown || strings.Contains(document, "](images/"+filepath.Base(file)+")")
		}
		if !shown {
			t.Errorf("no document includes picture %s", file)
		}
	}
}
