// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// ReplanOptions are the inputs of Replan in addition to the traces and the plan in service.
type ReplanOptions struct {
	// Options are those of Solve. The plan in service defines EP size, attention, objective, rank capacities, redundant
	// slots, the placement to start from and, if the options name none, the forecast.
	Options
	// MoveGainPercent is the minimum gain for moving an expert to another rank: local activations over the profile, in
	// percent of the activations of the mean expert of a layer. With message objectives, the gain is in saved messages.
	MoveGainPercent float64
	// PriorPercent is the weight of all older counts in percent of the recent counts when the placement is solved; 0
	// ignores older counts.
	PriorPercent int
	ReplanPolicy
}

// Check validates the options.
func (o *ReplanOptions) Check() error {
	switch {
	case !(o.MoveGainPercent >= 0):
		return fmt.Errorf("move gain percent is %v; it cannot be negative", o.MoveGainPercent)
	case o.PriorPercent < 0 || o.PriorPercent > 100:
		return fmt.Errorf("prior percent is %d; allowed is 0 to 100", o.PriorPercent)
	}
	return o.ReplanPolicy.Check()
}

// forecastAfter returns the forecast of the options or, if they name none, that of the plan in service.
func (o *ReplanOptions) forecastAfter(current *Plan) Forecast {
	if o.Forecast == AutoForecast {
		return current.Forecast
	}
	return cmp.Or(o.Forecast, current.Forecast)
}

// machines returns the target machines for a number of ranks.
func (o *ReplanOptions) machines(ranks, ranksPerNode int) cost.Machines {
	return cost.MachinesOf(o.profile(), ranks, ranksPerNode)
}

const (
	// DefaultPriorPercent is the default of ReplanOptions.PriorPercent.
	DefaultPriorPercent = 25
	// DefaultMoveGainPercent is the default of ReplanOptions.MoveGainPercent. It avoids moves with negligible gain.
	DefaultMoveGainPercent = 1
	// DefaultReplanTrainPercent is the default percentage of recent requests to train on. It is high because recent
	// requests are few, and few held-out requests suffice to compare plans on the same requests.
	DefaultReplanTrainPercent = 80

	// minRecentRequests is the minimum number of recent requests for a new plan, and minHeldOutRequests the minimum
	// number of held-out requests. Below these, a single long request decides.
	minRecentRequests, minHeldOutRequests = 20, 4
	// reusedPlacementRanks is the number of ranks per token in a table for a placement that was solved for other
	// traffic. Such a placement spreads a token's experts over more ranks.
	reusedPlacementRanks = 2 * bestRanks
)

// ErrTooFewRequests is wrapped in the error that Replan returns if there are too few recent requests. Retry when there
// are more.
var ErrTooFewRequests = errors.New("too few recent requests for a new plan")

// Candidate is a plan with its score on the held-out recent requests.
type Candidate struct {
	Plan  *Plan
	Score Score
	// Moves is the number of experts, over all layers, that ranks gain relative to the plan in service.
	Moves int
	// Neighbours is the comparison of the plan's tables with and without neighbours of unseen tokens; nil without
	// embeddings.
	Neighbours *NeighbourTrial
}

// Replanned is the result of Replan.
type Replanned struct {
	// Current is the plan in service, Tables the same placement with new tables, Layout a new placement.
	Current, Tables, Layout Candidate
	Decision
	// Trust is the maximum weight of an old row of a token in the new tables, in occurrences; 0 without a prior.
	Trust affinity.Trust
	// Unmet lists the load limits that the new placement exceeds. Truncated is set if the time budget cut off the
	// search.
	Unmet     []string
	Truncated bool
	// TrainRequests and TestRequests are the numbers of recent requests in the train and test parts. HeldOut are the
	// test requests.
	TrainRequests, TestRequests int
	HeldOut                     []int
}

