package tokenizer

import (
	"hash/maphash"
	"unicode/utf8"
)

// bpe merges the bytes or characters of a piece into tokens.
type bpe struct {
	// byteTokens are the tokens of single bytes.
	byteTokens [256]int32
	// characters are the tokens that pieces begin as, where those are not bytes; a character without one is its bytes.
	// It is nil where pieces begin as bytes.
	characters map[rune]int32
	merges     *pairTable
	// words are the pieces that are one token: those that their merges lead to, or all of the vocabulary where the model
	// takes them without merging (ignore_merges).
	words *wordTable
	cache pieceCache
}

// smallPiece is the greatest number of symbols that are merged by looking at all pairs each time, which needs no queue and
// takes a time that grows with the square.
const smallPiece = 64

// scratch is memory that is used again from text to text.
type scratch struct {
	pieces, more []span
	tokens       []int32
	symbols      []symbol
	queue        mergeQueue
}

// appendTokens appends the tokens of one piece of text.
func (b *bpe) appendTokens(ids []int32, piece string, s *scratch) []int32 {
	if len(piece) == 1 && b.characters == nil {
		return append(ids, b.byteTokens[piece[0]])
	}
	hash := maphash.String(hashSeed, piece)
	if token, ok := b.words.get(hash, piece); ok {
		return append(ids, token)
	}
	if cached := b.cache.get(hash, piece); cached != nil {
		return append(ids, cached...)
	}
	before := len(ids)
	ids = b.merge(ids, piece, s)
	b.cache.put(hash, piece, ids[before:])
	return ids
}

// merge appends what a piece becomes when the merges are applied in order of rank, the leftmost first among equals.
func (b *bpe) merge(ids []int32, piece string, s *scratch) []int32 {
	s.tokens = b.begin(s.tokens[:0], piece)
	if len(s.tokens) <= smallPiece {
		return append(ids, b.mergeSmall(s.tokens)...)
	}
	return b.mergeLarge(ids, s)
}

// begin appends the tokens that a piece is before any merge.
func (b *bpe) begin(tokens []int32, piece string) []int32 {
	if b.characters == nil {
		for i := range len(piece) {
			tokens = append(tokens, b.byteTokens[piece[i]])
		}
		return tokens
	}
	for len(piece) > 0 {
		r, size := utf8.DecodeRuneInString(piece)
		if token, ok := b.characters[r]; ok && (r != utf8.RuneError || size > 1) {
			tokens = append(tokens, token)
		} else {
			for i := range size {
				tokens = append(tokens, b.byteTokens[piece[i]])
			}
		}
		piece = piece[size:]
	}
	return tokens
}

// mergeSmall merges up to smallPiece tokens in place.
func (b *bpe) mergeSmall(tokens []int32) []int32 {
	var pairs [smallPiece]merge // pairs[i] is what tokens i and i+1 become
	for i := range len(tokens) - 1 {
		pairs[i] = b.merges.get(tokens[i], tokens[i+1])
	}
	for {
		best, at := noMerge.rank, -1
		for i, m := range pairs[:max(0, len(tokens)-1)] {
			if m.rank < best {
				best, at = m.rank, i
			}
		}
		if at < 0 {
			return tokens
		}
		tokens[at] = pairs[at].token
		tokens = append(tokens[:at+1], tokens[at+2:]...)
		copy(pairs[at:], pairs[at+1:len(tokens)])
		if at > 0 {
			pairs[at-1] = b.merges.get(tokens[at-1], tokens[at])
		}
		if at+1 < len(tokens) {
			pairs[at] = b.merges.get(tokens[at], tokens[at+1])
		}
	}
}

// mergeLarge appends what the tokens of the scratch become. Symbols form a linked list and candidates a heap, so that n of
// them take O(n log n): a long run of one character is ordinary input.
func (b *bpe) mergeLarge(ids []int32, s *scratch) []int32 {
	s.symbols, s.queue = s.symbols[:0], s.queue[:0]
	for i, token := range s.tokens {
		s.symbols = append(s.symbols, symbol{token: token, previous: int32(i) - 1, next: int32(i) + 1})
	}
	symbols := s.symbols
	symbols[len(symbols)-1].next = -1
	for i := range symbols[1:] {
		if m := b.merges.get(symbols[i].token, symbols[i+1].token); m.token >= 0 {
			s.queue = append(s.queue, newCandidate(m.rank, int32(i)))
		}
	}
	for i := len(s.queue)/2 - 1; i >= 0; i-- {
		s.queue.down(i)
	}
	for len(s.queue) > 0 {
		c := s.queue.pop()
		left := &symbols[c.at()]
		if left.next < 0 {
			continue
		}
		right := &symbols[left.next]
		// An earlier merge may have taken either side since the candidate was proposed. Pairs of the same rank make the same token.
		m := b.merges.get(left.token, right.token)
		if m.rank != c.rank() {
			continue
		}
		left.token, left.next = m.token, right.next
		right.token = gone
		if left.next >= 0 {
			symbols[left.next].previous = c.at()
		}
		for _, at := range [2]int32{left.previous, c.at()} {
			if at < 0 || symbols[at].next < 0 {
				continue
			}
			if m := b.merges.get(symbols[at].token, symbols[symbols[at].next].token); m.token >= 0 {
				s.queue.push(newCandidate(m.rank, at))
			}
		}
	}
	for i := int32(0); i >= 0; i = symbols[i].next {
		ids = append(ids, symbols[i].token)
	}
	return ids
}

// gone marks a symbol that was merged into its left neighbour; no pair has it.
const gone = -1

type symbol struct{ token, previous, next int32 }

// candidate is a merge at a place, as the number by which it is ordered: its rank, then its place.
type candidate uint64

func newCandidate(rank, at int32) candidate { return candidate(rank)<<32 | candidate(at) }

func (c candidate) rank() int32 { return int32(c >> 32) }

func (c candidate) at() int32 { return int32(c) }

// mergeQueue is a binary heap of candidates, the first to be merged on top.
type mergeQueue []candidate

func (q *mergeQueue) push(c candidate) {
	*q = append(*q, c)
	heap := *q
	i := len(heap) - 1
	for i > 0 && c < heap[(i-1)/2] {
		heap[i] = heap[(i-1)/2]
		i = (i - 1) / 2
	}
	heap[i] = c
}

// down moves a candidate away from the top until it comes before its children.
func (q mergeQueue) down(i int) {
	c := q[i]
	for {
		child := 2*i + 1
		if child+1 < len(q) && q[child+1] < q[child] {
			child++
		}
		if child >= len(q) || c <= q[child] {
			q[i] = c
			return
		}
		q[i] = q[child]
		i = child
	}
}

func (q *mergeQueue) pop() candidate {
	heap, last := *q, len(*q)-1
	top := heap[0]
	heap[0] = heap[last]
	*q = heap[:last]
	if last > 0 {
		q.down(0)
	}
	return top
}
