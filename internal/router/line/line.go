package line

import (
	"slices"
	"time"

	"github.com/semmoe/operator/solver/dispatch"
)

// Line are the requests that wait for the ranks of a plan, with what is known of each.
type Line[Known any] struct {
	size int
	// waiting stand in the order in which they came; from is where among them the next are looked at, if all would be too many.
	waiting []*Standing[Known]
	from    int
	// pace is that of all requests, the latest of which came at last.
	pace dispatch.Pace
	last time.Time
	// arrived is how many requests have come.
	arrived int
}

// Standing is a request in line.
type Standing[Known any] struct {
	Known Known
	// Must tells that it has to go, whatever it gives up.
	Must  bool
	in    *Line[Known]
	since time.Time
	// arrival is how many requests had come to the line when the request did.
	arrival int
	turn    chan struct{}
}

// New returns a line that is full with that many requests, at least 1, each of which waits at most as long as hold.
func New[Known any](size int, hold time.Duration) *Line[Known] {
	return &Line[Known]{size: size, pace: dispatch.NewPace(size, hold)}
}

// Come notes that a request has come, and reports whether it may wait (see dispatch.Pace). Where enough have come after the first request
// in the line (see dispatch.MustGo), that must go, and is called.
func (l *Line[Known]) Come(now time.Time) bool {
	l.arrived++
	l.hurry()
	after := now.Sub(l.last)
	l.last = now
	return l.pace.Come(after)
}

// Stand puts a request at the end of the line, unless it is in the line already; it leaves any other line. Where the line is full then, or
// still is when one has left, the first one must go, and is called.
func (l *Line[Known]) Stand(s *Standing[Known], now time.Time) {
	if s.in != l {
		if s.in == nil {
			s.since, s.turn = now, make(chan struct{}, 1)
		}
		s.leave()
		s.in, s.arrival = l, l.arrived
		l.waiting = append(l.waiting, s)
	}
	l.hurry()
}

// hurry has the first one go where dispatch.MustGo demands it.
func (l *Line[Known]) hurry() {
	if len(l.waiting) > 0 && dispatch.MustGo(len(l.waiting), l.arrived-l.waiting[0].arrival, l.size) {
		l.waiting[0].Must = true
		l.waiting[0].Call()
	}
}

// Len is the number of requests in line.
func (l *Line[Known]) Len() int { return len(l.waiting) }

// CallNext calls the first request that may go, of at most that many that are looked at; others have their turn at the next call.
func (l *Line[Known]) CallNext(most int, mayGo func(Known) bool) {
	if most >= len(l.waiting) {
		most, l.from = len(l.waiting), 0
	}
	for range most {
		s := l.waiting[l.from%len(l.waiting)]
		if l.from++; mayGo(s.Known) {
			s.Call()
			return
		}
	}
}

// Call lets a request try again.
func (s *Standing[Known]) Call() {
	select {
	case s.turn <- struct{}{}:
	default: // it has not yet heard of the call before
	}
}

// Turn has an element when the request is to try again; never where it is nil.
func (s *Standing[Known]) Turn() <-chan struct{} {
	if s == nil {
		return nil
	}
	return s.turn
}

// Leave takes the request out of line, and tells how long it has stood there.
func (s *Standing[Known]) Leave(now time.Time) time.Duration {
	s.leave()
	return now.Sub(s.since)
}

func (s *Standing[Known]) leave() {
	if s.in != nil {
		s.in.waiting = slices.DeleteFunc(s.in.waiting, func(other *Standing[Known]) bool { return other == s })
		s.in.hurry() // more may have come before it went
	}
}
