// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"text/tabwriter"

	"golang.org/x/sys/unix"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/solver"
)

// checkOutput checks the flags of verdict and output.
func checkOutput(minimumGainPercent float64, output string) error {
	if !(minimumGainPercent >= 0 && minimumGainPercent < 100) {
		return cli.UsageErrorf("--minimum-gain-percent is %v; allowed is 0 to below 100", minimumGainPercent)
	}
	if output != "" && output != "json" && output != "table" {
		return cli.UsageErrorf("--output is %q; allowed is json, table", output)
	}
	return nil
}

// asTable reports whether the output is a table: by default on a terminal.
func asTable(output string, to io.Writer) bool {
	if output != "" {
		return output == "table"
	}
	file, ok := to.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
	return err == nil
}

// table prints the verdict and the front of a solve as tables.
func (r *solveReport) table(to io.Writer) error {
	out := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	fmt.Fprintf(out, "plan\t%s\n", r.PlanDigest)
	printWorth(out, &r.Worth)
	fmt.Fprintf(out, "local activations\t%.1f%% (no plan %.1f%%)\n", 100*r.LAR, 100*r.BaselineLAR)
	if r.FallBack != "" {
		fmt.Fprintf(out, "fall-back\t%s\n", r.FallBack)
	}
	printFront(out, r.Front, r.Chosen)
	printCopies(out, r.Copies)
	return out.Flush()
}

func printWorth(out io.Writer, w *solver.Worth) {
	fmt.Fprintf(out, "verdict\t%s: %s\n", w.Verdict, w.Reason)
	fmt.Fprintf(out, "layer\t%.1f µs (no plan %.1f µs), mean over batches of %v tokens\n", w.LayerUS, w.BaselineLayerUS, w.BatchTokens)
	fmt.Fprintf(out, "saved\t%.1f%% (95%% interval: %.1f%% to %.1f%%)\n", w.SavedPercent, w.Low, w.High)
}

// printFront prints the candidate placements of a search by time; an asterisk marks the selected one.
func printFront(out io.Writer, front []solver.FrontPoint, chosen string) {
	if len(front) == 0 {
		return
	}
	var sizes []int
	for size := range front[0].LayerUS {
		n, _ := strconv.Atoi(size)
		sizes = append(sizes, n)
	}
	slices.Sort(sizes)
	fmt.Fprint(out, "\nfront\tload limit\tlocal\timbalance")
	for _, size := range sizes {
		fmt.Fprintf(out, "\tµs at %d", size)
	}
	fmt.Fprintln(out)
	for _, p := range front {
		name, limit := p.Name, "none"
		if p.Name == chosen {
			name += " *"
		}
		if p.ExpertLoadLimit > 0 {
			limit = fmt.Sprintf("%g%%", p.ExpertLoadLimit)
		}
		fmt.Fprintf(out, "%s\t%s\t%.1f%%\t%.3f", name, limit, 100*p.LAR, p.ExpertImbalance)
		for _, size := range sizes {
			fmt.Fprintf(out, "\t%.1f", p.LayerUS[strconv.Itoa(size)])
		}
		fmt.Fprintln(out)
	}
}

// printCopies prints the compared numbers of copies; an asterisk marks the selected one.
func printCopies(out io.Writer, c *solver.Copies) {
	if c == nil {
		return
	}
	fmt.Fprintf(out, "\ncopies\t%s\n", c.Text())
	if len(c.Points) == 0 {
		return
	}
	fmt.Fprintln(out, "\ncopies per rank\tmemory per rank\tlocal\timbalance\tµs (held-out documents to learn from)")
	for _, p := range c.Points {
		number := strconv.Itoa(p.RedundantSlots)
		if p.RedundantSlots == c.Chosen {
			number += " *"
		}
		fmt.Fprintf(out, "%s\t%s\t%.1f%%\t%.3f\t%.1f\n", number, solver.BytesText(p.MemoryBytes), 100*p.LAR, p.ExpertImbalance, p.LayerUS)
	}
}
