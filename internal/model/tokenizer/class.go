// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"sync"
	"unicode"
	"unicode/utf8"
)

// class is a set of character properties. It contains the properties that the known split expressions use.
type class uint8

const (
	classSpace   class = 1 << iota // \s
	classNewline                   // \r and \n
	classLetter                    // \p{L}
	classMark                      // \p{M}
	classNumber                    // \p{N}
	classSymbol                    // \p{P} and \p{S}
	classUpper                     // characters at the beginning of a word: \p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}
	classLower                     // characters in the rest of a word: \p{Ll}\p{Lm}\p{Lo}\p{M}
)

// classBlock is the number of characters in a block. Most blocks have equal content: unassigned, or of one script.
const classBlock = 128

// classTable maps each character to its class by two array lookups. Searching the ranges of Unicode's properties would
// take about ten comparisons per property.
type classTable struct {
	block   [(unicode.MaxRune + 1) / classBlock]uint16
	classes [][classBlock]class
	ascii   [utf8.RuneSelf]class
}

var classes = sync.OnceValue(func() *classTable {
	flat := make([]class, unicode.MaxRune+1)
	mark := func(table *unicode.RangeTable, c class) {
		for _, r := range table.R16 {
			for at := uint32(r.Lo); at <= uint32(r.Hi); at += uint32(r.Stride) {
				flat[at] |= c
			}
		}
		for _, r := range table.R32 {
			for at := r.Lo; at <= r.Hi; at += r.Stride {
				flat[at] |= c
			}
		}
	}
	mark(unicode.White_Space, classSpace)
	mark(unicode.Lu, classLetter|classUpper)
	mark(unicode.Lt, classLetter|classUpper)
	mark(unicode.Ll, classLetter|classLower)
	mark(unicode.Lm, classLetter|classUpper|classLower)
	mark(unicode.Lo, classLetter|classUpper|classLower)
	mark(unicode.M, classMark|classUpper|classLower)
	mark(unicode.N, classNumber)
	mark(unicode.P, classSymbol)
	mark(unicode.S, classSymbol)
	flat['\r'] |= classNewline
	flat['\n'] |= classNewline
	t := &classTable{}
	known := map[[classBlock]class]uint16{}
	for i := range t.block {
		block := [classBlock]class(flat[i*classBlock:])
		number, ok := known[block]
		if !ok {
			number = uint16(len(t.classes))
			known[block] = number
			t.classes = append(t.classes, block)
		}
		t.block[i] = number
	}
	copy(t.ascii[:], flat)
	return t
})

// of returns the class of a character.
func (t *classTable) of(r rune) class {
	return t.classes[t.block[uint32(r)/classBlock]][uint32(r)%classBlock]
}

// at returns the class and the size of the character at a position; the size is 0 at the end of the text. A byte that
// is not valid UTF-8 counts as U+FFFD.
func (t *classTable) at(text string, at int) (class, int) {
	if at >= len(text) {
		return 0, 0
	}
	if b := text[at]; b < utf8.RuneSelf {
		return t.ascii[b], 1
	}
	r, size := utf8.DecodeRuneInString(text[at:])
	return t.of(r), size
}

// run returns the end of the run of characters that have at least one of the properties, or, if without is set, that
// have none of them.
func (t *classTable) run(text string, at int, properties class, without bool) int {
	for at < len(text) {
		if b := text[at]; b < utf8.RuneSelf {
			if (t.ascii[b]&properties == 0) != without {
				return at
			}
			at++
			continue
		}
		r, size := utf8.DecodeRuneInString(text[at:])
		if (t.of(r)&properties == 0) != without {
			return at
		}
		at += size
	}
	return at
}
