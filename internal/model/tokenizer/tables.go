// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"hash/maphash"
	"math"
	"math/bits"
	"sync/atomic"
)

// pairTable maps a pair of adjacent tokens to its merge. It is an open-addressing hash table, at most two thirds full,
// with 16 bytes per slot. A real vocabulary has 150,000 merges, and a lookup must not cost more than one miss of the
// processor's cache.
type pairTable struct {
	slots []pairSlot
	shift int
}

type pairSlot struct{ left, right, rank, token int32 }

// merge is the merge of a pair. The lowest rank is applied first.
type merge struct{ rank, token int32 }

// noMerge is the result for a pair that cannot be merged.
var noMerge = merge{rank: math.MaxInt32, token: -1}

// tableSize returns the number of slots, a power of two, for a number of entries.
func tableSize(entries int) int { return 1 << bits.Len(uint(entries+entries/2)) }

func newPairTable(entries int) *pairTable {
	t := &pairTable{slots: make([]pairSlot, tableSize(entries))}
	t.shift = 64 - bits.TrailingZeros(uint(len(t.slots)))
	for i := range t.slots {
		t.slots[i].left = -1
	}
	return t
}

// slot returns the slot of a pair. The slot is empty if the pair is not in the table.
func (t *pairTable) slot(left, right int32) *pairSlot {
	const golden = 0x9e3779b97f4a7c15
	at := (uint64(uint32(left))<<32 | uint64(uint32(right))) * golden
	for i := int(at >> t.shift); ; i++ {
		s := &t.slots[i&(len(t.slots)-1)]
		if s.left == left && s.right == right || s.left < 0 {
			return s
		}
	}
}

func (t *pairTable) put(left, right int32, m merge) {
	*t.slot(left, right) = pairSlot{left, right, m.rank, m.token}
}

func (t *pairTable) get(left, right int32) merge {
	if s := t.slot(left, right); s.left >= 0 {
		return merge{s.rank, s.token}
	}
	return noMerge
}

// hashSeed is the seed of all tables. The positions of entries do not affect the encoding.
var hashSeed = maphash.MakeSeed()

// wordTable maps a piece to its token if the piece is one token.
type wordTable struct {
	// words maps each token to its piece.
	words []string
	slots []wordSlot
}

// wordSlot is a slot of a wordTable. token is the token id plus one; 0 marks an empty slot.
type wordSlot struct{ hash, token uint32 }

func newWordTable(words []string) *wordTable {
	return &wordTable{words: words, slots: make([]wordSlot, tableSize(len(words)))}
}

func (t *wordTable) put(token int32) {
	hash := maphash.String(hashSeed, t.words[token])
	for i := int(hash); ; i++ {
		if s := &t.slots[i&(len(t.slots)-1)]; s.token == 0 {
			*s = wordSlot{uint32(hash >> 32), uint32(token) + 1}
			return
		}
	}
}

// get looks up a piece by its hash under hashSeed.
func (t *wordTable) get(hash uint64, piece string) (token int32, ok bool) {
	for i := int(hash); ; i++ {
		s := t.slots[i&(len(t.slots)-1)]
		if s.token == 0 {
			return 0, false
		}
		if s.hash == uint32(hash>>32) && t.words[s.token-1] == piece {
			return int32(s.token - 1), true
		}
	}
}

const (
	// cachedBytes and cachedTokens are the maximum lengths of a cached piece and its tokens. With the two length
	// fields, an entry has 64 bytes.
	cachedBytes, cachedTokens = 30, 8
	// cacheSlots limits the cache to 4.5 MiB for every input.
	cacheSlots = 1 << 16
)

// pieceCache caches the tokens of short pieces, because words are repeated in text. Each piece has exactly one slot,
// which contains the most recently stored piece. It is safe for concurrent use, and readers never block.
type pieceCache struct {
	slots [cacheSlots]atomic.Pointer[cachedPiece]
}

type cachedPiece struct {
	tokens          [cachedTokens]int32
	text            [cachedBytes]byte
	length, written uint8 // of text and tokens
}

// get returns the tokens of a piece by its hash under hashSeed, or nil if the piece is not cached. The caller must not
// change the tokens.
func (c *pieceCache) get(hash uint64, piece string) []int32 {
	cached := c.slots[hash%cacheSlots].Load()
	if cached == nil || int(cached.length) != len(piece) || string(cached.text[:cached.length]) != piece {
		return nil
	}
	return cached.tokens[:cached.written]
}

// put caches the tokens of a piece unless the piece or its tokens are too long.
func (c *pieceCache) put(hash uint64, piece string, tokens []int32) {
	if len(piece) > cachedBytes || len(tokens) > cachedTokens {
		return
	}
	entry := &cachedPiece{length: uint8(len(piece)), written: uint8(len(tokens))}
	copy(entry.text[:], piece)
	copy(entry.tokens[:], tokens)
	c.slots[hash%cacheSlots].Store(entry)
}

const (
	// shortBytes is the maximum length of a piece in a wordCache, shortTokens the maximum number of its tokens.
	shortBytes, shortTokens = 16, 3
	// wordSlotBits limits a wordCache to 256 KiB, which fits the second-level cache of a processor. It contains the few
	// thousand most frequent words, most of a text.
	wordSlotBits = 13
)

// wordCache caches the tokens of short pieces for the text that is being encoded. A hit touches one line of memory, and
// needs neither a hash of the bytes nor an atomic load. Each piece has exactly one slot. A wordCache belongs to one
// tokenizer, and to one goroutine at a time.
type wordCache [1 << wordSlotBits]shortSlot

// shortPiece is a piece of 1 to shortBytes bytes as numbers. Equal numbers mean equal pieces. The zero value is no
// piece.
type shortPiece struct {
	first, last uint64
	length      uint8
}

type shortSlot struct {
	shortPiece
	written uint8
	tokens  [shortTokens]int32
}

// packShort returns the first and the last eight bytes of a piece, which overlap in most pieces, or all of its bytes.
func packShort(piece string) shortPiece {
	n := len(piece)
	p := shortPiece{length: uint8(n)}
	switch {
	case n >= 8:
		p.first, p.last = eightBytes(piece), eightBytes(piece[n-8:])
	case n >= 4:
		p.first = uint64(fourBytes(piece)) | uint64(fourBytes(piece[n-4:]))<<32
	default:
		p.first = uint64(piece[0]) | uint64(piece[n/2])<<8 | uint64(piece[n-1])<<16
	}
	return p
}

func eightBytes(s string) uint64 {
	return uint64(fourBytes(s)) | uint64(fourBytes(s[4:]))<<32
}

func fourBytes(s string) uint32 {
	_ = s[3]
	return uint32(s[0]) | uint32(s[1])<<8 | uint32(s[2])<<16 | uint32(s[3])<<24
}

// slot returns the slot of a piece, which may contain another one.
func (c *wordCache) slot(p shortPiece) *shortSlot {
	const golden, odd = 0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9
	hash := (p.first ^ p.first>>29) * golden
	hash ^= (p.last ^ p.last>>31 + uint64(p.length)) * odd
	return &c[hash>>(64-wordSlotBits)]
}

// put stores the tokens of a piece unless they are too many.
func (s *shortSlot) put(p shortPiece, tokens []int32) {
	if len(tokens) > shortTokens {
		return
	}
	s.shortPiece, s.written = p, uint8(len(tokens))
	copy(s.tokens[:], tokens)
}
