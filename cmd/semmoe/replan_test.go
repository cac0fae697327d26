// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/cmd/internal/clitest"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// replanned returns a plan for one half of the kinds of text, and traces of both halves.
func replanned(t *testing.T) (dir, old, recent string) {
	t.Helper()
	shape := tracetest.Small
	shape.Groups, shape.Experts, shape.DocumentsPerDomain, shape.Noise = 4, 32, 20, 10
	all := tracetest.Generate(shape, 1)
	half := func(first bool) *trace.Trace {
		var requests []int
		for r, domain := range all.Domains {
			if domain < 2 == first {
				requests = append(requests, r)
			}
		}
		return all.Subset(requests)
	}
	old, recent = clitest.Created(t, half(true)), clitest.Created(t, half(false))
	dir, _ = solved(t, "dp", "--trace", old)
	return dir, old, recent
}

func TestReplanPrintsScoresAndWritesTheDecision(t *testing.T) {
	current, old, recent := replanned(t)
	_, before, err := plan.Read(current)
	if err != nil {
		t.Fatal(err)
	}
	slow := slowProfile(t)
	for _, test := range []struct {
		flags  []string
		tier   string
		layout string
	}{
		{[]string{"--prior", old, "--batch-tokens", "131072"}, "layout", ""},
		{[]string{"--batch-tokens", "65536,131072", "--target-lar", ".01", "--minimum-gain-percent", "0"}, "tables", before.Digest},
		{[]string{"--batch-tokens", "16", "--hardware", slow}, "none", ""},
	} {
		out := filepath.Join(t.TempDir(), "plan")
		code, got, message := clitest.RunJSON(t, newReplanCommand(), append(test.flags, "--trace", recent, "--current", current, "--out", out, "--train-percent", "60")...)
		if code != 0 {
			t.Fatalf("%v: exit code %d: %s", test.flags, code, message)
		}
		if want := strings.Contains(strings.Join(test.flags, " "), slow); (got["hardware"] == "slow") != want || got["hardware"] == "" {
			t.Errorf("%v: times are modelled by %v", test.flags, got["hardware"])
		}
		if got["tier"] != test.tier || got["reason"] == "" {
			t.Fatalf("%v: tier %v, want %s: %v", test.flags, got["tier"], test.tier, got["reason"])
		}
		for _, candidate := range []string{"current", "tables", "layout"} {
			scores, _ := got[candidate].(map[string]any)
			for _, field := range []string{"plan_digest", "lar", "exchange_us", "compute_us", "modelled_us", "token_imbalance", "expert_imbalance", "moves"} {
				if _, ok := scores[field]; !ok {
					t.Errorf("%v: %s has no %s", test.flags, candidate, field)
				}
			}
		}
		if digest := got["current"].(map[string]any)["plan_digest"]; digest != before.Digest {
			t.Errorf("%v: the plan in service is %v; want %s", test.flags, digest, before.Digest)
		}
		if test.tier == "none" {
			if _, err := os.Stat(out); !os.IsNotExist(err) || got["verdict"] != "LocalityDoesNotPay" {
				t.Errorf("%v: a plan was written, %v, or the verdict is %v", test.flags, err, got["verdict"])
			}
			continue
		}
		_, written, err := plan.Read(out)
		if err != nil {
			t.Fatal(err)
		}
		if written.Digest != got["plan_digest"] || written.Manifest.Layout != test.layout || written.Digest != got[test.tier].(map[string]any)["plan_digest"] {
			t.Errorf("%v: plan %s with layout %q was written; printed is %v", test.flags, written.Digest, written.Manifest.Layout, got["plan_digest"])
		}
	}
}

// The written plan has a drift test calibrated on the held-out requests, for each kind of plan.
func TestReplanCalibratesDrift(t *testing.T) {
	current, _, recent := replanned(t)
	for tier, flags := range map[string][]string{"layout": nil, "tables": {"--target-lar", ".01", "--minimum-gain-percent", "0"}} {
		out := filepath.Join(t.TempDir(), "plan")
		code, got, message := clitest.RunJSON(t, newReplanCommand(), append(flags, "--trace", recent, "--current", current, "--out", out, "--batch-tokens", "131072", "--train-percent", "30")...)
		if code != 0 || got["tier"] != tier {
			t.Fatalf("exit code %d, tier %v, want %s: %s", code, got["tier"], tier, message)
		}
		written, _, err := plan.Read(out)
		if err != nil {
			t.Fatal(err)
		}
		if written.Drift == nil || float64(written.Drift.Requests) != got["test_requests"] {
			t.Errorf("tier %s: with %v held-out requests, the drift test is %+v", tier, got["test_requests"], written.Drift)
		}
	}
}

func TestReplanRefusals(t *testing.T) {
	current, old, recent := replanned(t)
	out := filepath.Join(t.TempDir(), "plan")
	for _, test := range []struct {
		flags []string
		code  int
		want  string
	}{
		{[]string{"--current", current, "--out", out}, cli.ExitUsage, "--trace is missing"},
		{[]string{"--trace", recent, "--out", out}, cli.ExitUsage, "--current is missing"},
		{[]string{"--trace", recent, "--current", current}, cli.ExitUsage, "--out is missing"},
		{[]string{"--trace", recent, "--current", current, "--out", out, "--batch-tokens", "0"}, cli.ExitUsage, "batch tokens is 0"},
		{[]string{"--trace", recent, "--current", current, "--out", out, "--prior-percent", "101"}, cli.ExitUsage, "--prior-percent is 101"},
		{[]string{"--trace", recent, "--current", current, "--out", out, "--ranks-per-node", "0"}, cli.ExitUsage, "--ranks-per-node is 0"},
		{[]string{"--trace", recent, "--current", current, "--out", out, "--minimum-gain-percent", "100"}, cli.ExitUsage, "minimum gain percent is 100"},
		{[]string{"--trace", recent, "--current", current, "--out", out, "--hardware", "abacus"}, cli.ExitUsage, "there is no built-in hardware profile \"abacus\""},
		{[]string{"--trace", recent, "--current", out, "--out", filepath.Dir(recent)}, cli.ExitUsage, "--out: " + filepath.Dir(recent) + " is not empty and contains no plan"},
		{[]string{"--trace", recent, "--current", out, "--out", out}, cli.ExitInvalidFile, "manifest.json is missing"},
		{[]string{"--trace", recent, "--current", current, "--out", out, "--prior", clitest.SampleTrace}, cli.ExitInvalidFile, "of different models"},
		{[]string{"--trace", clitest.Created(t, firstRequests(t, old, 8)), "--current", current, "--out", out}, 1, "too few recent requests"},
	} {
		if code, _, message := clitest.RunJSON(t, newReplanCommand(), test.flags...); code != test.code || !strings.Contains(message, test.want) {
			t.Errorf("%v: exit code %d, %q; want %d, %q", test.flags, code, message, test.code, test.want)
		}
	}
}

func firstRequests(t *testing.T, path string, n int) *trace.Trace {
	t.Helper()
	all, err := trace.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	return all.Subset(all.AllRequests()[:n])
}

// semmoe solve and semmoe replan have the same default batch sizes.
func TestDefaultBatchTokens(t *testing.T) {
	t.Parallel()
	solve, replan := newSolveCommand().Flags().Lookup("batch-tokens"), newReplanCommand().Flags().Lookup("batch-tokens")
	if solve.DefValue != replan.DefValue {
		t.Errorf("semmoe solve has %s by default, semmoe replan %s", solve.DefValue, replan.DefValue)
	}
}
