// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/cmd/internal/clitest"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// solved writes a plan for a trace, with its drift test if the trace suffices for one, and returns its directory.
func solved(t *testing.T, attention placement.Attention, tr *trace.Trace) string {
	t.Helper()
	s, err := solver.Solve(t.Context(), tr, solver.Options{
		Ranks: 4, Attention: attention, Algorithm: placement.Auto, Objective: placement.Time, Forecast: solver.Table, TrainPercent: 20, Seed: 1,
	})
	if err == nil {
		s.Plan.Drift, err = solver.CalibrateDrift(t.Context(), tr, s.Plan, s.HeldOut, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	artifact, err := plan.Encode(s.Plan)
	dir := filepath.Join(t.TempDir(), "plan")
	if err == nil {
		err = plan.Write(dir, artifact, []byte("{}"))
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestDriftPrintsAlarmsAndDelays(t *testing.T) {
	shape := tracetest.Small
	shape.Experts, shape.Groups, shape.DocumentsPerDomain = 16, 4, 20
	whole := tracetest.Generate(shape, 1)
	path, dir := clitest.Created(t, whole), solved(t, placement.DataParallel, whole.Without([]uint8{3}))
	flags := []string{"--trace", path, "--plan", dir, "--runs", "20", "--steps", "2000"}
	code, got, message := clitest.RunJSON(t, newDriftCommand(), append(flags, "--domains", "domain-3", "--rate", "20", "--drop", "10,50")...)
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, message)
	}
	var report driftReport
	text, err := json.Marshal(got)
	if err == nil {
		err = json.Unmarshal(text, &report)
	}
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Orders) != 2 || report.Orders[0].Sticky != 0 || report.Orders[1].Sticky != 0.9 {
		t.Fatalf("orders are %+v", report.Orders)
	}
	for _, order := range report.Orders {
		if order.Switch == nil || order.Switch.Unfound > 0 || order.Switch.Requests.P95 > 30 {
			t.Errorf("sticky %v: the switch is detected after %+v", order.Sticky, order.Switch)
		}
		// One of twenty requests per second is sampled.
		if len(order.Drops) != 2 || order.Drops[0].Percent != 10 || order.Drops[1].Percent != 50 {
			t.Fatalf("sticky %v: drops are %+v", order.Sticky, order.Drops)
		}
		small, large := order.Drops[0], order.Drops[1]
		if large.Requests.Median <= 0 || large.Requests.Median > small.Requests.Median || large.Requests.Median != large.Seconds.Median {
			t.Errorf("sticky %v: the drops are detected after %+v", order.Sticky, order.Drops)
		}
	}
	shape.Experts *= 2
	other := clitest.Created(t, tracetest.Generate(shape, 1))
	for _, more := range [][]string{nil, {"--other-documents"}} {
		code, _, message := clitest.RunJSON(t, newDriftCommand(), append([]string{"--trace", other, "--plan", dir}, more...)...)
		if code != cli.ExitInvalidFile || !strings.Contains(message, "experts") {
			t.Errorf("a trace of another model, %v: exit code %d, %q; want %d", more, code, message, cli.ExitInvalidFile)
		}
	}
	if code, got, _ = clitest.RunJSON(t, newDriftCommand(), flags...); code != 0 {
		t.Fatalf("without domains: exit code %d", code)
	}
	if _, has := got["orders"].([]any)[0].(map[string]any)["switch"]; has {
		t.Error("a switch to no domain is reported")
	}
	_, fresh, _ := clitest.RunJSON(t, newDriftCommand(), append(flags, "--other-documents")...)
	all, half := got["usual_requests"].(float64), fresh["usual_requests"].(float64)
	if from := fresh["calibration"].(map[string]any)["requests"].(float64); from < 0.4*all || from > 0.6*all || from+half != all {
		t.Errorf("of %v requests, a test calibrated on %v is evaluated on %v others", all, from, half)
	}
}

func TestDriftRefuses(t *testing.T) {
	few := tracetest.Generate(tracetest.Small, 1)
	path, dir := clitest.Created(t, few), solved(t, placement.DataParallel, few) // too few requests for a drift test
	shape := tracetest.Small
	shape.DocumentsPerDomain = 20
	many := tracetest.Generate(shape, 1)
	enough, tensor := clitest.Created(t, many), solved(t, placement.TensorParallel, many)
	for name, test := range map[string]struct {
		flags []string
		code  int
		want  string
	}{
		"no trace":      {[]string{"--plan", dir}, cli.ExitUsage, "--trace is missing"},
		"no plan":       {[]string{"--trace", path}, cli.ExitUsage, "--plan is missing"},
		"runs":          {[]string{"--trace", path, "--plan", dir, "--runs", "0"}, cli.ExitUsage, "--runs is 0"},
		"many runs":     {[]string{"--trace", path, "--plan", dir, "--runs", "100001"}, cli.ExitUsage, "--runs is 100001; allowed is 1 to 100000"},
		"sticky":        {[]string{"--trace", path, "--plan", dir, "--sticky", "1"}, cli.ExitUsage, "--sticky is 1"},
		"drop":          {[]string{"--trace", path, "--plan", dir, "--drop", "10,101"}, cli.ExitUsage, "--drop is 101"},
		"cap":           {[]string{"--trace", path, "--plan", dir, "--cap", "0.5"}, cli.ExitUsage, "--cap is 0.5"},
		"idle cap":      {[]string{"--trace", enough, "--plan", tensor, "--cap", "1.3"}, cli.ExitUsage, "--cap does not apply to this plan"},
		"no drift test": {[]string{"--trace", path, "--plan", dir}, cli.ExitInvalidFile, "drift.json"},
		"no directory":  {[]string{"--trace", path, "--plan", t.TempDir()}, cli.ExitInvalidFile, "manifest.json is missing"},
	} {
		code, _, message := clitest.RunJSON(t, newDriftCommand(), test.flags...)
		if code != test.code || !strings.Contains(message, test.want) {
			t.Errorf("%s: exit code %d, %q; want %d and %q", name, code, message, test.code, test.want)
		}
	}
}
