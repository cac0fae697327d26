// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"hash/maphash"
	"math"
	"math/bits"
	"slices"
)

// PrefixBlock is the number of tokens of a hashed block: each hash covers one block more than the previous one.
const PrefixBlock = 64

// blockBytes is the block size for text that is not tokenized: byte-pair tokens have about four bytes.
const blockBytes = 4 * PrefixBlock

const (
	// FNV-1a over 64-bit words: cheap and sufficient for hints. The words of a text are hashes of its parts, so that a
	// text and tokens match only by chance.
	tokenOffset = 14695981039346656037
	hashPrime   = 1099511628211
)

// mix distributes the entropy of the low bits over the hash.
func mix(hash uint64) uint64 { return (hash ^ hash>>32) * 0x9e3779b97f4a7c15 }

// PrefixHashes appends one hash for each whole block of tokens to dst. Each hash covers all tokens from the first one.
// The tokens are in several parts, without boundaries.
func PrefixHashes(dst []uint64, parts ...[]int32) []uint64 {
	hash, n := uint64(tokenOffset), 0
	for _, tokens := range parts {
		for _, token := range tokens {
			hash = (hash ^ uint64(uint32(token))) * hashPrime
			if n++; n%PrefixBlock == 0 {
				dst = append(dst, mix(hash))
			}
		}
	}
	return dst
}

// textSeed is the seed of the hashes of texts, which are never stored.
var textSeed = maphash.MakeSeed()

// textEnd is hashed at the end of a text.
const textEnd = 0xff

// TextPrefixHashes is PrefixHashes for texts without tokens, by blocks of the typical number of bytes of a token block.
// The boundaries of texts are part of the hash.
func TextPrefixHashes(dst []uint64, texts []string) []uint64 {
	hash, left := uint64(tokenOffset), blockBytes // of the current block
	for _, text := range texts {
		for len(text) >= left {
			hash = mix((hash ^ maphash.String(textSeed, text[:left])) * hashPrime)
			dst = append(dst, hash)
			text, left = text[left:], blockBytes
		}
		hash = mix((hash ^ maphash.String(textSeed, text)) * hashPrime)
		hash = (hash ^ textEnd) * hashPrime
		left -= len(text)
	}
	return dst
}

const (
	// DefaultCacheTokens is the assumed KV cache capacity of a place: the order of magnitude that a device of 141 GB
	// has left.
	DefaultCacheTokens = 1 << 18
	// maxBlocks is the maximum number of tracked blocks over all places, at about 80 bytes each.
	maxBlocks = 1 << 19
)

// Prefixes estimates which places have the beginning of a request in their KV caches, based on the requests sent to
// them. It tracks, for every place, the hashed blocks of the most recent tokens that fit its cache, up to a total of
// maxBlocks. The least recently used blocks are evicted first, and the end of a request before its beginning.
type Prefixes struct {
	tokens int
	// index finds the block of a hash. blocks contains all blocks, spare the free indices.
	index  blockIndex
	blocks []block
	spare  []int32
	// places are the rings of the places, vacant the indices of removed places, live the number of the others.
	places []cacheRing
	vacant []int
	live   int
	// hits are the results of the latest Match, marks the call numbers of the results.
	hits  []Hit
	marks []uint64
	calls uint64
	// chain contains the blocks found by the latest Match, with their cumulative Due.
	chain []chained
}

// Hit is the part of a request that a place has cached.
type Hit struct {
	// Tokens is the number of leading tokens.
	Tokens int
	// Due is the number of these tokens discounted by their popularity: a token counts 1/(1+n), where n is the number
	// of requests that began with it plus the turns, or levels of nesting, before it. A popular beginning that goes to
	// another place is computed once more there, and later requests can use that place as well. A beginning that n
	// requests had is expected to occur in about n more.
	Due float64
}

type chained struct {
	block int
	due   float64
}

// block is a hashed prefix with the places that hold it, in ascending order.
type block struct {
	hash    uint64
	holders []holder
	// asked is the number of requests with this prefix.
	asked int
}

