package tokenizer

import (
	"cmp"
	"container/heap"
	"sync"
)

// bpe merges bytes into tokens.
type bpe struct {
	byteTokens [256]int32
	merges     map[pair]merge
	// words holds whole vocabulary entries where the model takes them without merging (ignore_merges); nil elsewhere.
	words map[string]int32
	cache wordCache
}

// pair is two neighbouring tokens.
type pair struct{ left, right int32 }

// merge is what a pair becomes; the lowest rank is applied first.
type merge struct{ rank, token int32 }

// appendTokens appends the tokens of one piece of text.
func (b *bpe) appendTokens(ids []int32, piece string) []int32 {
	if len(piece) == 1 {
		return append(ids, b.byteTokens[piece[0]])
	}
	if token, ok := b.words[piece]; ok {
		return append(ids, token)
	}
	if cached, ok := b.cache.get(piece); ok {
		return append(ids, cached...)
	}
	tokens := b.merge(piece)
	b.cache.put(piece, tokens)
	return append(ids, tokens...)
}

// merge applies the merges in order of rank, the leftmost first among equals. Symbols form a linked list and candidates
// a heap, so that a piece of n bytes takes O(n log n): a long run of one character is ordinary input.
func (b *bpe) merge(piece string) []int32 {
	symbols := make([]symbol, len(piece))
	var queue mergeQueue
	for i := range symbols {
		symbols[i] = symbol{token: b.byteTokens[piece[i]], previous: i - 1, next: i + 1}
	}
	symbols[len(symbols)-1].next = -1
	propose := func(left int) {
		if left < 0 || symbols[left].next < 0 {
			return
		}
		p := pair{symbols[left].token, symbols[symbols[left].next].token}
		if m, ok := b.merges[p]; ok {
			queue = append(queue, candidate{merge: m, at: left, pair: p})
		}
	}
	for i := range symbols {
		propose(i)
	}
	heap.Init(&queue)
	for len(queue) > 0 {
		c := heap.Pop(&queue).(candidate)
		left := &symbols[c.at]
		// An earlier merge may have taken either side since the candidate was proposed.
		if left.next < 0 || left.token != c.pair.left || symbols[left.next].token != c.pair.right {
			continue
		}
		right := &symbols[left.next]
		left.token, left.next = c.token, right.next
		right.token = gone
		if left.next >= 0 {
			symbols[left.next].previous = c.at
		}
		for _, at := range []int{left.previous, c.at} {
			before := len(queue)
			if propose(at); len(queue) > before {
				heap.Fix(&queue, before)
			}
		}
	}
	tokens := make([]int32, 0, 4)
	for i := 0; i >= 0; i = symbols[i].next {
		tokens = append(tokens, symbols[i].token)
	}
	return tokens
}

// gone marks a symbol that was merged into its left neighbour.
const gone = -1

type symbol struct {
	token          int32
	previous, next int
}

type candidate struct {
	merge
	at   int
	pair pair
}

type mergeQueue []candidate

func (q mergeQueue) Len() int { return len(q) }
func (q mergeQueue) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(q[i].rank, q[j].rank), cmp.Compare(q[i].at, q[j].at)) < 0
}
func (q mergeQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *mergeQueue) Push(c any)   { *q = append(*q, c.(candidate)) }
func (q *mergeQueue) Pop() any {
	last := len(*q) - 1
	c := (*q)[last]
	*q = (*q)[:last]
	return c
}

const (
	// cacheWords and cacheWordBytes bound the cache to a few megabytes whatever is tokenized.
	cacheWords     = 1 << 16
	cacheWordBytes = 64
)

// wordCache remembers the tokens of short pieces: text repeats its words. When full it stays as it is.
type wordCache struct {
	mu    sync.RWMutex
	words map[string][]int32
}

func (c *wordCache) get(piece string) ([]int32, bool) {
	if len(piece) > cacheWordBytes {
		return nil, false
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	tokens, ok := c.words[piece]
	return tokens, ok
}

func (c *wordCache) put(piece string, tokens []int32) {
	if len(piece) > cacheWordBytes {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.words) < cacheWords {
		// The piece is copied: a substring would keep the whole text in memory.
		c.words[string([]byte(piece))] = tokens
	}
}
