// SPDX-License-Identifier: Apache-2.0

package httpserver

import (
	"context"
	"sync/atomic"
	"time"
)

// running counts the requests in progress. It is safe for concurrent use.
type running struct{ n, begun atomic.Int64 }

// begin counts a request as running until end is called.
func (r *running) begin() (end func()) {
	r.n.Add(1)
	r.begun.Add(1)
	return func() { r.n.Add(-1) }
}

// idlePolls is the number of consecutive polls, at intervals of idlePoll, without a running or new request, after which
// a server is idle.
const (
	idlePolls = 10
	idlePoll  = 100 * time.Millisecond
)

// idle waits until no request has run for a second. It returns false if the context ends earlier. A server uses it to
// stop while connections without a request are open.
func (r *running) idle(ctx context.Context) bool {
	tick := time.NewTicker(idlePoll)
	defer tick.Stop()
	for polls, begun := 0, r.begun.Load(); polls < idlePolls; polls++ {
		select {
		case <-ctx.Done():
			return false
		case <-tick.C:
		}
		if now := r.begun.Load(); r.n.Load() > 0 || now != begun {
			polls, begun = -1, now
		}
	}
	return true
}