// Replan computes new tables for the placement in service, and a new placement. Its inputs are recent requests and, if
// prior is not nil, an older trace of the same model. It scores both and the plan in service on held-out documents of
// the recent requests, and chooses the cheapest tier with a sufficient gain. When the placement is solved, the older
// requests weigh PriorPercent of the recent ones. The tables weigh each old row by how well the recent requests confirm
// the old rows. Errors about a trace are *trace.InvalidError.
func Replan(ctx context.Context, recent, prior *trace.Trace, current *Plan, o ReplanOptions) (*Replanned, error) {
	r, err := newReplan(recent, prior, current, o)
	if err != nil {
		return nil, err
	}
	if err := r.count(ctx); err != nil {
		return nil, err
	}
	out := &Replanned{Trust: r.trust, TrainRequests: len(r.train), TestRequests: len(r.test), HeldOut: r.test}
	if out.Current, err = r.candidate(ctx, current); err != nil {
		return nil, err
	}
	if r.options.seeksNeighbours() {
		begin := time.Now()
		if r.nearest, err = r.options.nearest(ctx, r.tokens, r.progress("Neighbours")); err != nil {
			return nil, err
		}
		r.options.spend(begin)
		out.Truncated = r.nearest == nil
	}
	if out.Tables, err = r.solved(ctx, current.Placement, current.Algorithm, reusedPlacementRanks); err != nil {
		return nil, err
	}
	if err := r.newLayouts(ctx, out); err != nil {
		return nil, err
	}
	return out, r.confirm(ctx, out)
}

// confirm also tests the chosen plan by the confidence interval of its gain.
func (r *replan) confirm(ctx context.Context, out *Replanned) error {
	chosen := out.Tables.Plan
	switch out.Tier {
	case NoTier:
		return nil
	case LayoutTier:
		chosen = out.Layout.Plan
	}
	trial, err := NewTimeTrial(ctx, r.trace, chosen, TrialOptions{
		Current: r.current, Hardware: r.options.profile(), Evaluation: r.evaluation(), BatchTokens: r.choice.BatchTokens,
	})
	if err != nil {
		return err
	}
	worth := trial.Worth(r.choice.MinimumGainPercent, r.choice.BatchTokens...)
	out.Decision.confirm(&worth)
	return nil
}

// replan is the state of one Replan. The counts of the search are the recent ones until count blends them with the
// prior.
type replan struct {
	search
	prior        *trace.Trace
	priorPercent float64
	current      *Plan
	choice       ReplanPolicy
	moveGain     float64
	layer        cost.Layer
	trust        affinity.Trust
	// placing are the token counts from which the placement is solved. All older counts in them have the same weight.
	placing []affinity.Counts
	// seen is the number of tokens in placing.
	seen float64
}

func newReplan(recent, prior *trace.Trace, current *Plan, o ReplanOptions) (*replan, error) {
	if err := errors.Join(fits(recent, current), o.Check(), checkPrior(recent, prior)); err != nil {
		return nil, err
	}
	if n := recent.Requests(); n < minRecentRequests {
		return nil, fmt.Errorf("%w: there are %d, at least %d are needed", ErrTooFewRequests, n, minRecentRequests)
	}
	p := current.Placement
	o.Ranks, o.Attention, o.Forecast, o.Algorithm = p.Ranks, current.Attention, o.forecastAfter(current), placement.Auto
	o.Options.BatchTokens = o.ReplanPolicy.BatchTokens
	o.Objective, o.RanksPerNode, o.Current, o.Fresh = current.Objective, cmp.Or(current.RanksPerNode, o.RanksPerNode), p, true
	o.RedundantSlots, o.RedundantMemory, o.Constraints.RankCapacity = p.SlotsPerRank-p.Experts/p.Ranks, 0, current.RankCapacity
	if p.Experts%p.Ranks != 0 {
		return nil, fmt.Errorf("the plan in service has %d experts on %d ranks; the number of ranks must divide the number of experts", p.Experts, p.Ranks)
	}
	s, err := newSearch(recent, o.Options)
	if err != nil {
		return nil, err
	}
	if len(s.test) < minHeldOutRequests {
		return nil, fmt.Errorf("%w: %d of %d are held out, at least %d are needed; the split keeps documents together", ErrTooFewRequests, len(s.test), recent.Requests(), minHeldOutRequests)
	}
	if o.PriorPercent == 0 {
		prior = nil
	}
	return &replan{
		search: *s, prior: prior, priorPercent: float64(o.PriorPercent), current: current, choice: o.ReplanPolicy, moveGain: o.MoveGainPercent,
		layer: cost.LayerOf(&recent.Model, o.machines(p.Ranks, s.options.ranksPerNode()), p.Ranks, p.SlotsPerRank),
	}, nil
}

// fits returns an error if a trace is of a different model than the plan.
func fits(t *trace.Trace, p *Plan) error {
	if err := cost.Matches(t, p.Placement); err != nil {
		return err
	}
	switch {
	case p.Vocabulary != t.Model.Vocabulary:
		return fmt.Errorf("the plan's tables are for a vocabulary of %d, the trace's is %d", p.Vocabulary, t.Model.Vocabulary)
	case p.ModelDigest != "" && t.Model.Digest != "" && p.ModelDigest != t.Model.Digest:
		return fmt.Errorf("the plan is for model %s, the trace is of model %s", p.ModelDigest, t.Model.Digest)
	}
	return nil
}

