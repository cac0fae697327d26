// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
)

// tinyModel contains the small tokenizer and the golden strings of both tokenizers.
const tinyModel = "../../refengine/testdata/tiny-qwen3moe/"

// readMaybeCompressed reads a file and decompresses it if its name ends in .zst.
func readMaybeCompressed(t testing.TB, path string) []byte {
	t.Helper()
	packed, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if filepath.Ext(path) != ".zst" {
		return packed
	}
	decoder, err := zstd.NewReader(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer decoder.Close()
	text, err := decoder.DecodeAll(packed, nil)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

var parseOnce = map[string]func(testing.TB) *Tokenizer{}

func init() {
	for name, path := range map[string]string{"tiny": tinyModel + "tokenizer.json", "big": "testdata/big.tokenizer.json.zst"} {
		var once sync.Once
		var parsed *Tokenizer
		parseOnce[name] = func(t testing.TB) *Tokenizer {
			once.Do(func() {
				var err error
				if parsed, err = Parse(readMaybeCompressed(t, path)); err != nil {
					t.Fatal(err)
				}
			})
			return parsed
		}
	}
}

type goldenString struct {
	Text string  `json:"text"`
	Tiny []int32 `json:"tiny"`
	Big  []int32 `json:"big"`
}

func goldenStrings(t testing.TB) []goldenString {
	t.Helper()
	text, err := os.ReadFile(tinyModel + "tokenizer_golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var list []goldenString
	if err := json.Unmarshal(text, &list); err != nil || len(list) == 0 {
		t.Fatalf("%d golden strings, %v", len(list), err)
	}
	return list
}

func TestGolden(t *testing.T) {
	for _, g := range goldenStrings(t) {
		for name, want := range map[string][]int32{"tiny": g.Tiny, "big": g.Big} {
			tok := parseOnce[name](t)
			got := tok.Encode(g.Text)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s: %q: %s", name, g.Text, diff)
			}
			if back := tok.Decode(got, true); back != g.Text {
				t.Errorf("%s: %q decodes to %q", name, g.Text, back)
			}
		}
	}
}

// small returns a tokenizer with every byte, a few merges and two added tokens. The merges are written in the given
// format.
func small(t *testing.T, merges any, change func(map[string]any)) (*Tokenizer, error) {
	t.Helper()
	vocab := map[string]int32{"ab": 256, "abc": 257, "bc": 258, "aa": 259}
	for written, value := range byteAlphabet {
		vocab[string(written)] = int32(value)
	}
	model := map[string]any{"type": "BPE", "vocab": vocab, "merges": merges}
	file := map[string]any{
		"added_tokens": []map[string]any{
			{"id": 300, "content": "<|end|>", "special": true},
			{"id": 301, "content": "<|end|><|end|>", "special": true},
			{"id": 302, "content": "tool", "normalized": true},
		},
		"pre_tokenizer": map[string]any{"type": "ByteLevel"},
		"decoder":       map[string]any{"type": "ByteLevel"},
		"model":         model,
	}
	if change != nil {
		change(file)
	}
	text, err := json.Marshal(file)
	if err != nil {
		t.Fatal(err)
	}
	return Parse(text)
}

func TestEncodeSmall(t *testing.T) {
	spellings := map[string]any{
		"strings": []string{"b c", "a b", "ab c", "a a"},
		"pairs":   [][2]string{{"b", "c"}, {"a", "b"}, {"ab", "c"}, {"a", "a"}},
	}
	for spelling, merges := range spellings {
		tok, err := small(t, merges, nil)
		if err != nil {
			t.Fatal(err)
		}
		for text, want := range map[string][]int32{
			"":                                 {},
			"abc":                              {'a', 258},
			"abab":                             {256, 256},
			"aaa":                              {259, 'a'},
			"<|end|>":                          {300},
			"<|end|><|end|><|end|>":            {301, 300},
			"ab<|end|>ab":                      {256, 300, 256},
			"<|end":                            {'<', '|', 'e', 'n', 'd'},
			"a tool":                           {'a', ' ', 302},
			"\xff\xc3":                         {0xff, 0xc3},
			"it's":                             {'i', 't', '\'', 's'},
			"to" + "ol<|end|>" + "t":           {302, 300, 't'},
			strings.Repeat("a", 5) + " " + "b": {259, 259, 'a', ' ', 'b'},
		} {
			got := tok.Encode(text)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s: %q: %s", spelling, text, diff)
			}
			if back := string(tok.DecodeBytes(got, false)); back != text {
				t.Errorf("%s: %q decodes to %q", spelling, text, back)
			}
		}
		if got := tok.Decode([]int32{'a', 300, 302, 9999, -1, 280}, true); got != "atool" {
			t.Errorf("special, unknown and unassigned ids: got %q", got)
		}
	}
}

func TestIgnoreMergesTakesWholeWords(t *testing.T) {
	tok, err := small(t, []string{"b c", "a b"}, func(file map[string]any) {
		file["model"].(map[string]any)["ignore_merges"] = true
	})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]int32{257, ' ', 'a', 258, 'c'}, tok.Encode("abc abcc")); diff != "" {
		t.Error(diff)
	}
}

