package tokenizer

import (
	"cmp"
	"slices"
	"strings"
)

// addedToken is a token that is found in the text before it is split and is never merged.
type addedToken struct {
	content string
	id      int32
}

// addedTokens finds added tokens: the leftmost, and the longest of those that begin at the same place.
type addedTokens [256][]addedToken

func newAddedTokens(tokens []addedToken) *addedTokens {
	var table addedTokens
	for _, token := range tokens {
		first := token.content[0]
		table[first] = append(table[first], token)
	}
	for _, list := range table {
		slices.SortStableFunc(list, func(a, b addedToken) int { return cmp.Compare(len(b.content), len(a.content)) })
	}
	return &table
}

// find returns the first added token in text and where it begins.
func (t *addedTokens) find(text string) (token addedToken, at int, found bool) {
	for at := range len(text) {
		for _, token := range t[text[at]] {
			if strings.HasPrefix(text[at:], token.content) {
				return token, at, true
			}
		}
	}
	return addedToken{}, 0, false
}
