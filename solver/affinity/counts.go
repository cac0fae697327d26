// SPDX-License-Identifier: Apache-2.0

package affinity

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/semmoe/operator/solver/trace"
)

// Counts contains the activations of one MoE layer by token id, as compressed sparse rows.
type Counts struct {
	// Experts is the number of experts, TopK the activations per occurrence of a token.
	Experts, TopK int
	// Index is the row of each token id, or -1 for none [V]; nil if token id and row are equal. The layers of a profile
	// share Index and Occurrences, so their memory does not grow with the number of layers.
	Index []int32
	// Start contains the bounds of each row's entries [rows+1].
	Start []int
	// Expert and Count are the entries. The experts of a row are in ascending order.
	Expert []uint16
	Count  []float32
	// Occurrences is the number of occurrences of each token id [V].
	Occurrences []float32
}

// Vocabulary returns the number of token ids.
func (c *Counts) Vocabulary() int { return len(c.Occurrences) }

// Row returns the experts and counts of a token id.
func (c *Counts) Row(token int) ([]uint16, []float32) {
	row := token
	if c.Index != nil {
		if row = int(c.Index[token]); row < 0 {
			return nil, nil
		}
	}
	begin, end := c.Start[row], c.Start[row+1]
	return c.Expert[begin:end], c.Count[begin:end]
}

// Equal reports whether both have the same counts for each token id, regardless of the row order.
func (c Counts) Equal(d Counts) bool {
	if checkShape(&c, &d) != nil || !slices.Equal(c.Occurrences, d.Occurrences) {
		return false
	}
	for id := range c.Vocabulary() {
		experts, counts := c.Row(id)
		others, otherCounts := d.Row(id)
		if !slices.Equal(experts, others) || !slices.Equal(counts, otherCounts) {
			return false
		}
	}
	return true
}

// RowOccurrences returns the number of occurrences of each row's token id.
func (c *Counts) RowOccurrences() []float32 {
	if c.Index == nil {
		return c.Occurrences
	}
	of := make([]float32, len(c.Start)-1)
	for id, row := range c.Index {
		if row >= 0 {
			of[row] = c.Occurrences[id]
		}
	}
	return of
}

// ExpertTotals returns the activations of each expert over all tokens.
func (c *Counts) ExpertTotals() []float64 {
	totals := make([]float64, c.Experts)
	for i, expert := range c.Expert {
		totals[expert] += float64(c.Count[i])
	}
	return totals
}

// CountTokens counts the activations of the listed requests and returns one Counts per MoE layer.
func CountTokens(ctx context.Context, t *trace.Trace, requests []int) ([]Counts, error) {
	positions, start := groupByToken(t, requests)
	seen := Counts{Experts: t.Model.Experts, TopK: t.Model.TopK, Index: make([]int32, t.Model.Vocabulary), Occurrences: make([]float32, t.Model.Vocabulary)}
	rows := 0
	for id := range t.Model.Vocabulary {
		seen.Index[id] = -1
		if n := start[id+1] - start[id]; n > 0 {
			seen.Index[id], seen.Occurrences[id] = int32(rows), float32(n)
			rows++
		}
	}
	layers := make([]Counts, len(t.Model.Layers))
	err := Parallel(ctx, len(layers), func(l int) {
		layers[l] = seen
		layers[l].Start = make([]int, 1, rows+1)
		layers[l].count(t, l, positions, start)
	})
	return layers, err
}

// groupByToken sorts the positions of the listed requests by token id. start contains the bounds of each id [V+1].
func groupByToken(t *trace.Trace, requests []int) (positions []int32, start []int) {
	start = make([]int, t.Model.Vocabulary+1)
	for _, r := range requests {
		for _, id := range t.Request(r) {
			start[id+1]++
		}
	}
	for id := range t.Model.Vocabulary {
		start[id+1] += start[id]
	}
	positions = make([]int32, start[t.Model.Vocabulary])
	next := append([]int(nil), start...)
	for _, r := range requests {
		for p := t.Offsets[r]; p < t.Offsets[r+1]; p++ {
			id := t.Tokens[p]
			positions[next[id]] = int32(p)
			next[id]++
		}
	}
	return positions, start
}

// count appends the rows of a layer.
func (c *Counts) count(t *trace.Trace, layer int, positions []int32, start []int) {
	row := make([]float32, c.Experts)
	for id, n := range c.Occurrences {
		if n == 0 {
			continue
		}
		for _, p := range positions[start[id]:start[id+1]] {
			for _, expert := range t.Row(int(p), layer) {
				row[expert]++
			}
		}
		c.appendRow(row)
		c.Start = append(c.Start, len(c.Expert))
	}
}

