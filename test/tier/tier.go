// SPDX-License-Identifier: Apache-2.0

// Package tier selects how much the tests of a run cover. The environment variable SEMMOE_TESTS names the tier:
//
//	(unset)  the tests of every commit; a test whose programs are not built is skipped
//	commit   the tests of every commit; a missing program is an error (make test)
//	nightly  all tests in all variants; a missing program is an error (make e2e)
//	soak     all tests, with many more random cases (test/soak.sh)
//
// With CI=true a missing program is an error in every tier.
package tier

import (
	"errors"
	"fmt"
	"os"
	"testing"
)

// Variable is the name of the environment variable.
const Variable = "SEMMOE_TESTS"

// The values of the environment variable.
const (
	commit  = "commit"
	nightly = "nightly"
	soak    = "soak"
)

// current returns the tier of this run: commit, nightly or soak. An unknown value ends the process, because the run
// would cover less than its caller expects.
func current() string {
	switch value := os.Getenv(Variable); value {
	case "", commit:
		return commit
	case nightly, soak:
		return value
	default:
		fmt.Fprintf(os.Stderr, "%s=%s is invalid: want %s, %s or %s\n", Variable, value, commit, nightly, soak)
		os.Exit(2)
		return ""
	}
}

// IsNightly reports whether this run covers all variants.
func IsNightly() bool { return current() != commit }

// Nightly skips a test in the commit tier.
func Nightly(t testing.TB) {
	t.Helper()
	if !IsNightly() {
		t.Skipf("runs only with %s=%s", Variable, nightly)
	}
}

// Choose returns the value for the tier of this run.
func Choose[T any](inCommit, inNightly, inSoak T) T {
	switch current() {
	case nightly:
		return inNightly
	case soak:
		return inSoak
	default:
		return inCommit
	}
}

// NotBuiltError reports a program that tests need and that is not built.
type NotBuiltError struct {
	// Path is the path of the program.
	Path string
	// Command builds the program.
	Command string
}

func (e *NotBuiltError) Error() string {
	return fmt.Sprintf("%s does not exist: run `%s` to build it", e.Path, e.Command)
}

// Require ends a test if err is not nil: a missing program skips the test, unless this run must have all programs.
func Require(t testing.TB, err error) {
	t.Helper()
	switch {
	case err == nil:
	case skips(err):
		t.Skip(err)
	default:
		t.Fatal(err)
	}
}

// ExitCode prints an error and returns the exit code of a test process that ends because of it. A missing program
// skips all tests of the process, unless this run must have all programs.
func ExitCode(err error) int {
	switch {
	case err == nil:
		return 0
	case skips(err):
		fmt.Fprintln(os.Stderr, "SKIPPED:", err)
		return 0
	default:
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
}

// skips reports whether an error skips tests.
func skips(err error) bool {
	var missing *NotBuiltError
	return errors.As(err, &missing) && os.Getenv(Variable) == "" && os.Getenv("CI") != "true"
}
