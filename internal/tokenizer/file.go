package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
)

// file mirrors tokenizer.json. Constructs that are only looked at to refuse them stay raw.
type file struct {
	AddedTokens   []fileAddedToken `json:"added_tokens"`
	Normalizer    json.RawMessage  `json:"normalizer"`
	PreTokenizer  *fileByteLevel   `json:"pre_tokenizer"`
	PostProcessor *fileByteLevel   `json:"post_processor"`
	Decoder       *fileByteLevel   `json:"decoder"`
	Truncation    json.RawMessage  `json:"truncation"`
	Padding       json.RawMessage  `json:"padding"`
	Model         fileModel        `json:"model"`
}

type fileAddedToken struct {
	ID         int32  `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
}

type fileByteLevel struct {
	Type           string `json:"type"`
	AddPrefixSpace bool   `json:"add_prefix_space"`
	// UseRegex is true where the file does not say.
	UseRegex *bool `json:"use_regex"`
}

type fileModel struct {
	Type                    string           `json:"type"`
	Dropout                 *float64         `json:"dropout"`
	ContinuingSubwordPrefix string           `json:"continuing_subword_prefix"`
	EndOfWordSuffix         string           `json:"end_of_word_suffix"`
	ByteFallback            bool             `json:"byte_fallback"`
	IgnoreMerges            bool             `json:"ignore_merges"`
	Vocab                   map[string]int32 `json:"vocab"`
	Merges                  []fileMerge      `json:"merges"`
}

// fileMerge is written as "a b" or, by newer versions, as ["a", "b"].
type fileMerge [2]string

func (m *fileMerge) UnmarshalJSON(text []byte) error {
	if len(text) > 0 && text[0] == '[' {
		var parts []string
		if err := json.Unmarshal(text, &parts); err != nil {
			return err
		}
		if len(parts) != 2 {
			return fmt.Errorf("merge %s does not have two parts", text)
		}
		*m = fileMerge(parts)
		return nil
	}
	var joined string
	if err := json.Unmarshal(text, &joined); err != nil {
		return err
	}
	left, right, ok := strings.Cut(joined, " ")
	if !ok || strings.Contains(right, " ") {
		return fmt.Errorf("merge %q does not have two parts", joined)
	}
	*m = fileMerge{left, right}
	return nil
}

// maxTokenID bounds the ids of a vocabulary, whose table has an entry for each.
const maxTokenID = 1 << 24

// Load reads a tokenizer.json.
func Load(path string) (*Tokenizer, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: %w", err)
	}
	t, err := Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return t, nil
}

// Parse reads the content of a tokenizer.json. A construct that is not supported is an error that names it.
func Parse(text []byte) (*Tokenizer, error) {
	var f file
	if err := json.Unmarshal(text, &f); err != nil {
		return nil, fmt.Errorf("not a tokenizer.json: %w", err)
	}
	if err := errors.Join(f.checkPipeline(), f.Model.check()); err != nil {
		return nil, err
	}
	t := &Tokenizer{split: gpt2Split, ids: map[string]int32{}}
	if r := f.PreTokenizer.UseRegex; r != nil && !*r {
		t.split = wholeText
	}
	if err := t.addVocabulary(f.Model.Vocab); err != nil {
		return nil, err
	}
	if err := t.addAddedTokens(f.AddedTokens); err != nil {
		return nil, err
	}
	bpe, err := newBPE(f.Model)
	if err != nil {
		return nil, err
	}
	t.bpe = bpe
	return t, nil
}

func (f *file) checkPipeline() error {
	var errs []error
	refuse := func(bad bool, format string, args ...any) {
		if bad {
			errs = append(errs, fmt.Errorf("unsupported tokenizer: "+format, args...))
		}
	}
	for name, raw := range map[string]json.RawMessage{"normalizer": f.Normalizer, "truncation": f.Truncation, "padding": f.Padding} {
		refuse(isSet(raw), "%s %.200s; only null is supported", name, raw)
	}
	switch {
	case f.PreTokenizer == nil:
		refuse(true, "no pre_tokenizer; only ByteLevel is supported")
	case f.PreTokenizer.Type != "ByteLevel":
		refuse(true, "pre_tokenizer of type %q; only ByteLevel is supported", f.PreTokenizer.Type)
	default:
		refuse(f.PreTokenizer.AddPrefixSpace, "pre_tokenizer with add_prefix_space")
	}
	refuse(f.PostProcessor != nil && f.PostProcessor.Type != "ByteLevel", "post_processor of type %q; only ByteLevel and null are supported", typeOf(f.PostProcessor))
	refuse(typeOf(f.Decoder) != "ByteLevel", "decoder of type %q; only ByteLevel is supported", typeOf(f.Decoder))
	for _, token := range f.AddedTokens {
		refuse(token.SingleWord || token.LStrip || token.RStrip, "added token %q with single_word, lstrip or rstrip", token.Content)
	}
	return errors.Join(errs...)
}

func typeOf(b *fileByteLevel) string {
	if b == nil {
		return "null"
	}
	return b.Type
}

func isSet(raw json.RawMessage) bool { return len(raw) > 0 && string(raw) != "null" }

func (m *fileModel) check() error {
	var errs []error
	refuse := func(bad bool, format string, args ...any) {
		if bad {
			errs = append(errs, fmt.Errorf("unsupported tokenizer: model "+format, args...))
		}
	}
	refuse(m.Type != "BPE", "of type %q; only BPE is supported", m.Type)
	refuse(m.Dropout != nil && *m.Dropout != 0, "with dropout")
	refuse(m.ContinuingSubwordPrefix != "", "with continuing_subword_prefix %q", m.ContinuingSubwordPrefix)
	refuse(m.EndOfWordSuffix != "", "with end_of_word_suffix %q", m.EndOfWordSuffix)
	refuse(m.ByteFallback, "with byte_fallback")
	return errors.Join(errs...)
}

// setPiece enters a token id.
func (t *Tokenizer) setPiece(id int32, piece string) error {
	if id < 0 || id > maxTokenID {
		return fmt.Errorf("token %q has id %d; allowed is 0 to %d", piece, id, maxTokenID)
	}
	if missing := int(id) + 1 - len(t.pieces); missing > 0 {
		t.pieces = append(t.pieces, make([]string, missing)...)
		t.special = append(t.special, make([]bool, missing)...)
	}
	t.pieces[id] = piece
	return nil
}

// addVocabulary enters the model's tokens. Entries that are not written in the byte-level alphabet can only be added
// tokens that the file lists in the vocabulary too; they are kept as they stand.
func (t *Tokenizer) addVocabulary(vocab map[string]int32) error {
	owner := make(map[int32]string, len(vocab))
	for written, id := range vocab {
		if other, twice := owner[id]; twice {
			return fmt.Errorf("tokens %q and %q share id %d", min(written, other), max(written, other), id)
		}
		owner[id] = written
		piece, err := fromByteAlphabet(written)
		if err != nil {
			piece = written
		}
		if err := t.setPiece(id, piece); err != nil {
			return err
		}
	}
	return nil
}

func (t *Tokenizer) addAddedTokens(list []fileAddedToken) error {
	var raw, normalized []addedToken
	for _, token := range list {
		if token.Content == "" {
			return fmt.Errorf("added token %d is empty", token.ID)
		}
		if err := t.setPiece(token.ID, token.Content); err != nil {
			return err
		}
		t.special[token.ID] = token.Special
		t.ids[token.Content] = token.ID
		entry := addedToken{content: token.Content, id: token.ID}
		if token.Normalized {
			normalized = append(normalized, entry)
		} else {
			raw = append(raw, entry)
		}
	}
	t.raw, t.normalized = newAddedTokens(raw), newAddedTokens(normalized)
	return nil
}

func newBPE(m fileModel) (*bpe, error) {
	b := &bpe{merges: make(map[pair]merge, len(m.Merges)), cache: wordCache{words: map[string][]int32{}}}
	for written, value := range byteAlphabet {
		id, ok := m.Vocab[string(written)]
		if !ok {
			return nil, fmt.Errorf("unsupported tokenizer: the vocabulary has no token for byte 0x%02x", value)
		}
		b.byteTokens[value] = id
	}
	for rank, parts := range m.Merges {
		left, okLeft := m.Vocab[parts[0]]
		right, okRight := m.Vocab[parts[1]]
		joined, okJoined := m.Vocab[parts[0]+parts[1]]
		if !okLeft || !okRight || !okJoined {
			return nil, fmt.Errorf("merge %d (%q, %q): both parts and their concatenation must be in the vocabulary", rank, parts[0], parts[1])
		}
		// A repeated merge keeps its last rank, as in the reference implementation.
		b.merges[pair{left, right}] = merge{rank: int32(rank), token: joined}
	}
	if m.IgnoreMerges {
		b.words = make(map[string]int32, len(m.Vocab))
		for written, id := range m.Vocab {
			if piece, err := fromByteAlphabet(written); err == nil {
				b.words[piece] = id
			}
		}
	}
	return b, nil
}