// holder is a place and the slot of its ring that contains the block.
type holder struct{ place, slot int32 }

// cacheRing contains the blocks of one place for clock replacement: used marks blocks that were requested since the
// hand passed.
type cacheRing struct {
	slots []cacheSlot
	hand  int
}

type cacheSlot struct {
	block int32
	used  bool
}

// NewPrefixes returns an empty Prefixes for places with the given KV cache capacity in tokens; 0 is DefaultCacheTokens.
func NewPrefixes(cacheTokens int) *Prefixes {
	if cacheTokens <= 0 {
		cacheTokens = DefaultCacheTokens
	}
	return &Prefixes{tokens: cacheTokens}
}

// limit returns the maximum number of blocks per place. It rounds the number of places in steps of at most an eighth,
// so that the limit changes only a few hundred times for any number of places: each decrease visits all places.
func (p *Prefixes) limit() int {
	step := max(1, 1<<bits.Len(uint(p.live))>>4)
	places := max(1, (p.live+step-1)/step*step)
	return max(1, min(p.tokens/PrefixBlock, maxBlocks/places))
}

// Add adds a place and returns its index. With more places, each may hold fewer blocks.
func (p *Prefixes) Add() int {
	place := len(p.places)
	if n := len(p.vacant); n > 0 {
		place, p.vacant = p.vacant[n-1], p.vacant[:n-1]
	} else {
		p.places = append(p.places, cacheRing{})
		p.hits, p.marks = append(p.hits, Hit{}), append(p.marks, 0)
	}
	before := p.limit()
	p.live++
	if limit := p.limit(); limit < before {
		for other := range p.places {
			for len(p.places[other].slots) > limit {
				p.shrink(other)
			}
		}
	}
	return place
}

// Remove removes a place and its blocks. The index may be reused.
func (p *Prefixes) Remove(place int) {
	for len(p.places[place].slots) > 0 {
		p.shrink(place)
	}
	p.places[place] = cacheRing{slots: p.places[place].slots}
	p.marks[place] = 0
	p.vacant = append(p.vacant, place)
	p.live--
}

// Match finds the cached part of a request on every place; Hit returns the results until the next call.
func (p *Prefixes) Match(prefixes []uint64) {
	p.calls++
	p.chain = p.chain[:0]
	due, asked, turns := 0.0, math.MaxInt, 0
	for _, hash := range prefixes {
		at := p.index.find(p.blocks, hash)
		if at < 0 {
			break
		}
		if n := p.blocks[at].asked; n < asked { // some requests diverge or end here
			asked = n
			turns++
		}
		due += PrefixBlock / float64(asked+turns)
		p.chain = append(p.chain, chained{at, due})
	}
	for i, found := len(p.chain)-1, 0; i >= 0 && found < p.live; i-- {
		for _, h := range p.blocks[p.chain[i].block].holders {
			if p.marks[h.place] != p.calls {
				p.marks[h.place], p.hits[h.place] = p.calls, Hit{(i + 1) * PrefixBlock, p.chain[i].due}
				found++
			}
		}
	}
}

// Hit returns the part of the latest Match's request that the place has cached.
func (p *Prefixes) Hit(place int) Hit {
	if p.marks[place] != p.calls {
		return Hit{}
	}
	return p.hits[place]
}

// Due returns Hit.Due of a number of leading tokens of the latest Match's request, which a place is known to have cached.
// Tokens after the recorded blocks count half: one other request began with them.
func (p *Prefixes) Due(tokens int) float64 {
	blocks, due := min(tokens/PrefixBlock, len(p.chain)), 0.0
	if blocks > 0 {
		due = p.chain[blocks-1].due
	}
	return due + float64(tokens-blocks*PrefixBlock)/2
}

// Put records that the request was sent to the place.
func (p *Prefixes) Put(place int, prefixes []uint64) {
	// The end is put first and evicted before the beginning; it is useless without the beginning.
	for i := min(len(prefixes), p.limit()) - 1; i >= 0; i-- {
		p.put(int32(place), prefixes[i])
	}
}

