// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

const (
	// maxRankBlocks is the maximum number of indexed blocks of a rank: 2 million tokens in blocks of 16. maxBlocks is the
	// maximum of all ranks. A block needs about 80 bytes, so the index needs at most 160 MiB. Further blocks are not
	// indexed.
	maxRankBlocks = 1 << 17
	maxBlocks     = 1 << 21
	// maxAdapters is the maximum number of LoRA adapters of a rank whose names are kept.
	maxAdapters = 64
	// maxStarts is the maximum number of different first tokens of prompts that are kept per rank.
	maxStarts = 4
)

// Errors of events that do not fit the rank. The blocks of the rank are then forgotten.
var (
	errRank      = errors.New("the events are of another rank")
	errBlockSize = errors.New("the number of tokens of a block has changed")
	errGroups    = errors.New("the model has several groups of blocks per token, which are not supported")
)

// errVocabulary is returned for blocks with token IDs that the model does not have. They are not indexed.
var errVocabulary = errors.New("the blocks have token IDs outside the vocabulary of the model")

// rank contains the blocks that a rank has cached, as its events report them. It is safe for concurrent use by one
// writer and any number of readers.
type rank struct {
	number, vocabulary int
	total              *atomic.Int64

	mu sync.RWMutex
	// live is true while the events are complete: the subscription is connected and replayed.
	live bool
	// grouped is true for a model whose prefixes depend on several groups of blocks. mixed is true if the rank serves LoRA
	// adapters without names, so that their requests cannot be distinguished. adapters are the names of the others.
	grouped, mixed bool
	adapters       []string
	// size is the number of tokens of a block; 0 while no block is known.
	size int
	// blocks contains the blocks by the hash of the engine, for removals and for the blocks that follow. held contains
	// their hashes of this package.
	blocks map[uint64]block
	held   map[uint64]struct{}
	// starts are different first tokens of prompts.
	starts []int32
}

// block is a block that a rank has cached. hash is its hash of this package. vLLM keeps several copies of a block if
// requests compute it at the same time, and reports each copy.
type block struct {
	hash   uint64
	copies int32
}

func newRank(number, vocabulary int, total *atomic.Int64) *rank {
	return &rank{number: number, vocabulary: vocabulary, total: total, blocks: map[uint64]block{}, held: map[uint64]struct{}{}}
}

// rootHash is the hash before the first block.
const rootHash = 0

// hasher hashes blocks.
type hasher struct{ buffer []byte }

// chain returns the hash of a block, which covers all blocks before it: previous is the hash of the block before.
func (h *hasher) chain(previous uint64, tokens ...[]int32) uint64 {
	h.buffer = binary.LittleEndian.AppendUint64(h.buffer[:0], previous)
	for _, part := range tokens {
		for _, token := range part {
			h.buffer = binary.LittleEndian.AppendUint32(h.buffer, uint32(token))
		}
	}
	return maphash.Bytes(seed, h.buffer)
}

// setLive marks the events as complete, or forgets all blocks if they are not.
func (r *rank) setLive(live bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.live = live; !live {
		r.clear()
		r.size, r.grouped, r.mixed, r.adapters, r.starts = 0, false, false, nil, nil
	}
}

// forget forgets all blocks.
func (r *rank) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.clear()
}

// clear is forget. The lock must be held.
func (r *rank) clear() {
	r.total.Add(-int64(len(r.blocks)))
	r.blocks, r.held = map[uint64]block{}, map[uint64]struct{}{}
}

// changes counts what events did.
type changes struct {
	stored, removed, cleared, ignored int
	// orphans are blocks whose previous block is not known, full are blocks above the bounds, keyed are blocks that depend
	// on more than tokens. They are not indexed.
	orphans, full, keyed int
}

// apply applies the events of a batch, and counts them. After an error other than errVocabulary, all blocks are
// forgotten: events that were not applied may have removed some. The lock is held for each event only.
func (r *rank) apply(events []event, number int, done *changes) (err error) {
	if number != noRank && number != r.number {
		err = fmt.Errorf("%w: %d, want %d", errRank, number, r.number)
		r.forget()
		return err
	}
	var h hasher
	for i := range events {
		one := r.applyOne(&events[i], &h, done)
		if one != nil && !errors.Is(one, errVocabulary) {
			r.forget()
			return one
		}
		if one != nil {
			err = one
		}
	}
	return err
}

