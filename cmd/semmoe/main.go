// SPDX-License-Identifier: Apache-2.0

// Command semmoe is the static binary of the Sem-MoE operator. Every role of the system is one of its subcommands, so
// that one image serves all roles.
package main

import (
	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
)

func main() { cli.Main(newRootCommand()) }

// moved lists the commands of earlier versions that other programs have now.
var moved = map[string]string{
	"compare": "semmoe-lab", "drift": "semmoe-lab", "fit": "semmoe-lab", "lookahead": "semmoe-lab", "pipeline": "semmoe-lab",
	"simulate": "semmoe-lab", "stats": "semmoe-lab", "engine": "semmoe-refengine",
}

func newRootCommand() *cobra.Command {
	return cli.NewRoot("semmoe", "Co-schedule Mixture-of-Experts models and their requests on Kubernetes", moved,
		newManagerCommand(), newInspectCommand(), newRouterCommand(), newProfileCommand(), newStoreCommand(), newSolveCommand(), newReplanCommand(),
		newEvalCommand(), newVerifyCommand(), newReshuffleCommand(), newProbeCommand(), newFetchCommand(), newDownloadCommand(), newReportCommand(), newCalibrateCommand())
}
