package pipeline

import (
	"fmt"
	"math"
)

// Split is a way to part the ranks into an attention group and an expert group, and what tasks take there.
type Split struct {
	// AttentionRanks and ExpertRanks are the sizes of the groups (ag, eg).
	AttentionRanks, ExpertRanks int
	// Samples is how many a rank of the attention group can hold at once, all of its micro-batches together.
	Samples int
	// Attention and Shared are the times of as many samples on a rank of the attention group, in microseconds; Shared is nil without shared
	// experts. Dispatch, Experts and Combine are those of a chunk with as many tokens for each expert, in the mean.
	//
	// All must be convex, must not decrease, and must not be below 0 at 0, as start-up time plus work is, or the longest of several
	// such; of the ways to send a chunk, each must. The search rests on it.
	Attention, Shared func(samples float64) float64
	Experts           func(tokensPerExpert float64) float64
	Dispatch, Combine Ways
}

// Ways are the times of a chunk with as many tokens for each expert, in microseconds, by the ways to send it. It takes the one that is fastest for its
// size.
type Ways []func(tokensPerExpert float64) float64

// fastest is the time of a chunk.
func (w Ways) fastest(tokensPerExpert float64) float64 {
	us := math.Inf(1)
	for _, way := range w {
		us = min(us, way(tokensPerExpert))
	}
	return us
}

// Problem is what a schedule is sought for.
type Problem struct {
	// Layers is the number of MoE layers, Experts that of the routed experts of one, TopK how many of these a token activates.
	Layers, Experts, TopK int
	// Sequence is the number of tokens of a sample.
	Sequence int
	// MicroBatches bounds those of a rank; 0 is DefaultMicroBatches.
	MicroBatches int
	// Splits are the choices of groups.
	Splits []Split
}

// DefaultMicroBatches bounds micro-batches where nothing else is said: each needs a buffer and a launch of every kernel.
const DefaultMicroBatches = 32

// Check names what cannot be.
func (p *Problem) Check() error {
	for _, field := range []struct {
		name  string
		value int
		most  int
	}{
		{"layers", p.Layers, 1 << 12}, {"experts", p.Experts, 1 << 16}, {"experts of a token", p.TopK, p.Experts}, {"sequence length", p.Sequence, 1 << 24},
		{"number of splits", len(p.Splits), 1 << 16},
	} {
		if field.value < 1 || field.value > field.most {
			return fmt.Errorf("%s: %d; allowed is 1 to %d", field.name, field.value, field.most)
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
			return fmt.Errorf("split %d lacks a time: only that of shared experts may be missing", i)
		}
		if d := p.durations(&split, 1, 1); !d.possible() {
			return fmt.Errorf("split %d: the times of one sample are %+v; attention and a stage of the chunks must be above 0", i, d)
		}
	}
	return nil
}

// possible is whether all are times, and no throughput is without bound.
func (d Durations) possible() bool {
	for _, v := range []float64{d.Attention, d.Shared, d.Dispatch, d.Experts, d.Combine} {
		if !(v >= 0) || math.IsInf(v, 0) {
			return false
		}
	}
	return d.Attention > 0 && d.slowest() > 0
}

// microBatches is the bound of their number.
func (p *Problem) microBatches() int {
	if p.MicroBatches == 0 {
		return DefaultMicroBatches
	}
	return p.MicroBatches
}

// sentOneWay are the splits with one way to dispatch and one to combine: a split for each pair of ways.
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

// tokensPerExpert is what an expert gets, in the mean, of a micro-batch of all attention ranks.
func (p *Problem) tokensPerExpert(split *Split, samples int) float64 {
	return float64(split.AttentionRanks) * float64(samples) * float64(p.Sequence) * float64(p.TopK) / float64(p.Experts)
}

// mostChunks is the number of chunks with a token for each expert, in the mean: smaller ones have less than one.
func (p *Problem) mostChunks(split *Split, samples int) int {
	return int(min(max(1, p.tokensPerExpert(split, samples)), 1<<20))
}

// durations are those of a micro-batch of that many samples for each attention rank. Chunks are equal: they are cut from the tokens of all
// attention ranks, which are so many that one more or less does not matter, and tokens for an expert are a mean in any case.
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
