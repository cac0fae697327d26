// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/cmd/internal/clitest"
)

func TestStats(t *testing.T) {
	path := clitest.SmallTrace(t)
	code, report, message := clitest.RunJSON(t, newStatsCommand(), "--trace", path, "--ep", "4", "--format", "json", "--transfer", "dp")
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, message)
	}
	if layers := report["layers"].([]any); len(layers) != 3 || len(layers[2].(map[string]any)["look_back"].([]any)) != 2 {
		t.Errorf("layers %v", layers)
	}
	if transfer := report["transfer"].(map[string]any); transfer["attention"] != "dp" || len(transfer["lar"].([]any)) != 4 {
		t.Errorf("transfer %v", transfer)
	}
	cmd := newStatsCommand()
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(&bytes.Buffer{})
	cmd.SetArgs([]string{"--trace", path, "--ep", "4", "--transfer", "none"})
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	columns := 0
	for _, line := range strings.Split(out.String(), "\n") {
		if strings.HasPrefix(line, "|") {
			if n := strings.Count(line, "|"); columns != 0 && n != columns {
				t.Errorf("%d columns in %q", n, line)
			} else {
				columns = n
			}
		}
	}
	if columns != 14 || strings.Contains(out.String(), "Transfer") || !strings.Contains(out.String(), "\n| mean | ") {
		t.Errorf("%d columns:\n%s", columns, out.String())
	}
}

func TestStatsRefuses(t *testing.T) {
	path := clitest.SmallTrace(t)
	for want, args := range map[string][]string{
		"--trace is missing":                         nil,
		"--transfer is \"pp\"; allowed is tp, dp":    {"--trace", path, "--transfer", "pp"},
		"--train-percent is 0; allowed is 1 to 99":   {"--trace", path, "--train-percent", "0"},
		"--format is \"csv\"; allowed is markdown":   {"--trace", path, "--format", "csv"},
		"--ep: EP size 3 does not divide the 16 exp": {"--trace", path, "--ep", "3"},
	} {
		if code, _, message := clitest.RunJSON(t, newStatsCommand(), args...); code != cli.ExitUsage || !strings.Contains(message, want) {
			t.Errorf("%v: exit code %d, %q; want %q", args, code, message, want)
		}
	}
}
