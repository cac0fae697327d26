// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/cmd/internal/clitest"
	"github.com/semmoe/operator/solver/cost/hardware"
)

func TestFitWritesAProfile(t *testing.T) {
	out := filepath.Join(t.TempDir(), "profile.json")
	code, printed, message := clitest.Run(t, newFitCommand(), "--measurements", clitest.MeasuredTimes, "--name", "mine", "--memory-gib", "80", "--out", out)
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, message)
	}
	for _, want := range []string{"grouped GEMM", "dense GEMM", "attention", "all-to-all", "all-reduce", "reduce-scatter", "all-gather", "HELD-OUT", "38 of 51 all-to-alls of more than 1 MiB are modelled within 15%"} {
		if !strings.Contains(printed, want) {
			t.Errorf("the output does not contain %q:\n%s", want, printed)
		}
	}
	text, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	p, err := hardware.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	if p.Name != "mine" || p.MemoryBytes != 80<<30 || p.GPU != "NVIDIA H200" || p.Ranks != 4 {
		t.Errorf("the profile is of %q, %q, %v bytes, %d ranks", p.Name, p.GPU, p.MemoryBytes, p.Ranks)
	}
}

func TestFitRefuses(t *testing.T) {
	dir := t.TempDir()
	out := filepath.Join(dir, "profile.json")
	few := filepath.Join(dir, "few.json")
	if err := os.WriteFile(few, []byte(`{"all_to_all": [{"us": 1}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args []string
		code int
		want string
	}{
		"no measurements": {[]string{"--name", "x", "--memory-gib", "1", "--out", out}, cli.ExitUsage, "--measurements is missing"},
		"no name":         {[]string{"--measurements", few, "--memory-gib", "1", "--out", out}, cli.ExitUsage, "--name is missing"},
		"a long name":     {[]string{"--measurements", few, "--name", strings.Repeat("x", 64), "--out", out}, cli.ExitUsage, "with 64 characters; the maximum is 63"},
		"memory below 0":  {[]string{"--measurements", few, "--name", "x", "--memory-gib", "-1", "--out", out}, cli.ExitUsage, "--memory-gib is -1"},
		"any memory":      {[]string{"--measurements", clitest.MeasuredTimes, "--name", "x", "--memory-gib", "Inf", "--out", out}, cli.ExitUsage, "--memory-gib is +Inf"},
		"no memory":       {[]string{"--measurements", clitest.MeasuredTimes, "--name", "x", "--out", out}, cli.ExitUsage, "does not contain the memory of a GPU"},
		"no folder":       {[]string{"--measurements", few, "--name", "x", "--out", filepath.Join(few, "out")}, cli.ExitUsage, "--out"},
		"no out":          {[]string{"--measurements", few, "--name", "x", "--memory-gib", "1"}, cli.ExitUsage, "--out is missing"},
		"too few":         {[]string{"--measurements", few, "--name", "x", "--memory-gib", "1", "--out", out}, cli.ExitInvalidFile, "at least 6 are needed"},
		"no file":         {[]string{"--measurements", few + ".", "--name", "x", "--memory-gib", "1", "--out", out}, cli.ExitInvalidFile, "--measurements"},
	} {
		if code, _, message := clitest.Run(t, newFitCommand(), c.args...); code != c.code || !strings.Contains(message, c.want) {
			t.Errorf("%s: exit code %d, %q; want %d and %q", name, code, message, c.code, c.want)
		}
	}
	if _, err := os.Stat(out); !os.IsNotExist(err) {
		t.Errorf("a profile was written: %v", err)
	}
}
