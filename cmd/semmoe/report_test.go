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
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// runReport runs semmoe report and returns its exit code, standard output and error message.
func runReport(t *testing.T, args ...string) (code int, out, message string) {
	t.Helper()
	cmd := newReportCommand()
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	var stdout bytes.Buffer
	cmd.SetOut(&stdout)
	cmd.SetErr(&stdout)
	cmd.SetArgs(args)
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		return cli.ExitCode(err), stdout.String(), err.Error()
	}
	return 0, stdout.String(), ""
}

func TestReportWritesAPage(t *testing.T) {
	of := tracetest.Generate(tracetest.Small, 1)
	of.Model.Config = `{"hidden_size":1024,"moe_intermediate_size":512}`
	recorded := clitest.Created(t, of)
	dir, _ := solved(t, "dp", "--trace", recorded)
	_, artifact, err := plan.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "page.html")
	if err := os.WriteFile(out, []byte("an older page"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		flags []string
		wants []string
	}{
		"a plan alone":        {nil, []string{"This plan places 16 experts", "pass --trace", filepath.Base(dir)}},
		"with a trace":        {[]string{"--trace", recorded, "--name", "my <plan>"}, []string{"of expert activations on the rank of their request", "my &lt;plan&gt;", "that the plan was not solved from"}},
		"all requests":        {[]string{"--trace", recorded, "--requests", "all"}, []string{"48 requests", "that include training requests of the plan"}},
		"other machines":      {[]string{"--trace", recorded, "--hardware", slowProfile(t)}, []string{"with the hardware profile slow:"}},
		"measured machines":   {[]string{"--trace", recorded, "--calibration", clitest.MeasuredTimes}, []string{"with the hardware profile h200-nvlink with measurements of NVIDIA H200:"}},
		"the plan in service": {[]string{"--trace", recorded, "--current", dir}, []string{"Compared with the plan in service, " + artifact.Digest[:16]}},
	} {
		code, printed, message := runReport(t, append([]string{"--plan", dir, "--out", out}, c.flags...)...)
		if code != 0 {
			t.Fatalf("%s: exit code %d: %s", name, code, message)
		}
		page, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range append(c.wants, artifact.Digest) {
			if !strings.Contains(string(page), want) {
				t.Errorf("%s: the page does not contain %q", name, want)
			}
		}
		if !strings.HasPrefix(printed, "This plan ") || strings.Count(printed, "\n") != 1 {
			t.Errorf("%s: output %q; want one line about the plan", name, printed)
		}
		if files, err := os.ReadDir(filepath.Dir(out)); err != nil || len(files) != 1 {
			t.Errorf("%s: %d other files next to the page, error %v", name, len(files)-1, err)
		}
	}
	if info, err := os.Stat(out); err != nil || info.Mode().Perm() != 0o644 {
		t.Errorf("the page has mode %v, error %v", info.Mode(), err)
	}
}

func TestReportRefuses(t *testing.T) {
	recorded := clitest.Created(t, tracetest.Generate(tracetest.Small, 1))
	dir, _ := solved(t, "dp", "--trace", recorded)
	tp, _ := solved(t, "tp", "--trace", recorded)
	shape := tracetest.Small
	shape.Experts = 32
	other := clitest.Created(t, tracetest.Generate(shape, 1))
	file := func(content string) string {
		path := filepath.Join(t.TempDir(), "file.json")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	out := filepath.Join(t.TempDir(), "page.html")
	whole := []string{"--plan", dir, "--out", out}
	for name, c := range map[string]struct {
		args []string
		code int
		want string
	}{
		"no plan":                    {[]string{"--out", out}, cli.ExitUsage, "--plan is missing"},
		"no file":                    {[]string{"--plan", dir}, cli.ExitUsage, "--out is missing"},
		"an argument":                {append(whole, "more"), cli.ExitUsage, "more"},
		"unknown flag":               {append(whole, "--no-such"), cli.ExitUsage, "--no-such"},
		"other requests":             {append(whole, "--requests", "some"), cli.ExitUsage, "--requests is \"some\"; allowed is test, all"},
		"no batch":                   {append(whole, "--batch-tokens", "0"), cli.ExitUsage, "--batch-tokens is 0"},
		"calibration without trace":  {append(whole, "--calibration", file("{}")), cli.ExitUsage, "--calibration does not apply without --trace"},
		"hardware without trace":     {append(whole, "--hardware", "abacus"), cli.ExitUsage, "--hardware does not apply without --trace"},
		"no such hardware":           {append(whole, "--trace", recorded, "--hardware", "abacus"), cli.ExitUsage, "there is no built-in hardware profile"},
		"no such plan":               {[]string{"--plan", filepath.Join(dir, "none"), "--out", out}, cli.ExitInvalidFile, "--plan"},
		"no such plan in service":    {append(whole, "--current", filepath.Join(dir, "none")), cli.ExitInvalidFile, "--current"},
		"plan in service of another": {append(whole, "--current", tp), cli.ExitInvalidFile, "attention tp"},
		"no such trace":              {append(whole, "--trace", filepath.Join(dir, "none")), cli.ExitInvalidFile, "none"},
		"trace of another model":     {append(whole, "--trace", other), cli.ExitInvalidFile, "32"},
		"empty calibration":          {append(whole, "--trace", recorded, "--calibration", file("{}")), cli.ExitInvalidFile, "all_to_all has 0 measurements"},
		"no folder for the page":     {[]string{"--plan", dir, "--out", filepath.Join(dir, "none", "page.html")}, cli.ExitUsage, "--out"},
	} {
		code, printed, message := runReport(t, c.args...)
		if code != c.code || !strings.Contains(message, c.want) || printed != "" {
			t.Errorf("%s: exit code %d, want %d; message %q, want %q; output %q", name, code, c.code, message, c.want, printed)
		}
		if _, err := os.Stat(out); err == nil {
			t.Errorf("%s: a page was written", name)
		}
	}
}
