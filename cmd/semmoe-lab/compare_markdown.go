// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/lab"
	"github.com/semmoe/operator/solver/placement"
)

// markdown returns the report as self-contained text: the method, one table per attention mode with a row per method,
// the margins over each baseline, and, for several numbers of extra slots, locality as a function of memory.
func (r *comparisonReport) markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Trace %.16s, %s; %d%% of the documents of each kind for training, metrics on the others; means over %d splits, with minimum and\n"+
		"maximum. Prompts are clustered by %s. %.0f seconds on %d processors.\n\n", r.Trace, r.Model, r.TrainPercent, r.Seeds, r.Prompts, r.Seconds, r.Processors)
	for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
		if rows := methods(r.Comparisons, attention); len(rows) > 0 {
			writeMethods(&b, attention, rows)
		}
	}
	writeLeads(&b, r.Leads)
	for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
		writeMemoryCurve(&b, attention, r.Comparisons)
	}
	return strings.TrimRight(b.String(), "\n") + "\n"
}

// methods returns the comparisons of an attention mode, one row per method with one entry per EP size, in ascending
// order of the rate within a dispatch.
func methods(comparisons []lab.Comparison, attention placement.Attention) [][]lab.Comparison {
	var rows [][]lab.Comparison
	for _, c := range comparisons {
		if c.Attention != attention {
			continue
		}
		at := slices.IndexFunc(rows, func(row []lab.Comparison) bool {
			x := row[0]
			return x.Algorithm == c.Algorithm && x.RedundantSlots == c.RedundantSlots && x.Forecast == c.Forecast && x.Dispatch == c.Dispatch
		})
		if at < 0 {
			rows = append(rows, []lab.Comparison{c})
		} else {
			rows[at] = append(rows[at], c)
		}
	}
	slices.SortStableFunc(rows, func(a, b []lab.Comparison) int {
		return cmp.Or(a[0].RedundantSlots-b[0].RedundantSlots, cmp.Compare(b[0].Dispatch, a[0].Dispatch), cmp.Compare(a[0].LAR.Mean, b[0].LAR.Mean))
	})
	return rows
}

// epSizes returns the EP sizes of the comparisons in order of appearance.
func epSizes(rows [][]lab.Comparison) []int {
	var sizes []int
	for _, row := range rows {
		for _, c := range row {
			if !slices.Contains(sizes, c.Ranks) {
				sizes = append(sizes, c.Ranks)
			}
		}
	}
	return sizes
}

// entry returns the comparison of an EP size, or nil.
func entry(row []lab.Comparison, ranks int) *lab.Comparison {
	at := slices.IndexFunc(row, func(c lab.Comparison) bool { return c.Ranks == ranks })
	if at < 0 {
		return nil
	}
	return &row[at]
}

func writeMethods(b *strings.Builder, attention placement.Attention, rows [][]lab.Comparison) {
	sizes := epSizes(rows)
	head := "| placement | extra slots | forecast | dispatch | co-scheduling |"
	line := "| --- | --- | --- | --- | --- |"
	for _, n := range sizes {
		head += fmt.Sprintf(" EP %d | spread | imbalance | expert imbalance | remote ranks | s |", n)
		line += strings.Repeat(" --- |", 6)
	}
	fmt.Fprintf(b, "Attention %s\n\n%s\n%s\n", attention, head, line)
	for _, row := range rows {
		x := row[0]
		fmt.Fprintf(b, "| %s | %d | %s | %s | %s |", x.Algorithm, x.RedundantSlots, x.Forecast, x.Dispatch, x.Part)
		for _, n := range sizes {
			c := entry(row, n)
			if c == nil {
				b.WriteString(strings.Repeat(" |", 6))
				continue
			}
			balance := c.TokenImbalance
			if attention == placement.DataParallel {
				balance = c.WindowImbalance
			}
			fmt.Fprintf(b, " %.4f | %.4f–%.4f | %.3f | %.3f | %.3f | %.1f |",
				c.LAR.Mean, c.LAR.Min, c.LAR.Max, balance, c.ExpertWindowImbalance, c.RemoteRanksPerToken, c.PlacementSeconds)
		}
		b.WriteString("\n")
	}
	b.WriteString("\n")
}

// writeLeads writes one line per baseline.
func writeLeads(b *strings.Builder, leads []lab.BaselineMargin) {
	if len(leads) == 0 {
		return
	}
	b.WriteString("Margin of our method over each baseline (a cell is one EP size, split, forecast and dispatch)\n\n" +
		"| attention | baseline | ahead in | minimum margin | at | mean margin | imbalance, ours and baseline |\n| --- | --- | --- | --- | --- | --- | --- |\n")
	for _, l := range leads {
		fmt.Fprintf(b, "| %s | %s | %d of %d | %+.4f | %s | %+.4f | %.3f, %.3f |\n",
			l.Attention, l.Baseline, l.Ahead, l.Cells, l.Min, l.MinAt, l.Mean, l.OurImbalance, l.BaselineImbalance)
	}
	b.WriteString("\n")
}

// writeMemoryCurve writes one line per number of extra slots: our method, and load balancing only with the same memory.
func writeMemoryCurve(b *strings.Builder, attention placement.Attention, comparisons []lab.Comparison) {
	how := string(dispatch.Price)
	if attention == placement.TensorParallel {
		how = string(cost.EqualShards)
	}
	rows := slices.DeleteFunc(methods(comparisons, attention), func(row []lab.Comparison) bool {
		return row[0].Algorithm != placement.Auto || row[0].Forecast != string(solver.Table) || row[0].Dispatch != how
	})
	if len(rows) < 2 {
		return
	}
	head, line := "| extra slots |", "| --- |"
	sizes := epSizes(rows)
	for _, n := range sizes {
		head += fmt.Sprintf(" EP %d: slots | rate | gain | imbalance | expert imbalance | eplb |", n)
		line += strings.Repeat(" --- |", 6)
	}
	fmt.Fprintf(b, "Memory against locality, attention %s, %s\n\n%s\n%s\n", attention, how, head, line)
	for _, row := range rows {
		fmt.Fprintf(b, "| %d |", row[0].RedundantSlots)
		for _, n := range sizes {
			c, without := entry(row, n), entry(rows[0], n)
			if c == nil || without == nil {
				b.WriteString(strings.Repeat(" |", 6))
				continue
			}
			balance := c.TokenImbalance
			if attention == placement.DataParallel {
				balance = c.WindowImbalance
			}
			fmt.Fprintf(b, " %d | %.4f | %+.1f%% | %.3f | %.3f |", c.SlotsPerRank, c.LAR.Mean, 100*(c.LAR.Mean/without.LAR.Mean-1), balance, c.ExpertWindowImbalance)
			other := slices.IndexFunc(comparisons, func(x lab.Comparison) bool {
				return x.Attention == attention && x.Ranks == n && x.Algorithm == placement.EPLB && x.RedundantSlots == c.RedundantSlots &&
					x.Forecast == c.Forecast && x.Dispatch == how
			})
			if other < 0 {
				b.WriteString(" |")
			} else {
				fmt.Fprintf(b, " %.4f |", comparisons[other].LAR.Mean)
			}
		}
		b.WriteString("\n")
	}
	b.WriteString("\n")
}
