// SPDX-License-Identifier: Apache-2.0

package pattern

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"io"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// golden contains the pieces into which the reference implementation cuts texts by expressions.
type golden struct {
	Texts []string
	Cuts  []struct {
		Pattern, Behaviour string
		Invert             bool
		Pieces             [][]string
	}
}

func readGolden(t testing.TB) golden {
	t.Helper()
	packed, err := os.ReadFile("../testdata/patterns.json.gz")
	if err != nil {
		t.Fatal(err)
	}
	reader, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(reader)
	if err != nil {
		t.Fatal(err)
	}
	var g golden
	if err := json.Unmarshal(text, &g); err != nil {
		t.Fatal(err)
	}
	return g
}

// isolate cuts a text into matches and the gaps between them.
func isolate(m *Matcher, text string) []string {
	var pieces []string
	m.Reset(text)
	at := 0
	for {
		start, end, found := m.Find(at)
		if !found {
			break
		}
		if start > at {
			pieces = append(pieces, text[at:start])
		}
		pieces = append(pieces, text[start:end])
		at = end
	}
	if at < len(text) {
		pieces = append(pieces, text[at:])
	}
	return pieces
}

// refused lists the expressions of the golden file that this package does not support.
var refused = map[string]string{
	`(a|b)*c|[[:alpha:]]+`: "POSIX",
	`(?=[A-Z])\w+?x|.`:     "lazy",
}

func TestMatchesReference(t *testing.T) {
	g := readGolden(t)
	compared := 0
	for _, c := range g.Cuts {
		if c.Behaviour != "isolated" || c.Invert {
			continue
		}
		p, err := Compile(c.Pattern)
		if want, isRefused := refused[c.Pattern]; isRefused {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%q: got %v, want %q", c.Pattern, err, want)
			}
			continue
		}
		if err != nil {
			t.Error(err)
			continue
		}
		m := p.Matcher()
		for i, text := range g.Texts {
			if got := isolate(m, text); !slices.Equal(got, c.Pieces[i]) {
				t.Errorf("%q cuts %q into\n%q, want\n%q", c.Pattern, text, got, c.Pieces[i])
			}
			compared++
		}
	}
	if compared < 1000 {
		t.Errorf("compared only %d cuts", compared)
	}
}

