// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"context"
	"slices"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/pipeline"
	"github.com/semmoe/operator/solver/placement"
)

// Times holds the modelled times of an MoE layer.
type Times struct {
	// Machines is the machine model of the times.
	Machines cost.Machines
	// PromptTokens is the mean length of the evaluated requests, for the time to first token. It is 0 if the trace
	// lacks the sizes of attention.
	PromptTokens int
	// Sizes are in ascending order of batch size. Served is the batch size in service.
	Sizes  []Size
	Served Size
	// PaysFrom is the smallest batch size in Sizes from which all larger sizes gain solver.DefaultMinimumGainPercent; 0
	// if there is none.
	PaysFrom int
}

// Size holds the times at one batch size.
type Size struct {
	// BatchTokens is the number of tokens over all ranks.
	BatchTokens   int
	Before, After cost.LayerTime
	// Saved is the time saved in microseconds. Error is half the width of its 95% confidence interval.
	Saved, Error float64
	// MaxSaved is the time saved, in microseconds, if every activation were local and all ranks had equal loads.
	MaxSaved float64
	// First is today's time to first token of a prompt of Times.PromptTokens tokens without queueing, in microseconds.
	// FirstSaved is the part that is saved, and FirstError half the width of its 95% confidence interval. They are 0 if
	// unknown.
	First, FirstSaved, FirstError float64
}

// Percent converts a time in microseconds to percent of today's time.
func (s *Size) Percent(us float64) float64 { return 100 * us / s.Before.Total() }

// SavedPercent returns the time saved in percent of today's time. Low and High return the ends of its 95% confidence
// interval.
func (s *Size) SavedPercent() float64 { return s.Percent(s.Saved) }
func (s *Size) Low() float64          { return s.Percent(s.Saved - s.Error) }
func (s *Size) High() float64         { return s.Percent(s.Saved + s.Error) }

// FirstPercent returns the saved part of the time to first token, in percent. FirstLow and FirstHigh return the ends of
// its 95% confidence interval.
func (s *Size) FirstPercent() float64 { return 100 * s.FirstSaved / s.First }
func (s *Size) FirstLow() float64     { return 100 * (s.FirstSaved - s.FirstError) / s.First }
func (s *Size) FirstHigh() float64    { return 100 * (s.FirstSaved + s.FirstError) / s.First }

// Pays reports whether the plan saves at least solver.DefaultMinimumGainPercent at this size.
func (s *Size) Pays() bool { return s.SavedPercent() >= solver.DefaultMinimumGainPercent }

// Verdict returns the verdict on the plan at this size.
func (s *Size) Verdict() solver.Verdict {
	verdict, _ := (&solver.Finding{Saved: s.SavedPercent(), Low: s.Low(), Max: s.Percent(s.MaxSaved)}).Judge(solver.DefaultMinimumGainPercent)
	return verdict
}

// Surely reports whether the verdict is a gain.
func (s *Size) Surely() bool { return s.Verdict() == solver.Gain }

// batchSizes are the batch sizes of the table, in tokens over all ranks: from decoding a few requests to prefill of a
// large deployment.
var batchSizes = []int{512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144}

// addTimes compares the modelled times today and with the plan at all batch sizes.
func (s *Score) addTimes(ctx context.Context, in *Input) error {
	trial, err := solver.NewTimeTrial(ctx, in.Trace, in.Plan, solver.TrialOptions{
		Current: in.Current, Hardware: in.profile(), Evaluation: in.evaluation(), Progress: in.Progress,
	})
	if err != nil {
		return err
	}
	s.Documents = trial.Documents()
	s.GainError = trial.Jackknife(func(before, after *cost.Report) float64 { return after.LAR - before.LAR })
	if cost.ExpertWeights(&in.Trace.Model) == 0 {
		return nil
	}
	t := &Times{Machines: trial.Machines}
	first := in.firstToken(t)
	at := func(batch int) Size {
		saved := trial.At(batch)
		size := Size{
			BatchTokens: batch, Before: saved.Before, After: saved.After, Saved: saved.Saved(), Error: saved.Error, MaxSaved: saved.Before.Total() - saved.Local,
		}
		first(&size)
		return size
	}
	for _, batch := range batchSizes {
		t.Sizes = append(t.Sizes, at(batch))
	}
	t.Served = at(in.BatchTokens)
	for _, size := range slices.Backward(t.Sizes) {
		if !size.Pays() {
			break
		}
		t.PaysFrom = size.BatchTokens
	}
	s.Times = t
	return nil
}

// firstToken returns a function that adds the time to first token of a prompt of mean length. The function does nothing
// if the trace lacks the sizes of attention. A prompt takes pass.PassesOfPrompt passes through all layers. The plan
// only changes the time of MoE layers. The time of the rest of a pass is the same today and with the plan.
func (in *Input) firstToken(t *Times) func(*Size) {
	shape, err := pipeline.ShapeOf(&in.Trace.Model)
	if err != nil || shape.Check() != nil {
		return func(*Size) {}
	}
	tokens := 0
	for _, request := range in.Requests {
		tokens += in.Trace.Length(request)
	}
	t.PromptTokens = max(1, tokens/len(in.Requests))
	profile := cost.Spread(in.profile(), in.Plan.Placement.Ranks, in.evaluation().RanksPerNode)
	return func(size *Size) {
		pass := pipeline.Pass{
			Ranks: in.Plan.Placement.Ranks, Tokens: size.BatchTokens, Sequence: t.PromptTokens, TensorParallel: in.Plan.Attention == placement.TensorParallel,
		}
		passes, layers := float64(pass.PassesOfPrompt()), float64(shape.MoELayers)
		size.First = passes * (shape.OutsideExperts(profile, pass) + layers*size.Before.Total())
		size.FirstSaved, size.FirstError = passes*layers*size.Saved, passes*layers*size.Error
	}
}

// profile returns the hardware profile for modelled times.
func (in *Input) profile() *hardware.Profile { return cmp.Or(in.Hardware, in.Plan.Machines()) }
