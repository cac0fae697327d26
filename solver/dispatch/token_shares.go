// SPDX-License-Identifier: Apache-2.0

package dispatch

import "github.com/semmoe/operator/solver/assign"

// Shards assigns the tokens of a batch to ranks in exact shares: equal shares by default, as reduce-scatter requires.
type Shards struct {
	ranks    int
	shares   []float64
	solver   assign.Solver
	capacity []int
}

// NewShards returns equal Shards for the given number of ranks.
func NewShards(ranks int) *Shards { return NewWeightedShards(ranks, nil) }

// NewWeightedShards returns Shards for ranks with the given capacities, in any unit; nil means equal shares.
func NewWeightedShards(ranks int, capacity []float64) *Shards {
	return &Shards{ranks: ranks, shares: sharesOf(capacity, ranks), capacity: make([]int, ranks)}
}

// Assign returns the rank of each token of a batch: the assignment with the highest sum of scores [tokens × ranks]
// within the shares. If equal shares do not divide the batch, the first ranks get one token more. The result is valid
// until the next call.
func (s *Shards) Assign(scores []float32) []int {
	apportion(s.capacity, len(scores)/s.ranks, s.shares)
	return s.solver.Assign(scores, s.capacity)
}

const (
	// streamBlock is the number of tokens between two price updates of a Stream.
	streamBlock = 512
	// streamStep is the price change of a rank that had twice its share in a block.
	streamStep = 0.01
)

// Stream assigns tokens one by one. Prices balance the load over time, not within a batch.
type Stream struct {
	shares []float64
	prices []float64
	load   []int
	count  int
}

// NewStream returns a Stream for the given number of ranks with equal shares.
func NewStream(ranks int) *Stream { return NewWeightedStream(ranks, nil) }

// NewWeightedStream returns a Stream for ranks with the given capacities, in any unit; nil means equal shares.
func NewWeightedStream(ranks int, capacity []float64) *Stream {
	return &Stream{shares: sharesOf(capacity, ranks), prices: make([]float64, ranks), load: make([]int, ranks)}
}

// Assign returns the rank of the next token.
func (s *Stream) Assign(scores []float32) int {
	best := 0
	bestValue := float64(scores[0]) - s.prices[0]
	for rank := 1; rank < len(s.prices); rank++ {
		if value := float64(scores[rank]) - s.prices[rank]; value > bestValue {
			best, bestValue = rank, value
		}
	}
	s.load[best]++
	if s.count++; s.count == streamBlock {
		s.update()
	}
	return best
}

func (s *Stream) update() {
	for rank, load := range s.load {
		s.prices[rank] += streamStep * (float64(load)/(streamBlock*s.shares[rank]) - 1)
	}
	clear(s.load)
	s.count = 0
}
