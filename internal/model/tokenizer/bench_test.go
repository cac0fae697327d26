// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"encoding/json"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/semmoe/operator/test/corpus"
)

// realVocabulary is the size of the vocabularies of Qwen 3.
const realVocabulary = 151_643

// synthetic returns a tokenizer.json with the pipeline of Qwen 3 and a vocabulary of a realistic size: the words of the
// corpus, the most frequent first, then generated words. Each word is merged from left to right, and all its prefixes
// are tokens.
func synthetic(tb testing.TB, tokens int) []byte {
	tb.Helper()
	var file map[string]any
	if err := json.Unmarshal(readFamily(tb, "qwen3").file, &file); err != nil {
		tb.Fatal(err)
	}
	alphabet := make([]string, 256)
	vocabulary := map[string]int32{}
	for written, value := range byteAlphabet {
		alphabet[value] = string(written)
		vocabulary[string(written)] = int32(value)
	}
	var merges [][2]string
	enter := func(word string) {
		begin := alphabet[word[0]]
		for i := 1; i < len(word) && len(vocabulary) < tokens; i++ {
			next := alphabet[word[i]]
			if _, known := vocabulary[begin+next]; !known {
				vocabulary[begin+next] = int32(len(vocabulary))
				merges = append(merges, [2]string{begin, next})
			}
			begin += next
		}
	}
	for _, word := range corpusWords() {
		enter(word)
	}
	random := rand.New(rand.NewPCG(7, 8))
	for len(vocabulary) < tokens {
		word := " "
		for range 2 + random.IntN(3) {
			word += string("bcdfghklmnprstvwz"[random.IntN(17)]) + string("aeiou"[random.IntN(5)])
		}
		enter(word)
	}
	file["added_tokens"] = []map[string]any{{"id": tokens, "content": "<|endoftext|>", "special": true}, {"id": tokens + 1, "content": "<|im_end|>", "special": true}}
	file["model"] = map[string]any{"type": "BPE", "vocab": vocabulary, "merges": merges}
	text, err := json.Marshal(file)
	if err != nil {
		tb.Fatal(err)
	}
	return text
}

// corpusWords returns the pieces of the corpus, the most frequent first.
func corpusWords() []string {
	count := map[string]int{}
	cutter := cutWords(knownWords[qwen2Pattern])
	for _, document := range corpus.Written() {
		for _, piece := range cutter(nil, document.Text, []span{{0, len(document.Text)}}) {
			count[document.Text[piece.start:piece.end]]++
		}
	}
	var words []string
	for word := range count {
		words = append(words, word)
	}
	slices.SortFunc(words, func(a, b string) int {
		if count[a] != count[b] {
			return count[b] - count[a]
		}
		return strings.Compare(a, b)
	})
	return words
}

// prompts returns texts of usual words and code in new combinations: lines of the corpus in random order.
func prompts(number, size int, seed uint64) []string {
	var lines []string
	for _, document := range corpus.Written() {
		switch document.Kind {
		case "english", "python", "c", "rust", "javascript", "sql":
			lines = append(lines, strings.SplitAfter(document.Text, "\n")...)
		}
	}
	random := rand.New(rand.NewPCG(seed, seed))
	list := make([]string, number)
	for i := range list {
		var text strings.Builder
		for text.Len() < size {
			words := strings.SplitAfter(lines[random.IntN(len(lines))], " ")
			random.Shuffle(len(words), func(i, j int) { words[i], words[j] = words[j], words[i] })
			text.WriteString(strings.Join(words, ""))
		}
		list[i] = text.String()
	}
	return list
}

// userTime returns the processor time that this process has used. It is more reliable than wall time if other processes
// use the processors too.
func userTime(b *testing.B) time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano())
}

// report reports the processor time in addition to the wall time, per prompt and per token.
func report(b *testing.B, tokens int, begin time.Duration) {
	used := float64((userTime(b) - begin).Nanoseconds())
	b.ReportMetric(used/float64(b.N), "user-ns/op")
	b.ReportMetric(used/float64(tokens), "user-ns/token")
	b.ReportMetric(float64(tokens)/float64(b.N), "tokens/op")
}

