// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"errors"
	"fmt"

	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/pipeline"
)

// Schedule is the content of a plan's schedule.json.
type Schedule struct {
	// Hardware is the name of the hardware profile from which all times are computed.
	Hardware string `json:"hardware"`
	// Model is the shape of the model. Ranks is the number of ranks: of both groups together, or of all ranks.
	Model pipeline.Shape `json:"model"`
	Ranks int            `json:"ranks"`
	// LAR is the local activation rate for modelling the exchanges of shared ranks.
	LAR float64 `json:"lar"`
	// TokensHeld is the maximum number of tokens in memory on a rank of the attention group.
	TokensHeld int `json:"tokens_held"`
	// Disaggregated contains the schedules for attention and experts on separate ranks, by ascending length. Lengths
	// for which the model fits no split of the ranks are omitted.
	Disaggregated []Length `json:"disaggregated"`
	// Shared contains the groups of experts if these share their ranks with attention, by ascending load.
	Shared []Load `json:"shared"`
}

// Length is the schedule for samples of one length.
type Length struct {
	// Sequence is the number of tokens of a sample.
	Sequence int `json:"sequence"`
	pipeline.Plan
	// The throughputs with only micro-batches and without them, each with the best groups, and an upper bound for all
	// schedules.
	PPPipeTokensPerSecond float64 `json:"pppipe_tokens_per_second"`
	NaiveTokensPerSecond  float64 `json:"naive_tokens_per_second"`
	BoundTokensPerSecond  float64 `json:"bound_tokens_per_second"`
}

// Inputs are the inputs of a schedule in addition to the model and the machines.
type Inputs struct {
	// Ranks is the EP size, SlotsPerRank the number of experts on each rank.
	Ranks, SlotsPerRank int
	// LAR is the local activation rate.
	LAR float64
}

const (
	// tokensHeld is the usual maximum number of tokens in a step of an engine, on one rank.
	tokensHeld = 16384
	// memoryPart is the fraction of a rank's memory for weights and KV cache.
	memoryPart = 0.9
	bf16Bytes  = 2
	// maxSplits is the maximum number of splits to evaluate. With many ranks, splits are sampled at regular intervals,
	// so that a length takes milliseconds.
	maxSplits = 32
)

// lengths are the lengths in the table, in tokens.
var lengths = []int{512, 1024, 2048, 4096, 8192, 16384}

// Of computes the schedule. It returns nil for a single rank, which has no exchange.
func Of(shape *pipeline.Shape, p *hardware.Profile, in Inputs) (*Schedule, error) {
	if in.Ranks < 2 {
		return nil, nil
	}
	if in.SlotsPerRank < 1 || !(in.LAR >= 0) || in.LAR > 1 {
		return nil, fmt.Errorf("%d slots per rank and a local activation rate of %v; allowed are at least 1, and 0 to 1", in.SlotsPerRank, in.LAR)
	}
	if err := shape.Check(); err != nil {
		return nil, err
	}
	s := &Schedule{Hardware: p.Name, Model: *shape, Ranks: in.Ranks, LAR: in.LAR, TokensHeld: tokensHeld, Disaggregated: []Length{}}
	for _, sequence := range lengths {
		length, err := disaggregated(shape, p, in.Ranks, sequence)
		if errors.Is(err, pipeline.ErrNoRoom) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("sequence %d: %w", sequence, err)
		}
		s.Disaggregated = append(s.Disaggregated, *length)
	}
	var err error
	s.Shared, err = sharedRanks(shape, p, in)
	return s, err
}

// disaggregated computes the schedule for one length.
func disaggregated(shape *pipeline.Shape, p *hardware.Profile, ranks, sequence int) (*Length, error) {
	problem, err := shape.Problem(p, pipeline.Serving{
		Ranks: ranks, Sequence: sequence, Samples: max(1, tokensHeld/sequence), MemoryBytes: memoryPart * p.MemoryBytes, WeightBytes: bf16Bytes, DispatchBytes: bf16Bytes,
	})
	if err != nil {
		return nil, err
	}
	problem.Splits = thinned(problem.Splits, ranks)
	found, err := pipeline.Search(problem)
	if err != nil {
		return nil, err
	}
	return &Length{
		Sequence: sequence, Plan: found.Plan, PPPipeTokensPerSecond: found.PPPipe.TokensPerSecond, NaiveTokensPerSecond: found.Naive.TokensPerSecond,
		BoundTokensPerSecond: found.BoundTokensPerSecond,
	}, nil
}

// thinned returns the splits whose group sizes are multiples of one number, at most maxSplits, or all splits if there
// is none.
func thinned(splits []pipeline.Split, ranks int) []pipeline.Split {
	step := (ranks + maxSplits - 1) / maxSplits
	var some []pipeline.Split
	for _, split := range splits {
		if split.AttentionRanks%step == 0 {
			some = append(some, split)
		}
	}
	if len(some) == 0 {
		return splits[:min(len(splits), maxSplits)]
	}
	return some
}

// Check validates a schedule for a number of ranks.
func (s *Schedule) Check(ranks int) error {
	switch {
	case s.Hardware == "":
		return fmt.Errorf("hardware is missing")
	case s.Ranks != ranks || ranks < 2:
		return fmt.Errorf("ranks is %d; the plan has %d, and a schedule at least 2", s.Ranks, ranks)
	case !(s.LAR >= 0) || s.LAR > 1:
		return fmt.Errorf("lar is %v; allowed is 0 to 1", s.LAR)
	case s.TokensHeld < 1:
		return fmt.Errorf("tokens_held is %d; it must be at least 1", s.TokensHeld)
	}
	if err := s.Model.Check(); err != nil {
		return fmt.Errorf("model: %w", err)
	}
	before := 0
	for i := range s.Disaggregated {
		l := &s.Disaggregated[i]
		if l.Sequence <= before {
			return fmt.Errorf("disaggregated[%d].sequence is %d; it must be above %d", i, l.Sequence, before)
		}
		if l.AttentionRanks+l.ExpertRanks != ranks {
			return fmt.Errorf("disaggregated[%d] has %d attention and %d expert ranks, of %d", i, l.AttentionRanks, l.ExpertRanks, ranks)
		}
		if err := l.Plan.Check(); err != nil {
			return fmt.Errorf("disaggregated[%d]: %w", i, err)
		}
		before = l.Sequence
	}
	before = 0
	for i := range s.Shared {
		l := &s.Shared[i]
		if l.TokensPerRank <= before {
			return fmt.Errorf("shared[%d].tokens_per_rank is %d; it must be above %d", i, l.TokensPerRank, before)
		}
		if err := l.check(); err != nil {
			return fmt.Errorf("shared[%d]: %w", i, err)
		}
		before = l.TokensPerRank
	}
	return nil
}
