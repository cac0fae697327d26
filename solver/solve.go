package solver

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/drift"
	"github.com/semmoe/operator/solver/embedding"
	"github.com/semmoe/operator/solver/forecast"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/schedule"
	"github.com/semmoe/operator/solver/trace"
)

// Forecast names what the scores of a plan are computed from.
type Forecast string

// The forecasts.
const (
	// Table scores by token id alone.
	Table Forecast = "table"
	// Prefill scores by all that is known while a prompt is processed: the token, the tokens before it, the prompt, and the
	// experts of earlier layers (attention TP).
	Prefill Forecast = "prefill"
	// Decode scores by all that is known while tokens are generated: as Prefill, with the routes of earlier positions instead
	// of the whole prompt (attention TP).
	Decode Forecast = "decode"
	// LookAhead scores by what the layer's gate says before attention, corrected by a profile, and by the experts of the layer
	// before (attention TP); RawLookAhead by what the gate says alone. The trace must have a look-ahead.
	LookAhead    Forecast = "lookahead"
	RawLookAhead Forecast = "lookahead-raw"
	// Transition scores by token id and by the ranks of the token's experts in the two layers before, as the papers do
	// (attention TP).
	Transition Forecast = "transition"
	// LookBack scores by the same, but weighs whole distributions over ranks, after up to four layers (attention TP).
	LookBack Forecast = "lookback"
)

// Forecasts lists the forecasts that a plan can carry.
var Forecasts = []Forecast{Table, Prefill, Decode, Transition, LookBack, LookAhead, RawLookAhead}

// Contextual reports whether the forecast is that of a forecast.Model.
func (f Forecast) Contextual() bool { return f == Prefill || f == Decode }

// Trained reports whether the forecast needs tables that no plan has but those that carry it.
func (f Forecast) Trained() bool { return f.Contextual() || f == LookAhead || f == LookBack }

// ParseForecast returns the forecast of that name.
func ParseForecast(name string) (Forecast, error) {
	for _, f := range Forecasts {
		if string(f) == name {
			return f, nil
		}
	}
	return "", fmt.Errorf("forecast %q is not available; available is %s", name, strings.Trim(fmt.Sprint(Forecasts), "[]"))
}

// Plan is a placement with the forecast tables that belong to it.
type Plan struct {
	Attention placement.Attention
	Forecast  Forecast
	Placement *placement.Placement
	// HiddenLayers and Vocabulary are the model's; the placement tells the rest.
	HiddenLayers, Vocabulary int
	// Shape is what a token of the model costs by, as far as the trace tells.
	Shape cost.Shape
	// Ranks are the scores of attention data parallelism, Tokens those of tensor parallelism; the other is nil.
	Ranks  *affinity.RankTable
	Tokens *affinity.TokenTable
	// Transitions tell of ranks in earlier layers (attention TP); nil where there are too many ranks.
	Transitions *affinity.Transitions
	// Context scores tokens by more than their id, where the forecast is Prefill or Decode; it reads the token table, too.
	Context *forecast.Model
	// LookAhead is the correction of the forecast LookAhead; nil for all others.
	LookAhead *forecast.LookAhead
	// LookBack are the tables of the forecast LookBack, read beside the token table; nil for all others.
	LookBack *forecast.LookBack
	// Seen is what the tables have learnt from; nil in plans of earlier versions.
	Seen *affinity.Seen
	// Objective and RanksPerNode are what the scores are about; RanksPerNode is 0 where the objective is Activation.
	Objective    placement.Objective
	RanksPerNode int
	// RankCapacity are the ranks' shares of the tokens; nil is equal shares.
	RankCapacity []float64
	// Algorithm made the placement: the one asked for, or contiguous after a fall-back.
	Algorithm placement.Algorithm
	// TrainPercent and Seed repeat the split by document under which the plan was solved, TraceDigest names the trace.
	TrainPercent int
	Seed         uint64
	TraceDigest  [sha256.Size]byte
	// ModelDigest identifies the checkpoint that the trace was recorded from; empty where the trace does not tell.
	ModelDigest string
	// Layout is the digest of the plan that this one has the placement of, with new tables alone; empty where the placement was
	// solved together with the tables.
	Layout string
	// Drift is the test of whether traffic has moved away from the plan; nil where there is none (see CalibrateDrift).
	Drift *drift.Calibration
	// Schedule is about the work inside MoE layers; nil where the model's shape is not known (see ScheduleLayers).
	Schedule *schedule.Schedule
	// Hardware is the profile of the machines that the plan is for; nil is hardware.DefaultProfile.
	Hardware *hardware.Profile
	// Front are the placements that a search by time chose among, and Chosen is the name of the plan's; both are empty with other objectives.
	Front  []FrontPoint
	Chosen string
	// Copies is how the number of redundant slots was chosen; nil where it was given.
	Copies *Copies
}

