package client

import (
	"context"
	"sync/atomic"
	"time"
)

// Running counts the requests that run. It is safe for concurrent use.
type Running struct{ n, begun atomic.Int64 }

// Begin counts a request until end is called.
func (r *Running) Begin() (end func()) {
	r.n.Add(1)
	r.begun.Add(1)
	return func() { r.n.Add(-1) }
}

// idlePolls and idlePoll are how often in a row no request must run or begin for Idle.
const (
	idlePolls = 10
	idlePoll  = 100 * time.Millisecond
)

// Idle waits until no request has run for a second. It reports false where the context ends earlier. A server uses it to end although
// connections are open on which no request has come yet.
func (r *Running) Idle(ctx context.Context) bool {
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
