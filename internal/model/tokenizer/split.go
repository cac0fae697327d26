// SPDX-License-Identifier: Apache-2.0

package tokenizer

import "unicode/utf8"

// span is a part of a text, as byte offsets.
type span struct{ start, end int }

// cutter cuts parts of a text and appends the pieces in order. Merges never cross pieces. The pieces of a part do not
// depend on neighbouring parts.
type cutter func(pieces []span, text string, parts []span) []span

// word returns the end of the match of a known split expression at a position, or 0 if there is no match.
type word func(t *classTable, text string, at int) (end int)

// cutWords returns a cutter for a known split expression. The text between matches is a piece as well.
func cutWords(next word) cutter {
	t := classes()
	return func(pieces []span, text string, parts []span) []span {
		for _, part := range parts {
			pieces = appendWords(pieces, t, next, text[:part.end], part.start)
		}
		return pieces
	}
}

// appendWords appends the pieces of a text from a position on.
func appendWords(pieces []span, t *classTable, next word, text string, at int) []span {
	for at < len(text) {
		end := plainWord(text, at)
		if end == 0 {
			end = next(t, text, at)
		}
		if end == 0 {
			end = gap(t, next, text, at)
		}
		pieces = append(pieces, span{at, end})
		at = end
	}
	return pieces
}

// plainWord returns the end of a run of lower-case ASCII letters, with at most one space before it, or 0 if there is
// none. Every known split expression matches exactly this run if the next character is in ASCII, and neither a letter
// nor an apostrophe. Most pieces of a text are such words, and they need no table of classes.
func plainWord(text string, at int) (end int) {
	if text[at] == ' ' {
		at++
	}
	end = at
	for end < len(text) && text[end]-'a' < 26 {
		end++
	}
	if end == at || end < len(text) && (text[end] >= utf8.RuneSelf || text[end] == '\'' || isASCIILetter(text[end])) {
		return 0
	}
	return end
}

// gap returns the position of the next match.
func gap(t *classTable, next word, text string, at int) int {
	for {
		_, size := t.at(text, at)
		at += size
		if at == len(text) || next(t, text, at) > 0 {
			return at
		}
	}
}

// The split expressions of known families. If a file contains exactly one of them, a hand-written function is used. Any
// other expression is handled by the package pattern, which is slower.
const (
	contractions = `(?i:'s|'t|'re|'ve|'m|'ll|'d)`
	gpt2Pattern  = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
	// Llama 3 and GLM-4 group up to three digits, Qwen 2 and 3 only one.
	llama3Pattern = contractions + `|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	qwen2Pattern  = contractions + `|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	// Qwen 3.5 keeps marks together with their letters.
	qwen35Pattern = contractions + `|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	// o200k is the expression of gpt-oss, tekken that of Mistral's later models. Both end words before capitals.
	upperWord     = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*`
	lowerWord     = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+`
	o200kRest     = ` ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	o200kPattern  = lowerWord + contractions + `?|` + upperWord + contractions + `?|\p{N}{1,3}|` + o200kRest
	tekkenPattern = lowerWord + `|` + upperWord + `|\p{N}|` + o200kRest
)

var knownWords = map[string]word{
	gpt2Pattern:   gpt2Word,
	llama3Pattern: func(t *classTable, text string, at int) int { return cl100kWord(t, text, at, classLetter, 3) },
	qwen2Pattern:  func(t *classTable, text string, at int) int { return cl100kWord(t, text, at, classLetter, 1) },
	qwen35Pattern: func(t *classTable, text string, at int) int { return cl100kWord(t, text, at, classLetter|classMark, 1) },
	o200kPattern:  func(t *classTable, text string, at int) int { return o200kWord(t, text, at, true, 3) },
	tekkenPattern: func(t *classTable, text string, at int) int { return o200kWord(t, text, at, false, 1) },
}

// deepSeekV3Patterns are applied in sequence: digits, then Chinese and Japanese, then words.
var deepSeekV3Patterns = [3]string{
	`\p{N}{1,3}`,
	"[一-龥\u3040-ゟ゠-ヿ]+",
	"[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|" + `[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`,
}

