// SPDX-License-Identifier: Apache-2.0

package kvevents

// maxLookupBlocks is the maximum number of blocks of a prompt that are looked up: 128 Ki tokens in blocks of 16.
const maxLookupBlocks = 1 << 13

// maxStartTokens is the maximum number of first tokens that are tried before a text.
const maxStartTokens = 4

// Place identifies a rank of an engine pod by the address of the pod's engine.
type Place struct {
	Address string
	Rank    int
}

// Prompt provides the token IDs of a prompt.
type Prompt struct {
	// Tokens returns at least n tokens from the beginning, or all if there are fewer. Further calls return the same
	// tokens, and more.
	Tokens func(n int) []int32
	// Model is the model that the request names. Ranks on which it is a LoRA adapter are left out of the result.
	Model string
	// MayPrecede reports whether an engine may add a token before the first one, such as the token for the beginning of a
	// text; nil means never. Tokens with which cached prompts begin are tried.
	MayPrecede func(token int32) bool
}

// Cached returns the number of tokens of a prompt that each rank has cached, for the ranks whose blocks are known. The
// engine computes the last token of a prompt in any case, so it never counts. Tokens are read only as long as a rank has
// the blocks before them.
func (s *Subscriptions) Cached(prompt Prompt) map[Place]int {
	cached := map[Place]int{}
	bySize := map[int][]found{}
	var first []int32
	for place, r := range s.ranks() {
		size, known := r.state()
		if !known || r.adapts(prompt.Model) {
			continue
		}
		if cached[place] = 0; size > 0 {
			bySize[size] = append(bySize[size], found{rank: r, place: place})
			first = r.firstTokens(first)
		}
	}
	starts := [][]int32{nil}
	for _, token := range first {
		if prompt.MayPrecede != nil && prompt.MayPrecede(token) && len(starts) <= maxStartTokens {
			starts = append(starts, []int32{token})
		}
	}
	var h hasher
	for size, all := range bySize {
		for _, start := range starts {
			h.walk(start, prompt.Tokens, size, all)
			for _, one := range all {
				cached[one.place] = max(cached[one.place], one.tokens)
			}
		}
	}
	return cached
}

// found is the number of leading tokens of a prompt that a rank has cached.
type found struct {
	rank   *rank
	place  Place
	tokens int
}

// walk looks up the blocks of a prompt, from the first one, on ranks with blocks of one size. It reorders the ranks:
// those that have cached the most tokens come first.
func (h *hasher) walk(start []int32, tokens func(n int) []int32, size int, all []found) {
	for i := range all {
		all[i].tokens = 0
	}
	hash := uint64(rootHash)
	for block, left := 0, len(all); left > 0 && block < maxLookupBlocks; block++ {
		begin, end := max(0, block*size-len(start)), (block+1)*size-len(start)
		ids := tokens(end + 1) // the engine computes the last token of the prompt
		if len(ids) <= end {
			return
		}
		if block == 0 {
			hash = h.chain(hash, start, ids[:end])
		} else {
			hash = h.chain(hash, ids[begin:end])
		}
		for i := 0; i < left; {
			if all[i].rank.holds(hash) {
				all[i].tokens = (block + 1) * size
				i++
			} else {
				left--
				all[i], all[left] = all[left], all[i]
			}
		}
	}
}