// Machines is the profile of the machines that the plan is for.
func (p *Plan) Machines() *hardware.Profile { return cmp.Or(p.Hardware, hardware.DefaultProfile()) }

// Options are the inputs of Solve besides the trace.
type Options struct {
	// Ranks is the EP size; it must divide the number of experts.
	Ranks     int
	Attention placement.Attention
	Algorithm placement.Algorithm
	Forecast  Forecast
	// RedundantSlots is the number of slots per rank for copies of other ranks' experts.
	RedundantSlots int
	// RedundantMemory, where it is above 0, is the memory of a rank for copies in bytes, over all layers: Solve chooses RedundantSlots, which is then 0
	// here. It needs the objective Time and the algorithm Auto.
	RedundantMemory int64
	// CopyRule is how the engine chooses among the copies of an expert: what it does not use is not local. Where it is empty, that of Current.
	CopyRule placement.CopyRule
	// Objective is what placement and tables are to keep small, and what decides whether the default placement is better; empty is
	// placement.Activation. RanksPerNode tells which ranks share a node, and 0 stands for DefaultEvaluation's.
	Objective    placement.Objective
	RanksPerNode int
	// BatchTokens are the sizes of the batches that are served, in tokens over all ranks, each as frequent as the others: the objective
	// Time minimizes the mean time over them, and the worth of a plan is judged by it. A size that is given n times is n times as frequent. Empty
	// is DefaultBatchTokens.
	BatchTokens []int
	// Unshuffled tells of attention tensor parallelism in an engine that leaves tokens where attention puts them: they lie on the ranks in
	// turn, whatever tables say. The local activation rate is then the same under every placement, so that the objective must be another.
	Unshuffled bool
	// Hardware is the profile of the machines that are to serve, by which times are modelled and messages weighed; nil is
	// hardware.DefaultProfile.
	Hardware *hardware.Profile
	// Constraints narrow the choice of the placement.
	Constraints placement.Constraints
	// PreserveGroups keeps the groups whole that the model's gate chooses among, so that a checkpoint permuted by the placement
	// computes the same. The trace's model config tells the groups; where it names none, nothing changes.
	PreserveGroups bool
	// Embeddings, where given, tell which tokens are alike: one that the train requests lack is scored like its nearest
	// neighbours among those that they have.
	Embeddings *embedding.Table
	// Current is the placement in service, if any: Auto starts from it, which is faster, and moves few experts.
	Current *placement.Placement
	// Fresh has the search start from nothing all the same: Current was solved for other traffic.
	Fresh bool
	// TrainPercent of the requests are learnt from, by whole documents; the others judge the plan.
	TrainPercent int
	// Seed makes split, search and evaluation repeatable.
	Seed uint64
	// TimeBudget cuts the search off; 0 never does.
	TimeBudget time.Duration
	// Progress, where set, is told what is being done and how much of it is done. Calls come from several goroutines.
	Progress func(step string, done, total int)
}

// Solution is a plan with what it is worth.
type Solution struct {
	Plan *Plan
	// Report is the plan's score on the held-out requests.
	Report cost.Report
	// Unplanned is the score of what serves without a plan on the same requests; nil but for tokens that are not shuffled.
	Unplanned *cost.Report
	// Worth is that of WorthOf; nil where it was not judged.
	Worth *Worth
	// Unmet says which load limits the placement does not keep on the profile.
	Unmet []string
	// FallBack says why the default placement was taken instead; empty where it was not.
	FallBack string
	// Truncated is set when the time budget cut off the search, or the comparison with the default placement.
	Truncated bool
	// TrainRequests and TestRequests count the requests on both sides of the split.
	TrainRequests, TestRequests int
	// HeldOut are the latter: requests of the trace.
	HeldOut []int
}

