package tokenizer

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// addedToken is a token that is found in the text before it is cut and is never merged.
type addedToken struct {
	content string
	id      int32
	// singleWord tokens count only where no part of a word stands beside them; leftSpace and rightSpace tokens take the
	// white space beside them.
	singleWord, leftSpace, rightSpace bool
}

// addedTokens finds added tokens: the leftmost, and the longest of those that begin at the same place.
type addedTokens struct {
	tokens []addedToken
	// begins tells the first bytes; first is the only one, where there is but one.
	begins [256]bool
	only   bool
	first  byte
	// nodes is a trie of the tokens' bytes, its root at 0.
	nodes []trieNode
}

type trieNode struct {
	// token is the index of the token that ends here, or -1.
	token int
	next  map[byte]int
}

func newAddedTokens(tokens []addedToken) *addedTokens {
	t := &addedTokens{tokens: tokens, nodes: []trieNode{{token: -1}}}
	for i, token := range tokens {
		t.begins[token.content[0]] = true
		t.insert(token.content, i)
	}
	t.only = len(t.nodes[0].next) == 1
	for first := range t.nodes[0].next {
		t.first = first
	}
	return t
}

// insert enters a token; of several with the same content, the last counts.
func (t *addedTokens) insert(content string, token int) {
	node := 0
	for i := range len(content) {
		next, ok := t.nodes[node].next[content[i]]
		if !ok {
			next = len(t.nodes)
			t.nodes = append(t.nodes, trieNode{token: -1})
			if t.nodes[node].next == nil {
				t.nodes[node].next = map[byte]int{}
			}
			t.nodes[node].next[content[i]] = next
		}
		node = next
	}
	t.nodes[node].token = token
}

// next returns the first position from at on where a token may begin, or the length of the text.
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

// longest returns the longest token that the text begins with, or nil.
func (t *addedTokens) longest(text string) *addedToken {
	best, node := -1, 0
	for i := range len(text) {
		next, ok := t.nodes[node].next[text[i]]
		if !ok {
			break
		}
		if node = next; t.nodes[node].token >= 0 {
			best = t.nodes[node].token
		}
	}
	if best < 0 {
		return nil
	}
	return &t.tokens[best]
}

// each calls between for the text between added tokens, if there is any, and token for each of them, in order.
func (t *addedTokens) each(text string, between func(part span), token func(id int32)) {
	if len(t.tokens) == 0 {
		if text != "" {
			between(span{0, len(text)})
		}
		return
	}
	from := 0
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
			taken.start = max(from, len(strings.TrimRightFunc(text[:taken.start], unicode.IsSpace)))
		}
		if found.rightSpace {
			taken.end = len(text) - len(strings.TrimLeftFunc(text[taken.end:], unicode.IsSpace))
		}
		if taken.start > from {
			between(span{from, taken.start})
		}
		token(found.id)
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

// wordRanges are the characters of words in the sense of Unicode's annex on regular expressions.
var wordRanges = []*unicode.RangeTable{unicode.L, unicode.M, unicode.Nd, unicode.Nl, unicode.Pc, unicode.Other_Alphabetic, unicode.Join_Control}

func isWord(r rune) bool { return unicode.In(r, wordRanges...) }

// normalized are the same tokens as they read once the text is normalized.
func normalized(tokens []addedToken, steps []normalizer) []addedToken {
	tokens = slices.Clone(tokens)
	for i := range tokens {
		for _, step := range steps {
			tokens[i].content = step(tokens[i].content)
		}
	}
	return slices.DeleteFunc(tokens, func(token addedToken) bool { return token.content == "" })
}
