package faults

import (
	"math/rand/v2"
	"time"
)

// Schedule says what goes wrong. The zero value lets everything through, and counts.
type Schedule struct {
	// Seed chooses which requests are hit.
	Seed uint64
	// CrashAfter is the write with which the manager dies, counted from 1; 0: never.
	CrashAfter int
	// Conflicts is the share of writes, in percent, that get 409 Conflict and are not done.
	Conflicts int
	// Throttled is the share of requests, in percent, that get 429 with a Retry-After of a second.
	Throttled int
	// Failed is the share of requests, in percent, that get 500 or 503.
	Failed int
	// TimedOut is the share of requests, in percent, that get no answer and are not done.
	TimedOut int
	// Lost is the share of writes, in percent, that are done, but get no answer.
	Lost int
	// Lag is by how many of the manager's own writes its view of the cluster lags behind; 0: not at all.
	Lag int
	// LagTime bounds the lag of each event while the manager does not write: a cache that never caught up would be one
	// that is broken, not late. Zero means DefaultLagTime.
	LagTime time.Duration
	// ListVersion is the resource version that each kind is listed at first, as by an API server that lags behind; empty:
	// the newest. It must be young enough not to be compacted (five minutes).
	ListVersion string
	// ClockBehind is by how much the manager's clock is set back; it is set right, and back again, every jumpPeriod.
	ClockBehind time.Duration
}

// DefaultLagTime is how long an event is held back at most.
const DefaultLagTime = time.Second

// jumpPeriod is how long a clock stays as it was set.
const jumpPeriod = 4 * time.Second

// clock is what the manager's clock shows when so much time has passed since it was started. At first it is behind.
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

// fault is what is done to a request.
type fault string

const (
	none      fault = ""
	conflict  fault = "conflict"
	throttled fault = "throttled"
	failed    fault = "failed"
	timedOut  fault = "timed out"
	lost      fault = "answer lost"
)

// choose is what is done to the n-th request. It depends on nothing else but the seed.
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
