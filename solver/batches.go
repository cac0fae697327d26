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
	// maxWindows is the maximum number of sampled batches in the search. windowWork bounds the activations counted for
	// them.
	maxWindows = 64
	windowWork = 1 << 26
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
	c.MeanExchange = s.options.Attention == placement.DataParallel
	windows := s.windows()
	c.Windows = make([][]float32, len(model.Layers))
	return c, affinity.Parallel(ctx, len(c.Windows), func(l int) {
		c.Windows[l] = make([]float32, len(windows)*model.Experts)
		for w, requests := range windows {
			loads := c.Windows[l][w*model.Experts : (w+1)*model.Experts]
			for _, r := range requests {
				for position := s.trace.Offsets[r]; position < s.trace.Offsets[r+1]; position++ {
					for _, e := range s.trace.Row(int(position), l) {
						loads[e]++
					}
				}
			}
		}
	})
}

// windows returns random samples of the train requests, each half as large as one step: the requests of an evaluation
// window with attention DP, those of a batch of the median size with attention TP. The expert loads of a future window
// differ from the profile by the sampling errors of both; a smaller sample has the variance of their sum. A sample has at
// most an eighth of the requests, because larger samples would all be alike, unlike future windows.
func (s *search) windows() [][]int {
	model, requests := &s.trace.Model, len(s.train)
	tokens := s.trace.TokenCount(s.train)
	size := dispatch.Arrivals
	if s.options.Attention == placement.TensorParallel {
		sizes := slices.Sorted(slices.Values(s.options.batchTokens()))
		size = sizes[len(sizes)/2] * requests / max(tokens, 1)
	}
	size = max(1, min(size, (requests+3)/4)/2)
	perWindow := float64(size) * float64(tokens) / float64(requests) * float64(len(model.Layers)*model.TopK)
	count := min(maxWindows, max(4, int(windowWork/max(perWindow, 1))))
	random := rand.New(rand.NewPCG(s.options.Seed, 0x77696e646f7773))
	windows := make([][]int, count)
	var left []int
	for w := range windows {
		for len(windows[w]) < size {
			if len(left) == 0 {
				left = random.Perm(requests)
			}
			windows[w] = append(windows[w], s.train[left[0]])
			left = left[1:]
		}
	}
	return windows
}
