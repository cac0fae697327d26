// SPDX-License-Identifier: Apache-2.0

package corpus

import (
	"bytes"
	"context"
	"embed"
	"encoding/json"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os/exec"
	"path"
	"slices"
	"strings"
)

//go:embed c chinese english french german japanese javascript json python russian rust spanish sql yaml
var written embed.FS

// Document is one text.
type Document struct {
	// Kind is the language or data format of the text, such as go-source, english or sql. Name is unique within the
	// corpus.
	Kind string
	Name string
	Text string
}

// Request is a part of a document that is sent as one prompt.
type Request struct {
	Kind string
	Text string
}

// Written returns the documents that were written for the corpus, at least eight of each kind, ordered by name.
func Written() []Document {
	var documents []Document
	err := fs.WalkDir(written, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := written.ReadFile(name)
		documents = append(documents, Document{Kind: path.Dir(name), Name: name, Text: string(text)})
		return err
	})
	if err != nil {
		panic(err) // the files are part of the program
	}
	return documents
}

// Split holds out a percentage of the documents of every kind, at least one of each, chosen by the seed. Both parts
// keep the order of the documents.
func Split(documents []Document, heldOutPercent int, seed uint64) (rest, heldOut []Document) {
	byKind := map[string][]int{}
	for i, document := range documents {
		byKind[document.Kind] = append(byKind[document.Kind], i)
	}
	held := map[int]bool{}
	for _, kind := range Kinds(documents) {
		indices := byKind[kind]
		random := rand.New(rand.NewPCG(seed, 0x636f72707573))
		random.Shuffle(len(indices), func(i, j int) { indices[i], indices[j] = indices[j], indices[i] })
		for _, index := range indices[:max(1, len(indices)*heldOutPercent/100)] {
			held[index] = true
		}
	}
	for i, document := range documents {
		if held[i] {
			heldOut = append(heldOut, document)
		} else {
			rest = append(rest, document)
		}
	}
	return rest, heldOut
}

// Kinds returns the kinds of the documents, in alphabetical order.
func Kinds(documents []Document) []string {
	var kinds []string
	for _, document := range documents {
		kinds = append(kinds, document.Kind)
	}
	slices.Sort(kinds)
	return slices.Compact(kinds)
}

// Requests cuts documents into requests of about size bytes; see Cut.
func Requests(documents []Document, size int) []Request {
	var requests []Request
	for _, document := range documents {
		for _, text := range Cut(document.Text, size) {
			requests = append(requests, Request{Kind: document.Kind, Text: text})
		}
	}
	return requests
}

// Cut cuts a text into parts of at least size bytes, each of which ends with a line or a sentence. The
// concatenated parts are the text. A short rest belongs to the last part.
func Cut(text string, size int) []string {
	var parts []string
	start := 0
	for end := range text {
		if end-start >= size && endsUnit(text[:end], text[end:]) {
			parts = append(parts, text[start:end])
			start = end
		}
	}
	rest := text[start:]
	if len(parts) > 0 && len(rest) < size/2 {
		parts[len(parts)-1] += rest
		return parts
	}
	return append(parts, rest)
}

// endsUnit reports whether a line or a sentence ends between two adjacent texts.
func endsUnit(before, after string) bool {
	switch {
	case strings.HasSuffix(before, "\n"), strings.HasSuffix(before, "。"):
		return true
	case strings.HasPrefix(after, " "):
		return strings.HasSuffix(before, ".") || strings.HasSuffix(before, "!") || strings.HasSuffix(before, "?")
	}
	return false
}

const (
	// requestBytes is the approximate length of a request of Halves.
	requestBytes = 180
	splitSeed    = 1
)

// Halves cuts the documents of the corpus and of the Go distribution of this machine into requests. One half of the
// documents is for profiling, the other half is held out.
func Halves(ctx context.Context) (train, heldOut []Request, err error) {
	root, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return nil, nil, fmt.Errorf("go env GOROOT: %w", err)
	}
	fromGo, err := FromGo(strings.TrimSpace(string(root)))
	if err != nil {
		return nil, nil, err
	}
	known, unknown := Split(append(Written(), fromGo...), 50, splitSeed)
	return Requests(known, requestBytes), Requests(unknown, requestBytes), nil
}

// JSONL writes requests as a data set for profiling: one prompt per line, with its kind as the domain.
func JSONL(requests []Request) ([]byte, error) {
	var buffer bytes.Buffer
	encoder := json.NewEncoder(&buffer)
	encoder.SetEscapeHTML(false)
	for _, request := range requests {
		if err := encoder.Encode(map[string]string{"prompt": request.Text, "domain": request.Kind}); err != nil {
			return nil, err
		}
	}
	return buffer.Bytes(), nil
}
