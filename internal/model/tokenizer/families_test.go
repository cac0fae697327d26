// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/text/unicode/norm"

	"github.com/semmoe/operator/internal/model/tokenizer/pattern"
)

// families lists the pipelines of testdata/make_goldens.py.
var families = []string{
	"gpt2", "qwen3", "qwen3.5", "llama3", "deepseek-v2", "deepseek-v3", "o200k", "tekken", "odd", "mixtral", "mixtral-metaspace", "metaspace-split",
}

// readGolden decodes a file of testdata.
func readGolden(t testing.TB, name string, into any) {
	t.Helper()
	packed, err := os.ReadFile("testdata/" + name + ".json.gz")
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
	if err := json.Unmarshal(text, into); err != nil {
		t.Fatal(err)
	}
}

// family is a tokenizer and the ids of the reference implementation for each case.
type family struct {
	file json.RawMessage
	*Tokenizer
	ids [][]int32
}

var (
	familiesMu   sync.Mutex
	readFamilies = map[string]*family{}
)

func readFamily(t testing.TB, name string) *family {
	t.Helper()
	familiesMu.Lock()
	defer familiesMu.Unlock()
	if f, ok := readFamilies[name]; ok {
		return f
	}
	var golden struct {
		Tokenizer json.RawMessage
		IDs       [][]int32
	}
	readGolden(t, name, &golden)
	parsed, err := Parse(golden.Tokenizer)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	f := &family{golden.Tokenizer, parsed, golden.IDs}
	readFamilies[name] = f
	return f
}

func readCases(t testing.TB) []string {
	var cases []string
	readGolden(t, "cases", &cases)
	return cases
}

// TestFamiliesMatchReference compares the ids of each family with the reference. The last family is a file with
// truncation and padding, with the ids that engines get from the library transformers.
func TestFamiliesMatchReference(t *testing.T) {
	cases := readCases(t)
	for _, name := range append(slices.Clone(families), "call-settings") {
		t.Run(name, func(t *testing.T) {
			f := readFamily(t, name)
			if len(f.ids) != len(cases) || len(cases) < 300 {
				t.Fatalf("got ids of %d texts, want %d", len(f.ids), len(cases))
			}
			for i, text := range cases {
				for range 2 { // the second iteration uses the cache
					if got := f.Encode(text); !slices.Equal(got, f.ids[i]) {
						t.Errorf("%q: %s", text, cmp.Diff(spell(f.Tokenizer, f.ids[i]), spell(f.Tokenizer, got)))
						break
					}
				}
			}
		})
	}
}

// spell returns tokens with their text.
func spell(t *Tokenizer, ids []int32) []string {
	var list []string
	for _, id := range ids {
		piece, _ := t.Token(id)
		list = append(list, piece)
	}
	return list
}

// splitOracle cuts by an expression of knownWords with the package pattern.
func splitOracle(t testing.TB, expression string) cutter {
	t.Helper()
	compiled, err := pattern.Compile(expression)
	if err != nil {
		t.Fatal(err)
	}
	return cut(findPattern(compiled), "Isolated")
}

// chain applies several cutters in sequence.
func chain(cutters ...cutter) cutter {
	return func(pieces []span, text string, parts []span) []span {
		for _, cut := range cutters {
			parts = cut(nil, text, parts)
		}
		return append(pieces, parts...)
	}
}

// FuzzSplit compares the hand-written functions for known expressions with the expressions.
func FuzzSplit(f *testing.F) {
	type ways struct {
		name       string
		fast, slow cutter
	}
	var all []ways
	for expression, next := range knownWords {
		all = append(all, ways{expression, cutWords(next), splitOracle(f, expression)})
	}
	var steps []cutter
	for _, expression := range deepSeekV3Patterns {
		steps = append(steps, splitOracle(f, expression))
	}
	all = append(all, ways{"DeepSeek V3", deepSeekV3, chain(steps...)}, ways{deepSeekV3Patterns[2], cutWords(deepSeekV3Word), steps[2]})
	for _, text := range append(readCases(f), trickyTexts...) {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		for _, w := range all {
			whole := []span{{0, len(text)}}
			if text == "" {
				continue
			}
			got, want := w.fast(nil, text, whole), w.slow(nil, text, whole)
			if !slices.Equal(got, want) {
				t.Fatalf("%s: %q is cut into %v, want %v", w.name, text, got, want)
			}
		}
	})
}

// decodedText returns the expected decoded text of a text's tokens.
func decodedText(name, text string) string {
	switch name {
	case "qwen3", "qwen3.5":
		return norm.NFC.String(text)
	case "mixtral", "mixtral-metaspace", "metaspace-split":
		return strings.ReplaceAll(text, spaceMark, " ")
	}
	return text
}

