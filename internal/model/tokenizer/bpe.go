// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"hash/maphash"
	"sync"
	"unicode/utf8"
)

// bpe merges the bytes or characters of a piece into tokens by byte-pair encoding.
type bpe struct {
	// byteTokens maps each byte to its token.
	byteTokens [256]int32
	// characters maps characters to the initial tokens of pieces. A character without an entry is represented by the
	// tokens of its bytes. It is nil if all pieces start as bytes.
	characters map[rune]int32
	merges     *pairTable
	// words contains the pieces that are one token: those that merging turns into one token, or the whole vocabulary if
	// the model looks up pieces without merging (ignore_merges).
	words *wordTable
	cache pieceCache
	// scratches contains *scratch.
	scratches sync.Pool
}

// smallPiece is the maximum number of symbols that are merged by scanning all pairs in each step. Scanning needs no
// queue, but takes quadratic time.
const smallPiece = 64

// scratch is memory that is reused between texts.
type scratch struct {
	pieces, more []span
	tokens       []int32
	symbols      []symbol
	queue        mergeQueue
	words        wordCache
}

// scratch returns a scratch for one text at a time.
func (b *bpe) scratch() *scratch {
	if s, ok := b.scratches.Get().(*scratch); ok {
		return s
	}
	return &scratch{}
}

// appendTokens appends the tokens of one piece of text.
func (b *bpe) appendTokens(ids []int32, piece string, s *scratch) []int32 {
	if len(piece) == 1 && b.characters == nil {
		return append(ids, b.byteTokens[piece[0]])
	}
	if len(piece) > shortBytes {
		return b.lookUp(ids, piece, s)
	}
	key := packShort(piece)
	slot := s.words.slot(key)
	if slot.shortPiece != key {
		before := len(ids)
		ids = b.lookUp(ids, piece, s)
		slot.put(key, ids[before:])
		return ids
	}
	if slot.written == 1 { // as nearly always, and faster than a copy of any length
		return append(ids, slot.tokens[0])
	}
	return append(ids, slot.tokens[:slot.written]...)
}

// lookUp appends the tokens of one piece of text, from the tables that all texts share.
func (b *bpe) lookUp(ids []int32, piece string, s *scratch) []int32 {
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

// merge appends the tokens that result from applying the merges in order of rank, and from left to right for equal
// ranks.
func (b *bpe) merge(ids []int32, piece string, s *scratch) []int32 {
	s.tokens = b.begin(s.tokens[:0], piece)
	if len(s.tokens) <= smallPiece {
		return append(ids, b.mergeSmall(s.tokens)...)
	}
	return b.mergeLarge(ids, s)
}

// begin appends the tokens of a piece before any merge.
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
	var pairs [smallPiece]merge // pairs[i] is the merge of tokens i and i+1
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

// mergeLarge merges the tokens of the scratch and appends the result. Symbols form a linked list and candidates a heap,
// so that n symbols take O(n log n). Long runs of one character are ordinary input.
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
		// An earlier merge may have changed either side since the candidate was added. Pairs of the same rank merge to
		// the same token.
		m := b.merges.get(left.token, right.token)
		if m.rank != c.rank() {
			continue
		}
		left.token, left.next = m.token, right.next
		right.token = mergedAway
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

// mergedAway marks a symbol that was merged into its left neighbour. No pair contains it.
const mergedAway = -1

type symbol struct{ token, previous, next int32 }

// candidate is a possible merge: its rank in the upper 32 bits and its position in the lower 32 bits, so that
// candidates are ordered by rank, then by position.
type candidate uint64

func newCandidate(rank, at int32) candidate { return candidate(rank)<<32 | candidate(at) }

func (c candidate) rank() int32 { return int32(c >> 32) }

func (c candidate) at() int32 { return int32(c) }

// mergeQueue is a binary heap of candidates. The next merge is on top.
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

// down restores the heap order by moving a candidate below its smaller children.
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
