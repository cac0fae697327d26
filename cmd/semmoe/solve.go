package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/semmoe/operator/internal/checkpoint"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/regularfile"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// Exit codes of profile, solve and eval, besides 1 for everything that another attempt might cure.
const (
	exitUsage       = 2
	exitInvalidFile = 3
)

// codedError carries an exit code.
type codedError struct {
	error
	code int
}

func (e codedError) Unwrap() error { return e.error }
func (e codedError) ExitCode() int { return e.code }

func usageErrorf(format string, args ...any) error {
	return codedError{fmt.Errorf(format, args...), exitUsage}
}

// inputError gives faults of a trace or a plan their exit code.
func inputError(err error) error {
	if trace.IsInvalid(err) || plan.IsInvalid(err) || checkpoint.IsInvalid(err) || errors.Is(err, os.ErrNotExist) || errors.Is(err, regularfile.ErrTooLarge) {
		return codedError{err, exitInvalidFile}
	}
	return err
}

// solveFlags are the flags of semmoe solve.
type solveFlags struct {
	trace, out, current, attention, algorithm, forecast, embeddings, objective string
	hardware                                                                   string
	copyRule                                                                   string
	redundantSlots, redundantMemory                                            string
	ranks, ranksPerNode, trainPercent                                          int
	withoutDomains                                                             []string
	constraints                                                                constraintFlags
	preserveGroups                                                             bool
	batchTokens                                                                []int
	minimumGain                                                                float64
	output                                                                     string
	seed                                                                       uint64
	timeBudget                                                                 time.Duration
}

func newSolveCommand() *cobra.Command {
	var flags solveFlags
	cmd := &cobra.Command{
		Use:   "solve --trace FILE --ep N --attention tp|dp --out DIR",
		Short: "Solve a placement plan from a routing trace",
		Long: "Solve which expert sits on which rank, and the tables that send tokens or requests there, from a routing trace. Part of the\n" +
			"documents is held back and judges the plan. Writes the plan directory, and prints its score as one JSON object.\n" +
			"Exit code 2: the command line must be changed; 3: the trace is invalid; 1: try again.",
		Args: usageArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			options, err := flags.options()
			if err != nil {
				return err
			}
			return flags.run(cmd.Context(), options, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return codedError{err, exitUsage} })
	f := cmd.Flags()
	f.StringVar(&flags.trace, "trace", "", "routing trace, .safetensors or .safetensors.zst (required)")
	f.IntVar(&flags.ranks, "ep", 0, "EP size: the number of ranks; must divide the experts (required)")
	f.StringVar(&flags.attention, "attention", "", "tp: each token has a rank in each layer; dp: each request has one (required)")
	f.StringVar(&flags.out, "out", "", "directory for the plan; a plan that is there is replaced (required)")
	f.StringVar(&flags.current, "current", "", "directory of the plan in service: auto starts from it, which is faster and moves few experts")
	f.StringVar(&flags.algorithm, "algorithm", string(placement.Auto), listOf(placement.Algorithms))
	f.StringVar(&flags.forecast, "forecast", string(solver.Table), "what scores are computed from: table (the token id), and with attention tp transition (and the ranks of earlier\nlayers, as the papers merge them), lookback (the same, weighed), prefill (and the prompt and earlier layers'\nexperts), decode (and earlier routes; never later tokens), lookahead-raw (the layer's gate before attention)\nor lookahead (the same, corrected by the profile)")
	f.StringVar(&flags.embeddings, "embeddings", "", ".npy file with a vector for each token id, float16 or float32: a token that is not among the requests to learn from\nis scored like the 8 nearest that are (default: like the mean of all tokens; not for prefill and decode)")
	f.StringVar(&flags.redundantSlots, "redundant-slots", "0", "extra slots per rank, for copies of experts of other ranks (auto, eplb, contiguous, round-robin); auto takes as many as\npay in modelled time and fit --redundant-memory")
	f.StringVar(&flags.redundantMemory, "redundant-memory", "", "memory of a rank for copies over all layers, with --redundant-slots auto: bytes, or as 8GiB")
	f.StringVar(&flags.copyRule, "copy-rule", placement.CopyRules[0], "which copy of an expert the engine uses on a rank: nearest (its own, as SGLang), rank-modulo (the copy with the number\nrank mod copies, as vllm-ascend with attention dp)")
	f.BoolVar(&flags.preserveGroups, "preserve-groups", false, "keep the groups whole that the gate chooses among (n_group), so that semmoe reshuffle can apply the plan\n(auto, contiguous; EP size and groups must divide one another)")
	f.IntVar(&flags.trainPercent, "train-percent", 20, "percent of the requests to learn from, by whole documents")
	f.StringSliceVar(&flags.withoutDomains, "without-domains", nil, "domains of the trace to leave out, for semmoe drift to switch to")
	f.Uint64Var(&flags.seed, "seed", 1, "seed of the split, the search and the evaluation")
	f.StringVar(&flags.objective, "objective", string(placement.Time), "what to minimise: time (the modelled time of an MoE layer), activation (remote activations), rank-dedup (other ranks per\ntoken), node-dedup (other nodes per token), hierarchical (both, each by what a message costs); algorithm auto searches\nfor it, all tables score by it")
	f.IntSliceVar(&flags.batchTokens, "batch-tokens", solver.DefaultBatchTokens, "sizes of the batches that are served, in tokens over all ranks; each is as frequent as the others")
	f.Float64Var(&flags.minimumGain, "minimum-gain-percent", solver.DefaultMinimumGainPercent, "percentage of a layer's modelled time that the plan must save for the verdict Gain")
	f.StringVarP(&flags.output, "output", "o", "", "output format: json, or table (default: table on a terminal, json elsewhere)")
	f.IntVar(&flags.ranksPerNode, "ranks-per-node", solver.DefaultEvaluation().RanksPerNode, "ranks that share a node")
	flags.constraints.add(cmd)
	hardwareFlag(f, &flags.hardware)
	f.DurationVar(&flags.timeBudget, "time-budget", time.Minute, "cut the search off after this time; 0 never does")
	return cmd
}