// gpt2Word implements gpt2Pattern.
func gpt2Word(t *classTable, text string, at int) int {
	if text[at] == '\'' {
		if n := contraction(text[at:], false); n > 0 {
			return at + n
		}
	}
	first, size := t.at(text, at)
	start := at
	if text[at] == ' ' {
		if next, nextSize := t.at(text, at+1); nextSize > 0 && next&classSpace == 0 {
			first, size, start = next, nextSize, at+1
		}
	}
	switch {
	case first&classSpace != 0:
		return t.spaces(text, at, false)
	case first&classLetter != 0:
		return t.run(text, start+size, classLetter, false)
	case first&classNumber != 0:
		return t.run(text, start+size, classNumber, false)
	}
	return t.run(text, start+size, classSpace|classLetter|classNumber, true)
}

// cl100kWord implements llama3Pattern and similar expressions. letters is the class of word characters, digits the
// maximum number of digits in a piece.
func cl100kWord(t *classTable, text string, at int, letters class, digits int) int {
	if text[at] == '\'' {
		if n := contraction(text[at:], true); n > 0 {
			return at + n
		}
	}
	first, size := t.at(text, at)
	if first&letters != 0 {
		return t.run(text, at+size, letters, false)
	}
	if first&classNumber != 0 {
		return t.numbers(text, at+size, digits-1)
	}
	next, nextSize := t.at(text, at+size)
	if first&classNewline == 0 && next&letters != 0 {
		return t.run(text, at+size+nextSize, letters, false)
	}
	outside := classSpace | classNumber | letters
	switch {
	case first&outside == 0:
		return newlines(text, t.run(text, at+size, outside, true), false)
	case text[at] == ' ' && nextSize > 0 && next&outside == 0:
		return newlines(text, t.run(text, at+1+nextSize, outside, true), false)
	}
	return t.spaces(text, at, true)
}

// o200kWord implements o200kPattern and similar expressions.
func o200kWord(t *classTable, text string, at int, contractions bool, digits int) int {
	first, size := t.at(text, at)
	if first&classNumber != 0 {
		return t.numbers(text, at+size, digits-1)
	}
	const letter = classUpper | classLower
	next, nextSize := t.at(text, at+size)
	start := at
	if first&(classNewline|classLetter) == 0 && next&letter != 0 {
		start = at + size
	}
	if start > at || first&letter != 0 {
		end, lower := casedWord(t, text, start)
		if !lower && start > at && first&classMark != 0 {
			// The first alternative has no match after the mark, but one at the mark: a mark is in both classes, so it
			// is a word by itself.
			return start
		}
		if n := contraction(text[end:], true); contractions && n > 0 {
			end += n
		}
		return end
	}
	const outside = classSpace | classLetter | classNumber
	switch {
	case first&outside == 0:
		return newlines(text, t.run(text, at+size, outside, true), true)
	case text[at] == ' ' && nextSize > 0 && next&outside == 0:
		return newlines(text, t.run(text, at+1+nextSize, outside, true), true)
	}
	return t.spaces(text, at, true)
}

// casedWord matches U*W+|U+W* at a character of U or W, where U is the upper and W the lower class. The classes
// overlap. lower reports whether the first alternative matched.
func casedWord(t *classTable, text string, at int) (end int, lower bool) {
	upper := t.run(text, at, classUpper, false)
	if end := t.run(text, upper, classLower, false); end > upper {
		return end, true
	}
	// U* must give back characters until one of them is also in W. If there is none, the second alternative matches the
	// whole run.
	for end := upper; end > at; {
		r, size := utf8.DecodeLastRuneInString(text[at:end])
		if t.of(r)&classLower != 0 {
			return end, true
		}
		end -= size
	}
	return upper, false
}