const (
	// bestRanks is how many ranks a token table keeps of each token: a frequent token is split over several.
	bestRanks = 4
	// contextRanks is the same for a table that another forecast reads and weighs: it compares all ranks with one another.
	contextRanks = 16
	// maxOccurrences is the number of tokens by which distinct ranks are counted during the search.
	maxOccurrences = 1 << 15
	// maxRequestCells (requests × layers × experts) bounds the memory for counts of whole requests, 4 bytes each. Above it a
	// sample of the train requests is counted.
	maxRequestCells = 1 << 26
	// shrinkage pulls a token's shares towards the prior like this many occurrences of it would.
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

// Check tells why options do not fit a trace, whatever would be found; nil where they do.
func Check(t *trace.Trace, o Options) error {
	_, err := newSearch(t, o)
	return err
}

// newSearch checks the options against the trace, and splits it.
func newSearch(t *trace.Trace, o Options) (*search, error) {
	if err := placement.CheckRanks(o.Ranks, t.Model.Experts); err != nil {
		return nil, err
	}
	if err := placement.CheckSlots(o.Algorithm, o.Ranks, t.Model.Experts, o.leastSlots()); err != nil {
		return nil, err
	}
	groups, err := o.groups(&t.Model)
	if err != nil {
		return nil, err
	}
	if err := placement.CheckGroups(o.Algorithm, o.Ranks, t.Model.Experts, o.leastSlots(), groups); err != nil {
		return nil, err
	}
	if err := o.check(&t.Model); err != nil {
		return nil, err
	}
	if _, err := ParseForecast(string(o.Forecast)); err != nil {
		return nil, err
	}
	if o.Forecast != Table && o.Attention == placement.DataParallel {
		return nil, fmt.Errorf("forecast %q is for attention tp; attention dp scores a request by its tokens: use %s", o.Forecast, Table)
	}
	if err := CheckForecast(o.Forecast, o.Ranks, t); err != nil {
		return nil, err
	}
	if o.Embeddings != nil && o.Forecast.Contextual() {
		return nil, fmt.Errorf("embeddings are not for forecast %s, which has learnt what the mean of all tokens is worth for one that was not seen", o.Forecast)
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
	return &search{trace: t, options: o, groups: groups, train: train, test: test}, nil
}

// maxTableBytes bounds the table of scores of a plan: readers of plans refuse larger files.
const maxTableBytes = 1 << 30

// checkTable refuses options for which the table of scores of a model is too large.
func (o *Options) checkTable(m *trace.Model) error {
	const scoreBytes = 2
	size := m.Vocabulary * o.Ranks * scoreBytes
	if o.Attention == placement.TensorParallel {
		size = m.Vocabulary * len(m.Layers) * min(o.best(), o.Ranks) * 2 * scoreBytes // ranks and their scores
	}
	if size > maxTableBytes {
		return fmt.Errorf("the table of scores of forecast %s has %d bytes for %d ranks, vocab_size %d and %d MoE layers; allowed are %d",
			o.Forecast, size, o.Ranks, m.Vocabulary, len(m.Layers), maxTableBytes)
	}
	return nil
}

// best returns how many ranks a table keeps of each token (attention TP).
func (o *Options) best() int {
	if o.Forecast.Contextual() || o.Forecast == LookBack {
		return contextRanks
	}
	return bestRanks
}

// CheckForecast checks that a forecast can be computed from a trace for a number of ranks.
func CheckForecast(f Forecast, ranks int, t *trace.Trace) error {
	switch {
	case f == LookAhead || f == RawLookAhead:
		return forecast.RawLookAhead(&t.Model).Fits(t)
	case f == Transition && ranks > affinity.MaxTransitionRanks:
		return fmt.Errorf("forecast %s is for at most %d ranks, not %d", f, affinity.MaxTransitionRanks, ranks)
	case f == LookBack && ranks > forecast.MaxLookBackRanks:
		return fmt.Errorf("forecast %s is for at most %d ranks, not %d", f, forecast.MaxLookBackRanks, ranks)
	}
	return nil
}

// groups is the number of groups to keep whole.
func (o *Options) groups(m *trace.Model) (int, error) {
	if !o.PreserveGroups {
		return 1, nil
	}
	return m.Groups()
}

// search is one Solve.
type search struct {
	trace       *trace.Trace
	options     Options
	groups      int
	train, test []int
	// counted are the train requests, or a sample of them, that are clustered whole.
	counted     []int
	tokens      []affinity.Counts
	pairs       []affinity.Pairs
	transitions [][]float32
	requests    *affinity.RequestCounts
	neighbours  *affinity.Neighbours
	occurrences *affinity.Occurrences
	// keep is how many ranks of each token a table is to keep where that is more than the usual number.
	keep int
	// unused is the table of a plan that is no longer used. Tables can be most of the memory of a solve, and there is one at a time.
	unused *affinity.TokenTable
	// solvedBaselines are the placements of timedBaselines, where they have been solved.
	solvedBaselines []*placement.Placement
	// solvedWithoutCopies are the candidates of a search by time without copies of experts, where they have been solved.
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
	if e := s.options.Embeddings; e != nil {
		if s.neighbours, err = affinity.NearestSeen(ctx, e, s.tokens[0].Occurrences, s.progress("Neighbours")); err != nil {
			return err
		}
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
		if result, by, err = s.orDefault(ctx, result, solution, deadline); err != nil {
			return nil, err
		}
	}
	return solution, s.finish(ctx, solution, &result, by)
}

func (s *search) solution(of *placement.Result) *Solution {
	return &Solution{Truncated: of.Truncated, Unmet: of.Unmet, TrainRequests: len(s.train), TestRequests: len(s.test), HeldOut: s.test}
}

// finish builds the tables of the chosen placement, and scores the plan on the test requests.
func (s *search) finish(ctx context.Context, solution *Solution, result *placement.Result, by placement.Algorithm) (err error) {
	if solution.Plan, err = s.plan(ctx, result.Placement, by); err != nil {
		return err
	}
	o := s.evaluation()
	o.WithoutBounds = false
	if solution.Report, err = s.evaluate(ctx, solution.Plan, o); err != nil {
		return err
	}
	if s.options.Unshuffled {
		unplanned, err := cost.Dealt(ctx, s.trace, s.options.Attention, s.options.Ranks, o)
		if err != nil {
			return err
		}
		solution.Unplanned = &unplanned
	}
	return nil
}

// orDefault is a solved placement and what made it, or the default one where the train requests prefer that. A placement that the time
// budget left no time to judge stays, and the solution says that it was truncated.
func (s *search) orDefault(ctx context.Context, solved placement.Result, solution *Solution, deadline time.Time) (placement.Result, placement.Algorithm, error) {
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

// evaluate scores a plan as the engine is going to use it.
func (s *search) evaluate(ctx context.Context, plan *Plan, o cost.Options) (cost.Report, error) {
	if !s.options.Unshuffled {
		return Evaluate(ctx, s.trace, plan, o)
	}
	o.RankCapacity = plan.RankCapacity
	return cost.TensorParallel(ctx, s.trace, plan.Placement, noForecast{}, o)
}

// problem is the placement of the train requests by an algorithm.
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

// place solves the placement on the train requests by an algorithm.
func (s *search) place(ctx context.Context, by placement.Algorithm, deadline time.Time) (placement.Result, error) {
	problem := s.problem(by, deadline)
	if by == placement.Auto && s.timed() {
		var err error
		if problem.Clock, err = s.clock(ctx); err != nil {
			return placement.Result{}, err
		}
		if problem.Starts, err = s.baselines(ctx); err != nil {
			return placement.Result{}, err
		}
	}
	return placement.Solve(ctx, problem)
}

// plan builds the tables of a placement.
func (s *search) plan(ctx context.Context, p *placement.Placement, by placement.Algorithm) (*Plan, error) {
	plan := &Plan{
		Attention: s.options.Attention, Forecast: s.options.Forecast, Placement: p,
		HiddenLayers: s.trace.Model.HiddenLayers, Vocabulary: s.trace.Model.Vocabulary, Shape: cost.ShapeOf(&s.trace.Model),
		Algorithm: by, TrainPercent: s.options.TrainPercent, Seed: s.options.Seed, TraceDigest: s.trace.Digest,
		ModelDigest: s.trace.Model.Digest, Objective: s.options.objective(), RankCapacity: s.options.Constraints.RankCapacity,
		Hardware: s.options.carried(),
	}
	if plan.Objective != placement.Activation {
		plan.RanksPerNode = s.options.ranksPerNode()
	}
	hosts := plan.hosts()
	plan.Seen = affinity.NewSeen(s.trace, s.train)
	estimator := affinity.Estimator{Shrinkage: shrinkage, Neighbours: s.neighbours}
	if plan.Attention == placement.DataParallel {
		plan.Ranks = affinity.NewRankTable(s.tokens, hosts, p.Ranks, estimator)
		plan.Ranks.Spread(s.options.messages())
		return plan, nil
	}
	unused := cmp.Or(s.unused, new(affinity.TokenTable))
	s.unused = nil
	plan.Tokens = unused.Rebuild(s.tokens, hosts, p.Ranks, max(s.options.best(), s.keep), estimator)
	var err error
	if plan.Transitions, err = affinity.CountRankTransitions(ctx, s.trace, s.train, hosts, p.Ranks); err != nil {
		return nil, err
	}
	switch plan.Forecast {
	case Prefill, Decode:
		plan.Context, err = forecast.Train(ctx, s.trace, s.train, hosts, p.Ranks, plan.Forecast == Decode, s.options.Seed, s.progress("Forecast"))
	case LookAhead:
		plan.LookAhead, err = forecast.TrainLookAhead(ctx, s.trace, s.train, s.options.Seed, s.progress("Forecast"))
	case LookBack:
		plan.LookBack, err = forecast.TrainLookBack(ctx, s.trace, s.train, hosts, p.Ranks, forecast.LookBackDepth(p.Ranks), s.options.Seed, s.progress("Forecast"))
	}
	return plan, err
}

// hosts are the ranks on which every layer's experts are local.
func (p *Plan) hosts() []affinity.Hosts {
	hosts := make([]affinity.Hosts, len(p.Placement.Layers))
	for l := range hosts {
		hosts[l] = p.Placement.Local(l)
	}
	return hosts
}

// DefaultEvaluation is how plans are scored unless told otherwise; Requests and Seed are left to the caller.
func DefaultEvaluation() cost.Options {
	return cost.Options{
		BatchTokens: 4096, Shards: cost.EqualShards, Policy: dispatch.Price, Cap: 1.15, Orders: 5, RanksPerNode: 8, Machines: cost.NodeOf(hardware.DefaultProfile()),
		Weights: dispatch.DefaultWeights, Workload: trace.Recorded,
	}
}

// Evaluate scores a plan on requests of a trace.
func Evaluate(ctx context.Context, t *trace.Trace, plan *Plan, o cost.Options) (cost.Report, error) {
	if err := plan.matches(t); err != nil {
		return cost.Report{}, err
	}
	o.RankCapacity = plan.RankCapacity
	if plan.Attention == placement.DataParallel {
		return cost.DataParallel(ctx, t, plan.Placement, plan.Ranks.Forecast(t), o)
	}
	tokens, err := plan.tokenForecast(t)
	if err != nil {
		return cost.Report{}, err
	}
	return cost.TensorParallel(ctx, t, plan.Placement, tokens, o)
}

// tokenForecast scores the tokens of a trace by the plan's objective (attention TP).
func (p *Plan) tokenForecast(t *trace.Trace) (cost.TokenForecast, error) {
	tokens, err := p.bind(t)
	if err != nil {
		return nil, err
	}
	if m := p.messages(); !m.None() {
		tokens = messageForecast{tokens, m, t.Model.TopK}
	}
	return tokens, nil
}

// bind readies the plan's forecast for the tokens of a trace.
func (p *Plan) bind(t *trace.Trace) (cost.TokenForecast, error) {
	switch p.Forecast {
	case Prefill, Decode:
		return p.Context.Bind(p.Tokens, p.hosts(), t), nil
	case LookAhead:
		return p.LookAhead.Bind(p.hosts(), t), p.LookAhead.Fits(t)
	case RawLookAhead:
		raw := forecast.RawLookAhead(&t.Model)
		return raw.Bind(p.hosts(), t), raw.Fits(t)
	case LookBack:
		return p.LookBack.Bind(p.Tokens, p.hosts(), t), nil
	case Transition:
		if p.Transitions == nil {
			return nil, fmt.Errorf("the plan has no table of transitions between ranks")
		}
		return p.Transitions.Forecast(p.Tokens, p.hosts(), t), nil
	default:
		return p.Tokens.Forecast(t), nil
	}
}