// departs tells whether a flag stands on the command line with another value than its default: to say the default asks for nothing, and
// is right where the flag has no meaning, too.
func departs(cmd *cobra.Command) func(name string) bool {
	return func(name string) bool {
		flag := cmd.Flags().Lookup(name)
		return flag.Changed && flag.Value.String() != flag.DefValue
	}
}

func listOf[T ~string](values []T) string {
	names := make([]string, len(values))
	for i, v := range values {
		names[i] = string(v)
	}
	return strings.Join(names, ", ")
}

func usageArgs(cmd *cobra.Command, args []string) error {
	if err := cobra.NoArgs(cmd, args); err != nil {
		return codedError{err, exitUsage}
	}
	return nil
}

// invalidArgs is usageArgs of commands that run in Jobs and pods, where a faulty command line has the exit code of what no other attempt
// mends.
func invalidArgs(cmd *cobra.Command, args []string) error {
	if err := cobra.NoArgs(cmd, args); err != nil {
		return codedError{err, exitInvalidFile}
	}
	return nil
}

func (f *solveFlags) options() (solver.Options, error) {
	o := solver.Options{
		Ranks: f.ranks, Attention: placement.Attention(f.attention), TrainPercent: f.trainPercent, Seed: f.seed, TimeBudget: f.timeBudget,
		PreserveGroups: f.preserveGroups, RanksPerNode: f.ranksPerNode,
	}
	switch {
	case f.trace == "":
		return o, usageErrorf("--trace is missing: name a routing trace")
	case f.out == "":
		return o, usageErrorf("--out is missing: name a directory for the plan")
	case f.ranks < 1:
		return o, usageErrorf("--ep is %d; give the number of ranks, at least 1", f.ranks)
	case o.Attention != placement.TensorParallel && o.Attention != placement.DataParallel:
		return o, usageErrorf("--attention is %q; allowed is tp, dp", f.attention)
	case f.ranksPerNode < 1:
		return o, usageErrorf("--ranks-per-node is %d; it must be at least 1", f.ranksPerNode)
	case f.trainPercent < 1 || f.trainPercent > 99:
		return o, usageErrorf("--train-percent is %d; allowed is 1 to 99", f.trainPercent)
	case f.timeBudget < 0:
		return o, usageErrorf("--time-budget is %v; it cannot be negative", f.timeBudget)
	}
	if err := f.copies(&o); err != nil {
		return o, err
	}
	o.BatchTokens = f.batchTokens
	if err := solver.CheckBatchTokens(o.BatchTokens); err != nil {
		return o, usageErrorf("--batch-tokens: %w", err)
	}
	if err := checkJudging(f.minimumGain, f.output); err != nil {
		return o, err
	}
	var err error
	if o.Algorithm, err = placement.ParseAlgorithm(f.algorithm); err != nil {
		return o, usageErrorf("--algorithm: %w", err)
	}
	if o.Forecast, err = solver.ParseForecast(f.forecast); err != nil {
		return o, usageErrorf("--forecast: %w", err)
	}
	if o.Objective, err = placement.ParseObjective(f.objective); err != nil {
		return o, usageErrorf("--objective: %w", err)
	}
	if err := placement.CheckObjective(o.Objective, o.Ranks, o.RanksPerNode); err != nil {
		return o, usageErrorf("--objective: %w", err)
	}
	if o.CopyRule, err = placement.ParseCopyRule(f.copyRule); err != nil {
		return o, usageErrorf("--copy-rule: %w", err)
	}
	if o.CopyRule != placement.NearestCopy && o.Attention != placement.DataParallel {
		return o, usageErrorf("--copy-rule %s is for attention dp", o.CopyRule)
	}
	if o.Constraints, err = f.constraints.constraints(); err != nil {
		return o, err
	}
	if o.Forecast != solver.Table && o.Attention == placement.DataParallel {
		return o, usageErrorf("--forecast %s is for attention tp; attention dp scores a request by its tokens: table", o.Forecast)
	}
	if f.embeddings != "" && o.Forecast.Contextual() {
		return o, usageErrorf("--embeddings is not for --forecast %s, whose weights are those for tokens that were not seen as they are", o.Forecast)
	}
	if f.embeddings != "" {
		if o.Embeddings, err = openEmbeddings(f.embeddings); err != nil {
			return o, err
		}
	}
	if f.current == "" {
		return o, nil
	}
	if o.Algorithm != placement.Auto {
		return o, usageErrorf("--current is for algorithm auto; %s starts from nothing", o.Algorithm)
	}
	current, _, err := plan.Read(f.current)
	if err != nil {
		return o, inputError(err)
	}
	if current.Placement.Ranks != o.Ranks {
		return o, usageErrorf("--current: the plan is for EP size %d, --ep is %d", current.Placement.Ranks, o.Ranks)
	}
	o.Current = current.Placement
	return o, nil
}

