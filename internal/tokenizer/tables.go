package tokenizer

import (
	"hash/maphash"
	"math"
	"math/bits"
	"sync/atomic"
)

// pairTable tells what a pair of neighbouring tokens becomes. It is an open-addressing table, at most two thirds full, of
// 16 bytes a slot: a real vocabulary has 150,000 merges, and looking one up must cost one miss of the processor's cache.
type pairTable struct {
	slots []pairSlot
	shift int
}

type pairSlot struct{ left, right, rank, token int32 }

// merge is what a pair becomes; the lowest rank is applied first.
type merge struct{ rank, token int32 }

// noMerge is that of a pair that stays.
var noMerge = merge{rank: math.MaxInt32, token: -1}

// tableSize is the number of slots, a power of two, for so many entries.
func tableSize(entries int) int { return 1 << bits.Len(uint(entries+entries/2)) }

func newPairTable(entries int) *pairTable {
	t := &pairTable{slots: make([]pairSlot, tableSize(entries))}
	t.shift = 64 - bits.TrailingZeros(uint(len(t.slots)))
	for i := range t.slots {
		t.slots[i].left = -1
	}
	return t
}

// slot returns the slot of a pair, which is empty if the table does not have the pair.
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

// hashSeed is that of all tables: where something stands in them has no influence on what is encoded.
var hashSeed = maphash.MakeSeed()

// wordTable finds the token of a piece that is one token.
type wordTable struct {
	// words are the pieces by token.
	words []string
	slots []wordSlot
}

// wordSlot is empty where token is 0: it is one more than the token.
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

// get finds a piece by its hash under hashSeed.
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
	// cachedBytes and cachedTokens bound what is remembered of one piece; with its lengths that is 64 bytes.
	cachedBytes, cachedTokens = 30, 8
	// cacheSlots bounds the cache to 4.5 MiB whatever is tokenized.
	cacheSlots = 1 << 16
)

// pieceCache remembers the tokens of short pieces: text repeats its words. Each piece has one place, where the latest one
// stays. It is safe for concurrent use, and readers never wait.
type pieceCache struct {
	slots [cacheSlots]atomic.Pointer[cachedPiece]
}

type cachedPiece struct {
	tokens          [cachedTokens]int32
	text            [cachedBytes]byte
	length, written uint8 // of text and tokens
}

// get returns the tokens of a piece by its hash under hashSeed, nil if they are not known. They must not be changed.
func (c *pieceCache) get(hash uint64, piece string) []int32 {
	cached := c.slots[hash%cacheSlots].Load()
	if cached == nil || int(cached.length) != len(piece) || string(cached.text[:cached.length]) != piece {
		return nil
	}
	return cached.tokens[:cached.written]
}

// put remembers the tokens of a piece, if they are not too long for it.
func (c *pieceCache) put(hash uint64, piece string, tokens []int32) {
	if len(piece) > cachedBytes || len(tokens) > cachedTokens {
		return
	}
	made := &cachedPiece{length: uint8(len(piece)), written: uint8(len(tokens))}
	copy(made.text[:], piece)
	copy(made.tokens[:], tokens)
	c.slots[hash%cacheSlots].Store(made)
}