func (r *rank) applyOne(e *event, h *hasher, done *changes) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch onDevice := e.medium == "" || e.medium == "GPU"; {
	case e.kind == cleared:
		done.cleared++
		r.clear()
	case e.kind == otherKind || !onDevice:
		done.ignored++
	case e.group > 0:
		r.grouped = true
		return errGroups
	case e.kind == removed:
		done.removed++
		for _, hash := range e.hashes {
			b, known := r.blocks[hash]
			switch {
			case !known:
			case b.copies > 1:
				r.blocks[hash] = block{b.hash, b.copies - 1}
			default:
				delete(r.blocks, hash)
				delete(r.held, b.hash)
				r.total.Add(-1)
			}
		}
	default:
		done.stored++
		return r.store(e, h, done)
	}
	return nil
}

func (r *rank) store(e *event, h *hasher, done *changes) error {
	if r.size != 0 && r.size != e.size {
		err := fmt.Errorf("%w: %d, before %d", errBlockSize, e.size, r.size)
		r.size = e.size
		return err
	}
	r.size = e.size
	r.addAdapter(e)
	limit := r.vocabulary
	if limit == 0 {
		limit = math.MaxInt32
	}
	previous := uint64(rootHash)
	if e.hasParent {
		parent, known := r.blocks[e.parent]
		if !known {
			done.orphans += len(e.hashes)
			return nil
		}
		previous = parent.hash
	}
	if e.keyed {
		done.keyed += len(e.hashes)
		return nil
	}
	for i, hash := range e.hashes {
		tokens := e.tokens[i*e.size : (i+1)*e.size]
		if len(e.keyedBlocks) > 0 && e.keyedBlocks[0] <= i {
			done.keyed += len(e.hashes) - i
			return nil
		}
		for _, token := range tokens {
			if token < 0 || int(token) >= limit {
				return fmt.Errorf("%w: %d, want 0 to %d", errVocabulary, token, limit-1)
			}
		}
		previous = h.chain(previous, tokens)
		b, known := r.blocks[hash]
		if !known {
			if len(r.blocks) >= maxRankBlocks || r.total.Load() >= maxBlocks {
				done.full += len(e.hashes) - i
				return nil
			}
			r.total.Add(1)
		} else if b.hash != previous {
			delete(r.held, b.hash)
			b.copies = 0
		}
		r.blocks[hash] = block{previous, b.copies + 1}
		r.held[previous] = struct{}{}
		if i == 0 && !e.hasParent {
			r.addStart(tokens[0])
		}
	}
	return nil
}

// addAdapter records the adapter of an event.
func (r *rank) addAdapter(e *event) {
	switch {
	case e.adapter == "":
		r.mixed = r.mixed || e.unnamed
	case slices.Contains(r.adapters, e.adapter):
	case len(r.adapters) == maxAdapters:
		r.mixed = true
	default:
		r.adapters = append(r.adapters, e.adapter)
	}
}

// addStart records the first token of a prompt.
func (r *rank) addStart(token int32) {
	if !slices.Contains(r.starts, token) && len(r.starts) < maxStarts {
		r.starts = append(r.starts, token)
	}
}

// holds reports whether the rank has a block.
func (r *rank) holds(hash uint64) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	_, held := r.held[hash]
	return held
}

// state returns the number of tokens of a block, and whether the blocks of the rank are known.
func (r *rank) state() (size int, known bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.size, r.live && !r.grouped && !r.mixed
}

// adapts reports whether a model is a LoRA adapter of the rank, whose blocks are not indexed. SGLang accepts a name after
// that of the model and a colon.
func (r *rank) adapts(model string) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return slices.ContainsFunc(r.adapters, func(name string) bool { return model == name || strings.HasSuffix(model, ":"+name) })
}

// firstTokens appends the first tokens of prompts to a list without duplicates.
func (r *rank) firstTokens(tokens []int32) []int32 {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, token := range r.starts {
		if !slices.Contains(tokens, token) {
			tokens = append(tokens, token)
		}
	}
	return tokens
}