// copies reads the flags about redundant slots.
func (f *solveFlags) copies(o *solver.Options) (err error) {
	if f.redundantSlots != "auto" {
		if o.RedundantSlots, err = strconv.Atoi(f.redundantSlots); err != nil {
			return usageErrorf("--redundant-slots is %q; allowed is a number, or auto", f.redundantSlots)
		}
		switch {
		case o.RedundantSlots < 0:
			return usageErrorf("--redundant-slots is %d; it cannot be negative", o.RedundantSlots)
		case f.redundantMemory != "":
			return usageErrorf("--redundant-memory is for --redundant-slots auto, not for %s", f.redundantSlots)
		}
		return nil
	}
	if f.redundantMemory == "" {
		return usageErrorf("--redundant-slots auto needs --redundant-memory: the memory of a rank that copies may take")
	}
	amount, err := resource.ParseQuantity(strings.TrimSuffix(f.redundantMemory, "B"))
	if err != nil || amount.Sign() <= 0 {
		return usageErrorf("--redundant-memory is %q; allowed is a number of bytes above 0, such as 8GiB", f.redundantMemory)
	}
	o.RedundantMemory = amount.Value()
	return nil
}

// solveReport is what solve prints: the score on the held-out requests and where it comes from.
type solveReport struct {
	cost.Report
	solver.Worth
	// Front are the placements that a search by time chose among, Chosen is the name of the one that became the plan.
	Front  []solver.FrontPoint `json:"front,omitempty"`
	Chosen string              `json:"chosen,omitempty"`
	// Copies is how the number of redundant slots was chosen from memory; absent where it was given.
	Copies        *solver.Copies      `json:"copies,omitempty"`
	PlanDigest    string              `json:"plan_digest"`
	LayoutDigest  string              `json:"layout_digest"`
	Algorithm     placement.Algorithm `json:"algorithm"`
	FallBack      string              `json:"fall_back,omitempty"`
	Truncated     bool                `json:"truncated"`
	Objective     placement.Objective `json:"objective"`
	LimitsMet     bool                `json:"limits_met"`
	LimitsUnmet   []string            `json:"limits_unmet,omitempty"`
	Moves         *int                `json:"moves,omitempty"`
	TrainRequests int                 `json:"train_requests"`
	TestRequests  int                 `json:"test_requests"`
	Seconds       float64             `json:"seconds"`
}

