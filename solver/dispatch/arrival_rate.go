// SPDX-License-Identifier: Apache-2.0

package dispatch

import "time"

// MaxWait is the maximum time that any request may wait for a rank.
const MaxWait = time.Second

// ArrivalRate estimates the arrival rate and decides whether waiting for a rank can pay: it pays if, within the maximum
// wait, at least as many requests arrive as the wait queue holds. At lower rates, the state of the ranks does not change
// during the wait. ArrivalRate is not safe for concurrent use.
type ArrivalRate struct {
	hold time.Duration
	size int
	// gap is the moving average of the time between two requests.
	gap time.Duration
}

// NewArrivalRate returns an estimate before the first request, for a wait queue of the given size, at least 1, and the
// maximum wait hold.
func NewArrivalRate(size int, hold time.Duration) ArrivalRate {
	return ArrivalRate{hold: hold, size: size, gap: hold}
}

// Arrive records an arrival and the time since the previous one, and reports whether the request may wait. A gap counts
// as hold at most, so that a few tens of requests suffice to detect the end of an idle period.
func (p *ArrivalRate) Arrive(after time.Duration) bool {
	p.gap += (min(after, p.hold) - p.gap) / time.Duration(p.size)
	return p.gap*time.Duration(p.size) <= p.hold
}
