// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"bytes"
	"encoding/xml"
	"errors"
	"image/png"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const (
	// phone is the width of a page's text on a phone, in pixels.
	phone = 342
	// minFont is the minimum size of a picture's text at that width, in pixels.
	minFont = 9
)

// picture is what a reader sees of an SVG file.
type picture struct {
	name     string
	elements map[string]int
	loaded   []string
	width    float64
	style    string
	// names maps classes of text to their texts, in the order of the file.
	names map[string][]string
}

// TestPictures checks that every picture is well-formed SVG with a title and a description, loads no other resource, is
// legible on a phone and with a dark theme, and is in a document.
func TestPictures(t *testing.T) {
	for _, p := range pictures(t) {
		if p.elements["svg"] != 1 || p.elements["title"] != 1 || p.elements["desc"] != 1 || p.elements["script"] != 0 {
			t.Errorf("%s has elements %v, want one svg, title and desc each, and no script", p.name, p.elements)
		}
		if len(p.loaded) > 0 {
			t.Errorf("%s loads the resources %q", p.name, p.loaded)
		}
		sizes := regexp.MustCompile(`font(?:-size)?: ([0-9.]+)px`).FindAllStringSubmatch(p.style, -1)
		if len(sizes) == 0 || p.width == 0 {
			t.Errorf("%s has no font sizes, or no viewBox", p.name)
		}
		for _, size := range sizes {
			if px, err := strconv.ParseFloat(size[1], 64); err != nil || px*min(1, phone/p.width) < minFont {
				t.Errorf("%s: text of %s px is too small for a phone: the picture is %.0f wide", p.name, size[1], p.width)
			}
		}
		// The theme of a page may differ from the scheme that a picture follows, so the picture has a background.
		if light, dark, found := strings.Cut(p.style, "prefers-color-scheme: dark"); !found || !strings.Contains(light, ".page {") || !strings.Contains(dark, ".page {") {
			t.Errorf("%s has no dark scheme, or no background (class page) in each scheme", p.name)
		}
		if !included(t, p.name) {
			t.Errorf("no document includes picture %s", p.name)
		}
	}
}

// maxScreenshot is the maximum size of a screenshot: every clone of the repository has all versions.
const maxScreenshot = 150_000

// TestScreenshots checks that every screenshot is a PNG file of bounded size in a document.
func TestScreenshots(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(repository, "docs", "images", "*"))
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, file := range files {
		if filepath.Ext(file) == ".svg" {
			continue
		}
		found++
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := png.DecodeConfig(bytes.NewReader(text)); err != nil || len(text) > maxScreenshot {
			t.Errorf("%s has %d bytes, want a PNG file of %d at most (error %v)", file, len(text), maxScreenshot, err)
		}
		if !included(t, filepath.Base(file)) {
			t.Errorf("no document includes screenshot %s", file)
		}
	}
	if found == 0 {
		t.Error("found no screenshots")
	}
}

// included reports whether a document includes a picture with a text for readers who do not see it.
func included(t *testing.T, name string) bool {
	t.Helper()
	text := regexp.MustCompile(`!\[[^\]]{10,}\]\(images/` + regexp.QuoteMeta(name) + `\)`)
	for _, document := range documents(t) {
		if text.MatchString(document) {
			return true
		}
	}
	return false
}

// TestNamesInPictures checks that fields (class field), kinds and flags (class code) in pictures exist, and that the
// stages (class stage) are those of docs/architecture.md.
func TestNamesInPictures(t *testing.T) {
	known, code, named := fields(t), sources(t), 0
	for _, p := range pictures(t) {
		for _, field := range p.names["field"] {
			named++
			path, _, _ := strings.Cut(field, ":")
			found := false
			for field := range known {
				found = found || strings.HasSuffix(field, "."+path)
			}
			if !found {
				t.Errorf("%s names the field %s, which docs/api.md does not have", p.name, path)
			}
		}
		for _, name := range p.names["code"] {
			named++
			name, _, _ = strings.Cut(name, " ")
			if !strings.Contains(code, `"`+name+`"`) && !strings.Contains(code, "type "+name+" struct") {
				t.Errorf("%s names %s, which is neither a type nor a string of the source code", p.name, name)
			}
		}
	}
	if named < 5 {
		t.Errorf("found only %d names", named)
	}
	section := section(documents(t)["docs/architecture.md"], "## The path of a request")
	var stages []string
	for _, match := range regexp.MustCompile(`(?m)^\d\. \*\*(\w+)\.\*\*`).FindAllStringSubmatch(section, -1) {
		stages = append(stages, match[1])
	}
	for _, p := range pictures(t) {
		if p.name == "router.svg" && !slices.Equal(p.names["stage"], stages) {
			t.Errorf("%s has the stages %q, docs/architecture.md has %q", p.name, p.names["stage"], stages)
		}
	}
}

func pictures(t *testing.T) []picture {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(repository, "docs", "images", "*.svg"))
	if err != nil || len(files) == 0 {
		t.Fatalf("found %d pictures (error %v)", len(files), err)
	}
	var all []picture
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		p := picture{name: filepath.Base(file), elements: map[string]int{}, names: map[string][]string{}}
		var open [][]string // the classes of the open elements
		style := 0
		for decoder := xml.NewDecoder(strings.NewReader(string(text))); ; {
			token, err := decoder.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			switch token := token.(type) {
			case xml.StartElement:
				p.elements[token.Name.Local]++
				var classes []string
				for _, attribute := range token.Attr {
					switch attribute.Name.Local {
					case "href", "src":
						p.loaded = append(p.loaded, attribute.Value)
					case "class":
						classes = strings.Fields(attribute.Value)
					case "viewBox":
						if sizes := strings.Fields(attribute.Value); token.Name.Local == "svg" && len(sizes) == 4 {
							p.width, _ = strconv.ParseFloat(sizes[2], 64)
						}
					}
				}
				open = append(open, classes)
				if token.Name.Local == "style" {
					style = len(open)
				}
			case xml.EndElement:
				open = open[:len(open)-1]
			case xml.CharData:
				if len(open) == 0 {
					continue
				}
				if style == len(open) {
					p.style += string(token)
					style = 0
				}
				for _, class := range open[len(open)-1] {
					p.names[class] = append(p.names[class], string(token))
				}
			}
		}
		all = append(all, p)
	}
	return all
}

// sources returns the Go files of the operator, without tests.
func sources(t *testing.T) string {
	t.Helper()
	var all strings.Builder
	for _, directory := range []string{"api", "controllers", "internal/engine"} {
		err := filepath.WalkDir(filepath.Join(repository, filepath.FromSlash(directory)), func(file string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go") {
				return err
			}
			text, err := os.ReadFile(file)
			all.Write(text)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return all.String()
}
