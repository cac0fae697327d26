// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/files/atomicfile"
	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/lab/stream"
	"github.com/semmoe/operator/solver/pipeline"
)

// pipelineFlags are the flags of semmoe-lab pipeline.
type pipelineFlags struct {
	model, hardware, output, gantt, stream string

	shape                 pipeline.Shape
	serving               pipeline.Serving
	sequences             []int
	memoryGiB, memoryPart float64
	dispatch              string
	ganttLayers           int
	ranksPerNode          int
}

func newPipelineCommand() *cobra.Command {
	var flags pipelineFlags
	cmd := &cobra.Command{
		Use:   "pipeline --model-path DIR --ranks N [--sequence TOKENS,...]",
		Short: "Schedule attention and experts on separate ranks",
		Long: "Divide ranks into an attention group and an expert group, and find the micro-batches, chunks and order of work with the highest\n" +
			"prefill throughput. Print the throughput, the throughput with micro-batches only (PPPipe) and without micro-batches (naive), and an\n" +
			"upper bound for all orders. All times are modelled with the hardware profile.\n" +
			"The model comes from a checkpoint's config.json, from the shape flags, or from both; flags take precedence.\n" +
			"Exit codes: 2 the command line is invalid; 3 a file is invalid; 4 the model does not fit on the ranks; 1 any other error, which a retry may fix.",
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := flags.check(); err != nil {
				return err
			}
			return flags.run(cmd)
		},
	}
	cmd.SetFlagErrorFunc(cli.FlagError)
	f := cmd.Flags()
	f.StringVar(&flags.model, "model-path", "", "directory of a checkpoint with config.json, or the path of a config.json")
	cli.HardwareFlag(f, &flags.hardware)
	f.IntVar(&flags.serving.Ranks, "ranks", 8, "total number of ranks of both groups")
	f.IntVar(&flags.ranksPerNode, "ranks-per-node", solver.DefaultEvaluation().RanksPerNode, "number of ranks per node; several nodes exchange over 50 GB/s network cards per rank, unless the profile covers all ranks")
	f.IntSliceVar(&flags.sequences, "sequence", []int{1024, 2048, 4096, 8192}, "sample lengths in tokens; one table row per length")
	f.IntVar(&flags.serving.Samples, "batch", 0, "maximum number of samples per rank of the attention group (default: limited by memory)")
	f.IntVar(&flags.serving.MicroBatches, "max-micro-batches", pipeline.DefaultMicroBatches, "maximum number of micro-batches")
	f.Float64Var(&flags.memoryGiB, "memory-gib", 0, "memory per rank in GiB (default: the hardware profile's)")
	f.Float64Var(&flags.memoryPart, "memory-fraction", 0.9, "fraction of the memory for weights and KV cache")
	f.Float64Var(&flags.serving.WeightBytes, "weight-bytes", 2, "bytes per expert weight in memory: 2 for bf16, 1 for FP8; times are always for bf16")
	f.StringVar(&flags.dispatch, "dispatch", "bf16", "data type of tokens sent to experts: bf16 or fp8; results return in bf16")
	f.StringVarP(&flags.output, "output", "o", "text", "output format: text or json")
	f.StringVar(&flags.stream, "stream", "", "file with one sample length in tokens per line, one line per batch: compares adaptive with constant schedules for these batches")
	f.StringVar(&flags.gantt, "gantt", "", "SVG file for a drawing of the schedule for the first --sequence")
	f.IntVar(&flags.ganttLayers, "gantt-layers", 2, "number of layers in the drawing")
	for _, s := range flags.shapeFlags() {
		f.IntVar(s.into, s.name, 0, s.usage)
	}
	cmd.AddCommand(newPipelineServeCommand())
	return cmd
}

// shapeFlag is a flag for a field of the model's shape.
type shapeFlag struct {
	name, usage string
	into        *int
}

func (f *pipelineFlags) shapeFlags() []shapeFlag {
	s := &f.shape
	return []shapeFlag{
		{"layers", "shape: number of layers", &s.HiddenLayers},
		{"moe-layers", "shape: number of layers with routed experts", &s.MoELayers},
		{"experts", "shape: number of routed experts per layer", &s.Experts},
		{"top-k", "shape: number of experts per token", &s.TopK},
		{"hidden", "shape: hidden size", &s.Hidden},
		{"expert-size", "shape: width of an expert", &s.ExpertSize},
		{"shared-size", "shape: total width of the shared experts", &s.SharedSize},
		{"dense-size", "shape: width of layers without experts", &s.DenseSize},
		{"heads", "shape: number of attention heads", &s.Heads},
		{"kv-heads", "shape: number of heads of keys and values", &s.KVHeads},
		{"query-dim", "shape: size of a head in queries and keys", &s.QueryDim},
		{"value-dim", "shape: size of a head in values", &s.ValueDim},
		{"kv-rank", "shape: width of compressed keys and values (latent attention)", &s.KVRank},
		{"query-rank", "shape: width of compressed queries (latent attention)", &s.QueryRank},
		{"rope-dim", "shape: part of a head for positions (latent attention)", &s.RopeDim},
	}
}

