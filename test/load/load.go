// Package load measures how busy this machine is, so that the deadlines of tests and of the local cluster can follow.
//
// A deadline in a test distinguishes slow from stuck. On a busy machine everything is slower, and nothing is stuck.
package load

import (
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"
)

// maxFactor bounds Factor: a deadline must still end a run that is stuck.
const maxFactor = 20

// Factor returns how many times longer than on an idle machine a task takes now: the number of runnable tasks per core, at
// least 1 and at most 20. It is the larger of the present number and of the mean over the last minute. It returns 1 where
// /proc/loadavg cannot be read.
func Factor() float64 {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 1
	}
	return factor(string(text), runtime.NumCPU())
}

// factor reads a line of /proc/loadavg: "0.20 0.18 0.12 1/80 11206" has the means over 1, 5 and 15 minutes, and the
// runnable tasks of all tasks.
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

// Clock measures time as an idle machine would: each interval between two calls of Elapsed counts divided by the Factor at its
// end. Its zero value starts at the first call. It is safe for concurrent use.
type Clock struct {
	mu      sync.Mutex
	last    time.Time
	elapsed time.Duration
}

// Elapsed returns the time since the first call. Callers call it often: an interval counts by the load at its end.
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
