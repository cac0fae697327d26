// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/lab"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// maxSeeds is the maximum number of splits: the scores of all splits are in memory until they are compared.
const maxSeeds = 1000

// compareFlags are the flags of semmoe-lab compare.
type compareFlags struct {
	trace, embeddings, format                    string
	ranks, redundantSlots                        []int
	attentions, algorithms, forecasts, baselines []string
	seeds, trainPercent, cells                   int
}

func newCompareCommand() *cobra.Command {
	var flags compareFlags
	cmd := &cobra.Command{
		Use:   "compare --trace FILE",
		Short: "Compare placement algorithms, forecasts and policies on a routing trace",
		Long: "Solve and evaluate every algorithm on the same documents, over several seeds of the split, and print the held-out local\n" +
			"activation rates side by side, and the margin of our method over each baseline. The default is the full matrix with the forecast\n" +
			"table for the baselines; --baseline-forecast table,prefill also evaluates them with our forecast, and --attention dp\n" +
			"--redundant-slots 0,1,2,4 prints locality as a function of memory. Exit codes: 2 the command line is invalid; 3 the trace is invalid;\n1 any other error, which a retry may fix.",
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return flags.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.SetFlagErrorFunc(cli.FlagError)
	f := cmd.Flags()
	f.StringVar(&flags.trace, "trace", "", "routing trace, .safetensors or .safetensors.zst (required)")
	f.IntSliceVar(&flags.ranks, "ep", []int{4, 8, 16}, "EP sizes")
	f.StringSliceVar(&flags.attentions, "attention", []string{"tp", "dp"}, "attention modes: tp, dp")
	f.StringSliceVar(&flags.algorithms, "algorithm", nil, "algorithms (default: all): "+cli.ListOf(placement.Algorithms))
	f.StringSliceVar(&flags.forecasts, "forecast", []string{"table", "prefill", "decode"}, "attention tp: forecasts for algorithm auto")
	f.StringSliceVar(&flags.baselines, "baseline-forecast", []string{"table"}, "attention tp: forecasts for all other algorithms")
	f.IntSliceVar(&flags.redundantSlots, "redundant-slots", []int{0}, "numbers of extra slots per rank; above 0 only for auto, eplb, contiguous and round-robin")
	f.StringVar(&flags.embeddings, "embeddings", "", "attention dp: .npy file with token embeddings [vocabulary, size] in f4 or f2, or checkpoint directory, for clustering prompts (default: a random\nprojection of the prompt's bag of tokens)")
	f.IntVar(&flags.cells, "cells", 0, "number of concurrently evaluated combinations of algorithm, EP size and split (default: half of the processors); affects only\ntimes and memory")
	f.IntVar(&flags.seeds, "seeds", 5, fmt.Sprintf("number of splits with seeds 1, 2, ..., up to %d", maxSeeds))
	f.IntVar(&flags.trainPercent, "train-percent", 20, "percentage of the requests for training, by whole documents")
	f.StringVar(&flags.format, "format", "markdown", "output format: markdown or json")
	return cmd
}

func (f *compareFlags) options() (lab.CompareOptions, error) {
	o := lab.CompareOptions{
		Ranks: f.ranks, RedundantSlots: f.redundantSlots, TrainPercent: f.trainPercent, Algorithms: placement.Algorithms, Cells: f.cells,
	}
	switch {
	case f.trace == "":
		return o, cli.UsageErrorf("--trace is missing: name a routing trace")
	case f.seeds < 1 || f.seeds > maxSeeds:
		return o, cli.UsageErrorf("--seeds is %d; allowed is 1 to %d", f.seeds, maxSeeds)
	case f.cells < 0:
		return o, cli.UsageErrorf("--cells is %d; it must be at least 0", f.cells)
	case f.format != "markdown" && f.format != "json":
		return o, cli.UsageErrorf("--format is %q; allowed is markdown, json", f.format)
	case f.trainPercent < 1 || f.trainPercent > 99:
		return o, cli.UsageErrorf("--train-percent is %d; allowed is 1 to 99", f.trainPercent)
	}
	if err := f.checkDistinct(); err != nil {
		return o, err
	}
	for _, attention := range f.attentions {
		if a := placement.Attention(attention); a != placement.TensorParallel && a != placement.DataParallel {
			return o, cli.UsageErrorf("--attention is %q; allowed is tp, dp", attention)
		}
		o.Attentions = append(o.Attentions, placement.Attention(attention))
	}
	for i := range f.seeds {
		o.Seeds = append(o.Seeds, uint64(i+1))
	}
	if len(f.algorithms) > 0 {
		o.Algorithms = nil
	}
	for _, name := range f.algorithms {
		a, err := placement.ParseAlgorithm(name)
		if err != nil {
			return o, cli.UsageErrorf("--algorithm: %w", err)
		}
		o.Algorithms = append(o.Algorithms, a)
	}
	var err error
	if o.Forecasts, err = parseForecasts("--forecast", f.forecasts); err != nil {
		return o, err
	}
	o.Baselines, err = parseForecasts("--baseline-forecast", f.baselines)
	return o, err
}

// checkDistinct returns an error for duplicate values, which would be counted twice.
func (f *compareFlags) checkDistinct() error {
	return errors.Join(
		distinct("--ep", f.ranks), distinct("--redundant-slots", f.redundantSlots), distinct("--attention", f.attentions),
		distinct("--algorithm", f.algorithms), distinct("--forecast", f.forecasts), distinct("--baseline-forecast", f.baselines),
	)
}

func distinct[T comparable](flag string, values []T) error {
	for i, value := range values {
		if slices.Contains(values[:i], value) {
			return cli.UsageErrorf("%s has %v twice; each value is compared once", flag, value)
		}
	}
	return nil
}

func parseForecasts(flag string, names []string) ([]solver.Forecast, error) {
	var forecasts []solver.Forecast
	for _, name := range names {
		forecast, err := solver.ParseForecast(name)
		if err != nil {
			return nil, cli.UsageErrorf("%s: %w", flag, err)
		}
		forecasts = append(forecasts, forecast)
	}
	return forecasts, nil
}

// checkForecasts returns an error for compared forecasts that cannot be computed for a number of ranks; only forecasts
// of attention tp are checked.
func checkForecasts(o lab.CompareOptions, ranks int, t *trace.Trace) error {
	if !slices.Contains(o.Attentions, placement.TensorParallel) {
		return nil
	}
	for _, of := range []struct {
		flag      string
		forecasts []solver.Forecast
		compared  bool
	}{
		{"--forecast", o.Forecasts, slices.Contains(o.Algorithms, placement.Auto)},
		{"--baseline-forecast", o.Baselines, slices.ContainsFunc(o.Algorithms, func(a placement.Algorithm) bool { return a != placement.Auto })},
	} {
		if !of.compared {
			continue
		}
		for _, forecast := range of.forecasts {
			if err := solver.CheckForecast(forecast, ranks, t); err != nil {
				return cli.UsageErrorf("%s %s: %w", of.flag, forecast, err)
			}
		}
	}
	return nil
}

// comparisonReport is the JSON output of compare.
type comparisonReport struct {
	Trace string `json:"trace"`
	// Model is the shape of the model, Prompts the representation of prompts for clustering.
	Model        string               `json:"model"`
	Prompts      string               `json:"prompts"`
	Seeds        int                  `json:"seeds"`
	TrainPercent int                  `json:"train_percent"`
	Processors   int                  `json:"processors"`
	Seconds      float64              `json:"seconds"`
	Comparisons  []lab.Comparison     `json:"comparisons"`
	Leads        []lab.BaselineMargin `json:"leads"`
}

func (f *compareFlags) run(ctx context.Context, stdout, stderr io.Writer) error {
	begin := time.Now()
	o, err := f.options()
	if err != nil {
		return err
	}
	t, err := trace.Open(ctx, f.trace)
	if err != nil {
		return cli.InputError(err)
	}
	for _, ranks := range o.Ranks {
		if err := placement.CheckRanks(ranks, t.Model.Experts); err != nil {
			return cli.UsageErrorf("--ep: %w", err)
		}
		for _, redundant := range o.RedundantSlots {
			if err := placement.CheckSlots(placement.Auto, ranks, t.Model.Experts, redundant); err != nil {
				return cli.UsageErrorf("--redundant-slots: %w", err)
			}
		}
		if err := checkForecasts(o, ranks, t); err != nil {
			return err
		}
	}
	report := comparisonReport{
		Trace: fmt.Sprintf("%x", t.Digest), Seeds: f.seeds, TrainPercent: f.trainPercent, Processors: runtime.GOMAXPROCS(0),
		Model:   fmt.Sprintf("%d MoE layers of %d experts, top-%d", len(t.Model.Layers), t.Model.Experts, t.Model.TopK),
		Prompts: "a random projection of their bags of tokens",
	}
	if f.embeddings != "" {
		report.Prompts = "the means of their tokens' embeddings"
		if o.Embeddings, err = cli.OpenEmbeddings(ctx, f.embeddings); err != nil {
			return err
		}
		if err := cli.CheckEmbeddings(o.Embeddings, t.Model.Vocabulary); err != nil {
			return err
		}
	}
	bar := cli.NewProgressBar(stderr)
	o.Progress = bar.Show
	report.Comparisons, err = lab.Compare(ctx, t, o)
	bar.Clear()
	if err != nil {
		return cli.InputError(err)
	}
	report.Leads, report.Seconds = lab.BaselineMargins(report.Comparisons), time.Since(begin).Seconds()
	if f.format == "json" {
		return json.NewEncoder(stdout).Encode(report)
	}
	_, err = io.WriteString(stdout, report.markdown())
	return err
}
