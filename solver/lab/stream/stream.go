// SPDX-License-Identifier: Apache-2.0

// Package stream compares schedules inside the layer for batches of different lengths: schedules that adapt to the
// length of each batch, and constant ones.
package stream

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/semmoe/operator/solver/pipeline"
)

// Batches are the batches of a stream with one sample length: their schedule problem and their number. Each batch has
// the maximum number of samples.
type Batches struct {
	Problem *pipeline.Problem
	Count   int
}

// Comparison compares schedules for batches of different lengths. The division of ranks into groups is constant, while
// micro-batches, chunks and order can be adapted to the length of each batch, or stay constant.
type Comparison struct {
	// Batches is the number of batches, Lengths the number of different lengths, MeanSequence the mean length of a
	// batch.
	Batches      int     `json:"batches"`
	Lengths      int     `json:"lengths"`
	MeanSequence float64 `json:"mean_sequence"`
	// Adaptive has one schedule per length, all with the groups that are best for the stream. Fixed is the schedule,
	// among those of each length, that is best for the whole stream. Mean is the schedule of the length nearest to the
	// mean.
	Adaptive Schedule `json:"adaptive"`
	Fixed    Schedule `json:"fixed"`
	Mean     Schedule `json:"mean"`
}

// Schedule is a schedule for a stream.
type Schedule struct {
	AttentionRanks int `json:"attention_ranks"`
	ExpertRanks    int `json:"expert_ranks"`
	// Sequence is the length that the schedule was optimised for; 0 if each batch has its own schedule.
	Sequence        int     `json:"sequence,omitempty"`
	TokensPerSecond float64 `json:"tokens_per_second"`
}

// Compare compares schedules that adapt to the lengths of a stream with constant schedules. All problems must have
// the same splits.
func Compare(ctx context.Context, stream []Batches) (*Comparison, error) {
	if len(stream) == 0 {
		return nil, fmt.Errorf("the stream has no batch")
	}
	r := &Comparison{Lengths: len(stream)}
	sum := 0.0
	for _, b := range stream {
		if b.Count < 1 {
			return nil, fmt.Errorf("the stream has %d batches of %d tokens; allowed is at least 1", b.Count, b.Problem.Sequence)
		}
		r.Batches += b.Count
		sum += float64(b.Count) * float64(b.Problem.Sequence)
	}
	r.MeanSequence = sum / float64(r.Batches)
	plans := make([]pipeline.Plan, len(stream))
	for i, b := range stream {
		plan, err := searchOne(ctx, b.Problem)
		if err != nil {
			return nil, err
		}
		plans[i] = *plan
	}
	if err := r.adapt(ctx, stream, plans); err != nil {
		return nil, err
	}
	return r, r.fix(ctx, stream, plans)
}

// searchOne returns the schedule for one length.
func searchOne(ctx context.Context, p *pipeline.Problem) (*pipeline.Plan, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	result, err := pipeline.Search(p)
	if err != nil {
		return nil, fmt.Errorf("sequence %d: %w", p.Sequence, err)
	}
	return &result.Plan, nil
}

// adapt evaluates the groups of each length's schedule for all lengths.
func (r *Comparison) adapt(ctx context.Context, stream []Batches, plans []pipeline.Plan) error {
	tried := map[int]bool{}
	for _, of := range plans {
		if tried[of.AttentionRanks] {
			continue
		}
		tried[of.AttentionRanks] = true
		throughput, err := throughputOf(stream, func(i int, p *pipeline.Problem) (*pipeline.Plan, error) {
			if plans[i].AttentionRanks == of.AttentionRanks {
				return &plans[i], nil
			}
			split, err := p.SplitOf(&of)
			if err != nil {
				return nil, err
			}
			narrowed := *p
			narrowed.Splits = []pipeline.Split{*split}
			return searchOne(ctx, &narrowed)
		})
		if err != nil {
			return err
		}
		if throughput > r.Adaptive.TokensPerSecond {
			r.Adaptive = Schedule{of.AttentionRanks, of.ExpertRanks, 0, throughput}
		}
	}
	return nil
}

// fix evaluates each length's schedule for all lengths.
func (r *Comparison) fix(ctx context.Context, stream []Batches, plans []pipeline.Plan) error {
	nearest := slices.MinFunc(stream, func(a, b Batches) int {
		return cmp.Compare(math.Abs(float64(a.Problem.Sequence)-r.MeanSequence), math.Abs(float64(b.Problem.Sequence)-r.MeanSequence))
	})
	for i := range plans {
		if err := ctx.Err(); err != nil {
			return err
		}
		throughput, err := throughputOf(stream, func(_ int, p *pipeline.Problem) (*pipeline.Plan, error) { return p.Keep(&plans[i]) })
		if err != nil {
			return err
		}
		sequence := stream[i].Problem.Sequence
		fixed := Schedule{plans[i].AttentionRanks, plans[i].ExpertRanks, sequence, throughput}
		if throughput > r.Fixed.TokensPerSecond {
			r.Fixed = fixed
		}
		if sequence == nearest.Problem.Sequence {
			r.Mean = fixed
		}
	}
	return nil
}

// throughputOf returns the throughput of a stream with the given plans, in tokens per second. The time of a batch is
// its samples divided by the plan's throughput, also if the samples do not divide into its micro-batches.
func throughputOf(stream []Batches, plan func(i int, p *pipeline.Problem) (*pipeline.Plan, error)) (float64, error) {
	tokens, seconds := 0.0, 0.0
	for i, b := range stream {
		p, err := plan(i, b.Problem)
		if err != nil {
			return 0, err
		}
		split, err := b.Problem.SplitOf(p)
		if err != nil {
			return 0, err
		}
		// The size of a batch does not depend on the groups: the samples of a rank times all ranks.
		batch := float64(b.Count) * float64(split.Samples) * float64(split.AttentionRanks+split.ExpertRanks) * float64(b.Problem.Sequence)
		tokens += batch
		seconds += batch / p.TokensPerSecond
	}
	return tokens / seconds, nil
}
