// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"runtime"
	"slices"
	"sync"
)

// Tokenizer encodes and decodes text. It is safe for concurrent use.
type Tokenizer struct {
	// raw and normalized contain the added tokens that are matched before and after normalization.
	raw, normalized *addedTokens
	normalizers     []normalizer
	pre             *preTokenizer
	bpe             *bpe
	// pieces contains the bytes of each token id, special reports which ids are control tokens. Entries of unused ids
	// are empty.
	pieces  []string
	special []bool
	// spaceFirst reports that decoded text begins with a space that was not in the encoded text.
	spaceFirst bool
}

// VocabSize returns the largest token id plus one.
func (t *Tokenizer) VocabSize() int { return len(t.pieces) }

// Token returns the bytes of a token; ok is false for an id outside the vocabulary.
func (t *Tokenizer) Token(id int32) (piece string, ok bool) {
	if id < 0 || int(id) >= len(t.pieces) {
		return "", false
	}
	return t.pieces[id], true
}

// IsSpecial reports whether id is a control token, such as the end of text.
func (t *Tokenizer) IsSpecial(id int32) bool {
	return id >= 0 && int(id) < len(t.special) && t.special[id]
}

// Encode returns the token ids of text. Added tokens in the text are replaced by their ids. Tokens that a
// post-processor adds to every text, such as a begin-of-text token, are not included.
func (t *Tokenizer) Encode(text string) []int32 {
	return t.AppendTokens(make([]int32, 0, len(text)/3+1), text)
}

// AppendTokens appends the result of Encode. A long text is encoded in parallel if the parts are independent.
func (t *Tokenizer) AppendTokens(ids []int32, text string) []int32 {
	s := t.bpe.scratch()
	defer t.bpe.keep(s)
	t.raw.each(text, func(part span) {
		text, begin := t.normalize(text[part.start:part.end]), part.start == 0
		t.normalized.each(text, func(part span) {
			ids = t.appendText(ids, text[part.start:part.end], begin && part.start == 0, s)
		}, func(id int32) { ids = append(ids, id) })
	}, func(id int32) { ids = append(ids, id) })
	return ids
}

func (t *Tokenizer) normalize(text string) string {
	for _, step := range t.normalizers {
		text = step(text)
	}
	return text
}

const (
	// partBytes is the approximate number of bytes that are cut into pieces at once, so that the pieces fit the
	// processor's cache.
	partBytes = 16 << 10
	// parallelBytes is the minimum number of bytes per additional goroutine.
	parallelBytes = 64 << 10
)

// appendText appends the tokens of a text without added tokens. begin reports whether the text is the beginning of the
// whole input.
func (t *Tokenizer) appendText(ids []int32, text string, begin bool, s *scratch) []int32 {
	if t.pre.spaces != nil {
		text = t.pre.spaces.write(text, begin)
	}
	if !t.pre.parts {
		return t.appendPart(ids, text, s)
	}
	if workers := min(runtime.GOMAXPROCS(0), len(text)/parallelBytes+1); workers > 1 {
		return t.appendParallel(ids, text, workers)
	}
	return t.appendParts(ids, text, s)
}

// appendParts appends the tokens of a text part by part.
func (t *Tokenizer) appendParts(ids []int32, text string, s *scratch) []int32 {
	for len(text) > 0 {
		end := partEnd(text, partBytes)
		ids = t.appendPart(ids, text[:end], s)
		text = text[end:]
	}
	return ids
}

// appendParallel encodes equal shares of the text in several goroutines.
func (t *Tokenizer) appendParallel(ids []int32, text string, workers int) []int32 {
	results := make([][]int32, workers)
	var group sync.WaitGroup
	for i := range results {
		end := partEnd(text, len(text)/(workers-i))
		share := text[:end]
		text = text[end:]
		group.Go(func() {
			s := t.bpe.scratch()
			defer t.bpe.keep(s)
			results[i] = t.appendParts(make([]int32, 0, len(share)/3+1), share, s)
		})
	}
	group.Wait()
	return append(ids, slices.Concat(results...)...)
}

// partEnd returns the first position at or after minBytes where a text may be cut: before a space or line break that
// follows an ASCII letter or digit.
func partEnd(text string, minBytes int) int {
	for i := max(1, minBytes); i < len(text); i++ {
		if b := text[i-1]; (text[i] == ' ' || text[i] == '\n') && (isASCIILetter(b) || b >= '0' && b <= '9') {
			return i
		}
	}
	return len(text)
}

