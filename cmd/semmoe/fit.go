package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/internal/wholefile"
	"github.com/semmoe/operator/solver/cost/hardware"
)

func newFitCommand() *cobra.Command {
	var measurements, name, out string
	var memory float64
	cmd := &cobra.Command{
		Use:   "fit --measurements FILE --name NAME --out FILE",
		Short: "Fit a hardware profile to measured kernels and exchanges",
		Long: "Fit start-up times and rates to what semmoe calibrate measured kernels and exchanges to take, and write them as a hardware profile, which semmoe\n" +
			"pipeline reads. Prints how well each model fits, also on measurements that it was not fitted to.\n" +
			"Exit code 2: the command line must be changed; 3: the measurements do not make a profile; 1: try again.",
		Args: usageArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case measurements == "":
				return usageErrorf("--measurements is missing: name the file with measured times")
			case name == "":
				return usageErrorf("--name is missing: say what the profile is to be called")
			case out == "":
				return usageErrorf("--out is missing: name the file for the profile")
			case memory < 0 || math.IsNaN(memory):
				return usageErrorf("--memory-gib is %v; it must be above 0, or 0 for what was measured", memory)
			}
			return fit(cmd.OutOrStdout(), measurements, name, memory, out)
		},
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return codedError{err, exitUsage} })
	f := cmd.Flags()
	f.StringVar(&measurements, "measurements", "", "JSON file with measured times (required)")
	f.StringVar(&name, "name", "", "what the profile is called (required)")
	f.Float64Var(&memory, "memory-gib", 0, "memory of a rank in GiB (default: what was measured on)")
	f.StringVar(&out, "out", "", "file for the profile; one that is there is replaced (required)")
	return cmd
}

func fit(stdout io.Writer, measurements, name string, memoryGiB float64, out string) error {
	text, err := os.ReadFile(measurements)
	if err != nil {
		return inputError(fmt.Errorf("--measurements: %w", err))
	}
	c, err := hardware.ParseCalibration(text)
	if err != nil {
		return codedError{fmt.Errorf("--measurements: %s: %w", measurements, err), exitInvalidFile}
	}
	memory := cmp.Or(memoryGiB*(1<<30), c.MemoryBytes)
	if memory == 0 {
		return usageErrorf("--memory-gib is missing: %s does not tell the memory of a GPU", measurements)
	}
	p, err := hardware.NewProfile(name, memory, c)
	if err != nil {
		return codedError{fmt.Errorf("--measurements: %s: %w", measurements, err), exitInvalidFile}
	}
	if text, err = json.MarshalIndent(p, "", "  "); err != nil {
		return err
	}
	if err := wholefile.WriteBytes(out, 0o644, append(text, '\n')); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	return printFits(stdout, p)
}

func printFits(out io.Writer, p *hardware.Profile) error {
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "MODEL\tPOINTS\tR2\tMEDIAN ERROR\tMAX\tHELD-OUT MEDIAN\tMAX\tSTART, US\tRATE PER US")
	row := func(name string, f hardware.Fit, start float64, rates ...float64) {
		words := make([]string, len(rates))
		for i, rate := range rates {
			words[i] = fmt.Sprintf("%.4g", rate)
		}
		fmt.Fprintf(table, "%s\t%d\t%.4f\t%.1f%%\t%.1f%%\t%.1f%%\t%.1f%%\t%.1f\t%s\n", name, f.Points, f.R2, 100*f.MedianError, 100*f.MaxError,
			100*f.HeldOutMedianError, 100*f.HeldOutMaxError, start, strings.Join(words, ", "))
	}
	row("grouped GEMM", p.Grouped.Fit, p.Grouped.Start, p.Grouped.BytesPerMicrosecond, p.Grouped.FlopsPerMicrosecond)
	row("dense GEMM", p.Dense.Fit, p.Dense.Start, p.Dense.BytesPerMicrosecond, p.Dense.FlopsPerMicrosecond)
	for _, l := range []struct {
		name string
		line hardware.Line
	}{
		{"attention", p.Attention}, {"all-to-all", p.AllToAll}, {"all-reduce", p.AllReduce}, {"reduce-scatter", p.ReduceScatter}, {"all-gather", p.AllGather},
	} {
		row(l.name, l.line.Fit, l.line.Start, l.line.PerMicrosecond)
	}
	for _, b := range p.A2E {
		row(fmt.Sprintf("A2E %d to %d", b.AttentionRanks, b.ExpertRanks), b.Line.Fit, b.Line.Start, b.Line.PerMicrosecond)
	}
	return table.Flush()
}