// checkPrior returns an error if the older trace is of a different model.
func checkPrior(recent, prior *trace.Trace) error {
	if prior == nil {
		return nil
	}
	a, b := &recent.Model, &prior.Model
	if a.Digest != "" && b.Digest != "" && a.Digest != b.Digest || a.Vocabulary != b.Vocabulary || a.Experts != b.Experts || a.TopK != b.TopK || !slices.Equal(a.Layers, b.Layers) {
		return errors.New("the prior trace and the recent trace are of different models")
	}
	return nil
}

// count counts both traces and blends them: tokens for the tables, and for the placement what it is solved from.
func (r *replan) count(ctx context.Context) error {
	if err := r.search.count(ctx); err != nil {
		return err
	}
	r.placing, r.seen = r.tokens, r.tokens[0].Tokens()
	if r.prior == nil {
		return nil
	}
	all := r.prior.AllRequests()
	old, err := affinity.CountTokens(ctx, r.prior, all)
	if err != nil {
		return err
	}
	if r.trust, err = r.fitTrust(ctx, old); err != nil {
		return err
	}
	weight := affinity.Fade(r.seen, old[0].Tokens(), r.priorPercent)
	if r.placing, err = affinity.MergeLayers(r.tokens, old, 1, weight); err != nil {
		return err
	}
	r.seen = r.placing[0].Tokens()
	if r.requests != nil {
		room := maxRequestCells / (len(r.trace.Model.Layers) * r.trace.Model.Experts)
		if err := r.addOldRequests(ctx, all, weight, room); err != nil {
			return err
		}
	}
	r.tokens, err = affinity.BlendLayers(r.tokens, old, r.trust)
	return err
}

// fitTrust estimates how well the recent requests confirm the old ones, by two halves of the train requests.
func (r *replan) fitTrust(ctx context.Context, old []affinity.Counts) (affinity.Trust, error) {
	part := r.trace.Subset(r.train)
	first, second, err := trace.Split(part, 50, r.options.Seed)
	if err != nil {
		return 0, fmt.Errorf("%w: the train requests are from one document; at least two are needed to compare them with the older trace", ErrTooFewRequests)
	}
	a, err := affinity.CountTokens(ctx, part, first)
	if err != nil {
		return 0, err
	}
	b, err := affinity.CountTokens(ctx, part, second)
	if err != nil {
		return 0, err
	}
	return affinity.FitTrust(ctx, a, b, old)
}

// addOldRequests adds old requests to the counts of recent ones, within room. Old requests get the rows that recent
// ones leave, or the fraction of room equal to their weight if that is more: a single request with the weight of many
// could not be balanced.
func (r *replan) addOldRequests(ctx context.Context, all []int, weight float32, room int) error {
	recent, prior := r.tokens[0].Tokens(), float64(r.prior.TokenCount(all))
	weighs := float64(weight) * prior / (recent + float64(weight)*prior)
	n := min(max(room-len(r.requests.Rows), int(math.Ceil(weighs*float64(room)))), len(all), room-1)
	if weight == 0 || n < 1 {
		return nil
	}
	old, err := affinity.CountRequests(ctx, r.prior, r.pick(all, n))
	if err != nil {
		return err
	}
	if most := room - n; most < len(r.requests.Rows) {
		r.requests = r.requests.Part(r.pick(indices(len(r.requests.Rows)), most))
	}
	// The weights extrapolate from the counted requests to all requests of each side.
	weight *= float32(r.requests.TokenCount() / recent * prior / max(old.TokenCount(), 1))
	r.requests, err = r.requests.Merge(old, weight)
	return err
}

// pick draws n of the requests and keeps their order.
func (r *replan) pick(of []int, n int) []int {
	picked := trace.Shuffled(of, r.options.Seed)[:n]
	slices.Sort(picked)
	return picked
}

