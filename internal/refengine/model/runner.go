// SPDX-License-Identifier: Apache-2.0

package model

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
)

// Chunk contains the next tokens of one sequence.
type Chunk struct {
	// Cache contains the preceding tokens. Step adds the tokens of the chunk to it.
	Cache  *Cache
	Tokens []int32
	// Routes receives the selected experts in the order of their gate weights: [len(Tokens)][Layers][TopK], with zeros
	// for dense layers.
	Routes []uint16
	// LookAhead receives the look-ahead. It may be nil.
	LookAhead *LookAhead
	// Logits receives the logits of the last tokens. Its length determines their number: [tokens][Vocab]. It may be
	// nil.
	Logits []float32
}

// Runner computes steps. It is not safe for concurrent use.
type Runner struct {
	model   *Model
	workers []workspace
	rows    []row
	// The rows of the batch, [rows][width]: the residual stream, its normalized form, queries, keys, values and the
	// output of attention.
	residual, normed, query, key, value, mixed []float32
	moe                                        moeScratch
	last                                       []int // rows whose logits are requested, one per entry of out
	out                                        []float32
}

// row is one token of the batch.
type row struct {
	chunk    *Chunk
	index    int // within the chunk
	position int // within the sequence
}

// workspace is the scratch memory of one worker.
type workspace struct {
	scores        []float32 // [heads per KV head][MaxPositions]
	input, output []float32 // [blockRows][Hidden]
	gated, upped  []float32 // [blockRows][widest FFN]
	chosen        []int     // [Experts], of a look-ahead
}

// blockRows is the number of rows of the batch that are multiplied at a time. 32 rows of a few hundred values fit into
// the L1 cache while a matrix is read.
const blockRows = 32

// NewRunner returns a runner that distributes the work of a step over the given number of goroutines.
func (m *Model) NewRunner(workers int) *Runner {
	r := &Runner{model: m, workers: make([]workspace, max(workers, 1))}
	width := max(m.MoEIntermediate, m.Intermediate)
	for i := range r.workers {
		r.workers[i] = workspace{
			scores: make([]float32, m.Heads/m.KVHeads*m.MaxPositions),
			input:  make([]float32, blockRows*m.Hidden),
			output: make([]float32, blockRows*m.Hidden),
			gated:  make([]float32, blockRows*width),
			upped:  make([]float32, blockRows*width),
			chosen: make([]int, m.Experts),
		}
	}
	return r
}

// Step computes the chunks together and advances their caches. A cache must not appear twice.
func (r *Runner) Step(chunks []Chunk) error {
	if err := r.load(chunks); err != nil {
		return err
	}
	m := r.model
	lookAhead := slices.ContainsFunc(chunks, func(c Chunk) bool { return c.LookAhead != nil })
	for l := range m.layers {
		if lookAhead && m.layers[l].gate != nil {
			r.lookAhead(l)
		}
		r.attention(l)
		r.feedForward(l)
	}
	r.logits()
	for i := range chunks {
		chunks[i].Cache.length += len(chunks[i].Tokens)
	}
	return nil
}

// load validates the chunks, lays out their rows and looks up the embeddings.
func (r *Runner) load(chunks []Chunk) error {
	m := r.model
	r.rows, r.last = r.rows[:0], r.last[:0]
	for i := range chunks {
		c := &chunks[i]
		if err := m.check(c); err != nil {
			return err
		}
		clear(c.Routes)
		c.LookAhead.clear()
		for j := range c.Tokens {
			r.rows = append(r.rows, row{chunk: c, index: j, position: c.Cache.length + j})
		}
		for j := len(c.Logits) / m.Vocab; j > 0; j-- {
			r.last = append(r.last, len(r.rows)-j)
		}
	}
	n := len(r.rows)
	grow(&r.residual, n*m.Hidden)
	grow(&r.normed, n*m.Hidden)
	grow(&r.query, n*m.Heads*m.HeadDim)
	grow(&r.mixed, n*m.Heads*m.HeadDim)
	grow(&r.key, n*m.KVHeads*m.HeadDim)
	grow(&r.value, n*m.KVHeads*m.HeadDim)
	for i, row := range r.rows {
		token := int(row.chunk.Tokens[row.index])
		copy(r.residual[i*m.Hidden:][:m.Hidden], m.embedding[token*m.Hidden:])
	}
	return nil
}