// BenchmarkPrompt encodes prompts of about 1,000 tokens, each of them once. The vocabulary has a realistic size and
// contains most of the words (real), or is a trained one that needs more merges (trained).
func BenchmarkPrompt(b *testing.B) {
	encode := func(b *testing.B, tok *Tokenizer) {
		for _, text := range prompts(200, 4000, 1) {
			tok.Encode(text)
		}
		list := prompts(4000, 4000, 2)
		ids := make([]int32, 0, 1<<13)
		tokens, i := 0, 0
		b.ReportAllocs()
		begin := userTime(b)
		for b.Loop() {
			ids = tok.AppendTokens(ids[:0], list[i%len(list)])
			tokens += len(ids)
			i++
		}
		report(b, tokens, begin)
	}
	b.Run("real", func(b *testing.B) {
		tok, err := Parse(synthetic(b, realVocabulary))
		if err != nil {
			b.Fatal(err)
		}
		encode(b, tok)
	})
	b.Run("trained", func(b *testing.B) { encode(b, parseOnce["big"](b)) })
	for _, name := range families {
		b.Run("pipeline="+name, func(b *testing.B) { encode(b, readFamily(b, name).Tokenizer) })
	}
}

// BenchmarkLongPrompt encodes a prompt of about 100,000 tokens.
func BenchmarkLongPrompt(b *testing.B) {
	tok, err := Parse(synthetic(b, realVocabulary))
	if err != nil {
		b.Fatal(err)
	}
	text := prompts(1, 400_000, 3)[0]
	tokens := 0
	begin := userTime(b)
	for b.Loop() {
		tokens += len(tok.Encode(text))
	}
	report(b, tokens, begin)
}

// BenchmarkUnusualText encodes random letters. No piece is one token, and no piece is repeated.
func BenchmarkUnusualText(b *testing.B) {
	tok := parseOnce["big"](b)
	random := rand.New(rand.NewPCG(3, 4))
	list := make([]string, 2000)
	for i := range list {
		letters := make([]byte, 4000)
		for j := range letters {
			letters[j] = " abcdefghijklmnopqrstuvwxyz"[random.IntN(27)]
		}
		list[i] = string(letters)
	}
	tokens, i := 0, 0
	b.ReportAllocs()
	begin := userTime(b)
	for b.Loop() {
		tokens += len(tok.Encode(list[i%len(list)]))
		i++
	}
	report(b, tokens, begin)
}

// BenchmarkLongRun encodes a megabyte of one character, which is one piece.
func BenchmarkLongRun(b *testing.B) {
	tok := parseOnce["big"](b)
	text := strings.Repeat(" ", 1<<20)
	tokens := 0
	begin := userTime(b)
	for b.Loop() {
		tokens += len(tok.Encode(text))
	}
	report(b, tokens, begin)
}

// BenchmarkParse parses a tokenizer.json with a vocabulary of a realistic size.
func BenchmarkParse(b *testing.B) {
	text := synthetic(b, realVocabulary)
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Parse(text); err != nil {
			b.Fatal(err)
		}
	}
}

// keptMiB returns the memory that a tokenizer retains, in MiB.
func keptMiB(tb testing.TB, text []byte) float64 {
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	tok, err := Parse(text)
	if err != nil {
		tb.Fatal(err)
	}
	after := heap()
	runtime.KeepAlive(tok)
	return float64(int64(after-before)) / (1 << 20)
}

// TestMemoryOfARealVocabulary checks that a tokenizer with a realistic vocabulary fits into the memory of a router.
func TestMemoryOfARealVocabulary(t *testing.T) {
	text := synthetic(t, realVocabulary)
	if kept := keptMiB(t, text); kept > 40 {
		t.Errorf("a vocabulary of %d takes %.1f MiB", realVocabulary, kept)
	} else {
		t.Logf("%.1f MiB", kept)
	}
	if tok, err := Parse(text); err != nil || tok.VocabSize() != realVocabulary+2 {
		t.Errorf("%v, or not all tokens", err)
	}
}
