// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"encoding/json"
	"runtime"
	"testing"
)

// FuzzParse checks that a file is either refused or encodes every text, without a panic, within a memory limit, and as
// tokens of its vocabulary.
func FuzzParse(f *testing.F) {
	file := func(normalizer, pre, added string) []byte {
		vocabulary := map[string]int{"ab": 256}
		for written, value := range byteAlphabet {
			vocabulary[string(written)] = int(value)
		}
		words, err := json.Marshal(vocabulary)
		if err != nil {
			f.Fatal(err)
		}
		return []byte(`{"normalizer":` + normalizer + `,"pre_tokenizer":` + pre + `,"added_tokens":` + added +
			`,"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","merges":["a b"],"vocab":` + string(words) + `}}`)
	}
	bytesOnly := `{"type":"ByteLevel","use_regex":false}`
	for _, parts := range [][3]string{
		{`null`, `{"type":"ByteLevel"}`, `[]`},
		{`{"type":"Sequence","normalizers":[{"type":"Replace","pattern":{"String":"a"},"content":"aaaa"},{"type":"NFKC"}]}`, bytesOnly, `[]`},
		{`{"type":"Replace","pattern":{"Regex":"\\s+"},"content":"-"}`, bytesOnly, `[{"id":300,"content":"<x>","lstrip":true}]`},
		{`{"type":"Prepend","prepend":"ab"}`, bytesOnly, `[{"id":300,"content":"b","normalized":true,"rstrip":true}]`},
		{`{"type":"Lowercase"}`, `{"type":"Sequence","pretokenizers":[{"type":"Split","behavior":"Isolated","pattern":{"Regex":"(?:a|b)+c|a{2,9}"}},` + bytesOnly + `]}`, `[]`},
	} {
		f.Add(file(parts[0], parts[1], parts[2]), "ab  abc İ ﷺ")
	}
	f.Fuzz(func(t *testing.T, content []byte, text string) {
		if len(text) > 200 {
			return
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		tok, err := Parse(content)
		if err != nil {
			return
		}
		ids := tok.Encode(text)
		runtime.ReadMemStats(&after)
		// The tables of a vocabulary have up to maxGap entries, even for a small file.
		if used := after.TotalAlloc - before.TotalAlloc; used > 64<<20+100*uint64(len(content)) {
			t.Fatalf("%d bytes for a file of %d", used, len(content))
		}
		for _, id := range ids {
			if id < 0 || int(id) >= tok.VocabSize() {
				t.Fatalf("token %d of %d", id, tok.VocabSize())
			}
		}
		tok.Decode(ids, true)
	})
}
