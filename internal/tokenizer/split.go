package tokenizer

import "unicode/utf8"

// span is a part of a text, as byte offsets.
type span struct{ start, end int }

// cutter appends the pieces into which it cuts parts of a text, in order. Merges never cross pieces, and a part knows
// nothing of its neighbours.
type cutter func(pieces []span, text string, parts []span) []span

// word is how a family cuts: the length of the piece at a position, or 0 where its expression has no match there.
type word func(t *classTable, text string, at int) (end int)

// cutWords cuts with a family's expression. What lies between matches is a piece as well.
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
		end := next(t, text, at)
		if end == 0 {
			end = gap(t, next, text, at)
		}
		pieces = append(pieces, span{at, end})
		at = end
	}
	return pieces
}

// gap returns where the next match begins.
func gap(t *classTable, next word, text string, at int) int {
	for {
		_, size := t.at(text, at)
		at += size
		if at == len(text) || next(t, text, at) > 0 {
			return at
		}
	}
}

// The expressions that families cut by. Where a file has exactly one of them, the function beside it is used; any other is
// left to the package pattern, which takes longer.
const (
	contractions = `(?i:'s|'t|'re|'ve|'m|'ll|'d)`
	gpt2Pattern  = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
	// Llama 3 and GLM-4 take up to three digits together, Qwen 2 and 3 one.
	llama3Pattern = contractions + `|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	qwen2Pattern  = contractions + `|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	// Qwen 3.5 keeps marks with the letters that they belong to.
	qwen35Pattern = contractions + `|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	// o200k is that of gpt-oss, tekken that of Mistral's later models. Both end words before capitals.
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

// deepSeekV3Patterns cut one after the other: digits, then Chinese and Japanese, then words.
var deepSeekV3Patterns = [3]string{
	`\p{N}{1,3}`,
	"[一-龥\u3040-ゟ゠-ヿ]+",
	"[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|" + `[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`,
}

// gpt2Word matches gpt2Pattern.
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

// cl100kWord matches llama3Pattern and its kin: letters is the class of what words consist of, digits how many digits go
// together.
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

// o200kWord matches o200kPattern and its kin.
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
			// The first alternative, which has no match behind the mark, has one at it: of both classes, it is a word of its own.
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

// casedWord matches U*W+|U+W* at a character of U or W, the upper and the lower class, which overlap, and reports whether it was the
// first alternative.
func casedWord(t *classTable, text string, at int) (end int, lower bool) {
	upper := t.run(text, at, classUpper, false)
	if end := t.run(text, upper, classLower, false); end > upper {
		return end, true
	}
	// U* has to give back characters until one of them is of W too. Where there is none, the second alternative takes all.
	for end := upper; end > at; {
		r, size := utf8.DecodeLastRuneInString(text[at:end])
		if t.of(r)&classLower != 0 {
			return end, true
		}
		end -= size
	}
	return upper, false
}

// deepSeekV3 cuts as the three expressions of deepSeekV3Patterns do one after the other.
func deepSeekV3(pieces []span, text string, parts []span) []span {
	t := classes()
	for _, part := range parts {
		text := text[:part.end]
		for at := part.start; at < len(text); {
			alone := standsAlone(t, text, at)
			if alone == classNumber {
				_, size := t.at(text, at)
				end := t.numbers(text, at+size, 2)
				pieces = append(pieces, span{at, end})
				at = end
				continue
			}
			end := at
			for end < len(text) && standsAlone(t, text, end) == alone {
				_, size := t.at(text, end)
				end += size
			}
			pieces = appendWords(pieces, t, deepSeekV3Word, text[:end], at)
			at = end
		}
	}
	return pieces
}

// standsAlone returns classNumber for digits, classLetter for the Chinese and Japanese characters that are cut out, else 0.
func standsAlone(t *classTable, text string, at int) class {
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

// deepSeekV3Word matches the last of deepSeekV3Patterns.
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

// contraction returns the length of what 's|'t|'re|'ve|'m|'ll|'d matches at the begin of text, 0 if nothing. Where case
// does not count, the long s is an s.
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

// numbers returns the end of at most so many numbers.
func (t *classTable) numbers(text string, at, most int) int {
	for range most {
		c, size := t.at(text, at)
		if c&classNumber == 0 {
			break
		}
		at += size
	}
	return at
}

// newlines returns the end of the run of \r and \n, and slashes if they are asked for.
func newlines(text string, at int, slashes bool) int {
	for at < len(text) && (text[at] == '\n' || text[at] == '\r' || slashes && text[at] == '/') {
		at++
	}
	return at
}

// spaces matches \s+(?!\S)|\s+ at white space: all of it, but the last character is left for the next piece if something
// else follows and it is not the only one. With lines, \s*[\r\n]+ comes first: up to the last line break of the run.
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
