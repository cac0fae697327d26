// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// TimeTrial compares the modelled time of a layer under a plan with that under the baseline, on the same requests. The
// baseline is the plan in service or the default placement. The trial contains the scores of all requests, and
// jackknife scores that leave out one part of the documents at a time.
type TimeTrial struct {
	// Machines are the machines for which times are modelled.
	Machines cost.Machines
	// From is the layer of the baseline, To that of the plan.
	From, To cost.Layer
	// scores are the scores of all requests, by ascending batch size. parts are the jackknife scores, each without one
	// part of the documents. parts is nil if there are too few documents.
	scores []scorePair
	parts  []scorePair
	// partFraction is the fraction of the documents that the jackknife scores sample. The variance of a mean over all of
	// them is smaller by this factor.
	partFraction float64
}

// scorePair contains the scores of the baseline (before) and of a plan (after), in batches of one size.
type scorePair struct {
	batchTokens   int
	before, after cost.Report
}

const (
	// JackknifeParts is the number of parts into which the documents are split.
	JackknifeParts = 8
	// confidence is half the width of a 95% interval, in standard errors.
	confidence = 2
)

// TrialOptions are the inputs of a TimeTrial.
type TrialOptions struct {
	// Current is the plan in service; nil means the default placement, with requests or tokens assigned round-robin.
	Current *Plan
	// Hardware is the profile that models the times; nil means that of the plan.
	Hardware *hardware.Profile
	// Evaluation defines which requests are scored, and how. BatchTokens are the batch sizes; empty means that of
	// Evaluation.
	Evaluation  cost.Options
	BatchTokens []int
	// Unshuffled is the same as in Options.
	Unshuffled bool
	Progress   func(step string, done, total int)
}

// NewTimeTrial scores a plan and its baseline.
func NewTimeTrial(ctx context.Context, t *trace.Trace, p *Plan, o TrialOptions) (*TimeTrial, error) {
	profile := o.Hardware
	if profile == nil {
		profile = p.Machines()
	}
	sizes := slices.Compact(slices.Sorted(slices.Values(o.BatchTokens)))
	if len(sizes) == 0 {
		sizes = []int{o.Evaluation.BatchTokens}
	}
	planned := p.Placement
	today := cost.DefaultPlacement(t.Model.Layers, planned.Experts, planned.Ranks)
	if o.Current != nil {
		today = o.Current.Placement
	}
	tr := &TimeTrial{Machines: cost.MachinesOf(profile, planned.Ranks, o.Evaluation.RanksPerNode)}
	tr.From = cost.LayerOf(&t.Model, tr.Machines, today.Ranks, today.SlotsPerRank)
	tr.To = cost.LayerOf(&t.Model, tr.Machines, planned.Ranks, planned.SlotsPerRank)
	e := o.Evaluation
	e.WithoutBounds, e.Detail, e.Volume, e.ScorePercent = true, false, false, 0
	if p.Attention == placement.TensorParallel {
		e.Layers = sampledLayers(len(planned.Layers))
	}
	e.Requests, _ = sampleDocuments(t, e.Requests, p.Seed, max(sizes[len(sizes)-1], trialTokens(p, maxTrialRows)))
	for _, tokens := range sizes {
		e.BatchTokens = tokens
		pair, err := o.score(ctx, t, p, e)
		if err != nil {
			return nil, err
		}
		tr.scores = append(tr.scores, pair)
		if p.Attention == placement.DataParallel {
			break // with attention DP, ranks of requests do not depend on the batch size
		}
	}
	o.Evaluation = e
	return tr, tr.leaveOut(ctx, t, p, &o)
}

const (
	// maxTrialRows is the maximum number of tokens × layers × ranks for scoring a plan and its baseline with attention
	// TP. maxPartRows is the same for the jackknife scores.
	maxTrialRows = 1 << 25
	maxPartRows  = 1 << 23
)

