package tokenizer

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// splitter returns the length in bytes, at least 1, of the first piece of a text that is not empty. Merges never cross
// pieces.
type splitter func(text string) int

// wholeText does not split.
func wholeText(text string) int { return len(text) }

// contractions are tried in this order, as alternatives of the expression below; no one is a prefix of another.
var contractions = []string{"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}

// gpt2Split matches what the expression of GPT-2 matches at the begin of text:
//
//	's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
func gpt2Split(text string) int {
	if text[0] == '\'' {
		for _, c := range contractions {
			if strings.HasPrefix(text, c) {
				return len(c)
			}
		}
	}
	first, size := classAt(text, 0)
	if first != classSpace {
		return runOf(first, text, size)
	}
	if text[0] == ' ' {
		if next, size := classAt(text, 1); size > 0 && next != classSpace {
			return runOf(next, text, 1+size)
		}
	}
	return spaceRun(text)
}

// spaceRun matches \s+(?!\S)|\s+ : all white space, but the last character of it is left for the next piece if something
// else follows and it is not the only one.
func spaceRun(text string) int {
	end, last := 0, 0
	for end < len(text) {
		class, size := classAt(text, end)
		if class != classSpace {
			if last > 0 {
				return last
			}
			return end
		}
		last, end = end, end+size
	}
	return end
}

// runOf returns the end of the run of characters of one class that goes on at position at.
func runOf(class charClass, text string, at int) int {
	for at < len(text) {
		c, size := classAt(text, at)
		if c != class {
			break
		}
		at += size
	}
	return at
}

type charClass int

const (
	classOther charClass = iota
	classSpace
	classLetter
	classNumber
)

// classAt classifies the character at a position; its size is 0 at the end. A byte that is not valid UTF-8 counts as a
// character of class other.
func classAt(text string, at int) (charClass, int) {
	if at >= len(text) {
		return classOther, 0
	}
	if b := text[at]; b < utf8.RuneSelf {
		return asciiClass[b], 1
	}
	r, size := utf8.DecodeRuneInString(text[at:])
	return classOf(r), size
}

var asciiClass = func() (table [utf8.RuneSelf]charClass) {
	for b := range table {
		table[b] = classOf(rune(b))
	}
	return table
}()

func classOf(r rune) charClass {
	switch {
	case unicode.IsSpace(r):
		return classSpace
	case unicode.IsLetter(r):
		return classLetter
	case unicode.IsNumber(r):
		return classNumber
	}
	return classOther
}
