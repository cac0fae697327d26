// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"github.com/semmoe/operator/internal/model/tokenizer/pattern"
)

// preTokenizer cuts text into pieces. Tokens are merged only within a piece.
type preTokenizer struct {
	// cutters are applied in sequence, each to the pieces of the previous one.
	cutters []cutter
	// spaces replaces spaces by another character before the cutters run. It is nil if spaces are kept.
	spaces *metaspace
	// byteLevel reports that pieces are merged from bytes. prefixSpace reports that a piece without a leading space
	// gets one. If the step also splits by its own regular expression (regex), the space is added before the last
	// cutter.
	byteLevel, prefixSpace, regex bool
	// parts reports that a text may be cut before a space or line break that follows an ASCII letter or digit, and that
	// the parts can be pre-tokenized independently. This holds for the known split expressions.
	parts bool
	// words is the number of cutters for known split expressions. characters is the number of cutters that treat each
	// character independently.
	words, characters int
}

// filePreTokenizer contains the fields of all pre-tokenizers of a tokenizer.json.
type filePreTokenizer struct {
	Type string `json:"type"`
	// Sequence
	PreTokenizers []filePreTokenizer `json:"pretokenizers"`
	// Split, Punctuation and Digits
	Pattern          *filePattern `json:"pattern"`
	Behavior         string       `json:"behavior"`
	Invert           bool         `json:"invert"`
	IndividualDigits bool         `json:"individual_digits"`
	// ByteLevel; UseRegex is true by default.
	AddPrefixSpace *bool `json:"add_prefix_space"`
	UseRegex       *bool `json:"use_regex"`
	// Metaspace; Split is true by default.
	Replacement   string `json:"replacement"`
	PrependScheme string `json:"prepend_scheme"`
	Split         *bool  `json:"split"`
}

type filePattern struct {
	String *string `json:"String"`
	Regex  *string `json:"Regex"`
}

// flat appends the steps of nested sequences, and stops after maxSteps.
func (f *filePreTokenizer) flat(list []filePreTokenizer) []filePreTokenizer {
	if f.Type != "Sequence" {
		return append(list, *f)
	}
	for i := range f.PreTokenizers {
		if list = f.PreTokenizers[i].flat(list); len(list) > maxSteps {
			break
		}
	}
	return list
}

// newPreTokenizer creates the pre-tokenizer of a file's steps.
func newPreTokenizer(steps []filePreTokenizer) (*preTokenizer, error) {
	if len(steps) > maxSteps {
		return nil, unsupported("pre_tokenizer with more than %d steps", maxSteps)
	}
	p := &preTokenizer{}
	for i := 0; i < len(steps); i++ {
		if p.byteLevel || p.spaces != nil {
			return nil, unsupported("pre_tokenizer of type %q after %s", steps[i].Type, steps[i-1].Type)
		}
		if i > 0 && steps[i].Type == "Metaspace" { // it would restart at each piece
			return nil, unsupported("pre_tokenizer of type %q after %s; it is supported only as the first step", steps[i].Type, steps[i-1].Type)
		}
		if isDeepSeekV3(steps[i:]) {
			p.cutters, p.words = append(p.cutters, deepSeekV3), p.words+1
			i += len(deepSeekV3Patterns) - 1
			continue
		}
		if err := p.add(steps[i]); err != nil {
			return nil, err
		}
	}
	p.parts = p.words == len(p.cutters)-p.characters && p.words > 0 && !p.prefixSpace
	return p, nil
}

func isDeepSeekV3(steps []filePreTokenizer) bool {
	if len(steps) < len(deepSeekV3Patterns) {
		return false
	}
	for i, expression := range deepSeekV3Patterns {
		if !steps[i].isolates(expression) {
			return false
		}
	}
	return true
}

// isolates reports whether the step is a Split that only cuts, by the given expression.
func (f *filePreTokenizer) isolates(expression string) bool {
	return f.Type == "Split" && f.Behavior == "Isolated" && !f.Invert && f.Pattern != nil && f.Pattern.Regex != nil && *f.Pattern.Regex == expression
}