// appendRow appends the non-zero entries of a dense row to the sparse rows and clears the dense row.
func (c *Counts) appendRow(row []float32) {
	for expert, n := range row {
		if n != 0 {
			c.Expert = append(c.Expert, uint16(expert))
			c.Count = append(c.Count, n)
			row[expert] = 0
		}
	}
}

// Merge returns weightA·a + weightB·b: the union of two profiles, or an old profile discounted by age.
func Merge(a, b *Counts, weightA, weightB float32) (Counts, error) {
	if err := checkShape(a, b); err != nil {
		return Counts{}, err
	}
	if weightA < 0 || weightB < 0 {
		return Counts{}, errors.New("weights of profiles must be at least 0")
	}
	c := Counts{Experts: a.Experts, TopK: a.TopK, Start: make([]int, a.Vocabulary()+1), Occurrences: make([]float32, a.Vocabulary())}
	row := make([]float32, a.Experts)
	for id := range a.Vocabulary() {
		c.Occurrences[id] = a.addRow(row, id, weightA) + b.addRow(row, id, weightB)
		c.appendRow(row)
		c.Start[id+1] = len(c.Expert)
	}
	return c, nil
}

// checkShape returns an error for counts of different models.
func checkShape(a, b *Counts) error {
	if a.Experts != b.Experts || a.TopK != b.TopK || a.Vocabulary() != b.Vocabulary() {
		return fmt.Errorf("profiles differ: %d and %d experts, top-%d and top-%d, vocabulary %d and %d",
			a.Experts, b.Experts, a.TopK, b.TopK, a.Vocabulary(), b.Vocabulary())
	}
	return nil
}

// RequestCounts contains the activations of whole requests over all MoE layers.
type RequestCounts struct {
	// Layers, Experts and TopK are the shape of one row.
	Layers, Experts, TopK int
	// Tokens is the length of each request [R].
	Tokens []float32
	// Rows contains the activations of each request [R][layers × experts].
	Rows [][]float32
	// Weight is the weight of each request, already multiplied into Tokens and Rows [R]; nil for weight 1.
	Weight []float32
}

// TokenCount returns the number of tokens of all requests.
func (c *RequestCounts) TokenCount() float64 {
	sum := 0.0
	for _, n := range c.Tokens {
		sum += float64(n)
	}
	return sum
}

// Part returns the requests with the given indices.
func (c *RequestCounts) Part(picked []int) *RequestCounts {
	part := *c
	part.Tokens, part.Rows, part.Weight = make([]float32, len(picked)), make([][]float32, len(picked)), nil
	for i, r := range picked {
		part.Tokens[i], part.Rows[i] = c.Tokens[r], c.Rows[r]
		if c.Weight != nil {
			part.Weight = append(part.Weight, c.Weight[r])
		}
	}
	return &part
}

// CountRequests counts the activations of each listed request.
func CountRequests(ctx context.Context, t *trace.Trace, requests []int) (*RequestCounts, error) {
	c := &RequestCounts{
		Layers: len(t.Model.Layers), Experts: t.Model.Experts, TopK: t.Model.TopK,
		Tokens: make([]float32, len(requests)), Rows: make([][]float32, len(requests)),
	}
	err := Parallel(ctx, len(requests), func(i int) {
		r := requests[i]
		row := make([]float32, c.Layers*c.Experts)
		for p := int(t.Offsets[r]); p < int(t.Offsets[r+1]); p++ {
			for l := range c.Layers {
				for _, expert := range t.Row(p, l) {
					row[l*c.Experts+int(expert)]++
				}
			}
		}
		c.Tokens[i], c.Rows[i] = float32(t.Length(r)), row
	})
	return c, err
}

// Parallel calls do for 0 to n-1 on all processors and returns when all calls have returned. After cancellation it
// starts no more calls and returns the context's error. The order of the calls is undefined.
func Parallel(ctx context.Context, n int, do func(i int)) error {
	var next atomic.Int64
	var workers sync.WaitGroup
	for range min(n, runtime.GOMAXPROCS(0)) {
		workers.Go(func() {
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				do(i)
			}
		})
	}
	workers.Wait()
	return ctx.Err()
}

// Counter returns a function that reports one more of total as done, from any goroutine; progress may be nil.
func Counter(total int, progress func(done, total int)) func() {
	if progress == nil {
		return func() {}
	}
	done := make(chan int, 1)
	done <- 0
	return func() {
		n := <-done + 1
		progress(n, total)
		done <- n
	}
}
