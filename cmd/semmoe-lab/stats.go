// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/solver/lab"
	"github.com/semmoe/operator/solver/lab/statistics"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// statsFlags are the flags of semmoe-lab stats.
type statsFlags struct {
	trace, transfer, format string
	ranks, trainPercent     int
	seed                    uint64
}

func newStatsCommand() *cobra.Command {
	var flags statsFlags
	cmd := &cobra.Command{
		Use:   "stats --trace FILE",
		Short: "Print statistics of a routing trace about tokens, experts and layers",
		Long: "Print how well token ids predict experts, which experts are activated together, how earlier layers predict later ones, and the locality of\n" +
			"a plan for one kind of text on other kinds. Predictions are trained on a part of the documents and measured on the rest.\n" +
			"Exit codes: 2 the command line is invalid; 3 the trace is invalid; 1 any other error, which a retry may fix.",
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return flags.run(cmd)
		},
	}
	cmd.SetFlagErrorFunc(cli.FlagError)
	f := cmd.Flags()
	f.StringVar(&flags.trace, "trace", "", "routing trace, .safetensors or .safetensors.zst (required)")
	f.IntVar(&flags.ranks, "ep", 8, "EP size: number of ranks, a divisor of the number of experts")
	f.StringVar(&flags.transfer, "transfer", "tp", "attention mode of the plans for transfer between kinds of text: tp or dp, or none")
	f.IntVar(&flags.trainPercent, "train-percent", 20, "percentage of the requests for training, by whole documents")
	f.Uint64Var(&flags.seed, "seed", 1, "seed of the split and the placement")
	f.StringVar(&flags.format, "format", "markdown", "output format: markdown or json")
	return cmd
}

func (f *statsFlags) options() (lab.StatisticsOptions, error) {
	o := lab.StatisticsOptions{Ranks: f.ranks, TrainPercent: f.trainPercent, Seed: f.seed}
	switch {
	case f.trace == "":
		return o, cli.UsageErrorf("--trace is missing: name a routing trace")
	case f.trainPercent < 1 || f.trainPercent > 99:
		return o, cli.UsageErrorf("--train-percent is %d; allowed is 1 to 99", f.trainPercent)
	case f.format != "markdown" && f.format != "json":
		return o, cli.UsageErrorf("--format is %q; allowed is markdown, json", f.format)
	}
	switch a := placement.Attention(f.transfer); a {
	case placement.TensorParallel, placement.DataParallel:
		o.Transfer = a
	case "none":
	default:
		return o, cli.UsageErrorf("--transfer is %q; allowed is tp, dp, none", f.transfer)
	}
	return o, nil
}

func (f *statsFlags) run(cmd *cobra.Command) error {
	o, err := f.options()
	if err != nil {
		return err
	}
	t, err := trace.Open(cmd.Context(), f.trace)
	if err != nil {
		return cli.InputError(err)
	}
	if err := placement.CheckRanks(o.Ranks, t.Model.Experts); err != nil {
		return cli.UsageErrorf("--ep: %w", err)
	}
	bar := cli.NewProgressBar(cmd.ErrOrStderr())
	o.Progress = bar.Show
	s, err := lab.Describe(cmd.Context(), t, o)
	bar.Clear()
	if err != nil {
		return cli.InputError(err)
	}
	if f.format == "json" {
		return json.NewEncoder(cmd.OutOrStdout()).Encode(s)
	}
	_, err = io.WriteString(cmd.OutOrStdout(), statsMarkdown(s))
	return err
}

// statsMarkdown returns one table for the layers and one for the transfer.
func statsMarkdown(s *lab.Statistics) string {
	var b strings.Builder
	fmt.Fprintf(&b, "Trained on %d tokens, measured on %d; %.1f%% of these have a token id seen in training, %.1f%% one seen at least five times. EP size %d.\n\n",
		s.TrainTokens, s.TestTokens, 100*s.SeenTokens.Once, 100*s.SeenTokens.Often, s.Ranks)
	maxLookBack := len(s.Mean.LookBack)
	b.WriteString("| layer | static top-k precision | recall | F1 | kurtosis | above 8 | covered | rest hotness (uniform) | co-activation (uniform) | transition (uniform) " +
		"| token route confidence, accuracy |")
	for n := range maxLookBack {
		fmt.Fprintf(&b, " look-back %d |", n+1)
	}
	fmt.Fprintf(&b, "\n|%s\n", strings.Repeat(" --- |", 11+maxLookBack))
	for _, d := range s.Layers {
		writeLayerStatistics(&b, fmt.Sprint(d.Layer), &d, maxLookBack)
	}
	writeLayerStatistics(&b, "mean", &s.Mean, maxLookBack)
	if s.Transfer != nil {
		writeTransfer(&b, s.Transfer)
	}
	return b.String()
}

func writeLayerStatistics(b *strings.Builder, name string, d *lab.LayerStatistics, maxLookBack int) {
	guess := func(g statistics.Guess) string { return fmt.Sprintf(" %.3f, %.3f |", g.Confidence, g.Accuracy) }
	p, c := d.StaticTopK, d.Concentration
	fmt.Fprintf(b, "| %s | %.3f | %.3f | %.3f | %.1f | %.3f | %.3f | %.3f (%.3f) | %.3f (%.3f) |",
		name, p.Precision, p.Recall, p.F1, c.Kurtosis, c.Above8, c.Covered, c.RestHotness, c.RestUniform, d.Coactivation.Share, d.Coactivation.Uniform)
	if d.Transition != nil {
		fmt.Fprintf(b, " %.3f (%.3f) |", d.Transition.Share, d.Transition.Uniform)
	} else {
		b.WriteString(" |")
	}
	b.WriteString(guess(d.TokenRoute))
	for n := range maxLookBack {
		if n < len(d.LookBack) {
			b.WriteString(guess(d.LookBack[n]))
		} else {
			b.WriteString(" |")
		}
	}
	b.WriteString("\n")
}

func writeTransfer(b *strings.Builder, t *lab.Transfer) {
	fmt.Fprintf(b, "\nTransfer, attention %s: local activation rate of a plan solved on one kind of text (row) that serves another (column)\n\n| |", t.Attention)
	for _, name := range t.Domains {
		fmt.Fprintf(b, " %s |", name)
	}
	fmt.Fprintf(b, "\n|%s\n", strings.Repeat(" --- |", 1+len(t.Domains)))
	for a, row := range t.LAR {
		fmt.Fprintf(b, "| %s |", t.Domains[a])
		for _, lar := range row {
			if lar == nil {
				b.WriteString(" |")
			} else {
				fmt.Fprintf(b, " %.3f |", *lar)
			}
		}
		b.WriteString("\n")
	}
}
