// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"maps"
	"slices"
	"sort"
	"strings"
	"unicode"
	"unicode/utf8"
)

// addedToken is a token that is found in the text before the text is cut into pieces. It is never merged.
type addedToken struct {
	content string
	id      int32
	// A singleWord token matches only if no word character is adjacent to it. leftSpace and rightSpace tokens include
	// adjacent white space.
	singleWord, leftSpace, rightSpace bool
}

// addedTokens finds added tokens: the leftmost token, and of those with the same start, the longest.
type addedTokens struct {
	// tokens are sorted by bytes.
	tokens []addedToken
	// begins marks the first bytes of tokens. If only is true, first is the only first byte.
	begins [256]bool
	only   bool
	first  byte
}

// newAddedTokens indexes tokens. If several tokens have the same content, the last one applies.
func newAddedTokens(tokens []addedToken) *addedTokens {
	last := make(map[string]addedToken, len(tokens))
	for _, token := range tokens {
		last[token.content] = token
	}
	t := &addedTokens{tokens: slices.SortedFunc(maps.Values(last), func(a, b addedToken) int { return strings.Compare(a.content, b.content) })}
	for _, token := range t.tokens {
		t.first = token.content[0]
		t.begins[t.first] = true
	}
	t.only = len(t.tokens) > 0 && t.tokens[0].content[0] == t.first
	return t
}

// next returns the first position at or after at where a token may begin, or the length of the text.
func (t *addedTokens) next(text string, at int) int {
	if t.only {
		if skip := strings.IndexByte(text[at:], t.first); skip >= 0 {
			return at + skip
		}
		return len(text)
	}
	for at < len(text) && !t.begins[text[at]] {
		at++
	}
	return at
}

// longest returns the longest token that is a prefix of the text, or nil.
func (t *addedTokens) longest(text string) (longest *addedToken) {
	// tokens[low:high] share the first i bytes with the text. A token is sorted before the tokens that it is a prefix
	// of.
	low, high := 0, len(t.tokens)
	for i := 0; i < len(text) && low < high; i++ {
		of := func(token addedToken) int {
			if len(token.content) <= i {
				return -1
			}
			return int(token.content[i])
		}
		low += sort.Search(high-low, func(n int) bool { return of(t.tokens[low+n]) >= int(text[i]) })
		high = low + sort.Search(high-low, func(n int) bool { return of(t.tokens[low+n]) > int(text[i]) })
		if low < high && len(t.tokens[low].content) == i+1 {
			longest = &t.tokens[low]
		}
	}
	return longest
}

// each calls between for each non-empty text between added tokens, and token for each added token, in order.
func (t *addedTokens) each(text string, between func(part span), token func(id int32)) {
	if len(t.tokens) == 0 {
		if text != "" {
			between(span{0, len(text)})
		}
		return
	}
	from, spacesEnd := 0, 0 // spacesEnd is the end of the last run of white space after a token, so that no run is read twice
	for at := t.next(text, 0); at < len(text); at = t.next(text, at) {
		found := t.longest(text[at:])
		if found == nil {
			at++
			continue
		}
		taken := span{at, at + len(found.content)}
		at = taken.end
		if found.singleWord && (endsWithWord(text[:taken.start]) || beginsWithWord(text[taken.end:])) {
			continue
		}
		if found.leftSpace {
			begin := min(from, taken.start)
			taken.start = max(from, begin+len(strings.TrimRightFunc(text[begin:taken.start], unicode.IsSpace)))
		}
		if found.rightSpace {
			if taken.end >= spacesEnd {
				spacesEnd = len(text) - len(strings.TrimLeftFunc(text[taken.end:], unicode.IsSpace))
			}
			taken.end = spacesEnd
		}
		if taken.start > from {
			between(span{from, taken.start})
		}
		if taken.end > taken.start { // the reference drops a token whose white space the token before has taken
			token(found.id)
		}
		from = taken.end
	}
	if from < len(text) {
		between(span{from, len(text)})
	}
}

func endsWithWord(text string) bool {
	r, _ := utf8.DecodeLastRuneInString(text)
	return isWord(r)
}

func beginsWithWord(text string) bool {
	r, _ := utf8.DecodeRuneInString(text)
	return isWord(r)
}

// wordRanges are the word characters as defined by Unicode Technical Standard #18 (regular expressions).
var wordRanges = []*unicode.RangeTable{unicode.L, unicode.M, unicode.Nd, unicode.Nl, unicode.Pc, unicode.Other_Alphabetic, unicode.Join_Control}

func isWord(r rune) bool { return unicode.In(r, wordRanges...) }

// normalized returns the tokens with normalized content. Tokens with an empty result are dropped.
func normalized(tokens []addedToken, steps []normalizer) []addedToken {
	tokens = slices.Clone(tokens)
	for i := range tokens {
		for _, step := range steps {
			tokens[i].content = step(tokens[i].content)
		}
	}
	return slices.DeleteFunc(tokens, func(token addedToken) bool { return token.content == "" })
}
