// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"time"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/files/atomicfile"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/refengine/lookahead"
	"github.com/semmoe/operator/internal/refengine/model"
	"github.com/semmoe/operator/solver/trace"
)

// lookAheadFlags are the flags of semmoe-lab lookahead.
type lookAheadFlags struct {
	model, trace, out string
	experts, threads  int
}

func newLookAheadCommand() *cobra.Command {
	var flags lookAheadFlags
	cmd := &cobra.Command{
		Use:   "lookahead --model-path DIR --trace FILE --out FILE",
		Short: "Add the gates' predictions before attention to a routing trace",
		Long: "Run the requests of a routing trace through the reference engine, and write the trace with the output of each layer's norm and\n" +
			"gate for the residual stream before the layer's attention. The forecasts lookahead and lookahead-raw of semmoe solve and\n" +
			"semmoe eval use this output. Recorded routes do not change. Prints one JSON object.\n" +
			"Exit codes: 2 the command line is invalid; 3 the model or the trace is invalid, or they do not match; 1 any other error, which a retry may fix.",
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			report, err := flags.run(cmd.Context(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			return json.NewEncoder(cmd.OutOrStdout()).Encode(report)
		},
	}
	cmd.SetFlagErrorFunc(cli.FlagError)
	f := cmd.Flags()
	f.StringVar(&flags.model, "model-path", "", "directory of the Qwen3-MoE checkpoint that the trace was recorded from (required)")
	f.StringVar(&flags.trace, "trace", "", "routing trace, .safetensors or .safetensors.zst (required)")
	f.StringVar(&flags.out, "out", "", "trace file to write, compressed if the name ends in .zst (required)")
	f.IntVar(&flags.experts, "experts", 0, "number of recorded experts per token and layer (default: four times top-k)")
	f.IntVar(&flags.threads, "threads", runtime.GOMAXPROCS(0), "number of compute threads")
	return cmd
}

// lookAheadReport is the output of lookahead.
type lookAheadReport struct {
	Requests int `json:"requests"`
	Tokens   int `json:"tokens"`
	// Experts is the number of recorded experts per token and layer.
	Experts int `json:"experts"`
	// Agreement is the share of the trace's activations that the reference engine reproduces.
	Agreement float64 `json:"agreement"`
	// Overlap is the share of the trace's activations among the top-k most probable experts of the look-ahead.
	Overlap float64 `json:"overlap"`
	Seconds float64 `json:"seconds"`
}

func (f *lookAheadFlags) run(ctx context.Context, stderr io.Writer) (*lookAheadReport, error) {
	begin := time.Now()
	for _, flag := range []struct{ name, value string }{{"model-path", f.model}, {"trace", f.trace}, {"out", f.out}} {
		if flag.value == "" {
			return nil, cli.UsageErrorf("--%s is missing", flag.name)
		}
	}
	if f.experts < 0 {
		return nil, cli.UsageErrorf("--experts is %d; it must be at least 0", f.experts)
	}
	if f.threads < 1 {
		return nil, cli.UsageErrorf("--threads is %d; it must be at least 1", f.threads)
	}
	if err := atomicfile.Check(f.out); err != nil {
		return nil, cli.UsageErrorf("--out: %w", err)
	}
	t, err := trace.Open(ctx, f.trace)
	if err != nil {
		return nil, cli.InputError(err)
	}
	m, err := loadModel(f.model)
	if err != nil {
		return nil, err
	}
	if f.experts == 0 {
		f.experts = trace.LookAheadWidth(t.Model.TopK, t.Model.Experts)
	}
	bar := cli.NewProgressBar(stderr)
	a, agreement, err := lookahead.Record(ctx, m, t, lookahead.Options{
		Width: f.experts, Workers: f.threads, Progress: func(done, total int) { bar.Show("Requests", done, total) },
	})
	bar.Clear()
	if checkpoint.IsInvalid(err) {
		return nil, cli.WithCode(err, cli.ExitInvalidFile)
	}
	if err != nil {
		return nil, err
	}
	t.LookAhead = a
	if err := cli.WriteTrace(f.out, t); err != nil {
		return nil, err
	}
	return &lookAheadReport{
		Requests: t.Requests(), Tokens: len(t.Tokens), Experts: f.experts, Agreement: agreement, Overlap: t.LookAheadOverlap(), Seconds: time.Since(begin).Seconds(),
	}, nil
}

// loadModel loads a checkpoint with all weights.
func loadModel(dir string) (*model.Model, error) {
	c, err := checkpoint.Open(dir)
	if err == nil {
		defer c.Close()
		var m *model.Model
		if m, err = model.Load(c, 0); err == nil {
			return m, nil
		}
	}
	if checkpoint.IsInvalid(err) || errors.Is(err, os.ErrNotExist) {
		err = cli.WithCode(fmt.Errorf("--model-path: %w", err), cli.ExitInvalidFile)
	}
	return nil, err
}
