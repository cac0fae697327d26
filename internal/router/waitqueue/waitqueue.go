// SPDX-License-Identifier: Apache-2.0

package waitqueue

import (
	"time"

	"github.com/semmoe/operator/solver/dispatch"
)

// Queue is a queue of requests that wait for the ranks of a plan. Known is the data of each request.
type Queue[Known any] struct {
	waiting dispatch.WaitList[*Entry[Known]]
	// from is the index of the next entry to evaluate if a call evaluates only some of them.
	from int
	// rate measures the arrival rate. last is the time of the latest arrival.
	rate dispatch.ArrivalRate
	last time.Time
}

// Entry is an entry of the queue.
type Entry[Known any] struct {
	Known Known
	// MustGo is true if the request has to go now, even to a worse rank.
	MustGo bool
	in     *Queue[Known]
	since  time.Time
	woken  chan struct{}
}

// New returns a queue for at most size requests, at least 1, each of which waits at most hold.
func New[Known any](size int, hold time.Duration) *Queue[Known] {
	return &Queue[Known]{waiting: dispatch.NewWaitList[*Entry[Known]](size), rate: dispatch.NewArrivalRate(size, hold)}
}

// Arrive records an arrival and reports whether the request may wait (see dispatch.ArrivalRate). If enough requests have
// arrived since the first entry (see dispatch.WaitList), the first entry must go and is woken.
func (l *Queue[Known]) Arrive(now time.Time) bool {
	l.waiting.Arrive()
	l.wakeOverdue()
	after := now.Sub(l.last)
	l.last = now
	return l.rate.Arrive(after)
}

// Enqueue appends an entry to the queue, unless it is already in it; the entry leaves any other queue. If the queue is
// then full, the first entry must go and is woken.
func (l *Queue[Known]) Enqueue(s *Entry[Known], now time.Time) {
	if s.in != l {
		if s.in == nil {
			s.since, s.woken = now, make(chan struct{}, 1)
		}
		s.leave()
		s.in = l
		l.waiting.Add(s)
	}
	l.wakeOverdue()
}

// wakeOverdue marks and wakes the first entry if it must go.
func (l *Queue[Known]) wakeOverdue() {
	if l.waiting.MustGo() {
		l.waiting.At(0).MustGo = true
		l.waiting.At(0).Wake()
	}
}

// Len returns the number of entries.
func (l *Queue[Known]) Len() int { return l.waiting.Len() }

// WakeNext wakes the first entry that may go, and evaluates at most limit entries. The next call continues with the
// entries that were not evaluated.
func (l *Queue[Known]) WakeNext(limit int, mayGo func(Known) bool) {
	if limit >= l.waiting.Len() {
		limit, l.from = l.waiting.Len(), 0
	}
	for range limit {
		s := l.waiting.At(l.from % l.waiting.Len())
		if l.from++; mayGo(s.Known) {
			s.Wake()
			return
		}
	}
}

// Wake wakes the request for another attempt.
func (s *Entry[Known]) Wake() {
	select {
	case s.woken <- struct{}{}:
	default: // the previous wake-up is still pending
	}
}

// Woken receives when the request is to try again; it never receives if s is nil.
func (s *Entry[Known]) Woken() <-chan struct{} {
	if s == nil {
		return nil
	}
	return s.woken
}

// Leave removes the entry from its queue and returns how long it has waited.
func (s *Entry[Known]) Leave(now time.Time) time.Duration {
	s.leave()
	return now.Sub(s.since)
}

func (s *Entry[Known]) leave() {
	if s.in == nil {
		return
	}
	for i := range s.in.waiting.Len() {
		if s.in.waiting.At(i) == s {
			s.in.waiting.Remove(i)
			break
		}
	}
	s.in.wakeOverdue() // more requests may have arrived before the entry left
}
