// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/semmoe/operator/solver/dispatch"
)

// conversationHashes returns the hashes of one of a few conversations, truncated at random, so that many share a
// beginning.
func conversationHashes(random *rand.Rand) []uint64 {
	var tokens []int32
	for range 1 + random.IntN(6) {
		piece := int32(random.IntN(3))
		for range dispatch.PrefixBlock {
			tokens = append(tokens, piece)
		}
	}
	return dispatch.PrefixHashes(nil, tokens)
}

// Due counts tokens that were requested often less, and others half.
func TestDueOfObservedTokens(t *testing.T) {
	p := dispatch.NewPrefixes(0)
	place := p.Add()
	hashes := dispatch.PrefixHashes(nil, make([]int32, 2*dispatch.PrefixBlock))
	if p.Match(hashes); p.Due(100) != 50 {
		t.Errorf("100 tokens of an unknown request are due %v, want 50", p.Due(100))
	}
	for range 3 {
		p.Put(place, hashes)
	}
	p.Match(hashes)
	if got, want := p.Due(2*dispatch.PrefixBlock), p.Hit(place).Due; got != want {
		t.Errorf("the recorded tokens are due %v, want %v as for a place that has them", got, want)
	}
	if got, want := p.Due(2*dispatch.PrefixBlock+10), p.Hit(place).Due+5; got != want {
		t.Errorf("the recorded tokens and 10 more are due %v, want %v", got, want)
	}
	if got := p.Due(10); got != 5 {
		t.Errorf("10 tokens, less than a block, are due %v, want 5", got)
	}
}

// Without eviction, Match finds exactly the longest beginning that each place was given.
func TestPrefixesAgreeWithALog(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	p := dispatch.NewPrefixes(0)
	given := map[int][][]uint64{}
	var live []int
	for range 4000 {
		switch n := random.IntN(20); {
		case n == 0 || len(live) == 0:
			place := p.Add()
			if _, used := given[place]; used {
				t.Fatalf("index %d is assigned twice", place)
			}
			given[place] = nil
			live = append(live, place)
		case n == 1 && len(live) > 1:
			i := random.IntN(len(live))
			p.Remove(live[i])
			delete(given, live[i])
			live = slices.Delete(live, i, i+1)
		case n < 8:
			place, hashes := live[random.IntN(len(live))], conversationHashes(random)
			p.Put(place, hashes)
			given[place] = append(given[place], hashes)
		default:
			hashes := conversationHashes(random)
			p.Match(hashes)
			for _, place := range live {
				want := 0
				for _, had := range given[place] {
					n := 0
					for n < min(len(had), len(hashes)) && had[n] == hashes[n] {
						n++
					}
					want = max(want, n*dispatch.PrefixBlock)
				}
				hit := p.Hit(place)
				if hit.Tokens != want {
					t.Fatalf("place %d: match of %d tokens, want %d", place, hit.Tokens, want)
				}
				if hit.Due < 0 || hit.Due > float64(want)/2 {
					t.Fatalf("%d tokens that were requested before have Due %v", want, hit.Due)
				}
			}
		}
	}
}

// A place evicts the least recently used blocks, ends before beginnings, and never holds more than its cache.
func TestPrefixesEviction(t *testing.T) {
	const blocks = 10
	p := dispatch.NewPrefixes(blocks * dispatch.PrefixBlock)
	place, other := p.Add(), p.Add()
	old, hot := []uint64{1, 2, 3, 4, 5, 6}, []uint64{11, 12}
	p.Put(place, old)
	p.Put(place, hot)
	p.Put(other, old)
	held := func(hashes []uint64) int {
		p.Match(hashes)
		return p.Hit(place).Tokens / dispatch.PrefixBlock
	}
	for n := uint64(100); n < 104; n++ {
		p.Put(place, hot)
		p.Put(place, []uint64{n})
	}
	if got := held(old); got != 4 {
		t.Errorf("%d blocks of the oldest request remain, want 4, without its end", got)
	}
	if got := held(hot); got != 2 {
		t.Errorf("%d of the 2 blocks that were requested again remain", got)
	}
	if p.Match(old); p.Hit(other).Tokens != 6*dispatch.PrefixBlock {
		t.Errorf("another place has %d tokens cached", p.Hit(other).Tokens)
	}
	long := make([]uint64, 3*blocks)
	for i := range long {
		long[i] = uint64(1000 + i)
	}
	p.Put(place, long)
	if got := held(long); got < blocks-len(hot) || got > blocks {
		t.Errorf("a cache of %d blocks, %d of which are in use, holds %d of a request", blocks, len(hot), got)
	}
	p.Remove(place)
	if again := p.Add(); again != place || held(long) != 0 {
		t.Errorf("place %d, added in its stead, holds %d blocks", again, held(long))
	}
}

