package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/reshuffle"
)

// runReshuffleCommand returns the exit code, standard output and the error's message.
func runReshuffleCommand(t *testing.T, args ...string) (code int, out, message string) {
	t.Helper()
	cmd := newReshuffleCommand()
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	var stdout bytes.Buffer
	cmd.SetOut(&stdout)
	cmd.SetArgs(args)
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		code, message = exitCode(err), err.Error()
	}
	return code, stdout.String(), message
}

func TestReshuffleCommand(t *testing.T) {
	dir := t.TempDir()
	permutation, out := filepath.Join(dir, "gate-permutation.json"), filepath.Join(dir, "out")
	newToOld := make([]int, 32)
	for i := range newToOld {
		newToOld[i] = 31 - i
	}
	text, err := json.Marshal(reshuffle.Permutation{Layers: []reshuffle.LayerPermutation{{Layer: 2, NewToOld: newToOld}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(permutation, text, 0o600); err != nil {
		t.Fatal(err)
	}
	arguments := []string{"--model", tinyModel, "--permutation", permutation, "--out", out}
	for _, reused := range []bool{false, true} {
		code, stdout, message := runReshuffleCommand(t, append(arguments, "--verify")...)
		var result reshuffle.Result
		if err := json.Unmarshal([]byte(stdout), &result); err != nil || code != 0 {
			t.Fatalf("exit code %d, %s; output %q: %v", code, message, stdout, err)
		}
		if result.Reused != reused || !result.Verified || result.Layers != 1 || result.Shards != 3 {
			t.Errorf("result %+v", result)
		}
	}
	for name, test := range map[string]struct {
		args []string
		code int
		want string
	}{
		"no model":       {arguments[2:], exitUsage, "--model is missing"},
		"no permutation": {[]string{"--model", tinyModel, "--out", out}, exitUsage, "--permutation is missing"},
		"no output":      {arguments[:4], exitUsage, "--out is missing"},
		"argument":       {append(arguments, "x"), exitUsage, "unknown command"},
		"unknown flag":   {append(arguments, "--x"), exitUsage, "unknown flag"},
		"none parallel":  {append(arguments, "--parallel", "0"), exitUsage, "--parallel is 0"},
		"model missing":  {append(arguments, "--model", "/nonexistent"), exitInvalidFile, "/nonexistent does not exist"},
		"no such file":   {append(arguments, "--permutation", "/nonexistent"), exitInvalidFile, "permutation file"},
		"not one":        {append(arguments, "--permutation", tinyModel+"/config.json"), exitInvalidFile, "not a gate permutation"},
		"output taken":   {append(arguments, "--out", dir), exitInvalidFile, "was not made by reshuffle"},
	} {
		t.Run(name, func(t *testing.T) {
			code, stdout, message := runReshuffleCommand(t, test.args...)
			if code != test.code || stdout != "" || !strings.Contains(message, test.want) {
				t.Errorf("exit code %d, output %q, message %q; want %d, %q", code, stdout, message, test.code, test.want)
			}
		})
	}
}
