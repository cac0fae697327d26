// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/files/atomicfile"
	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/solver/cost/hardware"
)

// maxProfileName is the maximum length of a hardware profile's name, in characters: the status of a PlacementPlan
// truncates longer names.
const maxProfileName = 63

func newFitCommand() *cobra.Command {
	var measurements, name, out string
	var memory float64
	cmd := &cobra.Command{
		Use:   "fit --measurements FILE --name NAME --out FILE",
		Short: "Fit a hardware profile to measured kernels and exchanges",
		Long: "Fit start-up times and rates to the kernel and exchange times measured by semmoe calibrate, and write them as a hardware profile for semmoe\n" +
			"solve, eval and pipeline. Prints the goodness of fit of each model, also on held-out measurements.\n" +
			"Exit codes: 2 the command line is invalid; 3 the measurements are invalid or insufficient; 1 any other error, which a retry may fix.",
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case measurements == "":
				return cli.UsageErrorf("--measurements is missing: name the file with measured times")
			case name == "":
				return cli.UsageErrorf("--name is missing: set it to the name of the profile")
			case utf8.RuneCountInString(name) > maxProfileName:
				return cli.UsageErrorf("--name is %q with %d characters; the maximum is %d because of the status of plans", name, utf8.RuneCountInString(name), maxProfileName)
			case out == "":
				return cli.UsageErrorf("--out is missing: name the file for the profile")
			case !(memory >= 0) || math.IsInf(memory*(1<<30), 1):
				return cli.UsageErrorf("--memory-gib is %v; it must be above 0 and finite, or 0 for the measured value", memory)
			}
			if err := atomicfile.Check(out); err != nil {
				return cli.UsageErrorf("--out: %w", err)
			}
			return fit(cmd.OutOrStdout(), measurements, name, memory, out)
		},
	}
	cmd.SetFlagErrorFunc(cli.FlagError)
	f := cmd.Flags()
	f.StringVar(&measurements, "measurements", "", "JSON file with measured times (required)")
	f.StringVar(&name, "name", "", "name of the profile (required)")
	f.Float64Var(&memory, "memory-gib", 0, "memory per rank in GiB (default: the memory of the measured GPU)")
	f.StringVar(&out, "out", "", "file for the profile; an existing file is replaced (required)")
	return cmd
}

func fit(stdout io.Writer, measurements, name string, memoryGiB float64, out string) error {
	text, err := regularfile.Read(measurements, cli.MaxInputBytes)
	if err != nil {
		return cli.InputError(fmt.Errorf("--measurements: %w", err))
	}
	c, err := hardware.ParseCalibration(text)
	if err != nil {
		return cli.WithCode(fmt.Errorf("--measurements: %s: %w", measurements, err), cli.ExitInvalidFile)
	}
	memory := cmp.Or(memoryGiB*(1<<30), c.MemoryBytes)
	if memory == 0 {
		return cli.UsageErrorf("--memory-gib is missing: %s does not contain the memory of a GPU", measurements)
	}
	p, err := hardware.NewProfile(name, memory, c)
	if err != nil {
		return cli.WithCode(fmt.Errorf("--measurements: %s: %w", measurements, err), cli.ExitInvalidFile)
	}
	if text, err = json.MarshalIndent(p, "", "  "); err != nil {
		return err
	}
	if err := atomicfile.WriteBytes(out, 0o644, append(text, '\n')); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	if err := printFits(stdout, p); err != nil {
		return err
	}
	within, of := p.Reproduced(c)
	_, err = fmt.Fprintf(stdout, "\n%d of %d all-to-alls of more than 1 MiB are modelled within 15%%.\n", within, of)
	return err
}

func printFits(out io.Writer, p *hardware.Profile) error {
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "MODEL\tPOINTS\tR2\tMEDIAN ERROR\tMAX\tHELD-OUT MEDIAN\tMAX\tSTART, US\tRATE PER US")
	row := func(name string, f *hardware.Fit, starts, rates string) {
		fmt.Fprintf(table, "%s\t%d\t%.4f\t%.1f%%\t%.1f%%\t%.1f%%\t%.1f%%\t%s\t%s\n", name, f.Points, f.R2, 100*f.MedianError, 100*f.MaxError,
			100*f.HeldOutMedianError, 100*f.HeldOutMaxError, starts, rates)
	}
	gemm := func(name string, g *hardware.GEMM) {
		row(name, &g.Fit, fmt.Sprintf("%.1f", g.Start), fmt.Sprintf("%.4g, %.4g", g.BytesPerMicrosecond, g.FlopsPerMicrosecond))
	}
	exchange := func(name string, e *hardware.Exchange) {
		var starts, rates []string
		for _, l := range e.Lines() {
			starts, rates = append(starts, fmt.Sprintf("%.1f", l.Start)), append(rates, fmt.Sprintf("%.4g", l.PerMicrosecond))
		}
		row(name, &e.Fit, strings.Join(starts, " or "), strings.Join(rates, " or "))
	}
	gemm("grouped GEMM", &p.Grouped)
	gemm("dense GEMM", &p.Dense)
	rate := fmt.Sprintf("%.4g", p.Attention.PerMicrosecond)
	if p.Attention.RowFlops > 0 {
		rate += fmt.Sprintf(", a row as %.4g", p.Attention.RowFlops)
	}
	row("attention", &p.Attention.Fit, fmt.Sprintf("%.1f", p.Attention.Start), rate)
	exchange("all-to-all", &p.AllToAll)
	exchange("all-reduce", &p.AllReduce)
	exchange("reduce-scatter", &p.ReduceScatter)
	exchange("all-gather", &p.AllGather)
	for i := range p.A2E {
		b := &p.A2E[i]
		exchange(fmt.Sprintf("A2E %d to %d", b.AttentionRanks, b.ExpertRanks), &b.Exchange)
	}
	return table.Flush()
}