func TestUseRegexFalseDoesNotSplit(t *testing.T) {
	tok, err := small(t, []string{"a a"}, func(file map[string]any) {
		file["pre_tokenizer"] = map[string]any{"type": "ByteLevel", "use_regex": false}
		model := file["model"].(map[string]any)
		model["vocab"].(map[string]int32)["aĠ"] = 260
		model["merges"] = []string{"a Ġ"}
	})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]int32{260, 'b'}, tok.Encode("a b")); diff != "" {
		t.Error(diff)
	}
}

func TestParseRefuses(t *testing.T) {
	set := func(key string, value any) func(map[string]any) {
		return func(file map[string]any) { file[key] = value }
	}
	model := func(key string, value any) func(map[string]any) {
		return func(file map[string]any) { file["model"].(map[string]any)[key] = value }
	}
	added := func(token map[string]any) func(map[string]any) {
		return set("added_tokens", []map[string]any{token})
	}
	typed := func(name string) map[string]any { return map[string]any{"type": name} }
	split := func(expression, behaviour string) map[string]any {
		return map[string]any{"type": "Split", "pattern": map[string]any{"Regex": expression}, "behavior": behaviour}
	}
	steps := func(steps ...map[string]any) func(map[string]any) {
		return set("pre_tokenizer", map[string]any{"type": "Sequence", "pretokenizers": steps})
	}
	replace := func(found, content string) map[string]any {
		return map[string]any{"type": "Replace", "pattern": map[string]any{"String": found}, "content": content}
	}
	sequence := func(step map[string]any, times int) map[string]any {
		return map[string]any{"type": "Sequence", "normalizers": slices.Repeat([]map[string]any{step}, times)}
	}
	nested := func(step map[string]any, times int) (made map[string]any) {
		for range times {
			made = map[string]any{"type": "Sequence", "pretokenizers": []map[string]any{step, step, {"type": "Sequence", "pretokenizers": []any{made}}}}
		}
		return made
	}
	for name, test := range map[string]struct {
		change func(map[string]any)
		want   string
	}{
		"normalizer":      {set("normalizer", typed("StripAccents")), `normalizer of type "StripAccents"`},
		"replace nothing": {set("normalizer", typed("Replace")), "Replace without a pattern"},
		"growth":          {set("normalizer", sequence(replace("a", "aa"), 8)), "write up to 256 bytes per byte of text; the maximum is 128"},
		"long content":    {set("normalizer", replace("a", strings.Repeat("b", 200))), "write up to 200 bytes"},
		"long prefix":     {set("normalizer", map[string]any{"type": "Prepend", "prepend": strings.Repeat("b", 200)}), "write up to 201 bytes"},
		"normal forms":    {set("normalizer", sequence(typed("NFKD"), 2*maxSteps)), "write up to 1331 bytes"},
		"normalizers":     {set("normalizer", sequence(replace("a", "b"), maxSteps+1)), "normalizer with more than 64 steps"},
		"pre-tokenizers":  {set("pre_tokenizer", nested(typed("Digits"), maxSteps+1)), "pre_tokenizer with more than 64 steps"},
		"sparse ids":      {model("vocab", map[string]int{"a": 1 << 23}), "token id 8388608 is invalid: allowed is 0 to 65544 for 4 tokens"},
		"long added":      {added(map[string]any{"id": 1, "content": strings.Repeat("b", 257)}), "has 257 bytes; the maximum is 256"},
		"long expression": {steps(split(strings.Repeat("b", 5000), "Isolated"), typed("ByteLevel")), "has 5000 bytes; the maximum is 4096"},
		"no splitting":    {set("pre_tokenizer", nil), "exactly one is supported"},
		"pre-tokenizer":   {set("pre_tokenizer", typed("Whitespace")), `pre_tokenizer of type "Whitespace"`},
		"in a sequence":   {steps(typed("ByteLevel"), typed("UnicodeScripts")), `pre_tokenizer of type "UnicodeScripts" after ByteLevel`},
		"no pattern":      {steps(typed("Split"), typed("ByteLevel")), "Split has no pattern"},
		"look-behind":     {steps(split("(?<=a)b", "Isolated"), typed("ByteLevel")), `groups of this kind are not supported`},
		"behaviour":       {steps(split("a", "Doubled"), typed("ByteLevel")), `behavior "Doubled"; allowed are Isolated, `},
		"post processor":  {set("post_processor", typed("BertProcessing")), `post_processor of type "BertProcessing"`},
		"no decoder":      {set("decoder", nil), "no decoder"},
		"decoder":         {set("decoder", typed("WordPiece")), `decoder of type "WordPiece"`},
		"empty added":     {added(map[string]any{"id": 1, "content": ""}), "added token 1 is empty"},
		"huge id":         {added(map[string]any{"id": 1 << 30, "content": "x"}), "allowed is 0 to"},
		"negative id":     {added(map[string]any{"id": -1, "content": "x"}), "allowed is 0 to"},
		"unigram":         {model("type", "Unigram"), `model of type "Unigram"`},
		"dropout":         {model("dropout", 0.1), "dropout"},
		"subword prefix":  {model("continuing_subword_prefix", "##"), `continuing_subword_prefix "##"`},
		"word suffix":     {model("end_of_word_suffix", "</w>"), `end_of_word_suffix "</w>"`},
		"byte fallback":   {model("byte_fallback", true), "byte_fallback"},
		"no byte tokens": {func(file map[string]any) {
			model("byte_fallback", true)(file)
			file["pre_tokenizer"] = map[string]any{"type": "Metaspace", "replacement": "▁"}
		}, "no token <0x00>"},
		"metaspace":       {set("pre_tokenizer", map[string]any{"type": "Metaspace", "replacement": "_"}), `replacement "_"`},
		"metaspace later": {steps(typed("Digits"), map[string]any{"type": "Metaspace", "replacement": "▁"}), `"Metaspace" after Digits; it is supported only as the first step`},
		"prepend scheme":  {set("pre_tokenizer", map[string]any{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "last"}), `prepend_scheme "last"`},
		"shared id":       {model("vocab", map[string]int{"a": 7, "b": 7}), `tokens "a" and "b" share id 7`},
		"missing byte":    {model("vocab", map[string]int{"a": 0}), "no token for byte"},
		"merge of three":  {model("merges", []string{"a b c"}), `merge 0: "a b c" does not have two parts`},
		"merge of one":    {model("merges", [][]string{{"a"}}), "does not have two parts"},
		"merge unknown":   {model("merges", []string{"a z"}), `merge 0 ("a", "z")`},
		"merges no array": {model("merges", "a"), "it must be an array"},
		"merge a number":  {model("merges", []int{1}), "neither a string nor an array"},
		"merge of a list": {model("merges", [][]any{{"a", []int{1}}}), "is not a string"},
		"vocab no object": {model("vocab", []int{1}), "it must be an object of ids"},
		"vocab of texts":  {model("vocab", map[string]any{"a": "b"}), `token "a" has id "b"`},
		"vocab of lists":  {model("vocab", map[string]any{"a": []string{"b, c"}}), `token "a" has id ["b;`},
		"huge vocab id":   {model("vocab", map[string]any{"a": 1 << 40}), "allowed is 0 to"},
		"fractional id":   {model("vocab", map[string]any{"a": 0.5}), "allowed is 0 to"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := small(t, []string{}, test.change)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Fatalf("got %v, want %q", err, test.want)
			}
		})
	}
}

