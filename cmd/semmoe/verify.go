// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/plan/bundle"
)

// verifyFlags are the flags of semmoe verify.
type verifyFlags struct {
	planDir, planDigest, modelPath, layoutAs, modelDigest, messageFile string
	expertParallelSize                                                 int
}

func newVerifyCommand() *cobra.Command {
	var flags verifyFlags
	command := &cobra.Command{
		Use:   "verify --plan-dir DIR [--plan-digest D] --model-path DIR [--model-digest M] --expert-parallel-size N",
		Short: "Verify that a mounted plan and a checkpoint match",
		Long: "Verify, before an engine starts, that a mounted plan has the expected digest, is undamaged, and was made for this model, and\n" +
			"that the checkpoint still contains this model. Without --plan-digest any complete plan is accepted; without --model-digest\n" +
			"the model must be the one in the plan. Loads no weights. Exit code 3: plan and checkpoint do not match; the reason is printed\n" +
			"on one line and is the termination message.",
		Args: invalidArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			mounted, report, err := verify(flags, cmd.Flags().Changed)
			message := ""
			if err != nil {
				err = cli.WithCode(errors.New(oneLine(err.Error())), cli.ExitInvalidFile)
				message = err.Error()
			}
			if writeErr := writeTerminationMessage(flags.messageFile, message); writeErr != nil {
				fmt.Fprintf(cmd.ErrOrStderr(), "semmoe: %v\n", writeErr)
			}
			if err == nil {
				fmt.Fprintf(cmd.OutOrStdout(), "Plan %s fits model %s (%s) at EP size %d\n", mounted.Digest, report.ModelDigest, report.Family, flags.expertParallelSize)
			}
			return err
		},
	}
	command.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return cli.WithCode(err, cli.ExitInvalidFile) })
	f := command.Flags()
	f.StringVar(&flags.planDir, "plan-dir", "", "directory where the plan's ConfigMap is mounted, or a plan directory (required)")
	f.StringVar(&flags.planDigest, "plan-digest", "", "required digest of the plan (default: any)")
	f.StringVar(&flags.modelPath, "model-path", "", "directory of the checkpoint (required)")
	f.StringVar(&flags.layoutAs, "layout-as", "", layoutAsHelp)
	f.StringVar(&flags.modelDigest, "model-digest", "", "required digest of the model in the plan and in the checkpoint (default: the plan's)")
	f.IntVar(&flags.expertParallelSize, "expert-parallel-size", 0, "number of ranks of the engine (required)")
	f.StringVar(&flags.messageFile, "termination-message", "", "file for the termination message (default "+terminationLog+", if it exists)")
	return command
}

// checkDigests returns an error for an empty digest, for example from an unset variable: without a digest any input is
// accepted.
func checkDigests(given func(flag string) bool, digests map[string]string) error {
	for name, value := range digests {
		if value == "" && given(name) {
			return fmt.Errorf("--%s is empty; set a digest or remove the flag", name)
		}
	}
	return nil
}

// verify compares plan and checkpoint; given reports which flags are set.
func verify(flags verifyFlags, given func(flag string) bool) (*bundle.Mounted, checkpoint.Report, error) {
	var none checkpoint.Report
	for name, value := range map[string]string{"--plan-dir": flags.planDir, "--model-path": flags.modelPath} {
		if value == "" {
			return nil, none, fmt.Errorf("%s is missing", name)
		}
	}
	if err := checkDigests(given, map[string]string{"plan-digest": flags.planDigest, "model-digest": flags.modelDigest}); err != nil {
		return nil, none, err
	}
	if flags.expertParallelSize < 1 {
		return nil, none, fmt.Errorf("--expert-parallel-size is %d; it must be at least 1", flags.expertParallelSize)
	}
	mounted, err := bundle.Check(flags.planDir, flags.planDigest)
	if err != nil {
		return nil, none, err
	}
	report, err := checkpoint.InspectAs(flags.modelPath, flags.layoutAs)
	if err != nil {
		return nil, none, err
	}
	return mounted, report, mounted.CheckModel(report, cmp.Or(flags.modelDigest, mounted.Manifest.ModelDigest), flags.expertParallelSize)
}
