package waitqueue

import (
	"slices"
	"time"

	"github.com/semmoe/operator/solver/dispatch"
)

// Queue is a queue of requests that wait for the ranks of a plan. Known is the data of each request.
type Queue[Known any] struct {
	size int
	// waiting contains the entries in order of arrival. from is the index of the next entry to evaluate if a call
	// evaluates only some of them.
	waiting []*Entry[Known]
	from    int
	// pace measures the arrival rate. last is the time of the latest arrival.
	pace dispatch.ArrivalRate
	last time.Time
	// arrived is the number of arrivals.
	arrived int
}

// Entry is an entry of the queue.
type Entry[Known any] struct {
	Known Known
	// MustGo is true if the request has to go now, even to a worse rank.
	MustGo bool
	in     *Queue[Known]
	since  time.Time
	// arrival is the value of arrived when the request was enqueued.
	arrival int
	woken   chan struct{}
}

// New returns a queue for at most size requests, at least 1, each of which waits at most hold.
func New[Known any](size int, hold time.Duration) *Queue[Known] {
	return &Queue[Known]{size: size, pace: dispatch.NewArrivalRate(size, hold)}
}

// Arrive records an arrival and reports whether the request may wait (see dispatch.Pace). If enough requests have
// arrived since the first entry (see dispatch.MustGo), the first entry must go and is woken.
func (l *Queue[Known]) Arrive(now time.Time) bool {
	l.arrived++
	l.wakeOverdue()
	after := now.Sub(l.last)
	l.last = now
	return l.pace.Arrive(after)
}

// Enqueue appends an entry to the queue, unless it is already in it; the entry leaves any other queue. If the queue is
// then full, the first entry must go and is woken.
func (l *Queue[Known]) Enqueue(s *Entry[Known], now time.Time) {
	if s.in != l {
		if s.in == nil {
			s.since, s.woken = now, make(chan struct{}, 1)
		}
		s.leave()
		s.in, s.arrival = l, l.arrived
		l.waiting = append(l.waiting, s)
	}
	l.wakeOverdue()
}

// wakeOverdue marks and wakes the first entry if dispatch.MustGo requires it.
func (l *Queue[Known]) wakeOverdue() {
	if len(l.waiting) > 0 && dispatch.MustGo(len(l.waiting), l.arrived-l.waiting[0].arrival, l.size) {
		l.waiting[0].MustGo = true
		l.waiting[0].Wake()
	}
}

// Len returns the number of entries.
func (l *Queue[Known]) Len() int { return len(l.waiting) }

// WakeNext wakes the first entry that may go, and evaluates at most limit entries. The next call continues with the
// entries that were not evaluated.
func (l *Queue[Known]) WakeNext(limit int, mayGo func(Known) bool) {
	if limit >= len(l.waiting) {
		limit, l.from = len(l.waiting), 0
	}
	for range limit {
		s := l.waiting[l.from%len(l.waiting)]
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
	if s.in != nil {
		s.in.waiting = slices.DeleteFunc(s.in.waiting, func(other *Entry[Known]) bool { return other == s })
		s.in.wakeOverdue() // more requests may have arrived before the entry left
	}
}
