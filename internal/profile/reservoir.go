// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"cmp"
	"container/heap"
	"math"
	"math/rand/v2"
	"slices"
)

// recorded is one recorded request.
type recorded struct {
	item   int // index in the sample of the data set
	tokens []int32
	// experts are the experts of the MoE layers, with the shape [tokens, MoE layers, experts per token].
	experts []uint16
	// priority is random. The reservoir keeps the requests with the smallest priorities.
	priority uint64
}

// reservoir keeps a uniform sample of complete requests within a number of tokens. It keeps the longest prefix that
// fits of the requests in a random order. The seed determines the order.
type reservoir struct {
	limit  int // tokens
	tokens int
	random *rand.Rand
	// cutoff is the smallest priority that did not fit. Requests with a larger priority are not kept, even if they are
	// short. Otherwise the sample would be biased towards short requests.
	cutoff uint64
	kept   byPriority
}

func newReservoir(limit int, seed uint64) *reservoir {
	return &reservoir{limit: limit, random: rand.New(rand.NewPCG(seed, 0x74726163)), cutoff: math.MaxUint64}
}

func (r *reservoir) add(result *recorded) {
	result.priority = r.random.Uint64()
	if result.priority >= r.cutoff {
		return
	}
	heap.Push(&r.kept, result)
	r.tokens += len(result.tokens)
	for r.tokens > r.limit {
		out := heap.Pop(&r.kept).(*recorded)
		r.tokens -= len(out.tokens)
		r.cutoff = out.priority
	}
}

// requests returns the kept requests, in the order of the data set.
func (r *reservoir) requests() []*recorded {
	slices.SortFunc(r.kept, func(a, b *recorded) int { return cmp.Compare(a.item, b.item) })
	return r.kept
}

// byPriority is a heap with the largest priority on top.
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
