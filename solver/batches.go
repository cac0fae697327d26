// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// DefaultBatchTokens are the default batch sizes, in tokens over all ranks, all with equal weight: a large decode step
// or one prompt, several prompts, and many prompts.
var DefaultBatchTokens = []int{4096, 16384, 65536}

// maxBatchTokens is the maximum batch size: several times that of the largest known deployments.
const maxBatchTokens = 1 << 24

// CheckBatchTokens returns an error if a batch size is outside the range that engines support.
func CheckBatchTokens(sizes []int) error {
	if len(sizes) == 0 {
		return fmt.Errorf("batch tokens is empty; it must have at least one batch size, in tokens over all ranks")
	}
	for _, n := range sizes {
		if n < 1 || n > maxBatchTokens {
			return fmt.Errorf("batch tokens is %d; allowed is 1 to %d", n, maxBatchTokens)
		}
	}
	return nil
}

// batchTokens returns the given batch sizes, or the default.
func (o *Options) batchTokens() []int {
	if len(o.BatchTokens) == 0 {
		return DefaultBatchTokens
	}
	return o.BatchTokens
}

// layer models the layer of a placement on the target machines.
func (o *Options) layer(m *trace.Model, slotsPerRank int) cost.Layer {
	return cost.LayerOf(m, cost.MachinesOf(o.profile(), o.Ranks, o.ranksPerNode()), o.Ranks, slotsPerRank)
}

// timed reports whether the search minimizes modelled time.
func (s *search) timed() bool {
	return s.options.objective() == placement.Time && s.options.Algorithm == placement.Auto
}

const (
	// minWindows and maxWindows bound the number of sampled batches in the search. windowSwaps is the target for the
	// loads that one pass over all pairs of experts reads. With more windows, fewer swaps gain only by chance.
	minWindows, maxWindows = 32, 128
	windowSwaps            = 1 << 21
	// meanExchangeOfNodes is the weight of the mean exchange of all ranks with attention DP on several nodes. There the
	// exchange takes most of a layer's time: with weight 1, placements load some ranks more than others, and these also
	// receive the most. With weight 0, they give up locality to even out ranks that later requests load differently.
	meanExchangeOfNodes = 0.5
)

// clock returns the time model of a layer for the search, with samples of the requests that a rank group computes
// together.
func (s *search) clock(ctx context.Context) (*placement.Clock, error) {
	model := &s.trace.Model
	layer, sizes := s.options.layer(model, model.Experts/s.options.Ranks+s.options.RedundantSlots), s.options.batchTokens()
	c := placement.NewClock(func(exchange, load float64) float64 {
		sum := 0.0
		for _, tokens := range sizes {
			sum += layer.Time(tokens, exchange, load).Total()
		}
		return sum / float64(len(sizes))
	})
	if s.options.Attention == placement.DataParallel {
		c.MeanExchange = 1
		if s.options.Ranks > s.options.ranksPerNode() {
			c.MeanExchange = meanExchangeOfNodes
		}
	}
	count := min(maxWindows, max(minWindows, windowSwaps/(model.Experts*model.Experts)))
	documents := s.windows(count)
	c.Windows = make([][]float32, len(model.Layers))
	return c, affinity.Parallel(ctx, len(c.Windows), func(l int) {
		c.Windows[l] = make([]float32, count*model.Experts)
		loads := make([]float32, model.Experts)
		for _, d := range documents {
			if len(d.windows) == 0 {
				continue
			}
			clear(loads)
			for _, r := range d.requests {
				for position := s.trace.Offsets[r]; position < s.trace.Offsets[r+1]; position++ {
					for _, e := range s.trace.Row(int(position), l) {
						loads[e]++
					}
				}
			}
			for _, w := range d.windows {
				for e, n := range loads {
					c.Windows[l][w*model.Experts+e] += n
				}
			}
		}
	})
}

// windowedDocument contains the train requests of a document, and the windows that contain the document.
type windowedDocument struct{ requests, windows []int }

// windows draws whole documents with replacement into each window (bootstrap, Efron 1979). A window models the
// difference between the loads of a future step and those of the profile: with b requests in a step and n in the
// profile, the variance of the difference is that of a sample of bn/(b+n) requests. A step has the requests of an
// evaluation window with attention DP, those of a batch of the median size with attention TP.
func (s *search) windows(count int) []windowedDocument {
	size := float64(dispatch.Arrivals)
	if s.options.Attention == placement.TensorParallel {
		sizes := slices.Sorted(slices.Values(s.options.batchTokens()))
		size = float64(sizes[len(sizes)/2]*len(s.train)) / float64(max(s.trace.TokenCount(s.train), 1))
	}
	size = size * float64(len(s.train)) / (size + float64(len(s.train)))
	var documents []windowedDocument
	index := map[int32]int{}
	for _, r := range s.train {
		i, known := index[s.trace.Documents[r]]
		if !known {
			i = len(documents)
			index[s.trace.Documents[r]] = i
			documents = append(documents, windowedDocument{})
		}
		documents[i].requests = append(documents[i].requests, r)
	}
	random := rand.New(rand.NewPCG(s.options.Seed, 0x77696e646f7773))
	for w := range count {
		for drawn := 0; float64(drawn) < size; {
			d := &documents[random.IntN(len(documents))]
			d.windows = append(d.windows, w)
			drawn += len(d.requests)
		}
	}
	return documents
}
