// SPDX-License-Identifier: Apache-2.0

// Package python runs the Python programs of tests.
package python

import (
	"encoding/json"
	"os/exec"
	"strings"
	"testing"
)

// Run runs a program that prints nothing of interest.
func Run(t testing.TB, interpreter, program string, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), interpreter, append([]string{"-B", program}, args...)...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", program, err, out)
	}
}

// Lines runs a program that prints a line of JSON for each argument, and returns the lines.
func Lines[T any](t testing.TB, interpreter, program string, args ...string) []T {
	t.Helper()
	command := exec.CommandContext(t.Context(), interpreter, append([]string{"-B", program}, args...)...)
	var failure strings.Builder
	command.Stderr = &failure
	out, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	lines := make([]T, len(args))
	decoder := json.NewDecoder(out)
	for i, arg := range args {
		if err := decoder.Decode(&lines[i]); err != nil {
			_ = command.Wait()
			t.Fatalf("%s ended at %s: %v\n%s", program, arg, err, failure.String())
		}
	}
	if err := command.Wait(); err != nil {
		t.Errorf("%s: %v\n%s", program, err, failure.String())
	}
	return lines
}
