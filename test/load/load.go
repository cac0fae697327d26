// SPDX-License-Identifier: Apache-2.0

// Package load measures how busy this machine is, so that the deadlines of tests and of the local cluster can be
// scaled.
//
// A deadline in a test must distinguish a slow operation from a blocked one. On a busy machine every operation is
// slower.
package load

import (
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// maxFactor is the maximum Factor: a deadline must still end a blocked run.
const maxFactor = 20

// Factor returns the estimated slowdown relative to an idle machine: the number of runnable tasks per core, between 1
// and 20. It uses the larger of the current number and the mean over the last minute. It returns 1 if /proc/loadavg
// cannot be read.
func Factor() float64 {
	if factor := assumed.Load(); factor != nil {
		return *factor
	}
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 1
	}
	return factor(string(text), runtime.NumCPU())
}

// assumed is the factor that Assume sets; nil if there is none.
var assumed atomic.Pointer[float64]

// Assume makes Factor return a fixed value until the test ends, because the load of the machine that tests a deadline
// varies. Tests that call Assume must not run in parallel.
func Assume(t interface{ Cleanup(func()) }, factor float64) {
	t.Cleanup(func() { assumed.Store(nil) })
	assumed.Store(&factor)
}

// factor parses a line of /proc/loadavg, for example "0.20 0.18 0.12 1/80 11206": the load averages over 1, 5 and 15
// minutes, the numbers of runnable and of all tasks, and the last process ID.
func factor(line string, cores int) float64 {
	fields := strings.Fields(line)
	if len(fields) < 4 || cores < 1 {
		return 1
	}
	mean, _ := strconv.ParseFloat(fields[0], 64)
	runnable, _, _ := strings.Cut(fields[3], "/")
	present, _ := strconv.ParseFloat(runnable, 64)
	return min(max(1, max(mean, present)/float64(cores)), maxFactor)
}

// Scale returns d times Factor.
func Scale(d time.Duration) time.Duration { return time.Duration(float64(d) * Factor()) }

// Clock measures time scaled to an idle machine: the interval between two calls of Elapsed is divided by the Factor at
// the end of the interval. The zero value starts at the first call. Clock is safe for concurrent use.
type Clock struct {
	mu      sync.Mutex
	last    time.Time
	elapsed time.Duration
}

// Elapsed returns the scaled time since the first call. Call it often, because it applies the Factor at the end of an
// interval to the whole interval.
func (c *Clock) Elapsed() time.Duration { return c.advance(time.Now(), Factor()) }

func (c *Clock) advance(now time.Time, factor float64) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.last.IsZero() {
		c.elapsed += time.Duration(float64(now.Sub(c.last)) / factor)
	}
	c.last = now
	return c.elapsed
}
