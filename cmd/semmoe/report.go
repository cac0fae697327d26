// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/files/atomicfile"
	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/report"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/trace"
)

// reportFlags are the flags of semmoe report.
type reportFlags struct {
	plan, out, trace, current, hardware, calibration, requests, name string
	batchTokens                                                      int
}

func newReportCommand() *cobra.Command {
	var flags reportFlags
	cmd := &cobra.Command{
		Use:   "report --plan DIR [--trace FILE] --out FILE",
		Short: "Write an HTML report about the effects and the gain of a plan",
		Long: "Write one self-contained HTML page about a plan: local activations per layer, co-activated experts, ranks by kind of request, the load of the\n" +
			"ranks, changes relative to the current placement, and saved time by batch size. Without a trace, the page contains only the changes. Prints a\n" +
			"summary.\n" +
			"Exit codes: 2 the command line is invalid; 3 a file is invalid or does not match the plan; 1 any other error, which a retry may fix.",
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := flags.check(); err != nil {
				return err
			}
			return flags.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.SetFlagErrorFunc(cli.FlagError)
	f := cmd.Flags()
	f.StringVar(&flags.plan, "plan", "", "directory of the plan (required)")
	f.StringVar(&flags.out, "out", "", "HTML file; an existing file is replaced (required)")
	f.StringVar(&flags.trace, "trace", "", "routing trace for the evaluation, .safetensors or .safetensors.zst: the trace of the plan or a newer one of the same model")
	f.StringVar(&flags.current, "current", "", "directory of the plan in service for comparison (default: the default placement with round-robin assignment of tokens or requests)")
	planHardwareFlag(f, &flags.hardware)
	f.StringVar(&flags.calibration, "calibration", "", "JSON file of semmoe calibrate from the serving machines; its exchanges, and grouped products if present, replace those of --hardware")
	f.StringVar(&flags.requests, "requests", "test", "requests to evaluate: test (held out by the plan's split) or all")
	f.IntVar(&flags.batchTokens, "batch-tokens", solver.DefaultEvaluation().BatchTokens, "size of a served batch, in tokens over all ranks")
	f.StringVar(&flags.name, "name", "", "name of the plan on the page (default: the name of its directory)")
	return cmd
}

func (f *reportFlags) check() error {
	switch {
	case f.plan == "":
		return cli.UsageErrorf("--plan is missing: name the directory of a plan")
	case f.out == "":
		return cli.UsageErrorf("--out is missing: name the file for the page")
	case f.requests != "test" && f.requests != "all":
		return cli.UsageErrorf("--requests is %q; allowed is test, all", f.requests)
	case f.batchTokens < 1:
		return cli.UsageErrorf("--batch-tokens is %d; it must be at least 1", f.batchTokens)
	case f.hardware != "" && f.trace == "":
		return cli.UsageErrorf("--hardware does not apply without --trace: times are modelled from the activations of the trace's requests")
	case f.calibration != "" && f.trace == "":
		return cli.UsageErrorf("--calibration does not apply without --trace: times are modelled from the activations of the trace's requests")
	}
	if err := atomicfile.Check(f.out); err != nil {
		return cli.UsageErrorf("--out: %w", err)
	}
	return nil
}

func (f *reportFlags) run(ctx context.Context, stdout, stderr io.Writer) error {
	in, err := f.input(ctx)
	if err != nil {
		return err
	}
	bar := cli.NewProgressBar(stderr)
	in.Progress = bar.Show
	data, err := report.Build(ctx, *in)
	bar.Clear()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return cli.WithCode(err, cli.ExitInvalidFile)
	}
	var page bytes.Buffer
	if err := report.Render(&page, data); err != nil {
		return err
	}
	if err := atomicfile.WriteBytes(f.out, 0o644, page.Bytes()); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	_, err = fmt.Fprintln(stdout, data.Summary())
	return err
}

// input reads the files.
func (f *reportFlags) input(ctx context.Context) (*report.Input, error) {
	in := &report.Input{Name: f.name, BatchTokens: f.batchTokens}
	p, artifact, err := plan.Read(f.plan)
	if err != nil {
		return nil, cli.InputError(fmt.Errorf("--plan: %w", err))
	}
	in.Plan, in.Digest = p, artifact.Digest
	if in.Name == "" {
		if path, err := filepath.Abs(f.plan); err == nil {
			in.Name = filepath.Base(path)
		}
	}
	if f.current != "" {
		current, artifact, err := plan.Read(f.current)
		if err != nil {
			return nil, cli.InputError(fmt.Errorf("--current: %w", err))
		}
		in.Current, in.CurrentDigest = current, artifact.Digest
	}
	if in.Hardware, err = f.profile(p); err != nil {
		return nil, err
	}
	if f.trace == "" {
		return in, nil
	}
	if in.Trace, err = trace.Open(ctx, f.trace); err != nil {
		return nil, cli.InputError(err)
	}
	if in.Requests, err = pickRequests(in.Trace, p, f.requests); err != nil {
		return nil, cli.InputError(err)
	}
	return in, nil
}

// profile returns the hardware profile of modelled times.
func (f *reportFlags) profile(of *solver.Plan) (*hardware.Profile, error) {
	p, err := readPlanHardware(f.hardware, of)
	if err != nil || f.calibration == "" {
		return p, err
	}
	text, err := regularfile.Read(f.calibration, cli.MaxInputBytes)
	if err != nil {
		return nil, cli.InputError(fmt.Errorf("--calibration: %w", err))
	}
	c, err := hardware.ParseCalibration(text)
	if err == nil {
		p, err = p.With(c)
	}
	if err != nil {
		return nil, cli.WithCode(fmt.Errorf("--calibration: %s: %w", f.calibration, err), cli.ExitInvalidFile)
	}
	return p, nil
}
