// SPDX-License-Identifier: Apache-2.0

package corpus

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"
)

const (
	// extractBytes is the size of the extract of a file, in bytes: about the size of a document that was written for the
	// corpus.
	extractBytes = 1400
	// largestFile is the maximum size of a file, in bytes. Larger files are tables and generated code.
	largestFile = 256 << 10
)

// goKind is a kind of text in the Go distribution.
type goKind struct {
	name string
	root string // below GOROOT
	has  func(path string) bool
	most int // maximum number of files
}

var goKinds = []goKind{
	{"go-source", "src", func(p string) bool {
		return strings.HasSuffix(p, ".go") && !strings.HasSuffix(p, "_test.go") && !strings.Contains(p, "/testdata/")
	}, 20},
	{"go-assembly", "src", func(p string) bool { return strings.HasSuffix(p, ".s") }, 12},
	{"go-script", "src/cmd/go/testdata/script", func(p string) bool { return strings.HasSuffix(p, ".txt") }, 12},
	{"go-api", "api", func(p string) bool { return strings.HasSuffix(p, ".txt") }, 8},
	{"go-web", ".", func(p string) bool {
		return strings.HasSuffix(p, ".html") || strings.HasSuffix(p, ".js") || strings.HasSuffix(p, ".css")
	}, 10},
}

// FromGo returns extracts of the files of a Go distribution. root is `go env GOROOT`. For each kind of text it selects
// a bounded number of files, evenly spaced in the list of all files of the kind, and returns one extract per file.
func FromGo(root string) ([]Document, error) {
	var documents []Document
	for _, kind := range goKinds {
		files, err := kind.files(root)
		if err != nil {
			return nil, fmt.Errorf("text of kind %s in the Go distribution %s: %w", kind.name, root, err)
		}
		for _, file := range files {
			text, err := os.ReadFile(filepath.Join(root, file))
			if err != nil {
				return nil, err
			}
			documents = append(documents, Document{Kind: kind.name, Name: file, Text: extract(string(text))})
		}
	}
	return documents, nil
}

// files returns the selected files, relative to root, in alphabetical order.
func (k goKind) files(root string) ([]string, error) {
	var found []string
	err := filepath.WalkDir(filepath.Join(root, k.root), func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() || !k.has(filepath.ToSlash(path)) {
			return err
		}
		info, err := entry.Info()
		if err != nil || info.Size() < extractBytes || info.Size() > largestFile {
			return err
		}
		relative, err := filepath.Rel(root, path)
		found = append(found, relative)
		return err
	})
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("found no file of %d to %d bytes", extractBytes, largestFile)
	}
	slices.Sort(found)
	if len(found) <= k.most {
		return found, nil
	}
	chosen := make([]string, k.most)
	for i := range chosen {
		chosen[i] = found[i*len(found)/k.most]
	}
	return chosen, nil
}

// extract returns whole lines from the middle of a file, because many files begin with the same license.
func extract(text string) string {
	text = strings.ToValidUTF8(text, string(utf8.RuneError))
	start := max(0, (len(text)-extractBytes)/2)
	if line := strings.IndexByte(text[start:], '\n'); line >= 0 && line < extractBytes/2 {
		start += line + 1
	}
	text = text[start:min(start+extractBytes, len(text))]
	if line := strings.LastIndexByte(text, '\n'); line > extractBytes/2 {
		text = text[:line+1]
	}
	return strings.ToValidUTF8(text, "") // the end may cut a character
}