func (p *preTokenizer) add(step filePreTokenizer) error {
	var find finder
	behaviour := step.Behavior
	switch step.Type {
	case "ByteLevel":
		p.byteLevel = true
		p.prefixSpace = step.AddPrefixSpace != nil && *step.AddPrefixSpace
		if p.regex = step.UseRegex == nil || *step.UseRegex; p.regex {
			p.cutters, p.words = append(p.cutters, cutWords(gpt2Word)), p.words+1
		}
		return nil
	case "Metaspace":
		var err error
		if p.spaces, err = newMetaspace(step); err == nil && (step.Split == nil || *step.Split) {
			p.cutters = append(p.cutters, cut(findText(spaceMark), "MergedWithNext"))
		}
		return err
	case "Digits":
		find = findCharacters(unicode.IsNumber)
		if behaviour = "Contiguous"; step.IndividualDigits {
			behaviour = "Isolated"
		}
	case "Punctuation":
		find = findCharacters(isPunctuation)
	case "Split":
		if step.Pattern != nil && step.Pattern.Regex != nil && step.isolates(*step.Pattern.Regex) {
			if next, known := knownWords[*step.Pattern.Regex]; known {
				p.cutters, p.words = append(p.cutters, cutWords(next)), p.words+1
				return nil
			}
		}
		var err error
		if find, err = step.Pattern.finder(); err != nil {
			return err
		}
	default:
		return unsupported("pre_tokenizer of type %q; supported are Sequence, ByteLevel, Metaspace, Digits, Punctuation and Split", step.Type)
	}
	if !slices.Contains(behaviours, behaviour) {
		return unsupported("pre_tokenizer %s with behavior %q; allowed are %s", step.Type, behaviour, strings.Join(behaviours, ", "))
	}
	switch {
	case step.Type != "Split":
		p.characters++
	case step.Invert:
		find = invert(find)
	}
	p.cutters = append(p.cutters, cut(find, behaviour))
	return nil
}

func isPunctuation(r rune) bool {
	return unicode.IsPunct(r) || r < utf8.RuneSelf && unicode.IsSymbol(r)
}

// match is a part of a text that a step has found, or a part between two such parts.
type match struct {
	span
	found bool
	// first marks the first match of a part. It is never merged with the match before it.
	first bool
}

// finder appends the matches in parts of a text and the gaps between them, in order, without leaving out any text.
type finder func(matches []match, text string, parts []span) []match

func (f *filePattern) finder() (finder, error) {
	switch {
	case f != nil && f.String != nil && *f.String != "":
		return findText(*f.String), nil
	case f != nil && f.Regex != nil:
		compiled, err := pattern.Compile(*f.Regex)
		if err != nil {
			return nil, unsupported("pre_tokenizer Split: %w", err)
		}
		return findPattern(compiled), nil
	}
	return nil, errors.New("pre_tokenizer Split has no pattern; allowed are a non-empty String and a Regex")
}

// findEach appends all matches in a part of a text by calling next repeatedly. Positions are offsets in the whole text.
func findEach(matches []match, part span, next func(from int) (at span, ok bool)) []match {
	before, from := len(matches), part.start
	for {
		at, ok := next(from)
		if !ok {
			break
		}
		if at.start > from {
			matches = append(matches, match{span: span{from, at.start}})
		}
		matches = append(matches, match{span: at, found: true})
		from = at.end
	}
	if part.end > from {
		matches = append(matches, match{span: span{from, part.end}})
	}
	if len(matches) > before {
		matches[before].first = true
	}
	return matches
}

func findText(wanted string) finder {
	return func(matches []match, text string, parts []span) []match {
		for _, part := range parts {
			matches = findEach(matches, part, func(from int) (span, bool) {
				at := strings.Index(text[from:part.end], wanted)
				return span{from + at, from + at + len(wanted)}, at >= 0
			})
		}
		return matches
	}
}

// findCharacters returns a finder that matches single characters of a kind.
func findCharacters(wanted func(rune) bool) finder {
	return func(matches []match, text string, parts []span) []match {
		for _, part := range parts {
			matches = findEach(matches, part, func(from int) (span, bool) {
				at := strings.IndexFunc(text[from:part.end], wanted)
				if at < 0 {
					return span{}, false
				}
				_, size := utf8.DecodeRuneInString(text[from+at : part.end])
				return span{from + at, from + at + size}, true
			})
		}
		return matches
	}
}

func findPattern(compiled *pattern.Pattern) finder {
	matchers := sync.Pool{New: func() any { return compiled.Matcher() }}
	return func(matches []match, text string, parts []span) []match {
		m := matchers.Get().(*pattern.Matcher)
		defer matchers.Put(m)
		for _, part := range parts {
			m.Reset(text[part.start:part.end])
			matches = findEach(matches, part, func(from int) (span, bool) {
				start, end, ok := m.Find(from - part.start)
				return span{part.start + start, part.start + end}, ok
			})
		}
		m.Reset("") // release the text
		return matches
	}
}

