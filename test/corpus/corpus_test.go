// SPDX-License-Identifier: Apache-2.0

package corpus

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

// all returns the complete corpus on this machine.
func all(t *testing.T) []Document {
	t.Helper()
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	documents, err := FromGo(strings.TrimSpace(string(root)))
	if err != nil {
		t.Fatal(err)
	}
	return append(Written(), documents...)
}

func TestWritten(t *testing.T) {
	count := map[string]int{}
	texts := map[string]string{}
	for _, document := range Written() {
		count[document.Kind]++
		if n := len(document.Text); n < 700 || n > 1500 {
			t.Errorf("%s has %d bytes, want 700 to 1500", document.Name, n)
		}
		if !utf8.ValidString(document.Text) {
			t.Errorf("%s is not UTF-8", document.Name)
		}
		if other, ok := texts[document.Text]; ok {
			t.Errorf("%s and %s are equal", document.Name, other)
		}
		texts[document.Text] = document.Name
	}
	for kind, n := range count {
		if n < 8 {
			t.Errorf("%d documents of kind %s, want at least 8", n, kind)
		}
	}
	if len(count) < 8 {
		t.Errorf("%d kinds, want at least 8", len(count))
	}
}

func TestFromGo(t *testing.T) {
	documents := all(t)
	if diff := cmp.Diff(documents, all(t)); diff != "" {
		t.Errorf("a second call returns other documents:\n%s", diff)
	}
	names := map[string]bool{}
	for _, document := range documents {
		if names[document.Name] {
			t.Errorf("%s occurs twice", document.Name)
		}
		names[document.Name] = true
		if !utf8.ValidString(document.Text) || len(document.Text) < extractBytes/4 || len(document.Text) > 1500 {
			t.Errorf("%s: %d bytes, UTF-8 %v", document.Name, len(document.Text), utf8.ValidString(document.Text))
		}
	}
	for _, kind := range goKinds {
		if !slices.Contains(Kinds(documents), kind.name) {
			t.Errorf("found no text of kind %s", kind.name)
		}
	}
}

func TestSplitIsByDocumentWithinKinds(t *testing.T) {
	documents := all(t)
	rest, heldOut := Split(documents, 40, 1)
	if len(rest)+len(heldOut) != len(documents) {
		t.Errorf("split %[3]d documents into %[1]d and %[2]d", len(rest), len(heldOut), len(documents))
	}
	if diff := cmp.Diff(Kinds(rest), Kinds(heldOut)); diff != "" {
		t.Errorf("the parts have different kinds:\n%s", diff)
	}
	for _, document := range heldOut {
		if slices.Contains(rest, document) {
			t.Errorf("%s is in both parts", document.Name)
		}
	}
	if _, other := Split(documents, 40, 2); cmp.Equal(heldOut, other) {
		t.Error("another seed holds out the same documents")
	}
}

func TestCut(t *testing.T) {
	for name, test := range map[string]struct {
		text string
		size int
		want []string
	}{
		"empty":            {"", 10, []string{""}},
		"short":            {"a b", 10, []string{"a b"}},
		"lines":            {"first\nsecond\nthird line\n", 7, []string{"first\nsecond\n", "third line\n"}},
		"sentences":        {"One two. Three four! Five six? Seven.", 8, []string{"One two.", " Three four!", " Five six?", " Seven."}},
		"dots inside":      {"a.b.c.d.e.f", 3, []string{"a.b.c.d.e.f"}},
		"chinese":          {"一二三。四五六。七", 9, []string{"一二三。", "四五六。七"}},
		"short rest joins": {"aaaaa\nbbbbb\nc\n", 6, []string{"aaaaa\n", "bbbbb\nc\n"}},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, Cut(test.text, test.size)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func FuzzCut(f *testing.F) {
	f.Add("One two. Three.\nFour。五", 4)
	f.Fuzz(func(t *testing.T, text string, size int) {
		if size < 1 || size > 1<<20 {
			t.Skip()
		}
		parts := Cut(text, size)
		if strings.Join(parts, "") != text {
			t.Errorf("the concatenated parts %q differ from %q", parts, text)
		}
		for _, part := range parts[:len(parts)-1] {
			if len(part) < size {
				t.Errorf("part %q is shorter than %d bytes", part, size)
			}
		}
	})
}

func TestJSONL(t *testing.T) {
	requests := Requests(Written(), 350)
	data, err := JSONL(requests)
	if err != nil {
		t.Fatal(err)
	}
	var read []Request
	for line := range bytes.Lines(data) {
		var fields struct{ Prompt, Domain string }
		if err := json.Unmarshal(line, &fields); err != nil {
			t.Fatal(err)
		}
		read = append(read, Request{Kind: fields.Domain, Text: fields.Prompt})
	}
	if diff := cmp.Diff(requests, read); diff != "" {
		t.Error(diff)
	}
}
