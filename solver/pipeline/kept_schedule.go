// SPDX-License-Identifier: Apache-2.0

package pipeline

import "fmt"

// SplitOf returns the split with a plan's groups.
func (p *Problem) SplitOf(plan *Plan) (*Split, error) {
	for i := range p.Splits {
		if s := &p.Splits[i]; s.AttentionRanks == plan.AttentionRanks && s.ExpertRanks == plan.ExpertRanks {
			return s, nil
		}
	}
	return nil, fmt.Errorf("sequence %d: there is no split of %d attention and %d expert ranks", p.Sequence, plan.AttentionRanks, plan.ExpertRanks)
}

// Keep applies a schedule to another length: groups, micro-batches, chunks and order stay, and a micro-batch has the
// maximum number of samples. There are fewer micro-batches if fewer samples fit, and fewer chunks if a chunk would have
// less than one token per expert.
func (p *Problem) Keep(old *Plan) (*Plan, error) {
	split, err := p.SplitOf(old)
	if err != nil {
		return nil, err
	}
	batches, order := old.Sizes.MicroBatches, old.Order
	if split.Samples < batches {
		batches, order = split.Samples, ASAS(split.Samples)
	}
	s := &searcher{problem: p}
	c := candidate{split: split, samples: split.Samples / batches, microBatches: batches}
	chunks := min(old.Sizes.Chunks, p.maxChunks(split, c.samples))
	kept := s.plan(&c, chunks, order, func(d Durations, sizes Sizes) float64 { return s.makespan(d, sizes, order) })
	return &kept, nil
}