// invert swaps matches and gaps.
func invert(find finder) finder {
	return func(matches []match, text string, parts []span) []match {
		before := len(matches)
		matches = find(matches, text, parts)
		for i := range matches[before:] {
			matches[before+i].found = !matches[before+i].found
		}
		return matches
	}
}

// behaviours lists the ways in which matches are turned into pieces.
var behaviours = []string{"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"}

var matchBuffers = sync.Pool{New: func() any { return new([]match) }}

// cut returns a cutter that turns the matches of a finder into pieces according to the behaviour.
func cut(find finder, behaviour string) cutter {
	return func(pieces []span, text string, parts []span) []span {
		buffer := matchBuffers.Get().(*[]match)
		if *buffer = find((*buffer)[:0], text, parts); cap(*buffer) <= keptScratch {
			defer matchBuffers.Put(buffer)
		}
		return appendPieces(pieces, *buffer, behaviour)
	}
}

// appendPieces turns matches into pieces. Of several consecutive matches, MergedWithPrevious merges only the first with
// the text before it, and MergedWithNext only the last with the text after it.
func appendPieces(pieces []span, matches []match, behaviour string) []span {
	for i, m := range matches {
		var joined bool
		switch behaviour {
		case "Removed":
			if m.found {
				continue
			}
		case "MergedWithPrevious":
			joined = !m.first && m.found && !matches[i-1].found
		case "MergedWithNext":
			joined = !m.first && matches[i-1].found && !m.found
		case "Contiguous":
			joined = !m.first && m.found == matches[i-1].found
		}
		if joined {
			pieces[len(pieces)-1].end = m.end
			continue
		}
		pieces = append(pieces, m.span)
	}
	return pieces
}

// spaceMark is the character with which SentencePiece replaces spaces.
const spaceMark = "▁"

// metaspace replaces spaces in the way of SentencePiece. The scheme determines when a text without a leading space gets
// one: always, never, or first, which means only at the beginning of the whole input.
type metaspace struct{ scheme string }

func newMetaspace(f filePreTokenizer) (*metaspace, error) {
	m := &metaspace{f.PrependScheme}
	if f.Replacement != spaceMark {
		return nil, unsupported("pre_tokenizer Metaspace with replacement %q; only %q is supported", f.Replacement, spaceMark)
	}
	if m.scheme == "" {
		// Older files use add_prefix_space.
		if m.scheme = "always"; f.AddPrefixSpace != nil && !*f.AddPrefixSpace {
			m.scheme = "never"
		}
	}
	if !slices.Contains([]string{"always", "never", "first"}, m.scheme) {
		return nil, unsupported("pre_tokenizer Metaspace with prepend_scheme %q; allowed are always, never and first", m.scheme)
	}
	return m, nil
}

// write replaces the spaces of a text. begin reports whether the text is the beginning of the whole input.
func (m *metaspace) write(text string, begin bool) string {
	text = strings.ReplaceAll(text, " ", spaceMark)
	if (m.scheme == "always" || m.scheme == "first" && begin) && !strings.HasPrefix(text, spaceMark) {
		text = spaceMark + text
	}
	return text
}

// cutBeforeSpaces cuts before each run of replaced spaces.
func cutBeforeSpaces(pieces []span, text string, parts []span) []span {
	for _, part := range parts {
		from := part.start
		for at := from; at < part.end; {
			next := strings.Index(text[at:part.end], spaceMark)
			if next < 0 {
				break
			}
			if next > 0 {
				pieces = append(pieces, span{from, at + next})
				from = at + next
			}
			at += next + len(spaceMark)
		}
		if part.end > from {
			pieces = append(pieces, span{from, part.end})
		}
	}
	return pieces
}

// ErrUnsupported matches the errors of valid files with constructs that this package does not support.
var ErrUnsupported = errors.New("unsupported tokenizer")

func unsupported(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrUnsupported, fmt.Errorf(format, args...))
}

// readJSON decodes a member of the file. If the member is null or absent, it leaves into unchanged and returns false.
func readJSON(raw json.RawMessage, name string, into any) (set bool, err error) {
	if len(raw) == 0 || string(raw) == "null" {
		return false, nil
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return false, fmt.Errorf("not a valid tokenizer.json: %s: %w", name, err)
	}
	return true, nil
}
