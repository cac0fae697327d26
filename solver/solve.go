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

// Forecast names the model that computes the scores of a plan.
type Forecast string

// Supported forecasts.
const (
	// Table scores a token by its ID only.
	Table Forecast = "table"
	// Prefill scores a token by everything known while a prompt is processed: the token, the tokens before it, the
	// prompt, and the experts of earlier layers (attention TP).
	Prefill Forecast = "prefill"
	// Decode scores a token by everything known during generation: as Prefill, with the routes of earlier positions in
	// place of the whole prompt (attention TP).
	Decode Forecast = "decode"
	// LookAhead scores a token by the output of the layer's gate before attention, corrected by a profile, and by the
	// experts of the previous layer (attention TP). RawLookAhead uses the gate's output only. Both require a trace with
	// a look-ahead.
	LookAhead    Forecast = "lookahead"
	RawLookAhead Forecast = "lookahead-raw"
	// Transition scores a token by its ID and by the ranks of its experts in the two previous layers, as in the papers
	// (attention TP).
	Transition Forecast = "transition"
	// LookBack uses the same inputs as Transition, but weighs whole distributions over ranks, of up to four previous
	// layers (attention TP).
	LookBack Forecast = "lookback"
)

// Forecasts lists the forecasts that a plan can carry.
var Forecasts = []Forecast{Table, Prefill, Decode, Transition, LookBack, LookAhead, RawLookAhead}

// Contextual reports whether a forecast.Model computes the forecast.
func (f Forecast) Contextual() bool { return f == Prefill || f == Decode }

// Trained reports whether the forecast needs trained tables, which only a plan with this forecast contains.
func (f Forecast) Trained() bool { return f.Contextual() || f == LookAhead || f == LookBack }

// ParseForecast returns the forecast with the given name.
func ParseForecast(name string) (Forecast, error) {
	for _, f := range Forecasts {
		if string(f) == name {
			return f, nil
		}
	}
	return "", fmt.Errorf("forecast %q is unknown; allowed is %s", name, strings.Trim(fmt.Sprint(Forecasts), "[]"))
}

// Plan is a placement with its forecast tables.
type Plan struct {
	Attention placement.Attention
	Forecast  Forecast
	Placement *placement.Placement
	// HiddenLayers and Vocabulary are those of the model. The placement contains the other dimensions.
	HiddenLayers, Vocabulary int
	// Shape contains the cost parameters of a token of the model, as far as the trace records them.
	Shape cost.Shape
	// Ranks are the scores of attention data parallelism, Tokens those of tensor parallelism. The other one is nil.
	Ranks  *affinity.RankTable
	Tokens *affinity.TokenTable
	// Transitions are the rank transition tables between layers (attention TP). They are nil if there are too many
	// ranks.
	Transitions *affinity.Transitions
	// Context scores tokens in their context, for the forecasts Prefill and Decode. It also reads the token table.
	Context *forecast.Model
	// LookAhead is the correction of the forecast LookAhead; nil for all others.
	LookAhead *forecast.LookAhead
	// LookBack contains the tables of the forecast LookBack, which it uses together with the token table. It is nil for
	// all others.
	LookBack *forecast.LookBack
	// Seen describes the training data of the tables. It is nil in plans of earlier versions.
	Seen *affinity.Seen
	// Objective and RanksPerNode define what the scores optimize. RanksPerNode is 0 for the objective Activation.
	Objective    placement.Objective
	RanksPerNode int
	// RankCapacity contains the ranks' shares of the tokens; nil means equal shares.
	RankCapacity []float64
	// Algorithm produced the placement: the requested algorithm, or contiguous after a fallback.
	Algorithm placement.Algorithm
	// TrainPercent and Seed reproduce the split by document from which the plan was solved. TraceDigest identifies the
	// trace.
	TrainPercent int
	Seed         uint64
	TraceDigest  [sha256.Size]byte
	// ModelDigest identifies the checkpoint from which the trace was recorded. It is empty if the trace does not record
	// it.
	ModelDigest string
	// Layout is the digest of the plan whose placement this plan reuses with new tables. It is empty if placement and
	// tables were solved together.
	Layout string
	// Drift calibrates the test that detects whether traffic has drifted from the plan's profile. It is nil if there is
	// none (see CalibrateDrift).
	Drift *drift.Calibration
	// Schedule is the schedule inside MoE layers. It is nil if the model's shape is unknown (see ScheduleLayers).
	Schedule *schedule.Schedule
	// Hardware is the profile of the target machines; nil means hardware.DefaultProfile.
	Hardware *hardware.Profile
	// Front contains the candidates of a search by time, and Chosen the name of the selected one. Both are empty for
	// other objectives.
	Front  []FrontPoint
	Chosen string
	// Copies records how the number of redundant slots was chosen. It is nil if the number was given.
	Copies *Copies
}

