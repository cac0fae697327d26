// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"io"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/model/reshuffle"
)

// headerMemory is the soft memory limit of the garbage collector: the headers of the largest models need less, and the
// process stays below 256 MiB.
const headerMemory = 160 << 20

// reshuffleFlags are the flags of semmoe reshuffle.
type reshuffleFlags struct {
	reshuffle.Options
	permutation, messageFile string
	hold                     bool
}

func newReshuffleCommand() *cobra.Command {
	var flags reshuffleFlags
	cmd := &cobra.Command{
		Use:   "reshuffle --model DIR --permutation FILE --out DIR",
		Short: "Copy a checkpoint with permuted experts and gate rows",
		Long: "Copy a Hugging Face checkpoint and permute the experts, and the rows of their gates, in the layers listed in a\n" +
			"gate-permutation.json. The model's outputs do not change. The output directory appears when it is complete and verified. A\n" +
			"second run only updates changed files such as the tokenizer; a run after a kill resumes. Prints one JSON object, which is\n" +
			"also the termination message; an error is one line there.\n" +
			"Exit codes: 2 the command line is invalid; 3 model, permutation or output do not match, or exceed the limit;\n" +
			"1 any other error, which a retry may fix.",
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			result, hold, err := runReshuffle(cmd.Context(), flags)
			if err != nil {
				if writeErr := writeTerminationMessage(flags.messageFile, oneLine(err.Error())); writeErr != nil {
					cli.PrintError(cmd.ErrOrStderr(), "semmoe", writeErr)
				}
				return err
			}
			defer hold.Release()
			if err := writeResult(cmd.OutOrStdout(), flags.messageFile, result); err != nil {
				return err
			}
			if flags.hold {
				debug.FreeOSMemory() // the process only keeps the lease, possibly for weeks
				<-cmd.Context().Done()
			}
			return nil
		},
	}
	cmd.SetFlagErrorFunc(cli.FlagError)
	f := cmd.Flags()
	f.StringVar(&flags.Model, "model", "", "directory of the checkpoint (required)")
	f.StringVar(&flags.LayoutAs, "layout-as", "", layoutAsHelp)
	f.StringVar(&flags.permutation, "permutation", "", "gate-permutation.json of a plan (required)")
	f.StringVar(&flags.Out, "out", "", "output directory: new, empty, or with the same result (required)")
	f.BoolVar(&flags.Verify, "verify", false, "re-read of input and output with a comparison of every byte and full hashes")
	f.IntVar(&flags.Parallel, "parallel", reshuffle.DefaultParallel, "number of concurrently written shards")
	f.Int64Var(&flags.Limit, "limit", 0, "maximum total size, in bytes, of all outputs in the parent directory of --out; unused outputs are removed to free space; 0 means no limit")
	f.BoolVar(&flags.hold, "hold", false, "lease on the output after the copy, which prevents its removal until SIGTERM or SIGINT; then exit code 0")
	f.StringVar(&flags.messageFile, "termination-message", "", "file for the termination message (default "+terminationLog+", if it exists)")
	return cmd
}

// check validates the flags without file access.
func (f *reshuffleFlags) check() error {
	for _, flag := range []struct{ name, value string }{
		{"model", f.Model}, {"permutation", f.permutation}, {"out", f.Out},
	} {
		if flag.value == "" {
			return cli.UsageErrorf("--%s is missing", flag.name)
		}
	}
	if f.Parallel < 1 {
		return cli.UsageErrorf("--parallel is %d; it must be at least 1", f.Parallel)
	}
	if f.Limit < 0 {
		return cli.UsageErrorf("--limit is %d; it must be at least 0", f.Limit)
	}
	return nil
}

// runReshuffle creates or finds the output. The output is in use until the hold is released.
func runReshuffle(ctx context.Context, flags reshuffleFlags) (*reshuffle.Result, *reshuffle.Lease, error) {
	if err := flags.check(); err != nil {
		return nil, nil, err
	}
	debug.SetMemoryLimit(headerMemory)
	var err error
	if flags.Permutation, err = reshuffle.ReadPermutation(flags.permutation); err != nil {
		return nil, nil, reshuffleError(err)
	}
	result, hold, err := reshuffle.Acquire(cli.WithLogger(ctx, "reshuffle", 0), flags.Options)
	return result, hold, reshuffleError(err)
}

// writeResult prints a result and makes it the termination message.
func writeResult(out io.Writer, messageFile string, result *reshuffle.Result) error {
	if err := json.NewEncoder(out).Encode(result); err != nil {
		return err
	}
	message, err := resultMessage(result)
	if err != nil {
		return err
	}
	return writeTerminationMessage(messageFile, message)
}

// resultMessage returns the result as a termination message. It omits LeftOut, the only list that grows with the
// checkpoint, if the message is too long; standard output always contains the list.
func resultMessage(result *reshuffle.Result) (string, error) {
	text, err := json.Marshal(result)
	if err == nil && len(text) > terminationLimit {
		short := *result
		short.LeftOut = nil
		text, err = json.Marshal(short)
	}
	return string(text), err
}

func reshuffleError(err error) error {
	if checkpoint.IsInvalid(err) {
		return cli.WithCode(err, cli.ExitInvalidFile)
	}
	return err
}
