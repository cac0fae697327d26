// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/semmoe/operator/internal/files/regularfile"
)

// file mirrors tokenizer.json. Members with a type-dependent structure stay raw. The members truncation and padding are
// ignored: they are stored call settings, which the reference library replaces in each call, and engines call it with
// neither.
type file struct {
	AddedTokens   []fileAddedToken `json:"added_tokens"`
	Normalizer    json.RawMessage  `json:"normalizer"`
	PreTokenizer  json.RawMessage  `json:"pre_tokenizer"`
	PostProcessor json.RawMessage  `json:"post_processor"`
	Decoder       json.RawMessage  `json:"decoder"`
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

type fileModel struct {
	Type                    string         `json:"type"`
	Dropout                 *float64       `json:"dropout"`
	ContinuingSubwordPrefix string         `json:"continuing_subword_prefix"`
	EndOfWordSuffix         string         `json:"end_of_word_suffix"`
	ByteFallback            bool           `json:"byte_fallback"`
	IgnoreMerges            bool           `json:"ignore_merges"`
	Vocab                   fileVocabulary `json:"vocab"`
	Merges                  fileMerges     `json:"merges"`
}

// maxTokenID is the maximum token id; the tables of a vocabulary have an entry for each id. maxGap is, for small files,
// the maximum number of ids without a token; larger files may have as many unused ids as tokens. Known vocabularies
// have a few hundred unused ids.
const (
	maxTokenID = 1 << 24
	maxGap     = 1 << 16
)

// maxBytes is the maximum size of a tokenizer file. The largest known files have about 35 MB.
const maxBytes = 256 << 20

// Load reads a tokenizer.json.
func Load(path string) (*Tokenizer, error) {
	text, err := readFile(path)
	if err != nil {
		return nil, err
	}
	t, err := Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return t, nil
}

// readFile reads a file of a checkpoint. The error names a placeholder that a failed download has left.
func readFile(path string) ([]byte, error) {
	text, err := regularfile.Read(path, maxBytes)
	if err != nil {
		return nil, fmt.Errorf("failed to read tokenizer: %w", err)
	}
	if placeholder := regularfile.Placeholder(text); placeholder != "" {
		return nil, fmt.Errorf("tokenizer: %s %s", path, placeholder)
	}
	return text, nil
}

// RegularTokens returns the ids of the vocabulary of a tokenizer.json that are below a limit, ascending, without the
// added tokens: these control the engine, or stand for images. It returns nil if the text cannot be read.
func RegularTokens(text []byte, limit int) []int32 {
	var f struct {
		AddedTokens []fileAddedToken `json:"added_tokens"`
		Model       struct {
			Vocab fileVocabulary `json:"vocab"`
		} `json:"model"`
	}
	if json.Unmarshal(text, &f) != nil {
		return nil
	}
	added := map[int32]bool{}
	for _, token := range f.AddedTokens {
		added[token.ID] = true
	}
	var regular []int32
	for _, id := range f.Model.Vocab {
		if id >= 0 && int(id) < limit && !added[id] {
			regular = append(regular, id)
		}
	}
	slices.Sort(regular)
	return slices.Compact(regular)
}

// Parse parses a tokenizer.json. An unsupported construct returns an error that names it.
func Parse(text []byte) (*Tokenizer, error) {
	var f file
	if err := json.Unmarshal(text, &f); err != nil {
		return nil, fmt.Errorf("not a valid tokenizer.json: %w", err)
	}
	t := &Tokenizer{}
	var errs [5]error
	t.normalizers, errs[0] = newNormalizers(f.Normalizer)
	t.pre, errs[1] = f.preTokenizer()
	errs[2] = f.checkPostProcessor()
	t.spaceFirst, errs[3] = f.decodesFirstSpace()
	errs[4] = f.Model.check()
	if err := errors.Join(errs[:]...); err != nil {
		return nil, err
	}
	if t.pre.byteLevel == f.Model.ByteFallback {
		return nil, unsupported("model with byte_fallback %v, and ByteLevel in pre_tokenizer %v: exactly one is supported", f.Model.ByteFallback, t.pre.byteLevel)
	}
	if err := f.checkGaps(); err != nil {
		return nil, err
	}
	if f.Model.Type == rankedModel {
		if err := f.Model.rank(); err != nil {
			return nil, err
		}
	}
	if err := t.addVocabulary(&f.Model); err != nil {
		return nil, err
	}
	if err := t.addAddedTokens(f.AddedTokens); err != nil {
		return nil, err
	}
	var err error
	if t.bpe, err = newBPE(&f.Model, t.pieces); err != nil {
		return nil, err
	}
	if !t.pre.byteLevel && len(t.pre.cutters) == 0 && f.Model.spacesBegin() {
		t.pre.cutters = append(t.pre.cutters, cutBeforeSpaces)
	}
	return t, nil
}

// checkGaps refuses ids far above the number of tokens, because a small file would allocate large tables.
func (f *file) checkGaps() error {
	greatest := int32(0)
	for _, id := range f.Model.Vocab {
		greatest = max(greatest, id)
	}
	for _, token := range f.AddedTokens {
		greatest = max(greatest, token.ID)
	}
	tokens := len(f.Model.Vocab) + len(f.AddedTokens)
	if limit := min(2*tokens+maxGap, maxTokenID); int(greatest) > limit {
		return fmt.Errorf("token id %d is invalid: allowed is 0 to %d for %d tokens", greatest, limit, tokens)
	}
	return nil
}

func (f *file) preTokenizer() (*preTokenizer, error) {
	var steps filePreTokenizer
	if set, err := readJSON(f.PreTokenizer, "pre_tokenizer", &steps); err != nil || !set {
		return &preTokenizer{}, err
	}
	return newPreTokenizer(steps.flat(nil))
}

// checkPostProcessor accepts post-processors that only add tokens before or after a text.
func (f *file) checkPostProcessor() error {
	var p filePostProcessor
	if set, err := readJSON(f.PostProcessor, "post_processor", &p); err != nil || !set {
		return err
	}
	return p.check()
}

type filePostProcessor struct {
	Type       string              `json:"type"`
	Processors []filePostProcessor `json:"processors"` // Sequence
}

func (p *filePostProcessor) check() error {
	switch p.Type {
	case "ByteLevel", "TemplateProcessing":
		return nil
	case "Sequence":
		for _, one := range p.Processors {
			if err := one.check(); err != nil {
				return err
			}
		}
		return nil
	}
	return unsupported("post_processor of type %q; supported are ByteLevel, TemplateProcessing and Sequence", p.Type)
}

// fileDecoder contains the fields of all decoders of a tokenizer.json.
type fileDecoder struct {
	Type     string        `json:"type"`
	Decoders []fileDecoder `json:"decoders"` // Sequence
	// Replace and Strip
	Pattern *filePattern `json:"pattern"`
	Content string       `json:"content"`
	Start   int          `json:"start"`
	Stop    int          `json:"stop"`
	// Metaspace
	PrependScheme string `json:"prepend_scheme"`
}

// decodesFirstSpace accepts decoders that reverse the supported pre-tokenizers, and reports whether they remove a
// leading space.
func (f *file) decodesFirstSpace() (bool, error) {
	var d fileDecoder
	set, err := readJSON(f.Decoder, "decoder", &d)
	if err != nil {
		return false, err
	}
	if !set {
		return false, unsupported("no decoder; supported are ByteLevel, Metaspace and SentencePiece's sequence")
	}
	return d.takesFirstSpace()
}

func (d *fileDecoder) takesFirstSpace() (takes bool, err error) {
	switch {
	case d.Type == "ByteLevel", d.Type == "ByteFallback", d.Type == "Fuse":
		return false, nil
	case d.Type == "Replace" && d.Pattern != nil && d.Pattern.String != nil && *d.Pattern.String == spaceMark && d.Content == " ":
		return false, nil
	case d.Type == "Strip" && d.Content == " " && d.Start == 1 && d.Stop == 0:
		return true, nil
	case d.Type == "Metaspace":
		return d.PrependScheme != "never", nil
	case d.Type == "Sequence":
		for _, one := range d.Decoders {
			more, err := one.takesFirstSpace()
			if err != nil {
				return false, err
			}
			takes = takes || more
		}
		return takes, nil
	}
	return false, unsupported("decoder of type %q with these options; supported are ByteLevel, Metaspace and SentencePiece's sequence", d.Type)
}

func (m *fileModel) check() error {
	var errs []error
	refuse := func(bad bool, format string, args ...any) {
		if bad {
			errs = append(errs, unsupported("model "+format, args...))
		}
	}
	refuse(m.Type != "BPE" && m.Type != rankedModel, "of type %q; only BPE is supported", m.Type)
	refuse(m.Dropout != nil && *m.Dropout != 0, "with dropout")
	refuse(m.ContinuingSubwordPrefix != "", "with continuing_subword_prefix %q", m.ContinuingSubwordPrefix)
	refuse(m.EndOfWordSuffix != "", "with end_of_word_suffix %q", m.EndOfWordSuffix)
	return errors.Join(errs...)
}

// spacesBegin reports whether all spaces of each merged token are at its beginning. Then no merge crosses the position
// before a space, and a text can be cut there.
func (m *fileModel) spacesBegin() bool {
	return !m.IgnoreMerges && !slices.ContainsFunc(m.Merges, func(parts [2]string) bool {
		return strings.Contains(strings.TrimLeft(parts[0]+parts[1], spaceMark), spaceMark)
	})
}

// setPiece registers a token id.
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

// addVocabulary registers the model's tokens by their bytes.
func (t *Tokenizer) addVocabulary(m *fileModel) error {
	taken := make([]bool, len(m.Vocab))
	for written, id := range m.Vocab {
		if err := t.setPiece(id, m.bytes(written)); err != nil {
			return err
		}
		if missing := len(t.pieces) - len(taken); missing > 0 {
			taken = append(taken, make([]bool, missing)...)
		}
		if taken[id] {
			return m.shared(id)
		}
		taken[id] = true
	}
	return nil
}

// shared returns the error of an id that several tokens have.
func (m *fileModel) shared(id int32) error {
	var owners []string
	for written, other := range m.Vocab {
		if other == id {
			owners = append(owners, written)
		}
	}
	slices.Sort(owners)
	return fmt.Errorf("tokens %q and %q share id %d", owners[0], owners[1], id)
}

// bytes returns the bytes that a vocabulary entry represents. An entry that is not written in the byte-level alphabet
// must be an added token that the file also lists in the vocabulary; it is returned unchanged.
func (m *fileModel) bytes(written string) string {
	if m.ByteFallback {
		if b, ok := fallbackByte(written); ok {
			return string([]byte{b})
		}
		return strings.ReplaceAll(written, spaceMark, " ")
	}
	if piece, err := fromByteAlphabet(written); err == nil {
		return piece
	}
	return written
}

// fallbackByte parses the token of one byte, such as <0x0A>.
func fallbackByte(written string) (byte, bool) {
	if len(written) != len("<0x0A>") || !strings.HasPrefix(written, "<0x") || written[5] != '>' {
		return 0, false
	}
	b, err := strconv.ParseUint(written[3:5], 16, 8)
	return byte(b), err == nil
}

// maxAddedToken is the maximum length of an added token in bytes. The search for added tokens reads up to that many
// bytes at each position of a text. The longest known token has 50 bytes.
const maxAddedToken = 256

func (t *Tokenizer) addAddedTokens(list []fileAddedToken) error {
	var raw, later []addedToken
	for _, token := range list {
		if token.Content == "" {
			return fmt.Errorf("added token %d is empty", token.ID)
		}
		if len(token.Content) > maxAddedToken {
			return fmt.Errorf("added token %d (%.40q...) has %d bytes; the maximum is %d", token.ID, token.Content, len(token.Content), maxAddedToken)
		}
		if err := t.setPiece(token.ID, token.Content); err != nil {
			return err
		}
		t.special[token.ID] = token.Special
		entry := addedToken{token.Content, token.ID, token.SingleWord, token.LStrip, token.RStrip}
		if token.Normalized {
			later = append(later, entry)
		} else {
			raw = append(raw, entry)
		}
	}
	t.raw, t.normalized = newAddedTokens(raw), newAddedTokens(normalized(later, t.normalizers))
	return nil
}

// newBPE creates the model. pieces contains the bytes of its tokens.
func newBPE(m *fileModel, pieces []string) (*bpe, error) {
	b := &bpe{merges: newPairTable(len(m.Merges))}
	if err := b.setBytes(m); err != nil {
		return nil, err
	}
	if err := b.setMerges(m); err != nil {
		return nil, err
	}
	b.setWords(m, pieces)
	return b, nil
}

// setBytes registers the initial tokens of pieces.
func (b *bpe) setBytes(m *fileModel) error {
	if !m.ByteFallback {
		for written, value := range byteAlphabet {
			id, ok := m.Vocab[string(written)]
			if !ok {
				return unsupported("the vocabulary has no token for byte 0x%02x", value)
			}
			b.byteTokens[value] = id
		}
		return nil
	}
	for value := range b.byteTokens {
		id, ok := m.Vocab[fmt.Sprintf("<0x%02X>", value)]
		if !ok {
			return unsupported("byte_fallback and no token <0x%02X> in the vocabulary", value)
		}
		b.byteTokens[value] = id
	}
	b.characters = map[rune]int32{}
	for written, id := range m.Vocab {
		if r, size := utf8.DecodeRuneInString(written); size == len(written) && size > 0 {
			b.characters[r] = id
		}
	}
	return nil
}

func (b *bpe) setMerges(m *fileModel) error {
	for at, parts := range m.Merges {
		rank := at
		left, okLeft := m.Vocab[parts[0]]
		right, okRight := m.Vocab[parts[1]]
		joined, okJoined := m.Vocab[parts[0]+parts[1]]
		if !okLeft || !okRight || !okJoined {
			return fmt.Errorf("merge %d (%q, %q): both parts and their concatenation must be in the vocabulary", rank, parts[0], parts[1])
		}
		if m.Type == rankedModel {
			rank = int(joined)
		}
		// A repeated merge keeps its last rank, as in the reference implementation.
		b.merges.put(left, right, merge{rank: int32(rank), token: joined})
	}
	return nil
}

// setWords registers the pieces that are one token. In a real vocabulary, that is nearly all tokens. Tokens that
// merging does not produce are only found if the model ignores merges.
func (b *bpe) setWords(m *fileModel, pieces []string) {
	words := pieces
	if m.ByteFallback {
		words = make([]string, len(pieces))
		for written, id := range m.Vocab {
			words[id] = written
		}
	}
	b.words = newWordTable(words)
	var s scratch
	var merged []int32
	for written, id := range m.Vocab {
		piece := written
		if !m.ByteFallback {
			var err error
			// An added token may have replaced the model's token.
			if piece, err = fromByteAlphabet(written); err != nil || piece != words[id] {
				continue
			}
		}
		if !m.IgnoreMerges {
			merged = b.merge(merged[:0], piece, &s)
		}
		if m.IgnoreMerges || len(merged) == 1 && merged[0] == id {
			b.words.put(id)
		}
	}
}
