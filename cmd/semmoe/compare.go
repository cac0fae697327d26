package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// compareFlags are the flags of semmoe compare.
type compareFlags struct {
	trace, format                                string
	ranks                                        []int
	attentions, algorithms, forecasts, baselines []string
	seeds, trainPercent                          int
}

func newCompareCommand() *cobra.Command {
	var flags compareFlags
	cmd := &cobra.Command{
		Use:   "compare --trace FILE",
		Short: "Compare placement algorithms, forecasts and policies on a routing trace",
		Long: "Solve and score every algorithm on the same documents, over several seeds of the split, and print the held-out local\n" +
			"activation rates side by side. Exit code 2: the command line must be changed; 3: the trace is invalid; 1: try again.",
		Args: usageArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return flags.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return codedError{err, exitUsage} })
	f := cmd.Flags()
	f.StringVar(&flags.trace, "trace", "", "routing trace, .safetensors or .safetensors.zst (required)")
	f.IntSliceVar(&flags.ranks, "ep", []int{4, 8, 16}, "EP sizes")
	f.StringSliceVar(&flags.attentions, "attention", []string{"tp", "dp"}, "attention modes: tp, dp")
	f.StringSliceVar(&flags.algorithms, "algorithm", nil, "algorithms (default: all): "+listOf(placement.Algorithms))
	f.StringSliceVar(&flags.forecasts, "forecast", []string{"table", "prefill", "decode"}, "attention tp: forecasts of auto")
	f.StringSliceVar(&flags.baselines, "baseline-forecast", []string{"table"}, "attention tp: forecasts that the other algorithms' placements are given")
	f.IntVar(&flags.seeds, "seeds", 5, "number of splits: seeds 1, 2, ...")
	f.IntVar(&flags.trainPercent, "train-percent", 20, "percent of the requests to learn from, by whole documents")
	f.StringVar(&flags.format, "format", "markdown", "markdown or json")
	return cmd
}

func (f *compareFlags) options() (solver.CompareOptions, error) {
	o := solver.CompareOptions{Ranks: f.ranks, TrainPercent: f.trainPercent, Algorithms: placement.Algorithms}
	switch {
	case f.trace == "":
		return o, usageErrorf("--trace is missing: name a routing trace")
	case f.seeds < 1:
		return o, usageErrorf("--seeds is %d; it must be at least 1", f.seeds)
	case f.format != "markdown" && f.format != "json":
		return o, usageErrorf("--format is %q; allowed is markdown, json", f.format)
	case f.trainPercent < 1 || f.trainPercent > 99:
		return o, usageErrorf("--train-percent is %d; allowed is 1 to 99", f.trainPercent)
	}
	for _, attention := range f.attentions {
		if a := placement.Attention(attention); a != placement.TensorParallel && a != placement.DataParallel {
			return o, usageErrorf("--attention is %q; allowed is tp, dp", attention)
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
			return o, usageErrorf("--algorithm: %w", err)
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

func parseForecasts(flag string, names []string) ([]solver.Forecast, error) {
	var forecasts []solver.Forecast
	for _, name := range names {
		forecast, err := solver.ParseForecast(name)
		if err != nil {
			return nil, usageErrorf("%s: %w", flag, err)
		}
		forecasts = append(forecasts, forecast)
	}
	return forecasts, nil
}

// comparisonReport is what compare prints as JSON.
type comparisonReport struct {
	Trace       string              `json:"trace"`
	Seeds       int                 `json:"seeds"`
	Processors  int                 `json:"processors"`
	Seconds     float64             `json:"seconds"`
	Comparisons []solver.Comparison `json:"comparisons"`
}

func (f *compareFlags) run(ctx context.Context, stdout, stderr io.Writer) error {
	begin := time.Now()
	o, err := f.options()
	if err != nil {
		return err
	}
	t, err := trace.Open(ctx, f.trace)
	if err != nil {
		return inputError(err)
	}
	for _, ranks := range o.Ranks {
		if err := placement.CheckRanks(ranks, t.Model.Experts); err != nil {
			return usageErrorf("--ep: %w", err)
		}
	}
	bar := newProgressBar(stderr)
	o.Progress = bar.show
	comparisons, err := solver.Compare(ctx, t, o)
	bar.clear()
	if err != nil {
		return inputError(err)
	}
	if f.format == "json" {
		return json.NewEncoder(stdout).Encode(comparisonReport{
			fmt.Sprintf("%x", t.Digest), f.seeds, runtime.GOMAXPROCS(0), time.Since(begin).Seconds(), comparisons,
		})
	}
	return writeMarkdown(stdout, comparisons)
}

// writeMarkdown prints one table for each attention mode: a row for each method, a column for each EP size.
func writeMarkdown(out io.Writer, comparisons []solver.Comparison) error {
	var b strings.Builder
	for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
		var rows [][]solver.Comparison
		var sizes []int
		for _, c := range comparisons {
			if c.Attention != attention {
				continue
			}
			if !slices.Contains(sizes, c.Ranks) {
				sizes = append(sizes, c.Ranks)
			}
			at := slices.IndexFunc(rows, func(row []solver.Comparison) bool {
				return row[0].Algorithm == c.Algorithm && row[0].Forecast == c.Forecast && row[0].Dispatch == c.Dispatch
			})
			if at < 0 {
				rows = append(rows, []solver.Comparison{c})
			} else {
				rows[at] = append(rows[at], c)
			}
		}
		if len(rows) == 0 {
			continue
		}
		slices.SortStableFunc(rows, func(a, b []solver.Comparison) int {
			return cmp.Or(cmp.Compare(b[0].Dispatch, a[0].Dispatch), cmp.Compare(a[0].LAR.Mean, b[0].LAR.Mean))
		})
		writeTable(&b, attention, sizes, rows)
	}
	_, err := io.WriteString(out, b.String())
	return err
}

func writeTable(b *strings.Builder, attention placement.Attention, sizes []int, rows [][]solver.Comparison) {
	head := "| placement | forecast | dispatch |"
	line := "| --- | --- | --- |"
	for _, n := range sizes {
		head += fmt.Sprintf(" EP %d | spread | imbalance | expert imbalance | remote ranks | s |", n)
		line += strings.Repeat(" --- |", 6)
	}
	fmt.Fprintf(b, "Attention %s\n\n%s\n%s\n", attention, head, line)
	for _, row := range rows {
		fmt.Fprintf(b, "| %s | %s | %s |", row[0].Algorithm, row[0].Forecast, row[0].Dispatch)
		for _, n := range sizes {
			at := slices.IndexFunc(row, func(c solver.Comparison) bool { return c.Ranks == n })
			if at < 0 {
				b.WriteString(strings.Repeat(" |", 6))
				continue
			}
			c := row[at]
			balance := c.TokenImbalance
			if attention == placement.DataParallel {
				balance = c.WindowImbalance
			}
			fmt.Fprintf(b, " %.4f | %.4f–%.4f | %.3f | %.3f | %.3f | %.1f |",
				c.LAR.Mean, c.LAR.Least, c.LAR.Most, balance, c.ExpertWindowImbalance, c.RemoteRanksPerToken, c.PlacementSeconds)
		}
		b.WriteString("\n")
	}
	b.WriteString("\n")
}
