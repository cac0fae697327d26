package profile

import (
	"cmp"
	"container/heap"
	"math"
	"math/rand/v2"
	"slices"
)

// recorded is one answered request.
type recorded struct {
	item   int // its place in the data set's sample
	tokens []int32
	// experts are those of MoE layers [tokens, MoE layers, experts per token].
	experts []uint16
	// priority orders the requests at random; the reservoir keeps the smallest.
	priority uint64
}

// reservoir keeps a uniform sample of whole requests within a number of tokens: the longest run of requests, in a random
// order that the seed decides, that fits.
type reservoir struct {
	limit  int // tokens
	tokens int
	random *rand.Rand
	// bar is the smallest priority that did not fit: what lies behind it is not kept either, however short it is, or short
	// requests would be kept more often than long ones.
	bar  uint64
	kept byPriority
}

func newReservoir(limit int, seed uint64) *reservoir {
	return &reservoir{limit: limit, random: rand.New(rand.NewPCG(seed, 0x74726163)), bar: math.MaxUint64}
}

func (r *reservoir) add(result *recorded) {
	result.priority = r.random.Uint64()
	if result.priority >= r.bar {
		return
	}
	heap.Push(&r.kept, result)
	r.tokens += len(result.tokens)
	for r.tokens > r.limit {
		out := heap.Pop(&r.kept).(*recorded)
		r.tokens -= len(out.tokens)
		r.bar = out.priority
	}
}

// requests are those that were kept, in the order of the data set.
func (r *reservoir) requests() []*recorded {
	slices.SortFunc(r.kept, func(a, b *recorded) int { return cmp.Compare(a.item, b.item) })
	return r.kept
}

// byPriority is a heap with the greatest priority on top.
type byPriority []*recorded

func (b byPriority) Len() int           { return len(b) }
func (b byPriority) Less(i, j int) bool { return b[i].priority > b[j].priority }
func (b byPriority) Swap(i, j int)      { b[i], b[j] = b[j], b[i] }
func (b *byPriority) Push(x any)        { *b = append(*b, x.(*recorded)) }
func (b *byPriority) Pop() any {
	last := len(*b) - 1
	x := (*b)[last]
	(*b)[last] = nil
	*b = (*b)[:last]
	return x
}
