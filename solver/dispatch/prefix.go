package dispatch

import (
	"math"
	"math/bits"
	"slices"
)

// PrefixBlock is the number of tokens by which one hashed prefix is longer than the one before.
const PrefixBlock = 64

// blockBytes is the same for text that is not tokenized: byte-pair tokens have about four bytes.
const blockBytes = 4 * PrefixBlock

const (
	// FNV-1a over 64-bit words: cheap, and good enough for hints. Text starts elsewhere than tokens, so that the one is never
	// taken for the other.
	tokenOffset, textOffset = 14695981039346656037, 9650029242287828579
	hashPrime               = 1099511628211
)

// mix spreads what the low bits of a hash know.
func mix(hash uint64) uint64 { return (hash ^ hash>>32) * 0x9e3779b97f4a7c15 }

// PrefixHashes appends to dst one hash for each whole block of tokens, each covering everything from the first token on.
func PrefixHashes(dst []uint64, tokens []int32) []uint64 {
	hash := uint64(tokenOffset)
	for i, token := range tokens {
		hash = (hash ^ uint64(uint32(token))) * hashPrime
		if (i+1)%PrefixBlock == 0 {
			dst = append(dst, mix(hash))
		}
	}
	return dst
}

// TextPrefixHashes does the same for text of which the tokens are not known, by blocks of as many bytes as tokens of a block
// usually have. Where texts end counts.
func TextPrefixHashes(dst []uint64, texts []string) []uint64 {
	hash, n := uint64(textOffset), 0
	for _, text := range texts {
		for i := range len(text) {
			hash = (hash ^ uint64(text[i])) * hashPrime
			if n++; n%blockBytes == 0 {
				dst = append(dst, mix(hash))
			}
		}
		hash = (hash ^ 0x100) * hashPrime
	}
	return dst
}

const (
	// DefaultCacheTokens is what a place is thought to hold in its KV cache: the order of what a device of 141 GB has left for
	// it.
	DefaultCacheTokens = 1 << 18
	// maxBlocks bounds the blocks that are known over all places, about 80 bytes each.
	maxBlocks = 1 << 19
)

// Prefixes tells which places probably hold the beginning of a request in their KV caches, from what they were sent: for every
// place the hashed blocks of tokens that it was given last, as many as fit its cache, and in all no more than a bound. What has not
// been used for longest is forgotten first, of a request its end before its beginning.
type Prefixes struct {
	tokens int
	// index finds the block of a hash, blocks holds all of them, spare the unused ones.
	index  blockIndex
	blocks []block
	spare  []int32
	// places are the rings of the places, vacant those that were removed; live is the number of the others.
	places []cacheRing
	vacant []int
	live   int
	// hits are what the latest Match found, marks the calls that they are of.
	hits  []Hit
	marks []uint64
	calls uint64
	// chain are the blocks that the latest Match found, and what its tokens up to there count.
	chain []chained
}

// Hit is what a place holds of a request.
type Hit struct {
	// Tokens is how many of its first tokens.
	Tokens int
	// Due are these tokens, but for beginnings that many requests had: a token counts 1/(1+n), n being the requests that began with it
	// and the turns, or levels of nesting, that it comes after. Who takes such a request elsewhere has it computed once more, and
	// from then on those that follow can go there as well; of a beginning that n requests had, about n more can be expected.
	Due float64
}

type chained struct {
	block int
	due   float64
}

// block is one hashed prefix with the places that hold it, ascending.
type block struct {
	hash    uint64
	holders []holder
	// asked is the number of requests that had it.
	asked int
}

// holder is a place with the slot of its ring that the block takes.
type holder struct{ place, slot int32 }

// cacheRing is what one place holds, in the order of a clock: used says that the block has been asked for since the hand passed.
type cacheRing struct {
	slots []cacheSlot
	hand  int
}

type cacheSlot struct {
	block int32
	used  bool
}

// NewPrefixes returns an empty one for places whose KV caches hold that many tokens; 0 is DefaultCacheTokens.
func NewPrefixes(cacheTokens int) *Prefixes {
	if cacheTokens <= 0 {
		cacheTokens = DefaultCacheTokens
	}
	return &Prefixes{tokens: cacheTokens}
}

// limit is the maximum number of blocks of one place. It counts places in steps of an eighth or less, so that it changes only some
// hundred times, however many places there are: each time it falls, all places are visited.
func (p *Prefixes) limit() int {
	step := max(1, 1<<bits.Len(uint(p.live))>>4)
	places := max(1, (p.live+step-1)/step*step)
	return max(1, min(p.tokens/PrefixBlock, maxBlocks/places))
}

// Add returns the number of a new place. With more places each may hold less.
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

// Remove forgets a place and all that it held. Its number may be given to a new place.
func (p *Prefixes) Remove(place int) {
	for len(p.places[place].slots) > 0 {
		p.shrink(place)
	}
	p.places[place] = cacheRing{slots: p.places[place].slots}
	p.marks[place] = 0
	p.vacant = append(p.vacant, place)
	p.live--
}

// Match finds what every place holds of a request; Hit tells it until the next call.
func (p *Prefixes) Match(prefixes []uint64) {
	p.calls++
	p.chain = p.chain[:0]
	due, asked, turns := 0.0, math.MaxInt, 0
	for _, hash := range prefixes {
		at := p.index.find(p.blocks, hash)
		if at < 0 {
			break
		}
		if n := p.blocks[at].asked; n < asked { // some requests went another way, or had not come this far
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

// Hit is what a place holds of the request of the latest Match.
func (p *Prefixes) Hit(place int) Hit {
	if p.marks[place] != p.calls {
		return Hit{}
	}
	return p.hits[place]
}

// Put notes that a place was given a request.
func (p *Prefixes) Put(place int, prefixes []uint64) {
	// The end comes first, so that it is forgotten before the beginning: without that it is worth nothing.
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
		at = p.index.find(p.blocks, hash) // what was evicted may have moved others of the index
	}
	if at < 0 {
		at = p.newBlock(hash)
	}
	i, _ := p.blocks[at].find(place)
	p.blocks[at].holders = slices.Insert(p.blocks[at].holders, i, holder{place, int32(slot)})
	ring.slots[slot] = cacheSlot{block: int32(at)}
}

// open adds a slot to a place's ring, behind all others as the hand goes: what it points at takes the new slot, and is kept longer for it.
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

// evict frees the slot of the next block that was not asked for lately.
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

// shrink makes a place's ring one slot shorter.
func (p *Prefixes) shrink(place int) {
	p.closeGap(place, p.evict(int32(place)))
}

// Forget takes back that a place was given these prefixes: it has not computed them.
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

// closeGap takes a free slot from a place's ring.
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

// move puts what one slot of a place's ring holds into another.
func (p *Prefixes) move(place int32, from, to int) {
	slots := p.places[place].slots
	slots[to] = slots[from]
	i, _ := p.blocks[slots[to].block].find(place)
	p.blocks[slots[to].block].holders[i].slot = int32(to)
}

// release takes a place from a block, and forgets the block with its last holder.
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

// find is where a place stands, or would stand, among the holders.
func (b *block) find(place int32) (at int, holds bool) {
	return slices.BinarySearchFunc(b.holders, place, func(h holder, place int32) int { return int(h.place - place) })
}