func FuzzRoundTrip(f *testing.F) {
	for _, text := range append(readCases(f), trickyTexts...) {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		for _, name := range families {
			checkRoundTrip(t, name, readFamily(t, name).Tokenizer, text)
		}
		for name, parse := range parseOnce {
			checkRoundTrip(t, name, parse(t), text)
		}
	})
}

func checkRoundTrip(t *testing.T, name string, tok *Tokenizer, text string) {
	ids := tok.Encode(text)
	if got := tok.AppendTokens([]int32{-7}, text); got[0] != -7 || !slices.Equal(got[1:], ids) {
		t.Fatalf("%s: %q is appended as %v, encoded as %v", name, text, got, ids)
	}
	// Lower-casing, compatibility forms and several leading spaces cannot be reversed.
	lossy := name == "odd" || tok.spaceFirst && (strings.HasPrefix(text, " ") || strings.HasPrefix(text, spaceMark) || strings.Contains(text, ">"))
	if got, want := string(tok.DecodeBytes(ids, false)), decodedText(name, text); got != want && !lossy {
		t.Fatalf("%s: %q decodes to %q", name, want, got)
	}
	decoded := tok.Decode(ids, false)
	stream, streamed := tok.NewStream(false), ""
	for _, id := range ids {
		piece := stream.Next(id)
		if !utf8.ValidString(piece) {
			t.Fatalf("%s: %q streams invalid %q", name, text, piece)
		}
		streamed += piece
	}
	if streamed += stream.Flush(); streamed != decoded {
		t.Fatalf("%s: %q streams as %q, decodes as %q", name, text, streamed, decoded)
	}
}

// FuzzMerge compares both merge algorithms, the table of whole pieces and the cache with the definition of merging.
func FuzzMerge(f *testing.F) {
	for _, text := range readCases(f) {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, piece string) {
		if piece == "" || len(piece) > 400 {
			return
		}
		for _, name := range []string{"gpt2", "llama3", "mixtral"} {
			b := readFamily(t, name).bpe
			var s scratch
			want := mergeOracle(b, piece)
			s.tokens = b.begin(nil, piece)
			if got := b.mergeLarge(nil, &s); !slices.Equal(got, want) {
				t.Fatalf("%s: %q is merged to %v by the queue, want %v", name, piece, got, want)
			}
			if tokens := b.begin(nil, piece); len(tokens) <= smallPiece {
				if got := b.mergeSmall(tokens); !slices.Equal(got, want) {
					t.Fatalf("%s: %q is merged to %v pair by pair, want %v", name, piece, got, want)
				}
			}
			if name == "llama3" { // it looks up whole pieces without merging
				continue
			}
			for range 2 { // the second iteration uses the cache
				if got := b.appendTokens(nil, piece, &s); !slices.Equal(got, want) {
					t.Fatalf("%s: %q becomes %v, want %v", name, piece, got, want)
				}
			}
		}
	})
}

// FuzzWordCache checks that the words that a scratch has cached do not change any encoding: a text encodes alike after
// other texts and with an empty scratch.
func FuzzWordCache(f *testing.F) {
	for _, text := range []string{"the cat, the cat's hat", "aaaaaaaa aaaaaaaaa aaaaaaaaaa", "ab abc abcd abcde abcdef abcdefg abcdefgh", "der Hund\x00\x00\x00", "x = {\"a\": 1}\n\n"} {
		f.Add(text)
	}
	texts := prompts(20, 2000, 9)
	f.Fuzz(func(t *testing.T, text string) {
		for _, name := range []string{"qwen3", "o200k", "deepseek-v3", "mixtral"} {
			tok := readFamily(t, name)
			for _, text := range []string{text, text + texts[len(text)%len(texts)]} {
				used := tok.Encode(text)
				tok.bpe.scratches = sync.Pool{}
				if fresh := tok.Encode(text); !slices.Equal(used, fresh) {
					t.Fatalf("%s: %q becomes %v, and %v without cached words", name, text, used, fresh)
				}
			}
		}
	})
}