// trialTokens returns the number of tokens for a maximum number of rows. Attention DP takes a tenth of the time.
func trialTokens(p *Plan, rows int) int {
	if p.Attention == placement.DataParallel {
		return 8 * rows / (len(p.Placement.Layers) * max(p.Placement.Ranks, 8))
	}
	return rows / (len(sampledLayers(len(p.Placement.Layers))) * max(p.Placement.Ranks, 8))
}

// sampleDocuments returns the requests of a random sample of the documents, of at least the given number of tokens and
// at least 2·JackknifeParts documents, and the fraction of the documents that are in the sample.
func sampleDocuments(t *trace.Trace, requests []int, seed uint64, least int) (sampled []int, fraction float64) {
	tokens := map[int32]int{}
	var documents []int
	for _, r := range requests {
		if _, known := tokens[t.Documents[r]]; !known {
			documents = append(documents, int(t.Documents[r]))
		}
		tokens[t.Documents[r]] += t.Length(r)
	}
	sum, taken, kept := 0, map[int32]bool{}, 0
	for _, d := range trace.Shuffled(documents, seed) {
		if sum >= least && kept >= 2*JackknifeParts {
			break
		}
		sum += tokens[int32(d)]
		taken[int32(d)], kept = true, kept+1
	}
	if kept == len(documents) {
		return requests, 1
	}
	for _, r := range requests {
		if taken[t.Documents[r]] {
			sampled = append(sampled, r)
		}
	}
	return sampled, float64(kept) / float64(len(documents))
}

// score scores the plan and its baseline.
func (o *TrialOptions) score(ctx context.Context, t *trace.Trace, p *Plan, e cost.Options) (pair scorePair, err error) {
	pair.batchTokens = e.BatchTokens
	if o.Unshuffled {
		e.RankCapacity = p.RankCapacity
		pair.after, err = cost.TensorParallel(ctx, t, p.Placement, cost.NoForecast{}, e)
	} else {
		pair.after, err = Evaluate(ctx, t, p, e)
	}
	if err != nil {
		return pair, err
	}
	if o.Current != nil {
		pair.before, err = Evaluate(ctx, t, o.Current, e)
	} else {
		pair.before, err = cost.EvaluateBaseline(ctx, t, p.Attention, p.Placement.Ranks, e)
	}
	return pair, err
}

// leaveOut computes the jackknife scores: for each part of the documents, it scores all other requests in batches of
// the median size.
func (tr *TimeTrial) leaveOut(ctx context.Context, t *trace.Trace, p *Plan, o *TrialOptions) error {
	e, requests := o.Evaluation, []int(nil)
	requests, tr.partFraction = sampleDocuments(t, e.Requests, p.Seed, trialTokens(p, maxPartRows))
	var documents []int
	for _, request := range requests {
		documents = append(documents, int(t.Documents[request]))
	}
	slices.Sort(documents)
	documents = slices.Compact(documents)
	if len(documents) < JackknifeParts {
		return nil
	}
	part := map[int]int{}
	for i, document := range trace.Shuffled(documents, p.Seed) {
		part[document] = i % JackknifeParts
	}
	e.WithoutBounds, e.Detail, e.Volume, e.ScorePercent = true, false, false, 0
	e.BatchTokens = tr.scores[len(tr.scores)/2].batchTokens
	for out := range JackknifeParts {
		e.Requests = slices.DeleteFunc(slices.Clone(requests), func(request int) bool { return part[int(t.Documents[request])] == out })
		pair, err := o.score(ctx, t, p, e)
		if err != nil {
			return err
		}
		tr.parts = append(tr.parts, pair)
		if o.Progress != nil {
			o.Progress("Uncertainty", out+1, JackknifeParts)
		}
	}
	return nil
}

// at returns the scores at the batch size nearest to batchTokens on a logarithmic scale.
func (tr *TimeTrial) at(batchTokens int) *scorePair {
	best := 0
	for i := range tr.scores {
		if math.Abs(math.Log(float64(tr.scores[i].batchTokens)/float64(batchTokens))) < math.Abs(math.Log(float64(tr.scores[best].batchTokens)/float64(batchTokens))) {
			best = i
		}
	}
	return &tr.scores[best]
}

