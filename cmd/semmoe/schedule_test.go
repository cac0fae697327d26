// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/cmd/internal/clitest"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver/cost/hardware"
)

// A solved plan and a re-planned plan have a schedule for the hardware profile of the flag, and contain the profile; a
// report shows the schedule.
func TestPlansHaveSchedules(t *testing.T) {
	machines := clitest.WriteFile(t, "mine.json", measuredProfile(t))
	path := partOfSample(t, 1)
	dir, report := solved(t, "dp", "--trace", path, "--algorithm", "round-robin")
	solvedPlan, _, err := plan.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	s := solvedPlan.Schedule
	if s == nil || s.Hardware != "h200-nvlink" || s.Ranks != 4 || s.LAR != report["lar"] || len(s.Disaggregated) == 0 || len(s.Shared) == 0 {
		t.Fatalf("the schedule is %+v", s)
	}
	again := filepath.Join(t.TempDir(), "again")
	code, choice, message := clitest.RunJSON(t, newReplanCommand(), "--trace", path, "--current", dir, "--out", again, "--hardware", machines, "--minimum-gain-percent", "0", "--target-lar", ".01",
		"--batch-tokens", "65536")
	if code != 0 || choice["plan_digest"] == nil {
		t.Fatalf("exit code %d: %s, %v", code, message, choice)
	}
	made, _, err := plan.Read(again)
	if err != nil {
		t.Fatal(err)
	}
	if made.Schedule == nil || made.Schedule.Hardware != "mine" {
		t.Errorf("the schedule of the new plan is %+v", made.Schedule)
	}
	// The plan contains the profile, which is the default.
	if solvedPlan.Hardware != nil || made.Hardware == nil || made.Hardware.Name != "mine" {
		t.Errorf("the plans are for %+v and %+v", solvedPlan.Hardware, made.Hardware)
	}
	for want, args := range map[string][]string{"mine": nil, "h200-nvlink": {"--hardware", "h200-nvlink"}} {
		code, score, message := clitest.RunJSON(t, newEvalCommand(), append([]string{"--trace", path, "--plan", again, "--orders", "1"}, args...)...)
		if code != 0 || score["hardware"] != want {
			t.Errorf("eval %v: exit code %d, %q, by %v", args, code, message, score["hardware"])
		}
	}
	if code, choice, message := clitest.RunJSON(t, newReplanCommand(), "--trace", path, "--current", again, "--out", filepath.Join(t.TempDir(), "next")); code != 0 || choice["hardware"] != "mine" {
		t.Errorf("replan: exit code %d, %q, by %v", code, message, choice["hardware"])
	}
	page := filepath.Join(t.TempDir(), "page.html")
	if code, _, message := clitest.Run(t, newReportCommand(), "--plan", again, "--out", page); code != 0 {
		t.Fatalf("exit code %d: %s", code, message)
	}
	if text, err := os.ReadFile(page); err != nil || !strings.Contains(string(text), "<code>mine</code>") || !strings.Contains(string(text), "image/svg") {
		t.Errorf("the page does not show the schedule, error %v", err)
	}
	for _, args := range [][]string{
		{"--trace", path, "--ep", "4", "--attention", "dp", "--out", again}, {"--trace", path, "--current", dir, "--out", again},
	} {
		command := newSolveCommand()
		if len(args) == 6 {
			command = newReplanCommand()
		}
		if code, _, message := clitest.RunJSON(t, command, append(args, "--hardware", "abacus")...); code != cli.ExitUsage || !strings.Contains(message, "there are h200-nvlink") {
			t.Errorf("%v: exit code %d, %q", args, code, message)
		}
	}
}

// measuredProfile returns a hardware profile named mine.
func measuredProfile(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(clitest.MeasuredTimes)
	if err != nil {
		t.Fatal(err)
	}
	c, err := hardware.ParseCalibration(text)
	if err != nil {
		t.Fatal(err)
	}
	p, err := hardware.NewProfile("mine", 80<<30, c)
	if err != nil {
		t.Fatal(err)
	}
	if text, err = json.Marshal(p); err != nil {
		t.Fatal(err)
	}
	return string(text)
}
