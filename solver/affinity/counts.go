package affinity

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/semmoe/operator/solver/trace"
)

// Counts are the activations of one MoE layer by token id, as compressed sparse rows.
type Counts struct {
	// Experts is the number of experts, TopK the activations of one occurrence of a token.
	Experts, TopK int
	// Start are the bounds of each token id's entries [V+1].
	Start []int
	// Expert and Count are the entries; the experts of a row ascend.
	Expert []uint16
	Count  []float32
	// Occurrences is how often each token id occurred [V].
	Occurrences []float32
}

// Vocabulary is the number of rows.
func (c *Counts) Vocabulary() int { return len(c.Occurrences) }

// Row returns the experts and counts of a token id.
func (c *Counts) Row(token int) ([]uint16, []float32) {
	begin, end := c.Start[token], c.Start[token+1]
	return c.Expert[begin:end], c.Count[begin:end]
}

// ExpertTotals are the activations of each expert over all tokens.
func (c *Counts) ExpertTotals() []float64 {
	totals := make([]float64, c.Experts)
	for i, expert := range c.Expert {
		totals[expert] += float64(c.Count[i])
	}
	return totals
}

// CountTokens counts the listed requests, one Counts for each MoE layer.
func CountTokens(ctx context.Context, t *trace.Trace, requests []int) ([]Counts, error) {
	positions, start := groupByToken(t, requests)
	layers := make([]Counts, len(t.Model.Layers))
	err := Parallel(ctx, len(layers), func(l int) { layers[l] = countLayer(t, l, positions, start) })
	return layers, err
}

// groupByToken sorts the positions of the listed requests by token id; start are the bounds of each id [V+1].
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

func countLayer(t *trace.Trace, layer int, positions []int32, start []int) Counts {
	vocabulary := t.Model.Vocabulary
	c := Counts{
		Experts: t.Model.Experts, TopK: t.Model.TopK,
		Start: make([]int, vocabulary+1), Occurrences: make([]float32, vocabulary),
	}
	row := make([]float32, t.Model.Experts)
	for id := range vocabulary {
		for _, p := range positions[start[id]:start[id+1]] {
			for _, expert := range t.Row(int(p), layer) {
				row[expert]++
			}
		}
		c.Occurrences[id] = float32(start[id+1] - start[id])
		if start[id+1] > start[id] {
			c.appendRow(row)
		}
		c.Start[id+1] = len(c.Expert)
	}
	return c
}

// appendRow moves the non-zero entries of a dense row to the end of the sparse rows and clears it.
func (c *Counts) appendRow(row []float32) {
	for expert, n := range row {
		if n != 0 {
			c.Expert = append(c.Expert, uint16(expert))
			c.Count = append(c.Count, n)
			row[expert] = 0
		}
	}
}

// Merge returns weightA·a + weightB·b: the union of two profiles, or an old profile faded by its age.
func Merge(a, b *Counts, weightA, weightB float32) (Counts, error) {
	if err := alike(a, b); err != nil {
		return Counts{}, err
	}
	if weightA < 0 || weightB < 0 {
		return Counts{}, errors.New("weights of profiles cannot be negative")
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

// alike refuses counts of different models.
func alike(a, b *Counts) error {
	if a.Experts != b.Experts || a.TopK != b.TopK || a.Vocabulary() != b.Vocabulary() {
		return fmt.Errorf("profiles differ: %d and %d experts, top-%d and top-%d, vocabulary %d and %d",
			a.Experts, b.Experts, a.TopK, b.TopK, a.Vocabulary(), b.Vocabulary())
	}
	return nil
}

// RequestCounts are the activations of whole requests over all MoE layers.
type RequestCounts struct {
	// Layers, Experts and TopK are the shape of one row.
	Layers, Experts, TopK int
	// Tokens is the length of each request [R].
	Tokens []float32
	// Rows are the activations of each request [R][layers × experts].
	Rows [][]float32
	// Weight is what each request counts, which Tokens and Rows are multiplied by already [R]; nil where all count alike.
	Weight []float32
}

// TokenCount is how many tokens the requests have.
func (c *RequestCounts) TokenCount() float64 {
	sum := 0.0
	for _, n := range c.Tokens {
		sum += float64(n)
	}
	return sum
}

// Part are some of the requests.
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

// CountRequests counts each of the listed requests.
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

// Parallel calls do for 0 to n-1 on all processors and returns when all calls have; on a cancelled context it starts no
// more calls and returns the context's error. Calls must not depend on one another's order.
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
