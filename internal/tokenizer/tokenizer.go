package tokenizer

// Tokenizer encodes and decodes text. It is safe for concurrent use.
type Tokenizer struct {
	// raw and normalized are the added tokens that the file matches before and after normalization. There is no
	// normalizer, but the first group still takes precedence.
	raw, normalized *addedTokens
	split           splitter
	bpe             *bpe
	// pieces holds the bytes of each token id, special tells which ids are control tokens; gaps in the ids are empty.
	pieces  []string
	special []bool
	ids     map[string]int32
}

// VocabSize is one more than the largest token id.
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

// AddedID returns the id of an added token by its content, such as "<|endoftext|>".
func (t *Tokenizer) AddedID(content string) (id int32, ok bool) {
	id, ok = t.ids[content]
	return id, ok
}

// Encode returns the token ids of text; added tokens that stand in the text become their ids.
func (t *Tokenizer) Encode(text string) []int32 {
	ids := make([]int32, 0, len(text)/3+1)
	return t.appendAround(ids, text, t.raw, func(ids []int32, text string) []int32 {
		return t.appendAround(ids, text, t.normalized, t.appendText)
	})
}

// appendAround appends the added tokens found in text and, by between, the text between them.
func (t *Tokenizer) appendAround(ids []int32, text string, added *addedTokens, between func([]int32, string) []int32) []int32 {
	for {
		token, at, found := added.find(text)
		if !found {
			return between(ids, text)
		}
		ids = append(between(ids, text[:at]), token.id)
		text = text[at+len(token.content):]
	}
}

func (t *Tokenizer) appendText(ids []int32, text string) []int32 {
	for len(text) > 0 {
		n := t.split(text)
		ids = t.bpe.appendTokens(ids, text[:n])
		text = text[n:]
	}
	return ids
}

// DecodeBytes returns the bytes of the tokens; ids outside the vocabulary are left out, special tokens if asked for.
func (t *Tokenizer) DecodeBytes(ids []int32, skipSpecial bool) []byte {
	var raw []byte
	for _, id := range ids {
		if piece, ok := t.Token(id); ok && !(skipSpecial && t.IsSpecial(id)) {
			raw = append(raw, piece...)
		}
	}
	return raw
}

// Decode returns the text of the tokens, parts that are not valid UTF-8 replaced by U+FFFD.
func (t *Tokenizer) Decode(ids []int32, skipSpecial bool) string {
	text, _ := appendValidUTF8(nil, t.DecodeBytes(ids, skipSpecial), true)
	return string(text)
}

// Stream decodes tokens one by one. Its pieces, joined, are Decode of all the tokens: a character that is split over
// tokens comes with its last one.
type Stream struct {
	tokenizer   *Tokenizer
	skipSpecial bool
	pending     []byte
}

// NewStream starts a stream.
func (t *Tokenizer) NewStream(skipSpecial bool) *Stream {
	return &Stream{tokenizer: t, skipSpecial: skipSpecial}
}

// Next returns the text that the next token completes, often but not always that token's own.
func (s *Stream) Next(id int32) string {
	s.pending = append(s.pending, s.tokenizer.DecodeBytes([]int32{id}, s.skipSpecial)...)
	return s.take(false)
}

// Flush returns what is left of a character that never became complete, as U+FFFD.
func (s *Stream) Flush() string { return s.take(true) }

func (s *Stream) take(final bool) string {
	text, taken := appendValidUTF8(nil, s.pending, final)
	s.pending = append(s.pending[:0], s.pending[taken:]...)
	return string(text)
}