// Forget removes the prefixes from the place but keeps earlier blocks and those of other places.
func TestForget(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 3))
	const places, blocks = 3, 50
	p := dispatch.NewPrefixes(blocks * dispatch.PrefixBlock)
	for range places {
		p.Add()
	}
	held := func(place int, hashes ...uint64) int {
		p.Match(hashes)
		return p.Hit(place).Tokens / dispatch.PrefixBlock
	}
	p.Put(0, []uint64{1, 2, 3, 4})
	p.Put(1, []uint64{1, 2, 3})
	p.Forget(0, []uint64{3, 4, 5})
	if first, second := held(0, 1, 2, 3, 4), held(1, 1, 2, 3, 4); first != 2 || second != 3 {
		t.Errorf("%d and %d blocks are held, want 2 and 3", first, second)
	}
	for range 20_000 {
		place, begin := random.IntN(places), uint64(random.IntN(40))
		hashes := []uint64{begin, begin + 1, begin + 2}[:1+random.IntN(3)]
		p.Put(place, hashes)
		if got := held(place, hashes...); got != len(hashes) {
			t.Fatalf("%d of %d blocks that were just given are held", got, len(hashes))
		}
		if random.IntN(3) == 0 {
			kept := random.IntN(len(hashes) + 1)
			p.Forget(place, hashes[kept:])
			if got := held(place, hashes...); got != kept {
				t.Fatalf("%d blocks are held, want %d", got, kept)
			}
		}
	}
}

// A full cache keeps the most recent blocks longest, regardless of calls to Forget.
func TestPrefixesKeepTheNewest(t *testing.T) {
	const blocks = 100
	for _, every := range []int{2, 3, 7} {
		p := dispatch.NewPrefixes(blocks * dispatch.PrefixBlock)
		place := p.Add()
		request := func(i int) []uint64 { return []uint64{uint64(3 * i), uint64(3*i + 1), uint64(3*i + 2)} }
		for i := range 2000 {
			p.Put(place, request(i))
			if i%every == 0 {
				p.Put(place, request(100_000+i))
				p.Forget(place, request(100_000+i))
			}
			for back := range min(i, blocks/6) { // half of its capacity
				if p.Match(request(i - back)); p.Hit(place).Tokens != 3*dispatch.PrefixBlock {
					t.Fatalf("one of %d requests reverted: after %d requests, request -%d is not fully cached", every, i, back)
				}
			}
		}
	}
}

// Under constant eviction memory is bounded, and all places that hold a block find it.
func TestPrefixesUnderEviction(t *testing.T) {
	random := rand.New(rand.NewPCG(2, 2))
	const places, blocks = 5, 40
	p := dispatch.NewPrefixes(blocks * dispatch.PrefixBlock)
	for range places {
		p.Add()
	}
	for range 20_000 {
		hashes := make([]uint64, 1+random.IntN(8))
		hash := uint64(random.IntN(200))
		for i := range hashes {
			hash = (hash + 1) * 0x9e3779b97f4a7c15
			hashes[i] = hash
		}
		place := random.IntN(places)
		p.Put(place, hashes)
		p.Match(hashes)
		if got := p.Hit(place).Tokens; got != len(hashes)*dispatch.PrefixBlock {
			t.Fatalf("%d tokens of %d recent blocks are found", got, len(hashes))
		}
	}
	if n := testing.AllocsPerRun(1000, func() {
		p.Put(random.IntN(places), []uint64{random.Uint64(), random.Uint64()})
	}); n > 0.1 {
		t.Errorf("%v allocations for each request in steady state", n)
	}
}

func TestTextPrefixHashes(t *testing.T) {
	text := string(slices.Repeat([]byte("abcdefgh"), 100))
	whole := dispatch.TextPrefixHashes(nil, []string{text})
	if len(whole) != 3 {
		t.Fatalf("%d hashes of %d bytes", len(whole), len(text))
	}
	if shorter := dispatch.TextPrefixHashes(nil, []string{text[:600]}); !slices.Equal(shorter, whole[:2]) {
		t.Errorf("hashes %x of the beginning, %x of the whole", shorter, whole)
	}
	if parted := dispatch.TextPrefixHashes(nil, []string{text[:300], text[300:]}); parted[0] != whole[0] || parted[1] == whole[1] {
		t.Errorf("hashes %x of two texts, %x of one", parted, whole)
	}
}