// Head returns a beginning of the text whose tokens are the first tokens of the text: of at least minBytes, if the text
// is longer. It returns the whole text if the parts of a text are not independent.
func (t *Tokenizer) Head(text string, minBytes int) string {
	if !t.pre.parts {
		return text
	}
	return text[:partEnd(text, minBytes)]
}

// appendPart appends the tokens of a text that is cut into pieces at once.
func (t *Tokenizer) appendPart(ids []int32, text string, s *scratch) []int32 {
	cutters := t.pre.cutters
	if t.pre.prefixSpace && t.pre.regex {
		cutters = cutters[:len(cutters)-1]
	}
	s.pieces = append(s.pieces[:0], span{0, len(text)})
	for _, cut := range cutters {
		s.more = cut(s.more[:0], text, s.pieces)
		s.pieces, s.more = s.more, s.pieces
	}
	if t.pre.prefixSpace {
		return t.appendPrefixed(ids, text, s)
	}
	for _, piece := range s.pieces {
		ids = t.bpe.appendTokens(ids, text[piece.start:piece.end], s)
	}
	return ids
}

// appendPrefixed appends the tokens of pieces that each get a leading space before the last cutter.
func (t *Tokenizer) appendPrefixed(ids []int32, text string, s *scratch) []int32 {
	for _, piece := range s.pieces {
		written := text[piece.start:piece.end]
		if written[0] != ' ' {
			written = " " + written
		}
		if !t.pre.regex {
			ids = t.bpe.appendTokens(ids, written, s)
			continue
		}
		s.more = t.pre.cutters[len(t.pre.cutters)-1](s.more[:0], written, []span{{0, len(written)}})
		for _, word := range s.more {
			ids = t.bpe.appendTokens(ids, written[word.start:word.end], s)
		}
	}
	return ids
}

// keptScratch is the maximum number of entries of each kind that are kept between texts.
const keptScratch = 1 << 15

// keep keeps a scratch for the next text, unless an unusual text has made it large.
func (b *bpe) keep(s *scratch) {
	if max(cap(s.pieces), cap(s.more), cap(s.tokens), cap(s.symbols), cap(s.queue)) <= keptScratch {
		b.scratches.Put(s)
	}
}

// DecodeBytes returns the bytes of the tokens. Ids outside the vocabulary are left out, and special tokens if
// skipSpecial is set.
func (t *Tokenizer) DecodeBytes(ids []int32, skipSpecial bool) []byte {
	raw := t.appendBytes(nil, ids, skipSpecial)
	if t.spaceFirst && len(raw) > 0 && raw[0] == ' ' {
		raw = raw[1:]
	}
	return raw
}

func (t *Tokenizer) appendBytes(raw []byte, ids []int32, skipSpecial bool) []byte {
	for _, id := range ids {
		if piece, ok := t.Token(id); ok && !(skipSpecial && t.IsSpecial(id)) {
			raw = append(raw, piece...)
		}
	}
	return raw
}

// Decode returns the text of the tokens. Parts that are not valid UTF-8 are replaced by U+FFFD.
func (t *Tokenizer) Decode(ids []int32, skipSpecial bool) string {
	text, _ := appendValidUTF8(nil, t.DecodeBytes(ids, skipSpecial), true)
	return string(text)
}

// Stream decodes tokens one by one. The concatenation of its results is Decode of all tokens: a character that spans
// several tokens is returned with the last one.
type Stream struct {
	tokenizer   *Tokenizer
	skipSpecial bool
	pending     []byte
	begun       bool
}

// NewStream starts a stream.
func (t *Tokenizer) NewStream(skipSpecial bool) *Stream {
	return &Stream{tokenizer: t, skipSpecial: skipSpecial}
}

// Next returns the text that is complete after the next token. It is often, but not always, the text of that token.
func (s *Stream) Next(id int32) string {
	s.pending = s.tokenizer.appendBytes(s.pending, []int32{id}, s.skipSpecial)
	if !s.begun && len(s.pending) > 0 {
		s.begun = true
		if s.tokenizer.spaceFirst && s.pending[0] == ' ' {
			s.pending = s.pending[1:]
		}
	}
	return s.take(false)
}

// Flush returns U+FFFD for an incomplete character at the end, if any.
func (s *Stream) Flush() string { return s.take(true) }

func (s *Stream) take(final bool) string {
	text, taken := appendValidUTF8(nil, s.pending, final)
	s.pending = append(s.pending[:0], s.pending[taken:]...)
	return string(text)
}