func indices(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

// solved returns the plan of a placement with new tables, which store at least keep ranks per token. The tables have
// neighbours of unseen tokens if they are not worse with them.
func (r *replan) solved(ctx context.Context, p *placement.Placement, by placement.Algorithm, keep int) (Candidate, error) {
	s := r.search
	s.keep = keep
	plan, err := s.plan(ctx, p, by)
	if err != nil {
		return Candidate{}, err
	}
	without, err := r.candidate(ctx, plan)
	if err != nil || !r.options.seeksNeighbours() {
		return without, err
	}
	if r.nearest == nil {
		without.Neighbours = &NeighbourTrial{Truncated: true}
		return without, nil
	}
	// The tables are rebuilt in place, because two of them can exceed the memory of a manager.
	rebuild := func(near *affinity.Neighbours) {
		s.neighbours, s.unused = near, plan.Tokens
		s.scoreTokens(plan)
	}
	rebuild(r.nearest)
	with, err := r.candidate(ctx, plan)
	if err != nil {
		return Candidate{}, err
	}
	chosen := betterOf(with, without, r.nearest)
	if !chosen.Neighbours.Used {
		rebuild(nil)
	}
	return chosen, nil
}

// betterOf returns the candidate with neighbours, or the one without if the other is worse.
func betterOf(with, without Candidate, found *affinity.Neighbours) Candidate {
	n := &NeighbourTrial{
		Tokens: found.Tokens(), LAR: with.Score.LAR, LARWithout: without.Score.LAR, LayerUS: with.Score.Total(), LayerUSWithout: without.Score.Total(),
	}
	chosen := without
	if n.judge(); n.Used {
		chosen = with
	}
	chosen.Neighbours = n
	return chosen
}

// expertLoadLimits are the limits on the load of a rank's experts, in percent of the mean, under which new placements
// are solved; 0 means no limit. A layer waits for its slowest rank. If a placement groups experts that activate
// together, and so concentrates their load, it may not pay, while a slightly less local placement may.
var expertLoadLimits = []float64{0, 130, 110}

// newLayouts decides on the most local new placement with a sufficient gain, or on the most local one if none has it.
func (r *replan) newLayouts(ctx context.Context, out *Replanned) error {
	var deadline time.Time
	if budget := r.options.TimeBudget; budget > 0 {
		deadline = time.Now().Add(budget)
	}
	limits := expertLoadLimits
	if given := r.options.Constraints.ExpertLoadLimit; given > 0 || r.options.RedundantSlots > 0 || r.timed() { // copies share load and know no limit; a search by time finds its own
		limits = []float64{given}
	}
	for _, limit := range limits {
		solved, err := r.newLayout(ctx, limit, deadline)
		if err != nil {
			return err
		}
		layout, err := r.solved(ctx, solved.Placement, placement.Auto, 0)
		if err != nil {
			return err
		}
		out.Truncated = out.Truncated || solved.Truncated
		decision := r.choice.Choose(out.Current.Score, out.Tables.Score, layout.Score, r.local())
		pays := decision.LayoutGainPercent >= r.choice.MinimumGainPercent
		if out.Layout.Plan == nil || pays {
			out.Layout, out.Unmet, out.Decision = layout, solved.Unmet, decision
		}
		if pays || decision.Verdict == LocalityDoesNotPay {
			break
		}
	}
	return nil
}

// newLayout solves a placement from scratch and from the placement in service, with a cost for each expert that moves.
func (r *replan) newLayout(ctx context.Context, expertLoadLimit float64, deadline time.Time) (placement.Result, error) {
	s := r.search
	s.options.Constraints.ExpertLoadLimit = expertLoadLimit
	s.tokens = r.placing
	s.options.Constraints.MigrationCost = r.moveGain / 100 * r.seen * float64(r.trace.Model.TopK) / float64(r.trace.Model.Experts)
	return s.place(ctx, placement.Auto, deadline)
}

// candidate scores a plan on the held-out requests.
func (r *replan) candidate(ctx context.Context, p *Plan) (Candidate, error) {
	c := Candidate{Plan: p, Moves: placement.Moves(r.current.Placement, p.Placement)}
	var report cost.Report
	for i, tokens := range r.choice.BatchTokens {
		o := r.evaluation()
		o.BatchTokens, o.Machines = tokens, r.layer.Machines
		if i == 0 || p.Attention == placement.TensorParallel && tokens != r.choice.BatchTokens[i-1] { // as in modelledTimes
			var err error
			if report, err = Evaluate(ctx, r.trace, p, o); err != nil {
				return Candidate{}, err
			}
		}
		c.Score.add(&report, r.layer.TimeOf(tokens, &report), 1/float64(len(r.choice.BatchTokens)))
	}
	return c, nil
}

// local returns the time if every activation were local.
func (r *replan) local() float64 { return localTime(r.layer, r.choice.BatchTokens) }