// Machines returns the profile of the target machines.
func (p *Plan) Machines() *hardware.Profile { return cmp.Or(p.Hardware, hardware.DefaultProfile()) }

// Options are the inputs of Solve in addition to the trace.
type Options struct {
	// Ranks is the EP size; it must divide the number of experts.
	Ranks     int
	Attention placement.Attention
	Algorithm placement.Algorithm
	Forecast  Forecast
	// RedundantSlots is the number of slots per rank for copies of experts of other ranks.
	RedundantSlots int
	// RedundantMemory, if positive, is the memory of a rank for copies in bytes, over all layers. Solve then chooses
	// RedundantSlots, which must be 0 in the input. It requires the objective Time and the algorithm Auto.
	RedundantMemory int64
	// CopyRule is the engine's rule for choosing among the copies of an expert. A copy that the engine does not use is
	// not local. Empty means the rule of Current.
	CopyRule placement.CopyRule
	// Objective is the quantity that placement and tables minimize, and by which a solved placement is compared with
	// the default one. Empty means placement.Activation. RanksPerNode defines which ranks share a node; 0 means that of
	// DefaultEvaluation.
	Objective    placement.Objective
	RanksPerNode int
	// BatchTokens are the batch sizes in service, in tokens over all ranks. All entries have equal weight, so a size
	// listed n times counts n times. The objective Time minimizes the mean time over them, and plans are compared by
	// it. Empty means DefaultBatchTokens.
	BatchTokens []int
	// Unshuffled describes attention tensor parallelism in an engine that leaves tokens where attention puts them:
	// tokens are assigned to ranks round-robin, regardless of the tables. The local activation rate is then the same
	// under every placement, so a different objective is required.
	Unshuffled bool
	// Hardware is the profile of the target machines, used to model times and to weigh messages; nil means
	// hardware.DefaultProfile.
	Hardware *hardware.Profile
	// Constraints restrict the placement.
	Constraints placement.Constraints
	// PreserveGroups keeps the gate's groups of experts together, so that a checkpoint permuted by the placement
	// computes the same. The trace's model config defines the groups; without groups it has no effect.
	PreserveGroups bool
	// Embeddings, if given, define which tokens are similar: a token that the train requests lack is scored like its
	// nearest neighbors among the tokens they contain.
	Embeddings *embedding.Table
	// Current is the placement in service, if any. Auto starts from it, which is faster and moves few experts.
	Current *placement.Placement
	// Fresh starts the search from scratch although Current is set, because Current was solved for different traffic.
	Fresh bool
	// TrainPercent is the percentage of requests to train on, split by whole documents. The others score the plan.
	TrainPercent int
	// Seed makes split, search and evaluation reproducible.
	Seed uint64
	// TimeBudget limits the search; 0 means no limit.
	TimeBudget time.Duration
	// Progress, if set, receives each step's name and progress. It is called from several goroutines.
	Progress func(step string, done, total int)
}