func TestCompileRefuses(t *testing.T) {
	for expression, want := range map[string]string{
		"(?<=a)b":             "groups of this kind",
		"(?<name>a)":          "groups of this kind",
		"(a":                  "not closed",
		"a)":                  "unmatched closing parenthesis",
		"[a":                  "not closed",
		"[b-a]":               "is missing or lower",
		`[a-\d]`:              "is missing or lower",
		"*a":                  "nothing to repeat",
		"a|+":                 "nothing to repeat",
		`\k`:                  `the escape \k`,
		`\1`:                  `the escape \1`,
		`\`:                   "incomplete escape",
		`\p{Nonsense}`:        `property "Nonsense"`,
		`\pL`:                 "its name in braces",
		`\p{`:                 "its name in braces",
		`\x{110000}`:          "not a valid character number",
		`\u12`:                "needs 4 digits",
		"a{3,2}":              "the minimum is greater than the maximum",
		"a{,}":                "the minimum is greater than the maximum",
		"a{101}":              "the maximum number is 100",
		"a{x}":                "the maximum number is 100",
		"a{2":                 "a brace is not closed",
		"a+?":                 "lazy",
		"(?!a)*b":             "a repeated assertion",
		"(?:ab)++":            "possessive quantifier of a group",
		"(?:a*)*b":            "unbounded repetition of a group that matches the empty text",
		"a*":                  "matches the empty text",
		"":                    "matches the empty text",
		"a|$":                 "matches the empty text",
		"\xff":                "not valid UTF-8",
		"(?:(?:ab){90}){90}":  "more than 4000 steps",
		"(?:a|b){1,90}":       "",
		"(?:(?:a|b){90}){90}": "more than 512 choices",
		"(?=.*x)a":            "unbounded repetition in a look-ahead",
		"(?!(?:ab)+)a":        "unbounded repetition in a look-ahead",
		// An empty group compiles to no node. Only the count of calls limits its repetitions.
		"((((()){100}){100}){100}){100}a":                         "more than 4000 steps",
		strings.Repeat("ab", 2049):                                "the maximum is 4096",
		strings.Repeat("(", 200) + "a" + strings.Repeat(")", 200): "nested deeper",
		strings.Repeat("[", 200) + "a" + strings.Repeat("]", 200): "nested deeper",
	} {
		if _, err := Compile(expression); (want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %q", expression, err, want)
		}
	}
}

// grammar generates random expressions that Go's engine supports with the same meaning.
type grammar struct{ *rand.Rand }

func (g grammar) choice(depth int) string {
	parts := []string{g.sequence(depth)}
	for g.IntN(3) == 0 {
		parts = append(parts, g.sequence(depth))
	}
	return strings.Join(parts, "|")
}

func (g grammar) sequence(depth int) string {
	atoms := []string{"a", "b", "é", ".", `\n`, "[ab]", "[^a]", `[^a\n]`, "[b-é]", `\p{L}`, `\p{Lu}`, `\P{L}`, "(?i:A)", `\x{62}`}
	quantifiers := []string{"", "", "", "*", "+", "?", "{2}", "{1,2}", "{2,}", "{0,1}"}
	var written strings.Builder
	for range 1 + g.IntN(3) {
		if depth > 0 && g.IntN(4) == 0 {
			written.WriteString("(?:" + g.choice(depth-1) + ")")
		} else {
			written.WriteString(atoms[g.IntN(len(atoms))])
		}
		written.WriteString(quantifiers[g.IntN(len(quantifiers))])
	}
	return written.String()
}

func TestMatchesGoEngine(t *testing.T) {
	g := grammar{rand.New(rand.NewPCG(5, 6))}
	letters := []string{"a", "b", "c", "A", "é", "É", "\n", " ", "的", "aa", "bb"}
	compared := 0
	for range 4000 {
		expression := g.choice(2)
		p, err := Compile(expression)
		if err != nil {
			continue // matches the empty text, or repeats a group that does
		}
		engine, m := regexp.MustCompile(expression), p.Matcher()
		for range 5 {
			text := ""
			for range g.IntN(12) {
				text += letters[g.IntN(len(letters))]
			}
			var want []string
			at := 0
			for _, found := range engine.FindAllStringIndex(text, -1) {
				if found[0] > at {
					want = append(want, text[at:found[0]])
				}
				want = append(want, text[found[0]:found[1]])
				at = found[1]
			}
			if at < len(text) {
				want = append(want, text[at:])
			}
			if got := isolate(m, text); !slices.Equal(got, want) {
				t.Fatalf("%q cuts %q into %q, want %q", expression, text, got, want)
			}
			compared++
		}
	}
	if compared < 8000 {
		t.Errorf("compared only %d texts", compared)
	}
}

// TestLongTexts checks that backtracking tries no position twice. In quadratic time, the test would take minutes.
func TestLongTexts(t *testing.T) {
	const length = 1 << 18
	for expression, texts := range map[string][]string{
		`\s+$|x`:                            {strings.Repeat(" ", length) + "x"},
		`\s*[\r\n]+|\s+(?!\S)`:              {strings.Repeat(" ", length) + "x", strings.Repeat("\t ", length/2) + "\nx"},
		`a*a*b`:                             {strings.Repeat("a", length), strings.Repeat("a", length) + "b"},
		`a{3,}b`:                            {strings.Repeat("a", length)},
		`(?:(?:a|a){20}){20}b`:              {strings.Repeat("a", 1000)},
		`(?:a|b|ab)+c`:                      {strings.Repeat("ab", 2000), strings.Repeat("ab", length)},
		`(?:ab)*c`:                          {strings.Repeat("ab", length)},
		`a{0,100}a{0,100}a{0,100}a{0,100}b`: {strings.Repeat("a", length)},
		`(?:a?){100}b`:                      {strings.Repeat("a", length)},
		`(?:a|b){1,100}c`:                   {strings.Repeat("a", length)},
		`a+(?=b{1,100}c)|.`:                 {strings.Repeat("a", length) + strings.Repeat("b", length)},
		`\p{Lu}*\p{L}+!`:                    {strings.Repeat("A", length), strings.Repeat("Aa", length/2)},
	} {
		p, err := Compile(expression)
		if err != nil {
			t.Fatal(err)
		}
		m := p.Matcher()
		for _, text := range texts {
			if got := strings.Join(isolate(m, text), ""); got != text {
				t.Errorf("%q loses %d bytes", expression, len(text)-len(got))
			}
		}
	}
}

func FuzzCompile(f *testing.F) {
	for _, c := range readGolden(f).Cuts {
		f.Add(c.Pattern, "a1 的\n")
	}
	f.Fuzz(func(t *testing.T, expression, text string) {
		p, err := Compile(expression)
		if err != nil || len(text) > 40 {
			return
		}
		if got := strings.Join(isolate(p.Matcher(), text), ""); got != text {
			t.Fatalf("%q cuts %q into %q", expression, text, got)
		}
	})
}
