// SPDX-License-Identifier: Apache-2.0

package pipeline

import (
	"fmt"
	"math"
)

// Split is a division of the ranks into an attention group and an expert group, with the times of the tasks there.
type Split struct {
	// AttentionRanks and ExpertRanks are the sizes of the groups (ag, eg).
	AttentionRanks, ExpertRanks int
	// Samples is the maximum number of samples on a rank of the attention group, over all of its micro-batches.
	Samples int
	// Attention and Shared are the times on a rank of the attention group, in microseconds, as functions of the number
	// of samples; Shared is nil without shared experts. Dispatch, Experts and Combine are the times of a chunk as
	// functions of the mean number of tokens per expert.
	//
	// All functions must be convex, non-decreasing and at least 0 at 0, such as a start-up time plus work, or a maximum
	// of such functions. Of several ways to send a chunk, each must satisfy this. The search relies on it.
	Attention, Shared func(samples float64) float64
	Experts           func(tokensPerExpert float64) float64
	Dispatch, Combine Ways
}

// Ways are alternative ways to send a chunk: their times in microseconds as functions of the mean number of tokens per
// expert. A chunk uses the fastest way for its size.
type Ways []func(tokensPerExpert float64) float64

// fastest returns the time of a chunk.
func (w Ways) fastest(tokensPerExpert float64) float64 {
	us := math.Inf(1)
	for _, way := range w {
		us = min(us, way(tokensPerExpert))
	}
	return us
}

// Problem is the input of the schedule search.
type Problem struct {
	// Layers is the number of MoE layers, Experts the number of routed experts per layer, TopK the number that a token
	// activates.
	Layers, Experts, TopK int
	// Sequence is the number of tokens of a sample.
	Sequence int
	// MicroBatches is the maximum number of micro-batches per rank; 0 is DefaultMicroBatches.
	MicroBatches int
	// Splits are the possible divisions into groups.
	Splits []Split
}

// DefaultMicroBatches is the default maximum number of micro-batches: each needs a buffer and a launch of every kernel.
const DefaultMicroBatches = 32

// Check returns an error for an invalid problem.
func (p *Problem) Check() error {
	for _, field := range []struct {
		name  string
		value int
		max   int
	}{
		{"layers", p.Layers, 1 << 12}, {"experts", p.Experts, 1 << 16}, {"experts of a token", p.TopK, p.Experts}, {"sequence length", p.Sequence, 1 << 24},
		{"number of splits", len(p.Splits), 1 << 16},
	} {
		if field.value < 1 || field.value > field.max {
			return fmt.Errorf("%s: %d; allowed is 1 to %d", field.name, field.value, field.max)
		}
	}
	if p.MicroBatches < 0 || p.MicroBatches > 1<<12 {
		return fmt.Errorf("micro-batches: at most %d; allowed is 1 to %d, or 0 for %d", p.MicroBatches, 1<<12, DefaultMicroBatches)
	}
	for i, split := range p.Splits {
		if split.AttentionRanks < 1 || split.ExpertRanks < 1 || split.Samples < 1 {
			return fmt.Errorf("split %d has %d attention ranks, %d expert ranks and room for %d samples; all must be at least 1",
				i, split.AttentionRanks, split.ExpertRanks, split.Samples)
		}
		if split.Attention == nil || len(split.Dispatch) == 0 || split.Experts == nil || len(split.Combine) == 0 {
			return fmt.Errorf("split %d lacks a time function; only Shared is optional", i)
		}
		if d := p.durations(&split, 1, 1); !d.possible() {
			return fmt.Errorf("split %d: the times of one sample are %+v; attention and a stage of the chunks must be above 0", i, d)
		}
	}
	return nil
}

// possible reports whether all durations are finite and non-negative, and the throughput is bounded.
func (d Durations) possible() bool {
	for _, v := range []float64{d.Attention, d.Shared, d.Dispatch, d.Experts, d.Combine} {
		if !(v >= 0) || math.IsInf(v, 0) {
			return false
		}
	}
	return d.Attention > 0 && d.slowest() > 0
}

// microBatches returns the maximum number of micro-batches.
func (p *Problem) microBatches() int {
	if p.MicroBatches == 0 {
		return DefaultMicroBatches
	}
	return p.MicroBatches
}

// sentOneWay returns one split per pair of a way to dispatch and a way to combine.
func (s *Split) sentOneWay() []Split {
	list := make([]Split, 0, len(s.Dispatch)*len(s.Combine))
	for d := range s.Dispatch {
		for c := range s.Combine {
			one := *s
			one.Dispatch, one.Combine = s.Dispatch[d:d+1], s.Combine[c:c+1]
			list = append(list, one)
		}
	}
	return list
}

// tokensPerExpert returns the mean number of tokens per expert in a micro-batch of all attention ranks.
func (p *Problem) tokensPerExpert(split *Split, samples int) float64 {
	return float64(split.AttentionRanks) * float64(samples) * float64(p.Sequence) * float64(p.TopK) / float64(p.Experts)
}

// maxChunks returns the number of chunks with a mean of one token per expert.
func (p *Problem) maxChunks(split *Split, samples int) int {
	return int(min(max(1, p.tokensPerExpert(split, samples)), 1<<20))
}

// durations returns the durations of a micro-batch with the given number of samples per attention rank. Chunks are
// assumed equal: they are cut from the tokens of all attention ranks, where a difference of one token is negligible.
func (p *Problem) durations(split *Split, samples, chunks int) Durations {
	tokens := p.tokensPerExpert(split, samples) / float64(chunks)
	d := Durations{
		Attention: split.Attention(float64(samples)), Dispatch: split.Dispatch.fastest(tokens), Experts: split.Experts(tokens), Combine: split.Combine.fastest(tokens),
	}
	if split.Shared != nil {
		d.Shared = split.Shared(float64(samples))
	}
	return d
}
