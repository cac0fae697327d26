// SPDX-License-Identifier: Apache-2.0

package clientauth

import (
	"fmt"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// burstDivisor is the number of bursts in a minute: a client may send a tenth of its requests per minute at once.
const burstDivisor = 10

// Limits bounds the requests of each client, so that no client can occupy all ranks. The zero value has no limits. It is
// safe for concurrent use.
type Limits struct {
	// RequestsPerMinute is the maximum rate of requests of a client, Pending the maximum number of its concurrent
	// requests; 0 means no limit.
	RequestsPerMinute, Pending int
	// Now is the clock; nil means time.Now.
	Now func() time.Time

	mu      sync.Mutex
	clients map[string]*usage
}

// usage is the usage of a client.
type usage struct {
	rate    *rate.Limiter
	pending int
}

// LimitError is the reason why a request of a known client is rejected.
type LimitError struct {
	// Reason is Rate or Pending.
	Reason  string
	message string
	// RetryAfter is the time until a request of the client fits; 0 if it is not known.
	RetryAfter time.Duration
}

// The limits of a client.
const (
	Rate    = "rate"
	Pending = "pending"
)

// Error returns the limit.
func (e *LimitError) Error() string { return e.message }

// Admit counts a request of a client until release is called. It returns a LimitError if a limit is reached.
func (l *Limits) Admit(client string) (release func(), err error) {
	if l == nil || l.RequestsPerMinute == 0 && l.Pending == 0 {
		return func() {}, nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if l.Now != nil {
		now = l.Now()
	}
	used := l.clients[client]
	if used == nil {
		used = &usage{rate: rate.NewLimiter(rate.Limit(float64(l.RequestsPerMinute)/60), max(1, l.RequestsPerMinute/burstDivisor))}
		if l.clients == nil {
			l.clients = map[string]*usage{}
		}
		l.clients[client] = used
	}
	if l.Pending > 0 && used.pending >= l.Pending {
		return nil, &LimitError{Reason: Pending, message: fmt.Sprintf("this API key has reached its limit of %d concurrent requests", l.Pending)}
	}
	if l.RequestsPerMinute > 0 {
		reserved := used.rate.ReserveN(now, 1)
		if delay := reserved.DelayFrom(now); delay > 0 {
			reserved.CancelAt(now)
			return nil, &LimitError{Reason: Rate, RetryAfter: delay, message: fmt.Sprintf("this API key has reached its limit of %d requests per minute", l.RequestsPerMinute)}
		}
	}
	used.pending++
	return sync.OnceFunc(func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		used.pending--
	}), nil
}
