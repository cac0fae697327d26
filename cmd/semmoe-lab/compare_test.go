// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/cmd/internal/clitest"
)

func TestCompareReports(t *testing.T) {
	args := []string{
		"--trace", clitest.SmallTrace(t), "--ep", "2,4", "--seeds", "2", "--redundant-slots", "0,1", "--algorithm", "auto,eplb,contiguous", "--forecast", "table",
	}
	code, report, message := clitest.RunJSON(t, newCompareCommand(), append(args, "--format", "json")...)
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, message)
	}
	rows := report["comparisons"].([]any)
	// Two EP sizes and two numbers of slots: TP has 3 methods of auto and contiguous and 2 of eplb; DP has 7 policies
	// of auto and 3 other forecasts, and 3 policies of the others.
	if len(rows) != 2*2*(3+3+2+7+3+3+3) {
		t.Errorf("%d rows", len(rows))
	}
	leads := report["leads"].([]any)
	for _, lead := range leads {
		l := lead.(map[string]any)
		if l["cells"].(float64) < 4 || l["ahead"].(float64) > l["cells"].(float64) || l["least_lead"].(float64) > l["mean_lead"].(float64)+1e-12 || l["least_lead_at"] == "" {
			t.Errorf("%v", l)
		}
	}

	cmd := newCompareCommand()
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(&bytes.Buffer{})
	cmd.SetArgs(args)
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	text := out.String()
	for _, want := range []string{
		"means over 2 splits", "Attention tp\n", "Attention dp\n", "| auto | 1 | table | price | both | ", "| contiguous | 0 | none | equal | neither | ",
		"\nMargin of our method over each baseline", "| dp | placement eplb, 1 extra slots | ", "Memory against locality, attention tp, equal", "Memory against locality, attention dp, price",
		"\n| 1 | 9 | ",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in\n%s", want, text)
		}
	}
	if got := strings.Count(text, "| dp | ") + strings.Count(text, "| tp | "); got != len(leads) {
		t.Errorf("%d lines for %d baselines", got, len(leads))
	}
	for _, line := range strings.Split(text, "\n") {
		if strings.HasPrefix(line, "|") && !strings.HasSuffix(line, "|") {
			t.Errorf("row %q", line)
		}
	}
}

func TestCompareRefuses(t *testing.T) {
	path, npy := clitest.SmallTrace(t), filepath.Join(t.TempDir(), "e.npy")
	header := "{'descr': '<f2', 'fortran_order': False, 'shape': (1, 1), }"
	if err := os.WriteFile(npy, append([]byte("\x93NUMPY\x01\x00\x3b\x00"+header), 0, 0), 0o600); err != nil {
		t.Fatal(err)
	}
	for want, args := range map[string][]string{
		"--trace is missing":                                         nil,
		"--redundant-slots: 9 ":                                      {"--trace", path, "--ep", "2", "--redundant-slots", "9"},
		"--redundant-slots: -1 ":                                     {"--trace", path, "--ep", "2", "--redundant-slots", "-1"},
		"--cells is -1":                                              {"--trace", path, "--cells", "-1"},
		"--seeds is 1001; allowed is 1 to 1000":                      {"--trace", path, "--seeds", "1001"},
		"--ep has 8 twice":                                           {"--trace", path, "--ep", "8,4,8"},
		"--redundant-slots has 0 twice":                              {"--trace", path, "--redundant-slots", "0,0"},
		"--attention has dp twice":                                   {"--trace", path, "--attention", "dp,dp"},
		"--algorithm has auto twice":                                 {"--trace", path, "--algorithm", "auto,eplb,auto"},
		"--forecast has table twice":                                 {"--trace", path, "--forecast", "table,table"},
		"--baseline-forecast has prefill":                            {"--trace", path, "--baseline-forecast", "prefill,prefill"},
		"--format is \"xml\"":                                        {"--trace", path, "--format", "xml"},
		"--ep: EP size 3":                                            {"--trace", path, "--ep", "3"},
		"--forecast lookahead-raw: the trace has no look-ahead":      {"--trace", path, "--ep", "2", "--forecast", "lookahead-raw"},
		"--baseline-forecast lookahead: the trace has no look-ahead": {"--trace", path, "--ep", "2", "--baseline-forecast", "table,lookahead"},
		"the trace's vocabulary is 20":                               {"--trace", path, "--ep", "2", "--embeddings", npy},
		"is not a .npy file":                                         {"--trace", path, "--ep", "2", "--embeddings", path},
		"no such file":                                               {"--trace", path, "--ep", "2", "--embeddings", path + "x"},
	} {
		code, _, message := clitest.RunJSON(t, newCompareCommand(), args...)
		exit := cli.ExitUsage
		if strings.HasPrefix(want, "the trace") || strings.HasPrefix(want, "is not") || strings.HasPrefix(want, "no such") {
			exit = cli.ExitInvalidFile
		}
		if code != exit || !strings.Contains(message, want) {
			t.Errorf("%v: exit code %d, %q; want %q", args, code, message, want)
		}
	}
	// Forecasts without a compared algorithm are ignored.
	for _, idle := range [][]string{{"--attention", "dp", "--algorithm", "auto"}, {"--attention", "tp", "--algorithm", "eplb"}} {
		args := append(idle, "--trace", path, "--ep", "2", "--seeds", "1", "--forecast", "lookahead-raw", "--format", "json")
		if code, _, message := clitest.RunJSON(t, newCompareCommand(), args...); code != 0 {
			t.Errorf("%v: exit code %d, %q", args, code, message)
		}
	}
}