// TestAddedTokensInLongRuns checks that a text does not take quadratic time if each position could require reading the
// rest of the text. In quadratic time, the test would take minutes.
func TestRegularTokens(t *testing.T) {
	for name, tc := range map[string]struct {
		text string
		want []int32
	}{
		"map":            {`{"added_tokens": [{"id": 1}, {"id": 9}], "model": {"vocab": {"c": 3, "<s>": 1, "a": 0, "z": 7}}}`, []int32{0, 3}},
		"list of scores": {`{"added_tokens": [{"id": 0}], "model": {"vocab": [["<unk>", 0], ["a", -1.5], ["b", -2]]}}`, nil},
		"no vocabulary":  {`{"model": {}}`, nil},
		"damaged":        {`{"model": {"vocab": {"a": "b"}}}`, nil},
		"empty":          {``, nil},
	} {
		t.Run(name, func(t *testing.T) {
			if got := RegularTokens([]byte(tc.text), 5); !slices.Equal(got, tc.want) {
				t.Errorf("got %v, want %v", got, tc.want)
			}
		})
	}
}

func TestAddedTokensInLongRuns(t *testing.T) {
	const length = 1 << 19
	tok, err := small(t, []string{}, func(file map[string]any) {
		file["added_tokens"] = []map[string]any{
			{"id": 300, "content": " ", "lstrip": true, "rstrip": true}, {"id": 301, "content": strings.Repeat("a", 255) + "b"}, {"id": 302, "content": "ac"},
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	// The first token takes the whole run, and leaves nothing to the next ones: tokenizers 0.23.3 drops them.
	if got := tok.Encode(strings.Repeat(" ", length)); !slices.Equal(got, []int32{300}) {
		t.Errorf("%d tokens", len(got))
	}
	if got := tok.Encode(strings.Repeat("a", length) + "b"); len(got) != length-254 || got[len(got)-1] != 301 {
		t.Errorf("%d tokens, the last one %d", len(got), got[len(got)-1])
	}
}

var trickyTexts = []string{
	"", " ", "  ", "a  b", "   leading", "trailing   ", "\n\n x", "don't we'll I'D they're '' 'x 's", " 's", "1234 12a a12 ½Ⅷ٣",
	"a\r\nb\n\n\nc", "日本語 テスト\u3000全角", "naïve – “quoted”", "😀🚀", "\u0085\u00a0x", "e\u0301 \u0300", "<|endoftext|><|endoftext", "\x00\x01", "a\xffb\xc3", strings.Repeat(" ", 300) + "x",
	"\u0301A", "1\ufe0fA", "\n\u0301\u0301AB'S", "\u0301Ab", "x \u0301A\u0301B",
}

// mergeOracle merges by definition: repeatedly the leftmost pair of the lowest rank, until no pair can be merged.
func mergeOracle(b *bpe, piece string) []int32 {
	tokens := b.begin(nil, piece)
	for {
		best, at := noMerge, -1
		for i := range len(tokens) - 1 {
			if m := b.merges.get(tokens[i], tokens[i+1]); m.rank < best.rank {
				best, at = m, i
			}
		}
		if at < 0 {
			return tokens
		}
		tokens = append(append(tokens[:at:at], best.token), tokens[at+2:]...)
	}
}

// TestDecodeReplacesInvalidUTF8 checks that invalid bytes are replaced as recommended by Unicode: one U+FFFD for each
// maximal subpart.
func TestDecodeReplacesInvalidUTF8(t *testing.T) {
	tok := parseOnce["tiny"](t)
	ids := func(raw string) (list []int32) {
		for i := range len(raw) {
			list = append(list, tok.bpe.byteTokens[raw[i]])
		}
		return list
	}
	for raw, want := range map[string]string{
		"a\xffb":                          "a\ufffdb",
		"\xe3\x81":                        "\ufffd",
		"\xe3\x81\x82":                    "あ",
		"\xe3\x81x":                       "\ufffdx",
		"\xf0\x9f\x98\xe3\x81\x82":        "\ufffdあ",
		"\xc3\xc3\xa9":                    "\ufffdé",
		"\xe0\x80\x80":                    "\ufffd\ufffd\ufffd",
		"\xf4\x90\x80\x80":                "\ufffd\ufffd\ufffd\ufffd",
		"\xed\xa0\x80":                    "\ufffd\ufffd\ufffd",
		"\x61\xf1\x80\x80\xe1\x80\xc2b":   "a\ufffd\ufffd\ufffdb",
		"\xef\xbf\xbd":                    "\ufffd",
		"\xf0\x9f\x98\x80\xf0\x9f\x98":    "😀\ufffd",
		"\x80\x80":                        "\ufffd\ufffd",
		"\xf0\x9f\x98\x80" + "\xe3" + "z": "😀\ufffdz",
	} {
		if got := tok.Decode(ids(raw), false); got != want {
			t.Errorf("%q: got %q, want %q", raw, got, want)
		}
		stream, got := tok.NewStream(false), ""
		for _, id := range ids(raw) {
			got += stream.Next(id)
		}
		if got += stream.Flush(); got != want {
			t.Errorf("%q: streams as %q, want %q", raw, got, want)
		}
	}
}

func TestStreamHoldsBackIncompleteCharacters(t *testing.T) {
	tok := parseOnce["tiny"](t)
	stream := tok.NewStream(true)
	var got []string
	for _, b := range []byte("x😀") {
		got = append(got, stream.Next(tok.bpe.byteTokens[b]))
	}
	if diff := cmp.Diff([]string{"x", "", "", "", "😀"}, got); diff != "" {
		t.Error(diff)
	}
}

// TestHead checks that the tokens of a text are those of its parts.
func TestHead(t *testing.T) {
	tokens, err := Load(tinyModel + "tokenizer.json")
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Repeat("func main() { return the   name, or an error }\n\n", 50)
	var ids []int32
	parts := 0
	for rest := text; rest != ""; parts++ {
		head := tokens.Head(rest, 100)
		ids, rest = tokens.AppendTokens(ids, head), rest[len(head):]
	}
	if want := tokens.Encode(text); !slices.Equal(ids, want) || parts < 10 {
		t.Errorf("%d parts have %d tokens, want %d", parts, len(ids), len(want))
	}
}

func TestConcurrentUse(t *testing.T) {
	tok := parseOnce["tiny"](t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for _, g := range goldenStrings(t) {
				if diff := cmp.Diff(g.Tiny, tok.Encode(g.Text)); diff != "" {
					t.Error(diff)
				}
			}
		})
	}
	wg.Wait()
}