// TestPackShort checks that different pieces become different numbers, also with zero bytes and overlapping halves.
func TestPackShort(t *testing.T) {
	known := map[shortPiece]string{}
	enter := func(piece string) {
		p := packShort(piece)
		if other, ok := known[p]; ok && other != piece || p == (shortPiece{}) {
			t.Fatalf("%q and %q are packed alike", piece, other)
		}
		known[p] = piece
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range 300_000 {
		piece := make([]byte, 1+random.IntN(shortBytes))
		for i := range piece {
			piece[i] = "\x00ab\xff"[random.IntN(4)]
		}
		enter(string(piece))
	}
	for n := range shortBytes {
		for _, c := range []string{"a", "\x00"} {
			enter(strings.Repeat(c, n+1))
		}
	}
}

// TestPartsAreIndependent checks that the tokens of a text are the concatenation of its parts' tokens at every allowed
// cut.
func TestPartsAreIndependent(t *testing.T) {
	cases := readCases(t)
	random := rand.New(rand.NewPCG(1, 2))
	for _, name := range families {
		tok := readFamily(t, name).Tokenizer
		if !tok.pre.parts {
			continue
		}
		for range 300 {
			text := ""
			for range 5 {
				text += cases[random.IntN(len(cases))] + []string{"", "a ", "Z\n", "7 ", "x \n"}[random.IntN(5)]
			}
			at := partEnd(text, random.IntN(len(text)+1))
			var s scratch
			want := tok.appendPart(nil, text, &s)
			if got := tok.appendPart(tok.appendPart(nil, text[:at], &s), text[at:], &s); !slices.Equal(got, want) {
				t.Fatalf("%s: %q cut at %d: %s", name, text, at, cmp.Diff(spell(tok, want), spell(tok, got)))
			}
		}
	}
}

// TestLongTextInParallel encodes a long text with several goroutines and several concurrent callers.
func TestLongTextInParallel(t *testing.T) {
	var written strings.Builder
	for written.Len() < 2*parallelBytes {
		for _, text := range readCases(t) {
			written.WriteString(text + "\nend ")
		}
	}
	text := written.String()
	parallel := 0
	for _, name := range families {
		tok := readFamily(t, name).Tokenizer
		if !tok.pre.parts {
			continue
		}
		parallel++
		normal := tok.normalize(text)
		var s scratch
		want := tok.appendPart(nil, normal, &s)
		var group sync.WaitGroup
		for workers := range 3 {
			group.Go(func() {
				if got := tok.appendParallel(nil, normal, workers+1); !slices.Equal(got, want) {
					t.Errorf("%s: %d tokens with %d goroutines, want %d", name, len(got), workers+1, len(want))
				}
			})
		}
		group.Wait()
	}
	if parallel < 7 {
		t.Errorf("only %d families are encoded in parallel", parallel)
	}
}

// TestLongRuns checks that long runs of one character, or of two alternating characters, do not take quadratic time. In
// quadratic time, the test would take minutes.
func TestLongRuns(t *testing.T) {
	const length = 1 << 15
	for _, name := range families {
		tok := readFamily(t, name).Tokenizer
		for _, unit := range []string{"a", " ", "\n", " \n", "的", "\u0301", "9", "-", "A", "'", "\x00", "\u00a0", "<", spaceMark, "aB"} {
			text := strings.Repeat(unit, length/len(unit))
			for _, text := range []string{text, text + "x"} {
				if got, want := string(tok.DecodeBytes(tok.Encode(text), false)), decodedText(name, text); name != "odd" && got != want && got != want[min(1, len(want)):] {
					t.Errorf("%s: %d times %q is not restored", name, length, unit)
				}
			}
		}
	}
}

func TestBehavioursMatchReference(t *testing.T) {
	var golden struct {
		Texts []string
		Cuts  []struct {
			Pattern, Behaviour string
			Invert             bool
			Pieces             [][]string
		}
	}
	readGolden(t, "patterns", &golden)
	names := map[string]string{
		"isolated": "Isolated", "removed": "Removed", "merged_with_previous": "MergedWithPrevious", "merged_with_next": "MergedWithNext", "contiguous": "Contiguous",
	}
	compared := 0
	for _, c := range golden.Cuts {
		compiled, err := pattern.Compile(c.Pattern)
		if err != nil {
			continue // refused expressions are tested in the package pattern
		}
		find := findPattern(compiled)
		if c.Invert {
			find = invert(find)
		}
		cutter := cut(find, names[c.Behaviour])
		for i, text := range golden.Texts {
			var got []string
			for _, piece := range cutter(nil, text, []span{{0, len(text)}}) {
				got = append(got, text[piece.start:piece.end])
			}
			if !slices.Equal(got, c.Pieces[i]) {
				t.Errorf("%q, %s, invert %v cuts %q into\n%q, want\n%q", c.Pattern, c.Behaviour, c.Invert, text, got, c.Pieces[i])
			}
			compared++
		}
	}
	if compared < 10000 {
		t.Errorf("compared only %d cuts", compared)
	}
}
