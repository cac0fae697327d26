// SPDX-License-Identifier: Apache-2.0

package load

import (
	"testing"
	"time"
)

func TestFactor(t *testing.T) {
	for name, test := range map[string]struct {
		line  string
		cores int
		want  float64
	}{
		"idle":                 {"0.00 0.01 0.05 1/80 11206", 2, 1},
		"one task per core":    {"2.00 1.00 0.50 2/80 11206", 2, 1},
		"high one-minute mean": {"15.00 3.00 1.00 1/80 11206", 2, 7.5},
		"high current number":  {"0.10 0.10 0.10 9/80 11206", 2, 4.5},
		"bounded":              {"900.00 3.00 1.00 1/80 11206", 2, maxFactor},
		"many cores":           {"15.00 3.00 1.00 1/80 11206", 64, 1},
		"an empty file":        {"", 2, 1},
		"non-numeric fields":   {"a b c d/e f", 2, 1},
		"zero cores":           {"15.00 3.00 1.00 1/80 11206", 0, 1},
	} {
		if got := factor(test.line, test.cores); got != test.want {
			t.Errorf("%s: factor(%q, %d) = %v, want %v", name, test.line, test.cores, got, test.want)
		}
	}
}

func TestClock(t *testing.T) {
	var clock Clock
	begin := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, step := range []struct {
		at     time.Duration
		factor float64
		want   time.Duration
	}{
		{0, 5, 0},
		{10 * time.Second, 1, 10 * time.Second},
		{30 * time.Second, 4, 15 * time.Second},
		{30 * time.Second, 4, 15 * time.Second},
		{31 * time.Second, 1, 16 * time.Second},
	} {
		if got := clock.advance(begin.Add(step.at), step.factor); got != step.want {
			t.Errorf("at %v under a factor of %v: %v, want %v", step.at, step.factor, got, step.want)
		}
	}
}
