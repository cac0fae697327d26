// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/forecast"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// Solution is a plan with its scores.
type Solution struct {
	Plan *Plan
	// Report is the plan's score on the held-out requests.
	Report cost.Report
	// Unplanned is the score without a plan on the same requests. It is set only for tokens that are not shuffled.
	Unplanned *cost.Report
	// Worth is the result of WorthOf; nil if it was not computed.
	Worth *Worth
	// BatchRates is the result of BatchRates; nil if it was not computed.
	BatchRates []BatchRate
	// Unmet lists the load limits that the placement exceeds on the profile.
	Unmet []string
	// Neighbours is the comparison of tables with and without neighbours of unseen tokens; nil without embeddings.
	Neighbours *NeighbourTrial
	// Forecasts is the comparison of forecasts; nil if the options name one, or if only Table is possible.
	Forecasts *ForecastChoice
	// FallBack is the reason for falling back to the default placement. It is empty if there was no fallback.
	FallBack string
	// Truncated is set when the time budget cut off the search, or the comparison with the default placement.
	Truncated bool
	// TrainRequests and TestRequests are the numbers of requests in the two parts of the split.
	TrainRequests, TestRequests int
	// HeldOut are the test requests, as indices into the trace.
	HeldOut []int
}

const (
	// bestRanks is the number of ranks that a token table stores per token: a frequent token is split over several.
	bestRanks = 4
	// contextRanks is the same for a table that another forecast reads and weighs, because that forecast compares all
	// ranks.
	contextRanks = 16
	// maxOccurrences is the number of tokens sampled to count distinct ranks during the search.
	maxOccurrences = 1 << 15
	// maxRequestCells (requests × layers × experts) bounds the memory for counts of whole requests, 4 bytes per cell.
	// Above the limit, a sample of the train requests is counted.
	maxRequestCells = 1 << 26
	// shrinkage is the weight of the prior in a token's shares, in occurrences of the token.
	shrinkage = 1
)

// Solve splits the trace, solves the placement on the train requests, builds the tables and scores the plan on the test
// requests. Errors about the trace are *trace.InvalidError.
func Solve(ctx context.Context, t *trace.Trace, o Options) (*Solution, error) {
	s, err := newSearch(t, o)
	if err != nil {
		return nil, err
	}
	if err := s.count(ctx); err != nil {
		return nil, err
	}
	return s.run(ctx)
}

// Check validates options against a trace without solving.
func Check(t *trace.Trace, o Options) error {
	_, err := newSearch(t, o)
	return err
}

// newSearch validates the options against the trace, and splits the trace.
func newSearch(t *trace.Trace, o Options) (*search, error) {
	if err := placement.CheckRanks(o.Ranks, t.Model.Experts); err != nil {
		return nil, err
	}
	if err := placement.CheckSlots(o.Algorithm, o.Ranks, t.Model.Experts, o.minSlots()); err != nil {
		return nil, err
	}
	groups, err := o.groups(&t.Model)
	if err != nil {
		return nil, err
	}
	if err := placement.CheckGroups(o.Algorithm, o.Ranks, t.Model.Experts, o.minSlots(), groups); err != nil {
		return nil, err
	}
	if err := o.check(&t.Model); err != nil {
		return nil, err
	}
	auto := o.Forecast == AutoForecast
	if auto {
		o.Forecast = Table
	}
	if _, err := ParseForecast(string(o.Forecast)); err != nil {
		return nil, err
	}
	if o.Forecast != Table && o.Attention == placement.DataParallel {
		return nil, fmt.Errorf("forecast %q requires attention tp; with attention dp, allowed is %s", o.Forecast, Table)
	}
	if err := CheckForecast(o.Forecast, o.Ranks, t); err != nil {
		return nil, err
	}
	if o.Embeddings != nil && o.Forecast.Contextual() {
		return nil, fmt.Errorf("embeddings are not supported with forecast %s, which has its own scores for unseen tokens", o.Forecast)
	}
	if e := o.Embeddings; e != nil && e.Tokens != t.Model.Vocabulary {
		return nil, fmt.Errorf("embeddings are of %d tokens; the vocabulary of the trace is %d", e.Tokens, t.Model.Vocabulary)
	}
	if err := o.checkTable(&t.Model); err != nil {
		return nil, err
	}
	train, test, err := trace.Split(t, o.TrainPercent, o.Seed)
	if err != nil {
		return nil, err
	}
	if o.CopyRule == placement.NearestCopy && o.Current != nil {
		o.CopyRule = o.Current.CopyRule
	}
	auto = auto && o.Attention == placement.TensorParallel && !o.Unshuffled
	return &search{trace: t, options: o, groups: groups, train: train, test: test, choosesForecast: auto}, nil
}

