// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"math/rand/v2"
	"time"
)

// Schedule configures the injected faults. The zero value injects none and only counts requests.
type Schedule struct {
	// Seed is the random seed that selects the requests with faults.
	Seed uint64
	// CrashAfter is the number of the write at which the manager crashes, counted from 1; 0: never.
	CrashAfter int
	// Conflicts is the share of writes, in percent, that get 409 Conflict and are not executed.
	Conflicts int
	// Throttled is the share of requests, in percent, that get 429 with a Retry-After of one second.
	Throttled int
	// Failed is the share of requests, in percent, that get 500 or 503.
	Failed int
	// TimedOut is the share of requests, in percent, that get no answer and are not executed.
	TimedOut int
	// Lost is the share of writes, in percent, that are executed but get no answer.
	Lost int
	// Lag is the number of the manager's own writes by which its watches lag behind; 0: no lag.
	Lag int
	// LagTime is the maximum delay of an event while the manager does not write. Without a bound, the cache of an idle
	// manager would never catch up. Zero means DefaultLagTime.
	LagTime time.Duration
	// ListVersion is the resource version of the first list of each kind, as from an API server that lags behind;
	// empty: the latest. It must be younger than the compaction interval (five minutes).
	ListVersion string
	// ClockBehind is the offset by which the manager's clock is slow. The clock alternates between slow and correct
	// every jumpPeriod.
	ClockBehind time.Duration
}

// DefaultLagTime is the default maximum delay of an event.
const DefaultLagTime = time.Second

// jumpPeriod is the time between two jumps of the clock.
const jumpPeriod = 4 * time.Second

// clock returns the time of the manager's clock. passed is the time since the start of the manager. The clock starts
// slow.
func (s Schedule) clock(now time.Time, passed time.Duration) time.Time {
	if passed/jumpPeriod%2 == 0 {
		return now.Add(-s.ClockBehind)
	}
	return now
}

func (s Schedule) lagTime() time.Duration {
	if s.LagTime == 0 {
		return DefaultLagTime
	}
	return s.LagTime
}

// fault is a fault of a request.
type fault string

const (
	none      fault = ""
	conflict  fault = "conflict"
	throttled fault = "throttled"
	failed    fault = "failed"
	timedOut  fault = "timed out"
	lost      fault = "answer lost"
)

// choose returns the fault of the n-th request. It depends only on the seed, n, and whether the request is a write.
func (s Schedule) choose(n uint64, write bool) fault {
	at := rand.New(rand.NewPCG(s.Seed, n)).IntN(100)
	for _, candidate := range []struct {
		fault   fault
		percent int
		reads   bool
	}{
		{throttled, s.Throttled, true}, {failed, s.Failed, true}, {timedOut, s.TimedOut, true}, {conflict, s.Conflicts, false}, {lost, s.Lost, false},
	} {
		if !write && !candidate.reads {
			continue
		}
		if at < candidate.percent {
			return candidate.fault
		}
		at -= candidate.percent
	}
	return none
}