func (f *pipelineFlags) check() error {
	switch {
	case len(f.sequences) == 0:
		return cli.UsageErrorf("--sequence is empty; set at least one length in tokens")
	case f.ranksPerNode < 1:
		return cli.UsageErrorf("--ranks-per-node is %d; it must be at least 1", f.ranksPerNode)
	case !(f.memoryGiB >= 0) || math.IsInf(f.memoryGiB, 1):
		return cli.UsageErrorf("--memory-gib is %v; it must be above 0 and finite, or 0 for the value of the hardware profile", f.memoryGiB)
	case !(f.memoryPart > 0) || f.memoryPart > 1:
		return cli.UsageErrorf("--memory-fraction is %v; allowed is above 0 to 1", f.memoryPart)
	case f.dispatch != "bf16" && f.dispatch != "fp8":
		return cli.UsageErrorf("--dispatch is %q; allowed is bf16, fp8", f.dispatch)
	case f.output != "text" && f.output != "json":
		return cli.UsageErrorf("--output is %q; allowed is text, json", f.output)
	case f.ganttLayers < 1 || f.ganttLayers > 16:
		return cli.UsageErrorf("--gantt-layers is %d; allowed is 1 to 16", f.ganttLayers)
	}
	if f.gantt != "" {
		if err := atomicfile.Check(f.gantt); err != nil {
			return cli.UsageErrorf("--gantt: %w", err)
		}
	}
	return nil
}

// pipelineReport is the output with -o json.
type pipelineReport struct {
	Hardware string          `json:"hardware"`
	Shape    pipeline.Shape  `json:"shape"`
	Ranks    int             `json:"ranks"`
	Lengths  []pipelineSolve `json:"lengths"`
	// Stream is the result for the batches of --stream; absent without the flag.
	Stream *stream.Comparison `json:"stream,omitempty"`
}

// pipelineSolve is the schedule for one length.
type pipelineSolve struct {
	Sequence int `json:"sequence"`
	*pipeline.Result
	// OverPPPipe and OverNaive are ratios of throughputs.
	OverPPPipe float64 `json:"over_pppipe"`
	OverNaive  float64 `json:"over_naive"`
	// Exposed are the shares of the makespans with exposed exchanges.
	Exposed      exposedShares `json:"exposed"`
	SolveSeconds float64       `json:"solve_seconds"`
}

// exposedShares are the shares of a schedule and its baselines.
type exposedShares struct {
	Plan   float64 `json:"plan"`
	PPPipe float64 `json:"pppipe"`
	Naive  float64 `json:"naive"`
}

func exposedOf(r *pipeline.Result) (exposedShares, error) {
	var e exposedShares
	for _, of := range []struct {
		plan *pipeline.Plan
		into *float64
	}{{&r.Plan, &e.Plan}, {&r.PPPipe, &e.PPPipe}, {&r.Naive, &e.Naive}} {
		var err error
		if *of.into, err = of.plan.ExposedShare(); err != nil {
			return e, err
		}
	}
	return e, nil
}

// exitNoRoom is the exit code for a model that does not fit into memory.
const exitNoRoom = 4

func (f *pipelineFlags) run(cmd *cobra.Command) error {
	profile, err := cli.ReadHardware(f.hardware)
	if err != nil {
		return err
	}
	if err := f.readShape(func(name string) bool { return cmd.Flags().Changed(name) }); err != nil {
		return err
	}
	profile = cost.Spread(profile, f.serving.Ranks, f.ranksPerNode)
	f.serving.MemoryBytes = f.memoryPart * profile.MemoryBytes
	if f.memoryGiB > 0 {
		f.serving.MemoryBytes = f.memoryPart * f.memoryGiB * (1 << 30)
	}
	f.serving.DispatchBytes = 2
	if f.dispatch == "fp8" {
		f.serving.DispatchBytes = 1
	}
	report := pipelineReport{Hardware: profile.Name, Shape: f.shape, Ranks: f.serving.Ranks}
	for _, sequence := range f.sequences {
		if err := cmd.Context().Err(); err != nil {
			return err
		}
		solved, err := f.solve(profile, sequence)
		if err != nil {
			return err
		}
		report.Lengths = append(report.Lengths, *solved)
	}
	if f.stream != "" {
		if report.Stream, err = f.compareStream(cmd.Context(), profile); err != nil {
			return err
		}
	}
	if f.gantt != "" {
		if err := f.draw(&report); err != nil {
			return err
		}
	}
	if f.output == "json" {
		return json.NewEncoder(cmd.OutOrStdout()).Encode(report)
	}
	return printSchedules(cmd.OutOrStdout(), &report)
}