// search is the state of one Solve.
type search struct {
	trace       *trace.Trace
	options     Options
	groups      int
	train, test []int
	// choosesForecast selects the forecast by comparison once the placement is known. Until then, it is Table.
	choosesForecast bool
	// counted are the train requests, or a sample of them, of which whole requests are clustered.
	counted     []int
	tokens      []affinity.Counts
	pairs       []affinity.Pairs
	transitions [][]float32
	requests    *affinity.RequestCounts
	// nearest are the neighbours of unseen tokens; nil without embeddings, or if the time budget ended their search.
	// neighbours are the same, once the tables are known not to be worse with them.
	nearest     *affinity.Neighbours
	neighbours  *affinity.Neighbours
	occurrences *affinity.Occurrences
	// keep is the number of ranks that a table stores per token, if above the default.
	keep int
	// unused is the table of a plan that is no longer used. A table can be most of the memory of a solve; only one exists
	// at a time.
	unused *affinity.TokenTable
	// solvedBaselines caches the placements of timedBaselines.
	solvedBaselines []*placement.Placement
	// solvedWithoutCopies caches the candidates of a search by time without copies of experts.
	solvedWithoutCopies *uncopied
}

func (s *search) progress(step string) func(done, total int) {
	if s.options.Progress == nil {
		return nil
	}
	return func(done, total int) { s.options.Progress(step, done, total) }
}

func (s *search) count(ctx context.Context) (err error) {
	if s.tokens, err = affinity.CountTokens(ctx, s.trace, s.train); err != nil {
		return err
	}
	s.counted = s.train
	if n := maxRequestCells / (len(s.trace.Model.Layers) * s.trace.Model.Experts); n < len(s.counted) {
		s.counted = trace.Shuffled(s.train, s.options.Seed)[:max(n, 1)]
		slices.Sort(s.counted)
	}
	if s.options.Attention == placement.DataParallel {
		if s.requests, err = affinity.CountRequests(ctx, s.trace, s.counted); err != nil {
			return err
		}
	}
	if (s.options.Algorithm == placement.Auto || s.options.Constraints.Binding()) && !s.options.messages().None() {
		s.occurrences = affinity.SampleOccurrences(s.trace, s.train, maxOccurrences, s.options.Attention == placement.DataParallel, s.options.Seed)
	}
	switch s.options.Algorithm {
	case placement.Auto:
		if s.options.Forecast != Table {
			s.pairs, err = affinity.CountPairs(ctx, s.trace, s.train)
		}
	case placement.Coactivation:
		s.pairs, err = affinity.CountPairs(ctx, s.trace, s.train)
	}
	switch {
	case err != nil:
	case s.options.Algorithm == placement.ExFlow, s.options.Algorithm == placement.MoETuner, s.timed():
		s.transitions, err = affinity.CountTransitions(ctx, s.trace, s.train)
	}
	return err
}

