package main

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/internal/checkpoint"
	"github.com/semmoe/operator/internal/plan/bundle"
)

// verifyFlags are the flags of semmoe verify.
type verifyFlags struct {
	planDir, planDigest, modelPath, modelDigest, messageFile string
	expertParallelSize                                       int
}

func newVerifyCommand() *cobra.Command {
	var flags verifyFlags
	command := &cobra.Command{
		Use:   "verify --plan-dir DIR [--plan-digest D] --model-path DIR [--model-digest M] --expert-parallel-size N",
		Short: "Verify that a mounted plan and a checkpoint belong together",
		Long: "Verify, before an engine starts, that a mounted plan is the one that was asked for, undamaged, made for this model, and\n" +
			"that the checkpoint is still that model. Without --plan-digest any whole plan will do, without --model-digest the model\n" +
			"must be the one that the plan was made for. Loads no weights. Exit code 3: they do not belong together; the reason stands\n" +
			"on one line, also in the termination message.",
		Args: invalidArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			mounted, report, err := verify(flags, cmd.Flags().Changed)
			message := ""
			if err != nil {
				err = codedError{errors.New(oneLine(err.Error())), exitInvalidFile}
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
	command.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return codedError{err, exitInvalidFile} })
	f := command.Flags()
	f.StringVar(&flags.planDir, "plan-dir", "", "directory where the plan's ConfigMap is mounted, or a plan directory (required)")
	f.StringVar(&flags.planDigest, "plan-digest", "", "digest that the plan must have (default: any)")
	f.StringVar(&flags.modelPath, "model-path", "", "directory of the checkpoint (required)")
	f.StringVar(&flags.modelDigest, "model-digest", "", "digest of the model that the plan must be for, and the checkpoint have (default: the plan's)")
	f.IntVar(&flags.expertParallelSize, "expert-parallel-size", 0, "number of ranks of the engine (required)")
	f.StringVar(&flags.messageFile, "termination-message", "", "file for the termination message (default "+terminationLog+" where it exists)")
	return command
}

// checkDigests refuses a digest that was given and is empty, as one of a variable that is not set would be: without it anything will do.
func checkDigests(given func(flag string) bool, digests map[string]string) error {
	for name, value := range digests {
		if value == "" && given(name) {
			return fmt.Errorf("--%s is empty: give a digest, or leave the flag out", name)
		}
	}
	return nil
}

// verify compares plan and checkpoint; given tells which flags were.
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
		return nil, none, fmt.Errorf("--expert-parallel-size is %d; give the number of ranks, at least 1", flags.expertParallelSize)
	}
	mounted, err := bundle.Check(flags.planDir, flags.planDigest)
	if err != nil {
		return nil, none, err
	}
	report, err := checkpoint.Inspect(flags.modelPath)
	if err != nil {
		return nil, none, err
	}
	return mounted, report, mounted.Fits(report, cmp.Or(flags.modelDigest, mounted.Manifest.ModelDigest), flags.expertParallelSize)
}