// readShape reads the checkpoint's config.json; flags override it.
func (f *pipelineFlags) readShape(changed func(flag string) bool) error {
	if f.model == "" {
		if err := f.shape.Check(); err != nil {
			return cli.UsageErrorf("the shape of the model is invalid: %w; set --model-path to a checkpoint, or set the shape flags", err)
		}
		return nil
	}
	path := f.model
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		path = filepath.Join(path, "config.json")
	}
	text, err := regularfile.Read(path, cli.MaxInputBytes)
	if err != nil {
		return cli.InputError(fmt.Errorf("--model-path: %w", err))
	}
	config, err := checkpoint.ParseConfig(text)
	if err != nil {
		return cli.InputError(fmt.Errorf("--model-path: %s: %w", path, err))
	}
	given := map[string]int{}
	for _, s := range f.shapeFlags() {
		if changed(s.name) {
			given[s.name] = *s.into
		}
	}
	f.shape = pipeline.Shape{
		HiddenLayers: config.Layers, MoELayers: len(config.MoELayers), Experts: config.Experts, TopK: config.ExpertsPerToken, Hidden: config.HiddenSize,
	}
	if err := f.shape.ReadSizes(config.Text); err != nil {
		return cli.WithCode(fmt.Errorf("--model-path: %s: %w", path, err), cli.ExitInvalidFile)
	}
	own := f.shape.Check()
	for _, s := range f.shapeFlags() {
		if value, ok := given[s.name]; ok {
			*s.into = value
		}
	}
	if err := f.shape.Check(); err != nil {
		if own == nil {
			return cli.UsageErrorf("the shape of the model in %s with the shape flags is invalid: %w", path, err)
		}
		return cli.WithCode(fmt.Errorf("--model-path: %s: %w", path, err), cli.ExitInvalidFile)
	}
	return nil
}

// problem returns the schedule problem for samples of the given length.
func (f *pipelineFlags) problem(profile *hardware.Profile, sequence int) (*pipeline.Problem, error) {
	serving := f.serving
	serving.Sequence = sequence
	problem, err := f.shape.Problem(profile, serving)
	if errors.Is(err, pipeline.ErrNoRoom) {
		return nil, cli.WithCode(fmt.Errorf("sequence %d: %w", sequence, err), exitNoRoom)
	}
	if err != nil {
		return nil, cli.UsageErrorf("sequence %d: %w", sequence, err)
	}
	return problem, nil
}

func (f *pipelineFlags) solve(profile *hardware.Profile, sequence int) (*pipelineSolve, error) {
	begin := time.Now()
	problem, err := f.problem(profile, sequence)
	if err != nil {
		return nil, err
	}
	result, err := pipeline.Search(problem)
	if err != nil {
		return nil, cli.UsageErrorf("sequence %d: %w", sequence, err)
	}
	solved := &pipelineSolve{
		Sequence: sequence, Result: result, SolveSeconds: time.Since(begin).Seconds(),
		OverPPPipe: result.Plan.TokensPerSecond / result.PPPipe.TokensPerSecond, OverNaive: result.Plan.TokensPerSecond / result.Naive.TokensPerSecond,
	}
	if solved.Exposed, err = exposedOf(result); err != nil {
		return nil, cli.UsageErrorf("sequence %d: %w", sequence, err)
	}
	return solved, nil
}

func (f *pipelineFlags) draw(report *pipelineReport) error {
	first := report.Lengths[0]
	drawing, err := first.Plan.Draw(first.Sequence, f.ganttLayers)
	if err != nil {
		return cli.UsageErrorf("--gantt: %w", err)
	}
	if err := atomicfile.WriteBytes(f.gantt, 0o644, drawing); err != nil {
		return fmt.Errorf("--gantt: %w", err)
	}
	return nil
}

func printSchedules(out io.Writer, r *pipelineReport) error {
	fmt.Fprintf(out, "Modelled with hardware profile %s: %d MoE layers, %d experts, top-%d, on %d ranks.\n\n", r.Hardware, r.Shape.MoELayers, r.Shape.Experts, r.Shape.TopK, r.Ranks)
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "SEQUENCE\tATTENTION+EXPERT RANKS\tMICRO-BATCHES X SAMPLES\tCHUNKS\tORDER\tTOKENS/S\tOVER PPPIPE\tOVER NAIVE\tEXPOSED (PPPIPE, NAIVE)\tBELOW BOUND\tSOLVED IN")
	for _, s := range r.Lengths {
		p := s.Plan
		fmt.Fprintf(table, "%d\t%d+%d\t%d x %d\t%d\t%s\t%.0f\t%.3f\t%.3f\t%.1f%% (%.1f%%, %.1f%%)\t%.2f%%\t%.1f ms\n", s.Sequence, p.AttentionRanks, p.ExpertRanks, p.Sizes.MicroBatches, p.Samples, p.Sizes.Chunks,
			p.OrderName, p.TokensPerSecond, s.OverPPPipe, s.OverNaive, 100*s.Exposed.Plan, 100*s.Exposed.PPPipe, 100*s.Exposed.Naive, 100*s.Gap, 1e3*s.SolveSeconds)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	printStream(out, r.Stream)
	return nil
}