func (s *search) run(ctx context.Context) (*Solution, error) {
	var deadline time.Time
	if s.options.TimeBudget > 0 {
		deadline = time.Now().Add(s.options.TimeBudget)
	}
	if s.options.seeksNeighbours() {
		var err error
		if s.nearest, err = s.options.nearest(ctx, s.tokens, s.progress("Neighbours")); err != nil {
			return nil, err
		}
	}
	if s.timed() {
		return s.runTimed(ctx, deadline)
	}
	result, err := s.place(ctx, s.options.Algorithm, deadline)
	if err != nil {
		return nil, err
	}
	solution := s.solution(&result)
	by := s.options.Algorithm
	if by == placement.Auto && !result.Truncated {
		if result, by, err = s.placementOrDefault(ctx, result, solution, deadline); err != nil {
			return nil, err
		}
	}
	if err := s.tryNeighbours(ctx, solution, result.Placement, by); err != nil {
		return nil, err
	}
	return solution, s.finish(ctx, solution, &result, by, deadline)
}

func (s *search) solution(of *placement.Result) *Solution {
	return &Solution{Truncated: of.Truncated, Unmet: of.Unmet, TrainRequests: len(s.train), TestRequests: len(s.test), HeldOut: s.test}
}

// finish builds the tables of the selected placement, and scores the plan on the test requests.
func (s *search) finish(ctx context.Context, solution *Solution, result *placement.Result, by placement.Algorithm, deadline time.Time) (err error) {
	if s.choosesForecast {
		if solution.Forecasts, err = s.compareForecasts(ctx, result.Placement, by, deadline); err != nil {
			return err
		}
		s.options.Forecast = solution.Forecasts.Chosen
	}
	if solution.Plan, err = s.plan(ctx, result.Placement, by); err != nil {
		return err
	}
	if p := solution.Plan; p.Tokens != nil && p.Transitions == nil {
		if p.Transitions, err = affinity.CountRankTransitions(ctx, s.trace, s.train, p.hosts(), p.Placement.Ranks); err != nil {
			return err
		}
	}
	o := s.evaluation()
	o.WithoutBounds = false
	if solution.Report, err = s.evaluate(ctx, solution.Plan, o); err != nil {
		return err
	}
	if s.options.Unshuffled {
		unplanned, err := cost.EvaluateBaseline(ctx, s.trace, s.options.Attention, s.options.Ranks, o)
		if err != nil {
			return err
		}
		solution.Unplanned = &unplanned
	}
	return nil
}

// placementOrDefault returns the solved placement and its algorithm, or the default placement if validation on the
// train requests prefers it. If the time budget is exhausted before validation, the solved placement stays, and the
// solution is marked as truncated.
func (s *search) placementOrDefault(ctx context.Context, solved placement.Result, solution *Solution, deadline time.Time) (placement.Result, placement.Algorithm, error) {
	var err error
	if solution.FallBack, solution.Truncated, err = s.validate(ctx, deadline); err != nil || solution.FallBack == "" {
		return solved, placement.Auto, err
	}
	result, err := s.place(ctx, placement.ContiguousAlgorithm, deadline)
	solution.Truncated, solution.Unmet = result.Truncated, result.Unmet
	if s.options.Constraints.Moves() {
		return result, placement.Auto, err
	}
	return result, placement.ContiguousAlgorithm, err
}

// evaluate scores a plan the way the engine will use it.
func (s *search) evaluate(ctx context.Context, plan *Plan, o cost.Options) (cost.Report, error) {
	if !s.options.Unshuffled {
		return Evaluate(ctx, s.trace, plan, o)
	}
	o.RankCapacity = plan.RankCapacity
	return cost.TensorParallel(ctx, s.trace, plan.Placement, cost.NoForecast{}, o)
}

// evaluation returns options that score the test requests, without bounds.
func (s *search) evaluation() cost.Options {
	o := DefaultEvaluation()
	o.Requests, o.Seed, o.WithoutBounds = s.test, s.options.Seed, true
	o.RanksPerNode, o.Machines = s.options.ranksPerNode(), cost.NodeOf(s.options.profile())
	if limit := s.options.Constraints.TokenLoadLimit; limit > 0 {
		o.Cap = limit / 100
	}
	return o
}