// Documents reports whether errors include the spread over documents. If not, there are too few documents.
func (tr *TimeTrial) Documents() bool { return len(tr.parts) > 0 }

// TimeSaved is the modelled time of a layer that a plan saves, in microseconds.
type TimeSaved struct {
	Before, After cost.LayerTime
	// Error is half of the width of the 95% interval of Saved. It combines two errors as the root of the sum of
	// squares: the spread over documents, and the fit error of the hardware profile applied to the differences of
	// times. Latency that is equal before and after has the same error in both and cancels.
	Error float64
	// Local is the time if every activation were local and all ranks had equal loads. It is a lower bound for every
	// plan.
	Local float64
}

// Saved returns the time saved.
func (s *TimeSaved) Saved() float64 { return s.Before.Total() - s.After.Total() }

// At returns the mean time saved over the given batch sizes.
func (tr *TimeTrial) At(sizes ...int) TimeSaved {
	var s TimeSaved
	weight := 1 / float64(len(sizes))
	for _, tokens := range sizes {
		pair := tr.at(tokens)
		before, after := tr.From.TimeOf(tokens, &pair.before), tr.To.TimeOf(tokens, &pair.after)
		s.Before.Exchange += weight * before.Exchange
		s.Before.Compute += weight * before.Compute
		s.After.Exchange += weight * after.Exchange
		s.After.Compute += weight * after.Compute
		s.Local += weight * tr.To.LocalTime(tokens).Total()
	}
	documents := tr.Jackknife(func(before, after *cost.Report) float64 {
		sum := 0.0
		for _, tokens := range sizes {
			sum += weight * (tr.From.TimeOf(tokens, before).Total() - tr.To.TimeOf(tokens, after).Total())
		}
		return sum
	})
	exchange, compute := s.Before.Exchange-s.After.Exchange, s.Before.Compute-s.After.Compute
	s.Error = confidence * math.Hypot(documents, math.Hypot(tr.Machines.Link.Fit.Error()*exchange, tr.Machines.Grouped.Fit.Error()*compute))
	return s
}

// Jackknife returns the standard error of a figure by the jackknife (Quenouille 1949, Tukey 1958): the square root of
// (n-1)/n Σ (f_i - f̄)², with f_i the figure without the i-th of n parts of the documents and f̄ their mean. It returns
// 0 if there are too few documents.
func (tr *TimeTrial) Jackknife(figure func(before, after *cost.Report) float64) float64 {
	n := float64(len(tr.parts))
	if n < 2 {
		return 0
	}
	mean, sum := 0.0, 0.0
	values := make([]float64, len(tr.parts))
	for i := range tr.parts {
		values[i] = figure(&tr.parts[i].before, &tr.parts[i].after)
		mean += values[i] / n
	}
	for _, v := range values {
		sum += (v - mean) * (v - mean)
	}
	return math.Sqrt((n - 1) / n * sum * tr.partFraction)
}

// Worth is the verdict on whether a plan saves enough time.
type Worth struct {
	// BatchTokens are the batch sizes over which times are averaged.
	BatchTokens []int `json:"batch_tokens"`
	// LayerUS and BaselineLayerUS are the modelled times of a layer in microseconds, under the plan and under the
	// baseline.
	LayerUS         float64 `json:"layer_us"`
	BaselineLayerUS float64 `json:"baseline_layer_us"`
	// SavedPercent is the reduction from BaselineLayerUS to LayerUS. Low and High bound its 95% interval.
	SavedPercent float64 `json:"saved_percent"`
	Low          float64 `json:"saved_percent_low"`
	High         float64 `json:"saved_percent_high"`
	// Verdict is the result, and Reason one sentence that explains it.
	Verdict Verdict `json:"verdict"`
	Reason  string  `json:"reason"`
}