func (m *Model) check(c *Chunk) error {
	if len(c.Tokens) == 0 {
		return fmt.Errorf("chunk without tokens")
	}
	if end := c.Cache.length + len(c.Tokens); end > c.Cache.capacity || end > m.MaxPositions {
		return fmt.Errorf("sequence of %d tokens exceeds the capacity %d or the context length %d", end, c.Cache.capacity, m.MaxPositions)
	}
	if want := len(c.Tokens) * m.Layers * m.TopK; len(c.Routes) != want {
		return fmt.Errorf("routes have length %d, want %d", len(c.Routes), want)
	}
	if len(c.Logits)%m.Vocab != 0 || len(c.Logits) > len(c.Tokens)*m.Vocab {
		return fmt.Errorf("logits have length %d, want a multiple of %d for at most %d tokens", len(c.Logits), m.Vocab, len(c.Tokens))
	}
	for _, token := range c.Tokens {
		if token < 0 || int(token) >= m.Vocab {
			return fmt.Errorf("token %d is outside the vocabulary of %d", token, m.Vocab)
		}
	}
	if c.LookAhead == nil {
		return nil
	}
	return m.checkLookAhead(c)
}

// normalise writes the normalized residual stream of all rows to normed.
func (r *Runner) normalise(weight []float32) {
	hidden := r.model.Hidden
	r.eachBlock(len(r.rows), func(_ *workspace, from, to int) {
		for i := from; i < to; i++ {
			rmsNorm(r.normed[i*hidden:][:hidden], r.residual[i*hidden:][:hidden], weight, r.model.RMSNormEps)
		}
	})
}

// logits computes the requested logits.
func (r *Runner) logits() {
	m := r.model
	n := len(r.last)
	grow(&r.out, n*m.Vocab)
	for i, at := range r.last {
		rmsNorm(r.normed[i*m.Hidden:][:m.Hidden], r.residual[at*m.Hidden:][:m.Hidden], m.finalNorm, m.RMSNormEps)
	}
	r.linear(r.out, r.normed, n, m.head)
	for i, at := range r.last {
		chunk := r.rows[at].chunk
		first := len(chunk.Tokens) - len(chunk.Logits)/m.Vocab
		copy(chunk.Logits[(r.rows[at].index-first)*m.Vocab:], r.out[i*m.Vocab:][:m.Vocab])
	}
}

// linear computes dst[n][w.rows] = x[n][w.cols] times w transposed, in parallel over blocks of rows and outputs.
func (r *Runner) linear(dst, x []float32, n int, w matrix) {
	outputs := 256
	if n <= blockRows {
		// A decode step has few rows, so the matrix is split into smaller parts to use all workers.
		outputs = 64
	}
	rowBlocks, outBlocks := ceilDiv(n, blockRows), ceilDiv(w.rows, outputs)
	r.parallel(rowBlocks*outBlocks, func(_ *workspace, task int) {
		from, first := task/outBlocks*blockRows, task%outBlocks*outputs
		count, rows := min(blockRows, n-from), min(outputs, w.rows-first)
		multiply(dst[from*w.rows+first:], w.rows, x[from*w.cols:], w.cols, count, w.packed.from(first), rows, w.cols)
	})
}

// eachBlock calls f for blocks of at most blockRows of n rows, in parallel.
func (r *Runner) eachBlock(n int, f func(ws *workspace, from, to int)) {
	r.parallel(ceilDiv(n, blockRows), func(ws *workspace, task int) {
		f(ws, task*blockRows, min(n, (task+1)*blockRows))
	})
}

// parallel calls f once for every task below n. Tasks that run at the same time have different workspaces.
func (r *Runner) parallel(n int, f func(ws *workspace, task int)) {
	var next atomic.Int64
	work := func(ws *workspace) {
		for task := int(next.Add(1)) - 1; task < n; task = int(next.Add(1)) - 1 {
			f(ws, task)
		}
	}
	var others sync.WaitGroup
	for i := 1; i < min(n, len(r.workers)); i++ {
		others.Go(func() { work(&r.workers[i]) })
	}
	work(&r.workers[0])
	others.Wait()
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }

// grow returns a slice of length n, reusing s if possible. The content is undefined.
func grow[T any](s *[]T, n int) {
	*s = slices.Grow((*s)[:0], n)[:n]
}
