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

// reshuffleMemory is where the garbage collector begins to work harder: the headers of the largest models stay below,
// and so does the process below 256 MiB.
const reshuffleMemory = 160 << 20

func newReshuffleCommand() *cobra.Command {
	var options reshuffle.Options
	var permutation string
	cmd := &cobra.Command{
		Use:   "reshuffle --model DIR --permutation FILE --out DIR",
		Short: "Copy a checkpoint with its experts, and the rows of its gates, in another order",
		Long: "Copy a Hugging Face checkpoint with the experts of the layers that a gate-permutation.json lists, and the rows of their\n" +
			"gates, in its order. The model computes the same. The output appears when it is complete and verified; a second run finds\n" +
			"it and does nothing; a run after a kill goes on. Prints one JSON object.\n" +
			"Exit code 2: the command line must be changed; 3: model, permutation or output do not fit; 1: try again.",
		Args: usageArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, flag := range []struct{ name, value string }{
				{"model", options.Model}, {"permutation", permutation}, {"out", options.Out},
			} {
				if flag.value == "" {
					return usageErrorf("--%s is missing", flag.name)
				}
			}
			if options.Parallel < 1 {
				return usageErrorf("--parallel is %d; it must be at least 1", options.Parallel)
			}
			return runReshuffle(cmd.Context(), options, permutation, cmd.OutOrStdout())
		},
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return codedError{err, exitUsage} })
	f := cmd.Flags()
	f.StringVar(&options.Model, "model", "", "directory of the checkpoint (required)")
	f.StringVar(&permutation, "permutation", "", "gate-permutation.json of a plan (required)")
	f.StringVar(&options.Out, "out", "", "directory to make; must not exist, be empty, or hold the same result (required)")
	f.BoolVar(&options.Verify, "verify", false, "re-read input and output, compare every byte, and record full hashes")
	f.IntVar(&options.Parallel, "parallel", reshuffle.DefaultParallel, "shards to write at a time")
	return cmd
}

func runReshuffle(ctx context.Context, options reshuffle.Options, permutation string, out io.Writer) (err error) {
	debug.SetMemoryLimit(reshuffleMemory)
	if options.Permutation, err = reshuffle.ReadPermutation(permutation); err != nil {
		return reshuffleError(err)
	}
	result, err := reshuffle.Run(withLogger(ctx, "reshuffle"), options)
	if err != nil {
		return reshuffleError(err)
	}
	return json.NewEncoder(out).Encode(result)
}

func reshuffleError(err error) error {
	if checkpoint.IsInvalid(err) {
		return codedError{err, exitInvalidFile}
	}
	return err
}