// problem returns the placement problem of the train requests for an algorithm.
func (s *search) problem(by placement.Algorithm, deadline time.Time) placement.Problem {
	var prompts [][]int32
	if by == placement.AlternatingPrinted {
		for _, r := range s.counted {
			prompts = append(prompts, s.trace.Request(r))
		}
	}
	return placement.Problem{
		Prompts: prompts, Attention: s.options.Attention, Ranks: s.options.Ranks, Layers: s.trace.Model.Layers,
		Messages: s.options.messages(), Occurrences: s.occurrences, Constraints: s.options.Constraints,
		Tokens: s.tokens, Pairs: s.pairs, Transitions: s.transitions, Requests: s.requests, ProfileTokens: s.tokens[0].Tokens(),
		Algorithm: by, RedundantSlots: s.options.RedundantSlots, CopyRule: s.options.CopyRule, Groups: s.groups, Shrinkage: placement.DefaultShrinkage, Current: s.options.Current, Fresh: s.options.Fresh, Seed: s.options.Seed, Deadline: deadline, Progress: s.progress("Placement"),
	}
}

// place solves the placement on the train requests with an algorithm.
func (s *search) place(ctx context.Context, by placement.Algorithm, deadline time.Time) (placement.Result, error) {
	problem := s.problem(by, deadline)
	if by == placement.Auto && s.timed() {
		var err error
		if problem.Clock, err = s.clock(ctx); err != nil {
			return placement.Result{}, err
		}
		if problem.Starts, err = s.baselines(ctx, deadline); err != nil {
			return placement.Result{}, err
		}
	}
	return placement.Solve(ctx, problem)
}

// plan builds the tables of a placement that its forecast reads.
func (s *search) plan(ctx context.Context, p *placement.Placement, by placement.Algorithm) (*Plan, error) {
	plan := &Plan{
		Attention: s.options.Attention, Forecast: s.options.Forecast, Placement: p,
		HiddenLayers: s.trace.Model.HiddenLayers, Vocabulary: s.trace.Model.Vocabulary, Shape: cost.ShapeOf(&s.trace.Model),
		Algorithm: by, TrainPercent: s.options.TrainPercent, Seed: s.options.Seed, TraceDigest: s.trace.Digest,
		ModelDigest: s.trace.Model.Digest, Objective: s.options.objective(), RankCapacity: s.options.Constraints.RankCapacity,
		Hardware: s.options.storedProfile(),
	}
	if plan.Objective != placement.Activation {
		plan.RanksPerNode = s.options.ranksPerNode()
	}
	plan.Seen = affinity.NewSeen(s.trace, s.train)
	if s.scoreTokens(plan); plan.Attention == placement.DataParallel {
		return plan, nil
	}
	hosts := plan.hosts()
	var err error
	switch plan.Forecast {
	case Transition:
		plan.Transitions, err = affinity.CountRankTransitions(ctx, s.trace, s.train, hosts, p.Ranks)
	case Prefill, Decode:
		plan.Context, err = forecast.Train(ctx, s.trace, s.train, hosts, p.Ranks, plan.Forecast == Decode, s.options.Seed, s.progress("Forecast"))
	case LookAhead:
		plan.LookAhead, err = forecast.TrainLookAhead(ctx, s.trace, s.train, s.options.Seed, s.progress("Forecast"))
	case LookBack:
		plan.LookBack, err = forecast.TrainLookBack(ctx, s.trace, s.train, hosts, p.Ranks, forecast.LookBackDepth(p.Ranks), s.options.Seed, s.progress("Forecast"))
	}
	return plan, err
}

// scoreTokens builds the table of a plan that scores token IDs, in the memory of an unused one.
func (s *search) scoreTokens(plan *Plan) {
	ranks, estimator := plan.Placement.Ranks, affinity.Estimator{Shrinkage: shrinkage, Neighbours: s.neighbours}
	if plan.Attention == placement.DataParallel {
		plan.Ranks = affinity.NewRankTable(s.tokens, plan.hosts(), ranks, estimator)
		plan.Ranks.Spread(s.options.messages())
		return
	}
	unused := cmp.Or(s.unused, new(affinity.TokenTable))
	s.unused = nil
	plan.Tokens = unused.Rebuild(s.tokens, plan.hosts(), ranks, max(s.options.best(), s.keep), estimator)
}