func (p *Prefixes) put(place int32, hash uint64) {
	ring := &p.places[place]
	at := p.index.find(p.blocks, hash)
	if at >= 0 {
		p.blocks[at].asked++
		if i, holds := p.blocks[at].find(place); holds {
			ring.slots[p.blocks[at].holders[i].slot].used = true
			return
		}
	}
	slot := len(ring.slots)
	if slot < p.limit() {
		slot = p.open(place)
	} else {
		slot = p.evict(place)
		at = p.index.find(p.blocks, hash) // eviction may have moved index entries
	}
	if at < 0 {
		at = p.newBlock(hash)
	}
	i, _ := p.blocks[at].find(place)
	p.blocks[at].holders = slices.Insert(p.blocks[at].holders, i, holder{place, int32(slot)})
	ring.slots[slot] = cacheSlot{block: int32(at)}
}

// open adds a slot to a place's ring that the clock hand reaches last. The slot at the hand moves to the end of the
// ring, which extends its life.
func (p *Prefixes) open(place int32) (slot int) {
	ring := &p.places[place]
	last := len(ring.slots)
	ring.slots = append(ring.slots, cacheSlot{})
	if ring.hand == 0 {
		return last
	}
	slot = ring.hand
	p.move(place, slot, last)
	ring.hand++
	return slot
}

// evict frees the slot of the next block that was not used recently.
func (p *Prefixes) evict(place int32) (slot int) {
	ring := &p.places[place]
	for ring.slots[ring.hand].used {
		ring.slots[ring.hand].used = false
		ring.hand = (ring.hand + 1) % len(ring.slots)
	}
	slot = ring.hand
	ring.hand = (ring.hand + 1) % len(ring.slots)
	p.release(place, ring.slots[slot].block)
	return slot
}

// shrink evicts one block and shortens the ring by its slot.
func (p *Prefixes) shrink(place int) {
	p.closeGap(place, p.evict(int32(place)))
}

// Forget reverts a Put of the prefixes: the place did not compute them.
func (p *Prefixes) Forget(place int, prefixes []uint64) {
	for _, hash := range prefixes {
		at := p.index.find(p.blocks, hash)
		if at < 0 {
			continue
		}
		if i, holds := p.blocks[at].find(int32(place)); holds {
			slot := p.blocks[at].holders[i].slot
			p.blocks[at].asked--
			p.release(int32(place), int32(at))
			p.closeGap(place, int(slot))
		}
	}
}

// closeGap removes a free slot from a place's ring.
func (p *Prefixes) closeGap(place, slot int) {
	ring := &p.places[place]
	last := len(ring.slots) - 1
	if slot != last {
		p.move(int32(place), last, slot)
	}
	ring.slots = ring.slots[:last]
	if ring.hand >= last {
		ring.hand = 0
	}
}

// move moves the content of one slot of a place's ring to another.
func (p *Prefixes) move(place int32, from, to int) {
	slots := p.places[place].slots
	slots[to] = slots[from]
	i, _ := p.blocks[slots[to].block].find(place)
	p.blocks[slots[to].block].holders[i].slot = int32(to)
}

// release removes a place from a block, and the block with its last holder.
func (p *Prefixes) release(place, at int32) {
	b := &p.blocks[at]
	i, _ := b.find(place)
	b.holders = slices.Delete(b.holders, i, i+1)
	if len(b.holders) == 0 {
		p.index.remove(p.blocks, b.hash)
		p.spare = append(p.spare, at)
	}
}

func (p *Prefixes) newBlock(hash uint64) int {
	at := len(p.blocks)
	if n := len(p.spare); n > 0 {
		at, p.spare = int(p.spare[n-1]), p.spare[:n-1]
		p.blocks[at].hash, p.blocks[at].asked = hash, 1
	} else {
		p.blocks = append(p.blocks, block{hash: hash, asked: 1})
	}
	p.index.insert(p.blocks, at)
	return at
}

// find returns the index of a place among the holders, or its insertion index.
func (b *block) find(place int32) (at int, holds bool) {
	return slices.BinarySearchFunc(b.holders, place, func(h holder, place int32) int { return int(h.place - place) })
}
