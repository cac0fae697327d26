// SPDX-License-Identifier: Apache-2.0

package breaker

import (
	"fmt"
	"time"
)

// Settings configure circuit breakers. The zero value is invalid; see Default.
type Settings struct {
	// ConsecutiveFailures is the number of consecutive failed requests that open a breaker, at least 1.
	ConsecutiveFailures int
	// FailurePercent is the percentage of unsuccessful requests in a window at which a breaker opens; 0 means never.
	FailurePercent int
	// Ejection is the first ejection time, MaxEjection the longest.
	Ejection, MaxEjection time.Duration
	// HalfOpenRequests is the maximum number of concurrent requests of a half-open breaker; 0 means no limit.
	HalfOpenRequests int
}

// Default returns the default settings. An ejection of one second avoids a failed connection for each request, and a
// false one has little effect. The longest one leaves a failing canary enough requests for its evaluation.
func Default() Settings {
	return Settings{ConsecutiveFailures: 2, Ejection: time.Second, MaxEjection: 8 * time.Second}
}

// The bounds of the settings.
const (
	MaxConsecutiveFailures = 1000
	MaxEjection            = time.Hour
	MaxHalfOpenRequests    = 1000
)

// Validate returns an error for settings that are out of bounds.
func (s *Settings) Validate() error {
	switch {
	case s.ConsecutiveFailures < 1 || s.ConsecutiveFailures > MaxConsecutiveFailures:
		return fmt.Errorf("consecutiveFailures: %d is invalid: it must be 1 to %d", s.ConsecutiveFailures, MaxConsecutiveFailures)
	case s.FailurePercent < 0 || s.FailurePercent > 100:
		return fmt.Errorf("failurePercent: %d is invalid: it must be 0 to 100", s.FailurePercent)
	case s.Ejection <= 0 || s.Ejection > MaxEjection:
		return fmt.Errorf("ejection: %v is invalid: it must be above 0 and at most %v", s.Ejection, MaxEjection)
	case s.MaxEjection < s.Ejection || s.MaxEjection > MaxEjection:
		return fmt.Errorf("maxEjection: %v is invalid: it must be %v to %v", s.MaxEjection, s.Ejection, MaxEjection)
	case s.HalfOpenRequests < 0 || s.HalfOpenRequests > MaxHalfOpenRequests:
		return fmt.Errorf("halfOpenRequests: %d is invalid: it must be 0 to %d", s.HalfOpenRequests, MaxHalfOpenRequests)
	}
	return nil
}

// pause returns the ejection time after a number of earlier ejections in a row.
func (s *Settings) pause(earlier int) time.Duration {
	pause := s.Ejection
	for ; earlier > 0 && pause < s.MaxEjection; earlier-- {
		pause *= 2
	}
	return min(pause, s.MaxEjection)
}

const (
	// rateWindow is the length of the windows of the error rate. rateMinimum is the minimum number of requests in a
	// window: fewer do not show a rate.
	rateWindow  = 10 * time.Second
	rateMinimum = 20
)

// Reason is the cause of an ejection.
type Reason int

// The causes of an ejection. None means that no ejection has begun.
const (
	None Reason = iota
	Unreachable
	Unavailable
	Failures
	ErrorRate
	// ReasonCount is the number of values, with None.
	ReasonCount
)

// Reasons are all causes, without None.
func Reasons() (all []Reason) {
	for r := None + 1; r < ReasonCount; r++ {
		all = append(all, r)
	}
	return all
}

// String returns the name of a reason in metrics.
func (r Reason) String() string {
	return [...]string{"none", "unreachable", "unavailable", "failures", "error_rate"}[r]
}

// State is the state of a breaker.
type State int

// The states of a breaker.
const (
	Closed State = iota
	Open
	HalfOpen
)

// Breaker is the circuit breaker of a backend. The zero value is closed.
type Breaker struct {
	// until is the end of the latest ejection. tripped is true from an ejection until a request is served after it.
	until   time.Time
	tripped bool
	// failures counts consecutive failed and unavailable requests. highRates counts consecutive windows with a high error
	// rate.
	failures, highRates int
	// trials counts the requests that were sent in the state HalfOpen and have not ended.
	trials int
	// began is the start of the current window. requests and failed are its numbers of requests.
	began            time.Time
	requests, failed int
}

// State returns the state at a time.
func (b *Breaker) State(now time.Time) State {
	switch {
	case now.Before(b.until):
		return Open
	case b.tripped:
		return HalfOpen
	}
	return Closed
}

// Until returns the end of the latest ejection.
func (b *Breaker) Until() time.Time { return b.until }

// Admits reports whether a request may be sent.
func (b *Breaker) Admits(now time.Time, halfOpenRequests int) bool {
	return !now.Before(b.until) && (halfOpenRequests == 0 || !b.tripped || b.trials < halfOpenRequests)
}

// Begin counts a request and reports whether it is a trial, which End must end.
func (b *Breaker) Begin(now time.Time) (trial bool) {
	if trial = b.State(now) == HalfOpen; trial {
		b.trials++
	}
	return trial
}

// End ends a trial.
func (b *Breaker) End() { b.trials-- }

// Served records a request that was sent at a time and served.
func (b *Breaker) Served(s *Settings, sent, now time.Time) {
	b.failures = 0
	if !sent.Before(b.until) {
		b.tripped = false
	}
	b.count(s, now, false)
}

// Unreachable records a request without a response.
func (b *Breaker) Unreachable(s *Settings, now time.Time) Reason {
	return max(b.eject(s.Ejection, Unreachable, now), b.count(s, now, true))
}

// Unavailable records a request that was answered 503.
func (b *Breaker) Unavailable(s *Settings, sent, now time.Time) Reason {
	if sent.Before(b.until) {
		return None
	}
	b.failures++
	return max(b.eject(s.pause(b.failures-1), Unavailable, now), b.count(s, now, true))
}

// Failed records a request that was answered with another 5xx status.
func (b *Breaker) Failed(s *Settings, sent, now time.Time) (reason Reason) {
	if sent.Before(b.until) {
		return None
	}
	b.failures++
	if more := b.failures - s.ConsecutiveFailures; more >= 0 {
		reason = b.eject(s.pause(more), Failures, now)
	}
	return max(reason, b.count(s, now, true))
}

// eject opens the breaker. It returns the reason if the breaker was not open, and None otherwise: at most one reason of
// an outcome is not None.
func (b *Breaker) eject(pause time.Duration, reason Reason, now time.Time) Reason {
	begins := !now.Before(b.until)
	if until := now.Add(pause); until.After(b.until) {
		b.until = until
	}
	b.tripped = true
	if begins {
		return reason
	}
	return None
}

// count adds a request to the window, and opens the breaker if the error rate is too high.
func (b *Breaker) count(s *Settings, now time.Time, failed bool) Reason {
	if s.FailurePercent == 0 {
		return None
	}
	if now.Sub(b.began) >= rateWindow {
		if b.requests >= rateMinimum { // a high rate would have ended the window
			b.highRates = 0
		}
		b.began, b.requests, b.failed = now, 0, 0
	}
	b.requests++
	if !failed {
		return None
	}
	b.failed++
	if b.requests < rateMinimum || 100*b.failed < s.FailurePercent*b.requests {
		return None
	}
	b.highRates++
	b.began, b.requests, b.failed = now, 0, 0
	return b.eject(s.pause(b.highRates-1), ErrorRate, now)
}