func (f *solveFlags) run(ctx context.Context, o solver.Options, stdout, stderr io.Writer) (err error) {
	if o.Hardware, err = readHardware(f.hardware); err != nil {
		return err
	}
	if err := plan.CheckDirectory(f.out); err != nil {
		return usageErrorf("--out: %w", err)
	}
	begin := time.Now()
	t, err := f.open(ctx)
	if err != nil {
		return err
	}
	if err := checkAgainst(t, o); err != nil {
		return err
	}
	bar := newProgressBar(stderr)
	o.Progress = bar.show
	solution, err := solver.Solve(ctx, t, o)
	bar.clear()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case trace.IsInvalid(err):
		return inputError(err)
	case err != nil: // nothing is read by now: what was asked for contradicts itself, or the plan in service
		return codedError{err, exitUsage}
	}
	if solution.Plan.Drift, err = solver.CalibrateDrift(ctx, t, solution.Plan, solution.HeldOut, o.Constraints.TokenLoadLimit/100); err != nil {
		return err
	}
	if solution.Plan.Schedule, err = solver.ScheduleLayers(&t.Model, solution.Plan, solution.Report.LAR, o.Hardware, o.RanksPerNode); err != nil {
		return err
	}
	artifact, err := plan.Encode(solution.Plan)
	if err != nil {
		return err
	}
	worth, err := solver.WorthOf(ctx, t, solution, o, f.minimumGain)
	if err != nil {
		return err
	}
	result := solveReport{
		Report: solution.Report, Worth: *worth, Front: solution.Plan.Front, Chosen: solution.Plan.Chosen, Copies: solution.Plan.Copies,
		PlanDigest: artifact.Digest, LayoutDigest: artifact.Manifest.LayoutDigest,
		Algorithm: solution.Plan.Algorithm, FallBack: solution.FallBack, Truncated: solution.Truncated,
		Objective: o.Objective, LimitsMet: len(solution.Unmet) == 0, LimitsUnmet: solution.Unmet, Moves: moves(&o, solution),
		TrainRequests: solution.TrainRequests, TestRequests: solution.TestRequests, Seconds: time.Since(begin).Seconds(),
	}
	report, err := json.Marshal(result)
	if err != nil {
		return err
	}
	report = append(report, '\n')
	if err := plan.Write(f.out, artifact, report); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	if asTable(f.output, stdout) {
		return result.table(stdout)
	}
	_, err = stdout.Write(report)
	return err
}