// deepSeekV3 cuts in the same way as applying the three expressions of deepSeekV3Patterns in sequence.
func deepSeekV3(pieces []span, text string, parts []span) []span {
	t := classes()
	for _, part := range parts {
		text := text[:part.end]
		for at := part.start; at < len(text); {
			kind := isolatedClass(t, text, at)
			if kind == classNumber {
				_, size := t.at(text, at)
				end := t.numbers(text, at+size, 2)
				pieces = append(pieces, span{at, end})
				at = end
				continue
			}
			end := at
			for end < len(text) && isolatedClass(t, text, end) == kind {
				_, size := t.at(text, end)
				end += size
			}
			pieces = appendWords(pieces, t, deepSeekV3Word, text[:end], at)
			at = end
		}
	}
	return pieces
}

// isolatedClass returns classNumber for digits, classLetter for the Chinese and Japanese characters of
// deepSeekV3Patterns, and 0 for all other characters.
func isolatedClass(t *classTable, text string, at int) class {
	if b := text[at]; b < utf8.RuneSelf {
		return t.ascii[b] & classNumber
	}
	switch r, _ := utf8.DecodeRuneInString(text[at:]); {
	case r >= '一' && r <= '龥', r >= 0x3040 && r <= 'ヿ':
		return classLetter
	default:
		return t.of(r) & classNumber
	}
}

// deepSeekV3Word implements the last of deepSeekV3Patterns.
func deepSeekV3Word(t *classTable, text string, at int) int {
	first, size := t.at(text, at)
	const letters = classLetter | classMark
	if first&letters != 0 {
		return t.run(text, at+size, letters, false)
	}
	next, nextSize := t.at(text, at+size)
	if first&classSymbol != 0 && text[at] < utf8.RuneSelf && nextSize == 1 && isASCIILetter(text[at+1]) {
		end := at + 2
		for end < len(text) && isASCIILetter(text[end]) {
			end++
		}
		return end
	}
	switch {
	case first&(classNewline|classSymbol) == 0 && next&letters != 0:
		return t.run(text, at+size+nextSize, letters, false)
	case first&classSymbol != 0:
		return newlines(text, t.run(text, at+size, classSymbol, false), false)
	case text[at] == ' ' && next&classSymbol != 0:
		return newlines(text, t.run(text, at+1+nextSize, classSymbol, false), false)
	case first&classSpace != 0:
		return t.spaces(text, at, true)
	}
	return 0
}

func isASCIILetter(b byte) bool { return b|0x20 >= 'a' && b|0x20 <= 'z' }

// contraction returns the length of the match of 's|'t|'re|'ve|'m|'ll|'d at the beginning of text, or 0. If case is
// ignored, the long s (ſ) counts as s.
func contraction(text string, anyCase bool) int {
	if len(text) < 2 || text[0] != '\'' {
		return 0
	}
	lower := byte(0)
	if anyCase {
		lower = 0x20
	}
	switch text[1] | lower {
	case 's', 't', 'm', 'd':
		return 2
	case 'r', 'v':
		if len(text) > 2 && text[2]|lower == 'e' {
			return 3
		}
	case 'l':
		if len(text) > 2 && text[2]|lower == 'l' {
			return 3
		}
	}
	if anyCase && len(text) > 2 && text[1:3] == "ſ" {
		return 3
	}
	return 0
}

// numbers returns the end of a run of at most limit numbers.
func (t *classTable) numbers(text string, at, limit int) int {
	for range limit {
		c, size := t.at(text, at)
		if c&classNumber == 0 {
			break
		}
		at += size
	}
	return at
}

// newlines returns the end of the run of \r and \n, and of slashes if requested.
func newlines(text string, at int, slashes bool) int {
	for at < len(text) && (text[at] == '\n' || text[at] == '\r' || slashes && text[at] == '/') {
		at++
	}
	return at
}

// spaces matches \s+(?!\S)|\s+ at white space. It matches the whole run, except that a run of several characters leaves
// the last one for the next piece if other text follows. If lines is set, \s*[\r\n]+ is tried first, which matches up
// to the last line break of the run.
func (t *classTable) spaces(text string, at int, lines bool) int {
	end, last, line := at, at, 0
	for end < len(text) {
		c, size := t.at(text, end)
		if c&classSpace == 0 {
			break
		}
		last, end = end, end+size
		if c&classNewline != 0 {
			line = end
		}
	}
	switch {
	case lines && line > 0:
		return line
	case end < len(text) && last > at:
		return last
	}
	return end
}