// Worth returns the verdict on the plan of a trial.
func (tr *TimeTrial) Worth(minimumGainPercent float64, sizes ...int) Worth {
	saved := tr.At(sizes...)
	before := saved.Before.Total()
	w := Worth{
		BatchTokens: sizes, LayerUS: saved.After.Total(), BaselineLayerUS: before, SavedPercent: 100 * saved.Saved() / before,
		Low: 100 * (saved.Saved() - saved.Error) / before, High: 100 * (saved.Saved() + saved.Error) / before,
	}
	f := Finding{Saved: w.SavedPercent, Low: w.Low, Max: 100 * (1 - saved.Local/before)}
	for _, tokens := range sizes {
		if at := tr.At(tokens); at.Saved() < 0 && -at.Saved() > f.SlowerBy*at.Before.Total() {
			f.SlowerAt, f.SlowerBy = tokens, -at.Saved()/at.Before.Total()
		}
	}
	w.Verdict, w.Reason = f.Judge(minimumGainPercent)
	return w
}

// Finding contains the inputs of a verdict, in percent of the modelled time of the baseline: the time saved, the lower
// end of its 95% interval, and the saving if every activation were local and all ranks had equal loads. SlowerAt is the
// batch size with the largest slowdown, and SlowerBy this slowdown as a fraction. Both are 0 if no batch size is
// slower.
type Finding struct {
	Saved, Low, Max float64
	SlowerAt        int
	SlowerBy        float64
}

// maxSlowdown is the maximum slowdown, as a fraction, at a single batch size. At small batches, latency dominates a
// layer's time and is the same under every placement. The remaining difference is below the model's error.
const maxSlowdown = 0.01

// Judge is the only rule that decides whether a plan saves enough time. Time saved must reach the minimum, its 95%
// interval must exclude 0, and no batch size may become slower by more than maxSlowdown. With minimum 0, any mean
// saving suffices and the interval is not checked.
func (f *Finding) Judge(minimum float64) (Verdict, string) {
	change := fmt.Sprintf("a layer's modelled time falls by %.1f%%", f.Saved)
	if f.Saved < 0 {
		change = fmt.Sprintf("a layer's modelled time rises by %.1f%%", -f.Saved)
	}
	switch {
	case f.Max < minimum:
		return LocalityDoesNotPay, fmt.Sprintf("latency dominates: with every activation local a layer's modelled time would fall by %.1f%%; the minimum is %g%%", f.Max, minimum)
	case f.Saved < minimum || f.Saved <= 0:
		return NoGainExpected, fmt.Sprintf("%s; the minimum is %g%%", change, minimum)
	case f.SlowerBy > maxSlowdown:
		return NoGainExpected, fmt.Sprintf("%s in the mean, but rises by %.1f%% with %d tokens in a batch", change, 100*f.SlowerBy, f.SlowerAt)
	case f.Low <= 0 && minimum > 0:
		return NoGainExpected, fmt.Sprintf("%s, but its 95%% interval begins at %.1f%%: the requests are too few or too different to prove a gain", change, f.Low)
	}
	return Gain, change
}

// TrialOf compares a solved plan with the default placement on the held-out requests, at the batch sizes of the
// options.
func TrialOf(ctx context.Context, t *trace.Trace, s *Solution, o Options) (*TimeTrial, error) {
	e := DefaultEvaluation()
	e.Requests, e.Seed, e.RanksPerNode = s.HeldOut, o.Seed, o.ranksPerNode()
	if limit := o.Constraints.TokenLoadLimit; limit > 0 {
		e.Cap = limit / 100
	}
	return NewTimeTrial(ctx, t, s.Plan, TrialOptions{Hardware: o.profile(), Evaluation: e, BatchTokens: o.batchTokens(), Unshuffled: o.Unshuffled})
}

// WorthOf returns the verdict on a solved plan on the held-out requests.
func WorthOf(ctx context.Context, t *trace.Trace, s *Solution, o Options, minimumGainPercent float64) (*Worth, error) {
	trial, err := TrialOf(ctx, t, s, o)
	if err != nil {
		return nil, err
	}
	w := trial.Worth(minimumGainPercent, o.batchTokens()...)
	return &w, nil
}
