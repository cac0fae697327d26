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

// Times are the modelled times of a MoE layer.
type Times struct {
	// Machines are what they are modelled by.
	Machines cost.Machines
	// PromptTokens is the mean length of the requests that judge, whose time to the first token is modelled; 0 where the trace does not tell the
	// sizes of attention.
	PromptTokens int
	// Sizes ascend by batch; Served is that of the batches that are served.
	Sizes  []Size
	Served Size
	// PaysFrom is the smallest batch from which on every one of Sizes gains solver.DefaultMinimumGainPercent; 0 where there is none.
	PaysFrom int
}

// Size is one batch size.
type Size struct {
	// BatchTokens is the number of tokens over all ranks.
	BatchTokens   int
	Before, After cost.LayerTime
	// Saved is the time saved in microseconds, Error half of the width of its 95% interval.
	Saved, Error float64
	// Most is what would be saved if every activation were local and all ranks had equal loads.
	Most float64
	// First is today's time to the first token of a prompt of Times.PromptTokens that waits for nothing, FirstSaved what is saved of it and FirstError half of
	// the width of its 95% interval; 0 where they are not known.
	First, FirstSaved, FirstError float64
}

// Percent turns a time into a part of today's.
func (s *Size) Percent(us float64) float64 { return 100 * us / s.Before.Total() }

// SavedPercent is the time saved in percent of today's, Low and High are the ends of its 95% interval.
func (s *Size) SavedPercent() float64 { return s.Percent(s.Saved) }
func (s *Size) Low() float64          { return s.Percent(s.Saved - s.Error) }
func (s *Size) High() float64         { return s.Percent(s.Saved + s.Error) }

// FirstPercent is what is saved of the time to the first token in percent of today's, FirstLow and FirstHigh are the ends of its 95% interval.
func (s *Size) FirstPercent() float64 { return 100 * s.FirstSaved / s.First }
func (s *Size) FirstLow() float64     { return 100 * (s.FirstSaved - s.FirstError) / s.First }
func (s *Size) FirstHigh() float64    { return 100 * (s.FirstSaved + s.FirstError) / s.First }

// Pays reports whether the plan saves the minimum at this size.
func (s *Size) Pays() bool { return s.SavedPercent() >= solver.DefaultMinimumGainPercent }

// Verdict is the answer to whether the plan is worth having at this size.
func (s *Size) Verdict() solver.Verdict {
	verdict, _ := (&solver.Finding{Saved: s.SavedPercent(), Low: s.Low(), Most: s.Percent(s.Most)}).Judge(solver.DefaultMinimumGainPercent)
	return verdict
}

// Surely reports whether the verdict is a gain.
func (s *Size) Surely() bool { return s.Verdict() == solver.Gain }

// batchSizes are those of the table: from decoding a few requests to filling a large deployment with prompts.
var batchSizes = []int{512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144}

// addTimes compares the modelled times today and with the plan at all sizes.
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
			BatchTokens: batch, Before: saved.Before, After: saved.After, Saved: saved.Saved(), Error: saved.Error, Most: saved.Before.Total() - saved.Local,
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

// firstToken models the time to the first token of the mean prompt, where the trace tells the sizes of attention. A prompt takes the passes that it
// needs at a size of batch, and each has all layers: what a plan saves, and the error of that, is of the layers with experts. The rest
// of a pass is the same today and with the plan.
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

// profile is what times are modelled by.
func (in *Input) profile() *hardware.Profile { return cmp.Or(in.Hardware, in.Plan.Machines()) }
