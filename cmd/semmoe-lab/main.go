// SPDX-License-Identifier: Apache-2.0

// Command semmoe-lab studies routing traces and plans: comparisons of placement algorithms, statistics, simulations and
// schedules. No pod of the operator runs it.
package main

import (
	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
)

func main() { cli.Main(newRootCommand()) }

func newRootCommand() *cobra.Command {
	return cli.NewRoot("semmoe-lab", "Study routing traces, placement algorithms and schedules of Mixture-of-Experts models", nil,
		newCompareCommand(), newStatsCommand(), newSimulateCommand(), newPipelineCommand(), newLookAheadCommand(), newDriftCommand(), newFitCommand())
}
