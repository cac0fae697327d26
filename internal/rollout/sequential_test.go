// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"math"
	"testing"
	"time"
)

// The quantiles equal those of published tables.
func TestStudentQuantile(t *testing.T) {
	for _, tc := range []struct {
		tail float64
		df   int
		want float64
	}{
		{0.05, 1, 6.314}, {0.025, 1, 12.706}, {0.025, 2, 4.303}, {0.025, 3, 3.182}, {0.005, 4, 4.604}, {0.005, 5, 4.032},
		{0.001, 10, 4.144}, {0.0005, 11, 4.437}, {0.0005, 30, 3.646}, {0.025, 120, 1.980}, {0.5, 7, 0},
	} {
		if got := studentQuantile(tc.tail, tc.df); math.Abs(got-tc.want) > 0.001 {
			t.Errorf("tail %v of %d degrees of freedom: %.4f, want %.3f", tc.tail, tc.df, got, tc.want)
		}
	}
}

// Between two looks the same minutes are evaluated, and routers report all of them.
func TestWaitsForNewMinutes(t *testing.T) {
	since := start.Add(20 * time.Second)
	for name, tc := range map[string]struct {
		after   time.Duration
		from    int // in minutes after start
		minutes int
	}{
		"a clock that was set back":  {-3 * time.Hour, 1, 0},
		"at once":                    {0, 1, 0},
		"almost three whole minutes": {4*time.Minute - 21*time.Second, 1, 0},
		"three whole minutes":        {4*time.Minute - 20*time.Second, 1, 3},
		"seven":                      {8 * time.Minute, 2, 5},
		"eight":                      {9 * time.Minute, 3, 6},
		"58":                         {59 * time.Minute, 12, 35},
		"59":                         {60 * time.Minute, 15, 45},
		"an hour":                    {61 * time.Minute, 15, 45},
		"an hour and three":          {64 * time.Minute, 61, 3},
		"two hours and two":          {123 * time.Minute, 61, 59},
		"a day and 59 minutes":       {25 * time.Hour, 1 + 24*60, 59},
	} {
		from, minutes := lookAt(since, since.Add(tc.after))
		if minutes != tc.minutes || minutes > 0 && !from.Equal(start.Add(time.Duration(tc.from)*time.Minute)) {
			t.Errorf("%s: %d minutes from %v, want %d from minute %d", name, minutes, from, tc.minutes, tc.from)
		}
	}
}
