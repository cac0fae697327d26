package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/trace"
)

const tinyCheckpoint = "../../internal/refengine/testdata/tiny-qwen3moe"

// smallSample writes a part of the sample trace that the reference engine computes in one to two seconds.
func smallSample(t *testing.T) string {
	t.Helper()
	whole, err := trace.Open(t.Context(), sampleTrace)
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
	code, report, message := runJSON(t, newLookAheadCommand(), "--model-path", tinyCheckpoint, "--trace", path, "--out", out)
	if code != 0 || report["experts"] != 16.0 || report["agreement"].(float64) < 0.98 || report["overlap"].(float64) < 0.7 {
		t.Fatalf("exit code %d: %s %v", code, message, report)
	}
	lar := func(dir string, flags ...string) float64 {
		code, report, message := runJSON(t, newEvalCommand(), append([]string{"--trace", out, "--plan", dir}, flags...)...)
		if code != 0 {
			t.Fatalf("exit code %d: %s", code, message)
		}
		return report["lar"].(float64)
	}
	dir, solvedReport := solved(t, "tp", "--trace", out, "--forecast", "lookahead", "--train-percent", "60", "--algorithm", "coactivation")
	corrected, raw, table := lar(dir), lar(dir, "--forecast", "lookahead-raw"), lar(dir, "--forecast", "table")
	if diff := cmp.Diff(solvedReport["lar"], corrected); diff != "" {
		t.Errorf("eval's lar differs from solve's: %s", diff)
	}
	if corrected < raw-0.01 || raw < table+0.03 {
		t.Errorf("local activation rate: token table %.3f, look-ahead %.3f, corrected %.3f", table, raw, corrected)
	}
	code, _, message = runJSON(t, newEvalCommand(), "--trace", path, "--plan", dir)
	if code != exitInvalidFile || !strings.Contains(message, "the trace has no look-ahead") {
		t.Errorf("exit code %d: %s", code, message)
	}
}

func TestLookAheadRefuses(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out.safetensors")
	with := func(flags ...string) []string {
		return append([]string{"--model-path", tinyCheckpoint, "--trace", sampleTrace, "--out", out}, flags...)
	}
	for name, test := range map[string]struct {
		args []string
		code int
		want string
	}{
		"no trace":     {[]string{"--model-path", tinyCheckpoint, "--out", out}, exitUsage, "--trace is missing"},
		"no model":     {with("--model-path", t.TempDir()), exitInvalidFile, "--model-path"},
		"other model":  {with("--trace", groupedTrace(t, 0)), exitInvalidFile, "the trace is not of this model"},
		"no file":      {with("--trace", "none"), exitInvalidFile, "no such file"},
		"experts":      {with("--experts", "33"), exitInvalidFile, "allowed is 1 to 32"},
		"negative":     {with("--experts", "-1"), exitUsage, "must be at least 0"},
		"threads":      {with("--threads", "0"), exitUsage, "--threads is 0"},
		"no folder":    {with("--out", "/nonexistent/t.safetensors"), exitUsage, "--out: failed to create /nonexistent/t.safetensors"},
		"positional":   {with("more"), exitUsage, "more"},
		"unknown flag": {with("--fast"), exitUsage, "unknown flag"},
	} {
		code, _, message := runJSON(t, newLookAheadCommand(), test.args...)
		if code != test.code || !strings.Contains(message, test.want) {
			t.Errorf("%s: exit code %d, %q; want %d and %q", name, code, message, test.code, test.want)
		}
	}
	if _, err := os.Stat(out); err == nil {
		t.Error("a run with an error has left a file")
	}
}
