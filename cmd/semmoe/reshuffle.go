package main

import (
	"context"
	"encoding/json"
	"io"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/internal/checkpoint"
	"github.com/semmoe/operator/internal/reshuffle"
)

// headerMemory is the heap size above which the garbage collector works harder: the headers of the largest models need less, and the
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
		Short: "Copy a checkpoint with its experts, and the rows of its gates, in another order",
		Long: "Copy a Hugging Face checkpoint with the experts of the layers that a gate-permutation.json lists, and the rows of their\n" +
			"gates, in its order. The model computes the same. The output appears when it is complete and verified; a second run finds\n" +
			"it and does nothing, but for files such as the tokenizer that have changed; a run after a kill goes on. Prints one JSON\n" +
			"object, also into the termination message; a failure is one line there.\n" +
			"Exit code 2: the command line must be changed; 3: model, permutation or output do not fit, or not within the limit;\n" +
			"1: try again.",
		Args: usageArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			result, hold, err := runReshuffle(cmd.Context(), flags)
			if err != nil {
				if writeErr := writeTerminationMessage(flags.messageFile, oneLine(err.Error())); writeErr != nil {
					printError(cmd.ErrOrStderr(), writeErr)
				}
				return err
			}
			defer hold.Release()
			if err := tellResult(cmd.OutOrStdout(), flags.messageFile, result); err != nil {
				return err
			}
			if flags.hold {
				debug.FreeOSMemory() // what holds has nothing to do, perhaps for weeks
				<-cmd.Context().Done()
			}
			return nil
		},
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return codedError{err, exitUsage} })
	f := cmd.Flags()
	f.StringVar(&flags.Model, "model", "", "directory of the checkpoint (required)")
	f.StringVar(&flags.permutation, "permutation", "", "gate-permutation.json of a plan (required)")
	f.StringVar(&flags.Out, "out", "", "directory to make; must not exist, be empty, or hold the same result (required)")
	f.BoolVar(&flags.Verify, "verify", false, "re-read input and output, compare every byte, and record full hashes")
	f.IntVar(&flags.Parallel, "parallel", reshuffle.DefaultParallel, "shards to write at a time")
	f.Int64Var(&flags.Limit, "limit", 0, "bytes that all outputs in the parent directory of --out may have: to make room, unused ones are removed (0: no limit)")
	f.BoolVar(&flags.hold, "hold", false, "afterwards keep the output from being removed, until SIGTERM or SIGINT; then exit with code 0")
	f.StringVar(&flags.messageFile, "termination-message", "", "file for the termination message (default "+terminationLog+", if it exists)")
	return cmd
}

// check refuses flags that can be refused without looking at a file.
func (f *reshuffleFlags) check() error {
	for _, flag := range []struct{ name, value string }{
		{"model", f.Model}, {"permutation", f.permutation}, {"out", f.Out},
	} {
		if flag.value == "" {
			return usageErrorf("--%s is missing", flag.name)
		}
	}
	if f.Parallel < 1 {
		return usageErrorf("--parallel is %d; it must be at least 1", f.Parallel)
	}
	if f.Limit < 0 {
		return usageErrorf("--limit is %d; give a number of bytes, or 0 for no limit", f.Limit)
	}
	return nil
}

// runReshuffle makes or finds the output. It is in use until the hold is released.
func runReshuffle(ctx context.Context, flags reshuffleFlags) (*reshuffle.Result, *reshuffle.Hold, error) {
	if err := flags.check(); err != nil {
		return nil, nil, err
	}
	debug.SetMemoryLimit(headerMemory)
	var err error
	if flags.Permutation, err = reshuffle.ReadPermutation(flags.permutation); err != nil {
		return nil, nil, reshuffleError(err)
	}
	result, hold, err := reshuffle.Acquire(withLogger(ctx, "reshuffle"), flags.Options)
	return result, hold, reshuffleError(err)
}

// tellResult prints a result and makes it the termination message.
func tellResult(out io.Writer, messageFile string, result *reshuffle.Result) error {
	if err := json.NewEncoder(out).Encode(result); err != nil {
		return err
	}
	message, err := resultMessage(result)
	if err != nil {
		return err
	}
	return writeTerminationMessage(messageFile, message)
}

// resultMessage is the result as a termination message. The list of what was left out is the one part of it that grows
// with the checkpoint: where it is too long it stands on standard output alone.
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
		return codedError{err, exitInvalidFile}
	}
	return err
}
