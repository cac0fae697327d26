package report

import (
	"cmp"
	"context"
	"math"
	"slices"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/pipeline"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
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

// Pays reports whether the plan is worth having at this size.
func (s *Size) Pays() bool { return s.SavedPercent() >= solver.DefaultMinimumGainPercent }

// Surely reports whether it is at both ends of the interval.
func (s *Size) Surely() bool { return s.Low() >= solver.DefaultMinimumGainPercent }

// batchSizes are those of the table: from decoding a few requests to filling a large deployment with prompts.
var batchSizes = []int{512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144}

const (
	// parts is how many parts the documents are dealt to: leaving out one at a time tells how figures spread.
	parts = 8
	// confidence is how many standard errors are half of a 95% interval.
	confidence = 2
)

// addTimes computes the times of both reports at all sizes, and their errors, which are of two kinds that add up as squares: the spread
// over documents, and the error of the fits, which is taken of the differences in time, not of the times: what is the same today and
// with the plan, such as latency, is wrong in both alike.
func (s *Score) addTimes(ctx context.Context, in *Input, today *placement.Placement, before, after *cost.Report) error {
	spread, err := in.leaveOut(ctx)
	if err != nil {
		return err
	}
	s.Documents = len(spread) > 0
	s.GainError = jackknife(spread, func(p pair) float64 { return p.after.LAR - p.before.LAR })
	m := &in.Trace.Model
	if cost.ExpertWeights(m) == 0 {
		return nil
	}
	planned := in.Plan.Placement
	t := &Times{Machines: cost.MachinesOf(in.profile(), planned.Ranks, in.evaluation().RanksPerNode)}
	first := in.firstToken(t)
	from, to := cost.LayerOf(m, t.Machines, today.Ranks, today.SlotsPerRank), cost.LayerOf(m, t.Machines, planned.Ranks, planned.SlotsPerRank)
	at := func(batch int) Size {
		size := Size{BatchTokens: batch, Before: from.TimeOf(batch, before), After: to.TimeOf(batch, after)}
		size.Saved = size.Before.Total() - size.After.Total()
		local := to.LocalTime(batch)
		size.Most = size.Before.Total() - local.Total()
		documents := jackknife(spread, func(p pair) float64 {
			return from.TimeOf(batch, &p.before).Total() - to.TimeOf(batch, &p.after).Total()
		})
		exchange, compute := size.Before.Exchange-size.After.Exchange, size.Before.Compute-size.After.Compute
		size.Error = confidence * math.Sqrt(documents*documents+square(t.Machines.Link.Fit.Error()*exchange)+square(t.Machines.Grouped.Fit.Error()*compute))
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

func square(x float64) float64 { return x * x }

// pair are the scores today and with the plan.
type pair struct{ before, after cost.Report }

// leaveOut scores all requests but those of one part of the documents, for each part; it is empty where there are fewer documents than
// parts.
func (in *Input) leaveOut(ctx context.Context) ([]pair, error) {
	var documents []int
	for _, request := range in.Requests {
		documents = append(documents, int(in.Trace.Documents[request]))
	}
	slices.Sort(documents)
	documents = slices.Compact(documents)
	if len(documents) < parts {
		return nil, nil
	}
	part := map[int]int{}
	for i, document := range trace.Shuffled(documents, in.Plan.Seed) {
		part[document] = i % parts
	}
	pairs := make([]pair, parts)
	for out := range pairs {
		o := in.evaluation()
		o.WithoutBounds = true
		o.Requests = nil
		for _, request := range in.Requests {
			if part[int(in.Trace.Documents[request])] != out {
				o.Requests = append(o.Requests, request)
			}
		}
		var err error
		if pairs[out].before, pairs[out].after, err = in.evaluate(ctx, o); err != nil {
			return nil, err
		}
		if in.Progress != nil {
			in.Progress("Uncertainty", out+1, parts)
		}
	}
	return pairs, nil
}

// jackknife is the standard error of a figure that is computed with each part left out in turn (Quenouille, Tukey); 0 without parts.
func jackknife(spread []pair, figure func(p pair) float64) float64 {
	n := float64(len(spread))
	mean, sum := 0.0, 0.0
	values := make([]float64, len(spread))
	for i, p := range spread {
		values[i] = figure(p)
		mean += values[i] / n
	}
	for _, v := range values {
		sum += square(v - mean)
	}
	if n < 2 {
		return 0
	}
	return math.Sqrt((n - 1) / n * sum)
}
