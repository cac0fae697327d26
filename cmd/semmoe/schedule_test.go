package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/plan"
)

// A solved plan and a re-planned plan have a schedule for the hardware profile of the flag, and contain the profile; a
// report shows the schedule.
func TestPlansHaveSchedules(t *testing.T) {
	machines := filepath.Join(t.TempDir(), "mine.json")
	if code, _, message := runCommand(t, newFitCommand(), "--measurements", measuredTimes, "--name", "mine", "--memory-gib", "80", "--out", machines); code != 0 {
		t.Fatalf("exit code %d: %s", code, message)
	}
	dir, report := solved(t, "dp", "--algorithm", "round-robin")
	solvedPlan, _, err := plan.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	s := solvedPlan.Schedule
	if s == nil || s.Hardware != "h200-nvlink" || s.Ranks != 4 || s.LAR != report["lar"] || len(s.Disaggregated) == 0 || len(s.Shared) == 0 {
		t.Fatalf("the schedule is %+v", s)
	}
	again := filepath.Join(t.TempDir(), "again")
	code, choice, message := runJSON(t, newReplanCommand(), "--trace", sampleTrace, "--current", dir, "--out", again, "--hardware", machines, "--minimum-gain-percent", "0", "--target-lar", ".01",
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
		code, score, message := runJSON(t, newEvalCommand(), append([]string{"--trace", sampleTrace, "--plan", again, "--orders", "1"}, args...)...)
		if code != 0 || score["hardware"] != want {
			t.Errorf("eval %v: exit code %d, %q, by %v", args, code, message, score["hardware"])
		}
	}
	if code, choice, message := runJSON(t, newReplanCommand(), "--trace", sampleTrace, "--current", again, "--out", filepath.Join(t.TempDir(), "next")); code != 0 || choice["hardware"] != "mine" {
		t.Errorf("replan: exit code %d, %q, by %v", code, message, choice["hardware"])
	}
	page := filepath.Join(t.TempDir(), "page.html")
	if code, _, message := runCommand(t, newReportCommand(), "--plan", again, "--out", page); code != 0 {
		t.Fatalf("exit code %d: %s", code, message)
	}
	if text, err := os.ReadFile(page); err != nil || !strings.Contains(string(text), "<code>mine</code>") || !strings.Contains(string(text), "image/svg") {
		t.Errorf("the page does not show the schedule, error %v", err)
	}
	for _, args := range [][]string{
		{"--trace", sampleTrace, "--ep", "4", "--attention", "dp", "--out", again}, {"--trace", sampleTrace, "--current", dir, "--out", again},
	} {
		command := newSolveCommand()
		if len(args) == 6 {
			command = newReplanCommand()
		}
		if code, _, message := runJSON(t, command, append(args, "--hardware", "abacus")...); code != exitUsage || !strings.Contains(message, "there are h200-nvlink") {
			t.Errorf("%v: exit code %d, %q", args, code, message)
		}
	}
}
