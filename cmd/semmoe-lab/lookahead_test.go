// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/cmd/internal/clitest"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// smallSample writes a part of the sample trace that the reference engine computes in one to two seconds.
func smallSample(t *testing.T) string {
	t.Helper()
	whole, err := trace.Open(t.Context(), clitest.SampleTrace)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "small.safetensors.zst")
	if err := trace.Create(path, whole.Subset([]int{2, 11, 20, 29, 38, 47, 56, 65})); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestLookAhead records, solves and evaluates. The gates' predictions before attention must yield more locality than a
// table of so few tokens. The correction has too little data to gain, and must not lose.
func TestLookAhead(t *testing.T) {
	path, out := smallSample(t), filepath.Join(t.TempDir(), "ahead.safetensors.zst")
	code, report, message := clitest.RunJSON(t, newLookAheadCommand(), "--model-path", clitest.TinyModel, "--trace", path, "--out", out)
	if code != 0 || report["experts"] != 16.0 || report["agreement"].(float64) < 0.98 || report["overlap"].(float64) < 0.7 {
		t.Fatalf("exit code %d: %s %v", code, message, report)
	}
	ahead, err := trace.Open(t.Context(), out)
	if err != nil {
		t.Fatal(err)
	}
	solved, err := solver.Solve(t.Context(), ahead, solver.Options{
		Ranks: 4, Attention: placement.TensorParallel, Algorithm: placement.Coactivation, Forecast: solver.LookAhead, TrainPercent: 60, Seed: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	lar := func(by solver.Forecast) float64 {
		p, o := *solved.Plan, solver.DefaultEvaluation()
		p.Forecast, o.Requests, o.Seed = by, solved.HeldOut, 1
		report, err := solver.Evaluate(t.Context(), ahead, &p, o)
		if err != nil {
			t.Fatal(err)
		}
		return report.LAR
	}
	corrected, raw, table := lar(solver.LookAhead), lar(solver.RawLookAhead), lar(solver.Table)
	if corrected < raw-0.01 || raw < table+0.03 {
		t.Errorf("local activation rate: token table %.3f, look-ahead %.3f, corrected %.3f", table, raw, corrected)
	}
}

func TestLookAheadRefuses(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out.safetensors")
	with := func(flags ...string) []string {
		return append([]string{"--model-path", clitest.TinyModel, "--trace", clitest.SampleTrace, "--out", out}, flags...)
	}
	for name, test := range map[string]struct {
		args []string
		code int
		want string
	}{
		"no trace":     {[]string{"--model-path", clitest.TinyModel, "--out", out}, cli.ExitUsage, "--trace is missing"},
		"no model":     {with("--model-path", t.TempDir()), cli.ExitInvalidFile, "--model-path"},
		"other model":  {with("--trace", clitest.SmallTrace(t)), cli.ExitInvalidFile, "the trace is not of this model"},
		"no file":      {with("--trace", "none"), cli.ExitInvalidFile, "no such file"},
		"experts":      {with("--experts", "33"), cli.ExitInvalidFile, "allowed is 1 to 32"},
		"negative":     {with("--experts", "-1"), cli.ExitUsage, "must be at least 0"},
		"threads":      {with("--threads", "0"), cli.ExitUsage, "--threads is 0"},
		"no folder":    {with("--out", "/nonexistent/t.safetensors"), cli.ExitUsage, "--out: failed to create /nonexistent/t.safetensors"},
		"positional":   {with("more"), cli.ExitUsage, "more"},
		"unknown flag": {with("--fast"), cli.ExitUsage, "unknown flag"},
	} {
		code, _, message := clitest.RunJSON(t, newLookAheadCommand(), test.args...)
		if code != test.code || !strings.Contains(message, test.want) {
			t.Errorf("%s: exit code %d, %q; want %d and %q", name, code, message, test.code, test.want)
		}
	}
	if _, err := os.Stat(out); err == nil {
		t.Error("a run with an error has left a file")
	}
}
