package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/internal/checkpoint"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/solver/trace"
)

type profileOptions struct {
	endpoint, engine, model, dataset, out      string
	requests, tokens, requestTokens, newTokens int
	concurrency                                int
	seed                                       uint64
	wait                                       time.Duration
}

func newProfileCommand() *cobra.Command {
	var o profileOptions
	command := &cobra.Command{
		Use:   "profile --endpoint URL --model-path DIR --dataset FILE --out TRACE",
		Short: "Record which experts the tokens of a data set activate, from a running engine",
		Long: `Sends the requests of a data set to a running engine, or to the request router in front of it, and writes the routing
trace: which experts each token activated. The engine must have been started with --enable-return-routed-experts.

The data set is JSONL: {"prompt": "..."}, {"messages": [{"role", "content"}, ...]} or ShareGPT's {"conversations":
[{"from", "value"}, ...]}, each with an optional "domain".`,
		Args: cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			summary, err := runProfile(command.Context(), o)
			if err != nil {
				return profileError{err}
			}
			return json.NewEncoder(command.OutOrStdout()).Encode(summary)
		},
	}
	flags := command.Flags()
	flags.StringVar(&o.endpoint, "endpoint", "", "base URL of the engine or its request router (required)")
	flags.StringVar(&o.engine, "engine", "SGLang", "type of the engine")
	flags.StringVar(&o.model, "model-path", "", "directory of the checkpoint that the engine serves (required)")
	flags.StringVar(&o.dataset, "dataset", "", "JSONL file with the requests (required)")
	flags.StringVar(&o.out, "out", "", "trace to write, .safetensors or .safetensors.zst (required)")
	flags.IntVar(&o.requests, "requests", 2000, "requests to send at most: a uniform sample of the data set")
	flags.IntVar(&o.tokens, "tokens", 200_000, "tokens to record at most")
	flags.IntVar(&o.requestTokens, "request-tokens", 512, "tokens of a prompt to send at most")
	flags.IntVar(&o.newTokens, "new-tokens", 1, "tokens that each request generates")
	flags.IntVar(&o.concurrency, "concurrency", 16, "requests in flight")
	flags.Uint64Var(&o.seed, "seed", 1, "seed of the sample")
	flags.DurationVar(&o.wait, "wait", 10*time.Minute, "how long the engine may take to serve")
	for _, name := range []string{"endpoint", "model-path", "dataset", "out"} {
		if err := command.MarkFlagRequired(name); err != nil {
			panic(err) // a flag of the lines above
		}
	}
	return command
}

// profileError carries the exit code: 3 where only another input helps.
type profileError struct{ error }

func (e profileError) Unwrap() error { return e.error }

func (e profileError) ExitCode() int {
	var refused *profile.RefusedError
	var dataset *profile.DatasetError
	if errors.As(e.error, &refused) || errors.As(e.error, &dataset) || errors.Is(e.error, os.ErrNotExist) || checkpoint.IsInvalid(e.error) {
		return exitInvalidFile
	}
	return 1
}

func runProfile(ctx context.Context, o profileOptions) (profile.Summary, error) {
	if !strings.HasSuffix(o.out, ".safetensors") && !strings.HasSuffix(o.out, ".safetensors.zst") {
		return profile.Summary{}, fmt.Errorf("--out is %q: want a name that ends in .safetensors or .safetensors.zst", o.out)
	}
	adapter, err := registry.For(o.engine)
	if err != nil {
		return profile.Summary{}, err
	}
	report, err := checkpoint.Inspect(o.model)
	if err != nil {
		return profile.Summary{}, err
	}
	config, err := os.ReadFile(filepath.Join(o.model, "config.json"))
	if err != nil {
		return profile.Summary{}, err
	}
	file, err := os.Open(o.dataset)
	if err != nil {
		return profile.Summary{}, fmt.Errorf("data set: %w", err)
	}
	defer file.Close()
	items, err := profile.ReadDataset(file, o.requests, o.seed)
	if err != nil {
		return profile.Summary{}, fmt.Errorf("data set %s: %w", o.dataset, err)
	}
	recorded, summary, err := profile.Run(ctx, profile.Options{
		Endpoint: strings.TrimSuffix(o.endpoint, "/"), Adapter: adapter, Report: report, Config: string(config), Items: items,
		Tokens: o.tokens, RequestTokens: o.requestTokens, NewTokens: o.newTokens, Concurrency: o.concurrency, Wait: o.wait,
		Progress: progressLine(os.Stderr),
	})
	if err != nil {
		return summary, err
	}
	return summary, trace.Create(o.out, recorded)
}

// progressLine tells how far a run is: each quarter of a second on a terminal, every ten seconds elsewhere.
func progressLine(w *os.File) func(profile.Progress) {
	info, err := w.Stat()
	terminal := err == nil && info.Mode()&os.ModeCharDevice != 0
	period, form := 10*time.Second, "%s\n"
	if terminal {
		period, form = 250*time.Millisecond, "\r\033[K%s"
	}
	var last time.Time
	return func(p profile.Progress) {
		finished := p.Done == p.Total
		if time.Since(last) < period && !finished {
			return
		}
		last = time.Now()
		perSecond := float64(p.Tokens) / p.Elapsed.Seconds()
		remaining := time.Duration(float64(p.Elapsed) / float64(p.Done) * float64(p.Total-p.Done)).Round(time.Second)
		fmt.Fprintf(w, form, fmt.Sprintf("%d of %d requests, %d tokens, %.0f tokens/s, %v left", p.Done, p.Total, p.Tokens, perSecond, remaining))
		if terminal && finished {
			fmt.Fprintln(w)
		}
	}
}