// open reads the trace, without the domains to leave out.
func (f *solveFlags) open(ctx context.Context) (*trace.Trace, error) {
	t, err := trace.Open(ctx, f.trace)
	if err != nil {
		return nil, inputError(err)
	}
	leave, err := domainIndices(t, f.withoutDomains)
	if err != nil {
		return nil, usageErrorf("--without-domains: %w", err)
	}
	if len(leave) == 0 {
		return t, nil
	}
	part := without(t, leave)
	if part.Requests() == 0 {
		return nil, usageErrorf("--without-domains names all domains; some must be left to learn from")
	}
	return part, f.checkSplit(t, part, leave)
}

// checkSplit refuses to leave out domains where the others' documents are then split otherwise than with all of them: who judges the plan
// splits the whole trace, and would take requests for held out that the plan has learnt from.
func (f *solveFlags) checkSplit(whole, part *trace.Trace, leave []uint8) error {
	learnt, _, err := trace.Split(part, f.trainPercent, f.seed)
	if err != nil {
		return inputError(err)
	}
	ofWhole, _, err := trace.Split(whole, f.trainPercent, f.seed)
	if err != nil {
		return inputError(err)
	}
	var same []int
	left := 0
	for r, domain := range whole.Domains {
		if slices.Contains(leave, domain) {
			continue
		}
		if _, taken := slices.BinarySearch(ofWhole, r); taken {
			same = append(same, left)
		}
		left++
	}
	if !slices.Equal(learnt, same) {
		return usageErrorf("--without-domains is %s: without them the other domains' documents are split otherwise than in the whole trace, by which semmoe eval and drift would judge the plan by what it has learnt from; one of those that are left must have two documents, and a document one domain",
			strings.Join(f.withoutDomains, ","))
	}
	return nil
}

// checkAgainst refuses what cannot be had for the model of the trace.
func checkAgainst(t *trace.Trace, o solver.Options) error {
	if err := placement.CheckRanks(o.Ranks, t.Model.Experts); err != nil {
		return usageErrorf("--ep: %w", err)
	}
	redundant := o.RedundantSlots
	if o.RedundantMemory > 0 {
		redundant = 1 // what does not go with copies does not go with a number of them that is to be chosen
	}
	if err := placement.CheckSlots(o.Algorithm, o.Ranks, t.Model.Experts, redundant); err != nil {
		return usageErrorf("--redundant-slots: %w", err)
	}
	if err := solver.CheckForecast(o.Forecast, o.Ranks, t); err != nil {
		return usageErrorf("--forecast %s: %w", o.Forecast, err)
	}
	if err := checkEmbeddings(o.Embeddings, t.Model.Vocabulary); err != nil {
		return err
	}
	if err := placement.CheckConstraints(o.Algorithm, o.Constraints, t.Model.Layers, t.Model.Experts, o.Ranks, redundant, o.Current != nil); err != nil {
		return codedError{err, exitUsage}
	}
	if !o.PreserveGroups {
		return nil
	}
	groups, err := t.Model.Groups()
	if err != nil {
		return inputError(err)
	}
	if err := placement.CheckGroups(o.Algorithm, o.Ranks, t.Model.Experts, redundant, groups); err != nil {
		return usageErrorf("--preserve-groups: %w", err)
	}
	return nil
}

// progressBar shows one line of progress on a terminal, and nothing elsewhere.
type progressBar struct {
	out   io.Writer
	lock  sync.Mutex
	drawn bool
}

func newProgressBar(out io.Writer) *progressBar {
	if file, ok := out.(*os.File); ok {
		if _, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS); err == nil {
			return &progressBar{out: out}
		}
	}
	return &progressBar{}
}

func (b *progressBar) show(step string, done, total int) {
	if b.out == nil {
		return
	}
	b.lock.Lock()
	defer b.lock.Unlock()
	fmt.Fprintf(b.out, "\r\x1b[K%s: %d of %d", step, done, total)
	b.drawn = true
}

func (b *progressBar) clear() {
	if b.drawn {
		fmt.Fprint(b.out, "\r\x1b[K")
	}
}
