// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"errors"
	"fmt"
	"testing"
)

func TestChoose(t *testing.T) {
	for value, want := range map[string]int{"": 1, "commit": 1, "nightly": 2, "soak": 3} {
		t.Setenv(Variable, value)
		if got := Choose(1, 2, 3); got != want {
			t.Errorf("%s=%q: Choose = %d, want %d", Variable, value, got, want)
		}
		if got := IsNightly(); got != (want > 1) {
			t.Errorf("%s=%q: IsNightly = %t", Variable, value, got)
		}
	}
}

// TestExitCode checks that a missing program skips tests only on a developer's machine, and that another error never
// does.
func TestExitCode(t *testing.T) {
	missing := fmt.Errorf("failed to start: %w", &NotBuiltError{Path: "bin/program", Command: "make program"})
	for _, tc := range []struct {
		tier, ci string
		err      error
		want     int
	}{
		{"", "", nil, 0}, {"", "", missing, 0}, {"commit", "", missing, 1}, {"nightly", "", missing, 1}, {"", "true", missing, 1}, {"", "", errors.New("other"), 1},
	} {
		t.Setenv(Variable, tc.tier)
		t.Setenv("CI", tc.ci)
		if got := ExitCode(tc.err); got != tc.want {
			t.Errorf("%s=%q CI=%q: ExitCode(%v) = %d, want %d", Variable, tc.tier, tc.ci, tc.err, got, tc.want)
		}
	}
}
