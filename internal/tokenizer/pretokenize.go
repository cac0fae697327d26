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

	"github.com/semmoe/operator/internal/tokenizer/pattern"
)

// preTokenizer cuts text into the pieces within which tokens are merged.
type preTokenizer struct {
	// cutters work one after the other on each other's pieces.
	cutters []cutter
	// spaces writes spaces in another character before all else; nil where they stay.
	spaces *metaspace
	// byteLevel tells that pieces are merged from their bytes, prefixSpace that each gets a space in front if it has none,
	// which happens before the last cutter where that belongs to the same step (regex).
	byteLevel, prefixSpace, regex bool
	// parts tells that a text may be cut before a space or line break that follows an ASCII letter or digit, and its parts
	// pre-tokenized by themselves: known of the families' own ways to cut.
	parts bool
	// words and characters are how many of the cutters are families' own, and look at each character by itself.
	words, characters int
}

// filePreTokenizer is any pre-tokenizer of a tokenizer.json.
type filePreTokenizer struct {
	Type string `json:"type"`
	// Sequence
	PreTokenizers []filePreTokenizer `json:"pretokenizers"`
	// Split, Punctuation and Digits
	Pattern          *filePattern `json:"pattern"`
	Behavior         string       `json:"behavior"`
	Invert           bool         `json:"invert"`
	IndividualDigits bool         `json:"individual_digits"`
	// ByteLevel; UseRegex is true where the file does not say.
	AddPrefixSpace *bool `json:"add_prefix_space"`
	UseRegex       *bool `json:"use_regex"`
	// Metaspace; Split is true where the file does not say.
	Replacement   string `json:"replacement"`
	PrependScheme string `json:"prepend_scheme"`
	Split         *bool  `json:"split"`
}

type filePattern struct {
	String *string `json:"String"`
	Regex  *string `json:"Regex"`
}

// flat appends the steps of nested sequences, and stops behind maxSteps.
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

// newPreTokenizer prepares the steps of a file.
func newPreTokenizer(steps []filePreTokenizer) (*preTokenizer, error) {
	if len(steps) > maxSteps {
		return nil, unsupported("pre_tokenizer with more than %d steps", maxSteps)
	}
	p := &preTokenizer{}
	for i := 0; i < len(steps); i++ {
		if p.byteLevel || p.spaces != nil {
			return nil, unsupported("pre_tokenizer of type %q behind %s", steps[i].Type, steps[i-1].Type)
		}
		if i > 0 && steps[i].Type == "Metaspace" { // it would begin at each piece anew
			return nil, unsupported("pre_tokenizer of type %q behind %s; it is supported as the first step alone", steps[i].Type, steps[i-1].Type)
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

// isolates reports whether the step is a Split that only cuts, by one expression.
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

// match is a part of a text that a step has found, or that lies between such.
type match struct {
	span
	found bool
	// first marks the first one of a part: it has nothing to do with the match before it.
	first bool
}

// finder appends the matches in parts of a text and what lies between them, in order and without gaps.
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
	return nil, errors.New("pre_tokenizer Split has no pattern; allowed are a String that is not empty and a Regex")
}

// findEach is the finder that finds the next match in a part of a text, again and again. Positions are those in the whole
// text.
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

// findCharacters finds each character of a kind by itself.
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
		m.Reset("") // or the pool would keep the text
		return matches
	}
}

// invert takes what lies between matches for the matches.
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

// behaviours are what becomes of matches.
var behaviours = []string{"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"}

var matchBuffers = sync.Pool{New: func() any { return new([]match) }}

// cut is the cutter that does with the matches of a finder what the behaviour says.
func cut(find finder, behaviour string) cutter {
	return func(pieces []span, text string, parts []span) []span {
		buffer := matchBuffers.Get().(*[]match)
		if *buffer = find((*buffer)[:0], text, parts); cap(*buffer) <= keptScratch {
			defer matchBuffers.Put(buffer)
		}
		return appendPieces(pieces, *buffer, behaviour)
	}
}

// appendPieces appends the pieces that matches make. Of several matches in a row only the first is merged with what lies
// before it (MergedWithPrevious), or the last with what lies behind.
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

// spaceMark is the character in which SentencePiece writes spaces.
const spaceMark = "▁"

// metaspace is how SentencePiece writes spaces. Its scheme tells where one is put in front of a text that does not begin
// with one: always, never, or first, at the begin of the whole input alone.
type metaspace struct{ scheme string }

func newMetaspace(f filePreTokenizer) (*metaspace, error) {
	m := &metaspace{f.PrependScheme}
	if f.Replacement != spaceMark {
		return nil, unsupported("pre_tokenizer Metaspace with replacement %q; only %q is supported", f.Replacement, spaceMark)
	}
	if m.scheme == "" {
		// As older files say it.
		if m.scheme = "always"; f.AddPrefixSpace != nil && !*f.AddPrefixSpace {
			m.scheme = "never"
		}
	}
	if !slices.Contains([]string{"always", "never", "first"}, m.scheme) {
		return nil, unsupported("pre_tokenizer Metaspace with prepend_scheme %q; allowed are always, never and first", m.scheme)
	}
	return m, nil
}

// write writes the spaces of a text; begin tells that it begins the whole input.
func (m *metaspace) write(text string, begin bool) string {
	text = strings.ReplaceAll(text, " ", spaceMark)
	if (m.scheme == "always" || m.scheme == "first" && begin) && !strings.HasPrefix(text, spaceMark) {
		text = spaceMark + text
	}
	return text
}

// cutBeforeSpaces cuts before each run of written spaces.
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

// ErrUnsupported matches the errors of files that are valid and use what this package does not read.
var ErrUnsupported = errors.New("unsupported tokenizer")

func unsupported(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrUnsupported, fmt.Errorf(format, args...))
}

// readJSON decodes a part of the file where it is set, and leaves into alone where it is null or absent.
func readJSON(raw json.RawMessage, name string, into any) (set bool, err error) {
	if len(raw) == 0 || string(raw) == "null" {
		return false, nil
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return false, fmt.Errorf("not a tokenizer.json: %s: %w", name, err)
	}
	return true, nil
}