// Solution is a plan with its scores.
type Solution struct {
	Plan *Plan
	// Report is the plan's score on the held-out requests.
	Report cost.Report
	// Unplanned is the score without a plan on the same requests. It is set only for tokens that are not shuffled.
	Unplanned *cost.Report
	// Worth is the result of WorthOf; nil if it was not computed.
	Worth *Worth
	// Unmet lists the load limits that the placement exceeds on the profile.
	Unmet []string
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

// maxTableBytes bounds the score table of a plan: readers of plans reject larger files.
const maxTableBytes = 1 << 30

// checkTable rejects options whose score table would exceed maxTableBytes.
func (o *Options) checkTable(m *trace.Model) error {
	const scoreBytes = 2
	size := m.Vocabulary * o.Ranks * scoreBytes
	if o.Attention == placement.TensorParallel {
		size = m.Vocabulary * len(m.Layers) * min(o.best(), o.Ranks) * 2 * scoreBytes // ranks and their scores
	}
	if size > maxTableBytes {
		return fmt.Errorf("the score table of forecast %s has %d bytes for %d ranks, vocab_size %d and %d MoE layers; the maximum is %d",
			o.Forecast, size, o.Ranks, m.Vocabulary, len(m.Layers), maxTableBytes)
	}
	return nil
}

// best returns the number of ranks that a table stores per token (attention TP).
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
		return fmt.Errorf("forecast %s supports at most %d ranks, not %d", f, affinity.MaxTransitionRanks, ranks)
	case f == LookBack && ranks > forecast.MaxLookBackRanks:
		return fmt.Errorf("forecast %s supports at most %d ranks, not %d", f, forecast.MaxLookBackRanks, ranks)
	}
	return nil
}

// groups returns the number of expert groups to keep together.
func (o *Options) groups(m *trace.Model) (int, error) {
	if !o.PreserveGroups {
		return 1, nil
	}
	return m.Groups()
}

// search is the state of one Solve.
type search struct {
	trace       *trace.Trace
	options     Options
	groups      int
	train, test []int
	// counted are the train requests, or a sample of them, of which whole requests are clustered.
	counted     []int
	tokens      []affinity.Counts
	pairs       []affinity.Pairs
	transitions [][]float32
	requests    *affinity.RequestCounts
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
		if result, by, err = s.placementOrDefault(ctx, result, solution, deadline); err != nil {
			return nil, err
		}
	}
	return solution, s.finish(ctx, solution, &result, by)
}

func (s *search) solution(of *placement.Result) *Solution {
	return &Solution{Truncated: of.Truncated, Unmet: of.Unmet, TrainRequests: len(s.train), TestRequests: len(s.test), HeldOut: s.test}
}

// finish builds the tables of the selected placement, and scores the plan on the test requests.
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
		Hardware: s.options.storedProfile(),
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

// hosts returns, for every layer, the ranks on which each expert is local.
func (p *Plan) hosts() []affinity.Hosts {
	hosts := make([]affinity.Hosts, len(p.Placement.Layers))
	for l := range hosts {
		hosts[l] = p.Placement.Local(l)
	}
	return hosts
}

// DefaultEvaluation returns the default options for scoring plans. The caller sets Requests and Seed.
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

// TokenForecast returns the plan's forecast for the tokens of a trace, weighted by the plan's objective (attention TP).
func (p *Plan) TokenForecast(t *trace.Trace) (cost.TokenForecast, error) {
	if err := p.matches(t); err != nil {
		return nil, err
	}
	return p.tokenForecast(t)
}

// tokenForecast is TokenForecast for a trace that matches.
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

// bind prepares the plan's forecast for the tokens of a trace.
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
			return nil, fmt.Errorf("the plan has no table of rank transitions")
		}
		return p.Transitions.Forecast(p.Tokens, p.hosts(), t), nil
	default:
		return p.Tokens.Forecast(t), nil
	}
}
