package schedule

import (
	"errors"
	"fmt"

	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/pipeline"
)

// Schedule is the content of a plan's schedule.json.
type Schedule struct {
	// Hardware is the name of the profile that all times come from.
	Hardware string `json:"hardware"`
	// Model is the shape of the model, Ranks their number, for both groups together or for everything.
	Model pipeline.Shape `json:"model"`
	Ranks int            `json:"ranks"`
	// LAR is the local activation rate that exchanges of shared ranks are modelled with.
	LAR float64 `json:"lar"`
	// TokensHeld bounds the tokens that a rank of the attention group holds at once.
	TokensHeld int `json:"tokens_held"`
	// Disaggregated are the schedules for attention and experts on ranks of their own, by ascending length. A length for which no split of
	// the ranks has room for the model is missing.
	Disaggregated []Length `json:"disaggregated"`
	// Shared are the groups of experts where these share their ranks with attention, by ascending load.
	Shared []Load `json:"shared"`
}

// Length is the schedule for samples of one length.
type Length struct {
	// Sequence is the number of tokens of a sample.
	Sequence int `json:"sequence"`
	pipeline.Plan
	// The throughputs of micro-batches alone and of none, with the groups that suit them best, and the one that no schedule exceeds.
	PPPipeTokensPerSecond float64 `json:"pppipe_tokens_per_second"`
	NaiveTokensPerSecond  float64 `json:"naive_tokens_per_second"`
	BoundTokensPerSecond  float64 `json:"bound_tokens_per_second"`
}

// Inputs is what a schedule depends on beside the model and the machines.
type Inputs struct {
	// Ranks is the EP size, SlotsPerRank the experts that each of them holds.
	Ranks, SlotsPerRank int
	// LAR is the local activation rate.
	LAR float64
}

const (
	// tokensHeld is what engines commonly bound the tokens of a step by, on one rank.
	tokensHeld = 16384
	// memoryPart is the part of a rank's memory for weights and KV cache.
	memoryPart = 0.9
	bf16Bytes  = 2
	// maxSplits bounds the splits that are looked at: of many ranks every few ones are, so that a length takes milliseconds.
	maxSplits = 32
)

// lengths are those of the table, in tokens.
var lengths = []int{512, 1024, 2048, 4096, 8192, 16384}

// Of makes the schedule; nil for a single rank, on which nothing is exchanged.
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

// disaggregated is the schedule for one length.
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

// thinned leaves splits whose groups are multiples of one number, at most maxSplits; all where none is.
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

// Check refuses a schedule that is not one for that many ranks.
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
