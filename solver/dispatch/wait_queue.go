// SPDX-License-Identifier: Apache-2.0

package dispatch

import "fmt"

// patience limits the recent load excess of a rank at which a request may go immediately, as a fraction of the excess
// that the cap allows. At 0, requests wait twice as long at 8 ranks, and 25% longer at 16, for slightly more even
// windows. At 1, windows are slightly less even.
const patience = 1. / 3

// WaitQueue implements the policy Late (late binding, as in Sparrow, SOSP 2013). A request goes immediately if it loses
// no value by going, to a rank without much recent load (see MayGo). All other requests wait until that holds, or until
// they must go (see WaitList).
//
// A scheduler that decides at arrival has to send each request somewhere, and under a tight cap often not to its
// experts. With a few requests to choose from, one of them nearly always loses nothing.
type WaitQueue struct {
	scheduler *Scheduler
	list      WaitList[queuedRequest]
}

// queuedRequest is a queued request with the caller's id.
type queuedRequest struct {
	id int
	*Request
}

// Dispatched is a request that has left the queue.
type Dispatched struct {
	ID       int
	Request  *Request
	Decision Decision
	// Waited is the number of requests that arrived after it.
	Waited int
}

// NewWaitQueue returns a wait queue for size requests; a queue of size 1 decides at arrival. The policy in the options is
// ignored.
func NewWaitQueue(o Options, size int) (*WaitQueue, error) {
	if size < 1 {
		return nil, fmt.Errorf("a wait queue of %d requests; at least 1 is needed", size)
	}
	o.Policy, o.Patient = Price, size > 1
	scheduler, err := NewScheduler(o)
	return &WaitQueue{scheduler: scheduler, list: NewWaitList[queuedRequest](size)}, err
}

// Len returns the number of waiting requests.
func (l *WaitQueue) Len() int { return l.list.Len() }

// First returns the id of the request that has waited longest; the queue must not be empty.
func (l *WaitQueue) First() int { return l.list.At(0).id }

// Load returns the rank's load over the last requests that left the queue, in tokens.
func (l *WaitQueue) Load(rank int) int { return l.scheduler.Load(rank) }

// Arrive appends a request, which must not change while it waits.
func (l *WaitQueue) Arrive(id int, r *Request) {
	l.list.Arrive()
	l.list.Add(queuedRequest{id, r})
}

// Bypass decides on a request that bypasses the queue, and accounts for it.
func (l *WaitQueue) Bypass(r *Request, places []Place) Decision {
	d := l.scheduler.Decide(r, places)
	l.scheduler.Take(r, &d)
	return d
}

// Next removes the next request that may or must go and decides on its place. It returns false if there is none; with
// must set, it returns false only for an empty queue. places returns the current places for a request, always the same
// number, valid until the next call. The caller accounts for the request with Take and calls Next again.
func (l *WaitQueue) Next(places func(id int) []Place, must bool) (Dispatched, bool) {
	next := 0
	for next < l.list.Len() && !l.scheduler.MayGo(l.list.At(next).Request, places(l.list.At(next).id)) {
		next++
	}
	if next == l.list.Len() {
		if next == 0 || !must && !l.list.MustGo() {
			return Dispatched{}, false
		}
		next = 0
	}
	chosen := l.list.At(next)
	waited := l.list.Remove(next)
	d := l.scheduler.Decide(chosen.Request, places(chosen.id))
	return Dispatched{chosen.id, chosen.Request, d, waited}, true
}

// Take accounts for a request at its chosen place.
func (l *WaitQueue) Take(sent *Dispatched) { l.scheduler.Take(sent.Request, &sent.Decision) }

// MayGo reports whether a request loses nothing by going now: its place of highest value is below the cap, on a rank
// with little recent load beyond its share. It changes no state.
func (s *Scheduler) MayGo(r *Request, places []Place) bool {
	first := s.first
	defer func() { s.first = first }()
	s.begin(len(places))
	c := newCrowd(places)
	best := s.compare(r, places, c)
	if best.open < 0 {
		return false
	}
	top, there := s.weigh(r, best.any, &places[best.any], c), s.weigh(r, best.open, &places[best.open], c)
	return top.Value() <= there.Value() && s.recent.excess(there.Rank, s.shares[there.Rank]) <= patience*(s.cap-1)
}
