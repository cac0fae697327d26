// SPDX-License-Identifier: Apache-2.0

package waitqueue

import (
	"cmp"
	"slices"
	"time"
)

// FairQueue is a queue of requests that wait for a free place. Requests of a higher priority are first. Within a
// priority, the next request is one of the client that was served the least work, as in the virtual token counter of
// "Fairness in Serving Large Language Models" (OSDI 2024); the requests of a client keep their order. Known is the data
// of each request.
type FairQueue[Known any] struct {
	size, length int
	// levels are the priorities with waiters, highest first.
	levels []*level[Known]
}

// level contains the waiters of a priority.
type level[Known any] struct {
	priority int
	// flows are the clients that had waiters since the level was last empty, in order of their first one.
	flows []*flow[Known]
	// arrivals counts the waiters that were added.
	arrivals int
}

// flow contains the waiters of a client.
type flow[Known any] struct {
	client  string
	waiters []*Waiter[Known]
	// served is the work of the served waiters, with a client that returns at the minimum of the clients that wait. queued
	// is the work of the waiters.
	served, queued float64
}

// Waiter is a request in a FairQueue.
type Waiter[Known any] struct {
	Known Known
	// Evicted is true once a waiter before this one in the order has taken its place in the full queue.
	Evicted bool
	arrival int
	work    float64
	since   time.Time
	level   *level[Known] // nil if the waiter is in no queue
	flow    *flow[Known]
	woken   chan struct{}
}

// NewFairQueue returns a queue for at most size requests, at least 1.
func NewFairQueue[Known any](size int) *FairQueue[Known] { return &FairQueue[Known]{size: size} }

// Len returns the number of waiters.
func (q *FairQueue[Known]) Len() int { return q.length }

// Add appends a waiter. If the queue is full, the last waiter is evicted and woken: the newest one of the client with the
// most work, served and queued, of the lowest priority. Add returns nil if that is the new one.
func (q *FairQueue[Known]) Add(known Known, priority int, client string, work float64, now time.Time) *Waiter[Known] {
	l := q.level(priority)
	f := l.flow(client)
	l.arrivals++
	w := &Waiter[Known]{Known: known, arrival: l.arrivals, work: work, since: now, level: l, flow: f, woken: make(chan struct{}, 1)}
	if len(f.waiters) == 0 {
		f.served = max(f.served, l.minServed())
	}
	f.waiters = append(f.waiters, w)
	f.queued += work
	if q.length++; q.length <= q.size {
		return w
	}
	last := q.last()
	q.remove(last)
	if last == w {
		return nil
	}
	last.Evicted = true
	last.Wake()
	return w
}

// level returns the level of a priority.
func (q *FairQueue[Known]) level(priority int) *level[Known] {
	at, found := slices.BinarySearchFunc(q.levels, priority, func(l *level[Known], priority int) int { return cmp.Compare(priority, l.priority) })
	if !found {
		q.levels = slices.Insert(q.levels, at, &level[Known]{priority: priority})
	}
	return q.levels[at]
}

// flow returns the flow of a client.
func (l *level[Known]) flow(client string) *flow[Known] {
	at := slices.IndexFunc(l.flows, func(f *flow[Known]) bool { return f.client == client })
	if at < 0 {
		at = len(l.flows)
		l.flows = append(l.flows, &flow[Known]{client: client})
	}
	return l.flows[at]
}

// minServed returns the minimum work of the clients that wait; 0 if none waits.
func (l *level[Known]) minServed() float64 {
	minimum, found := 0., false
	for _, f := range l.flows {
		if len(f.waiters) > 0 && (!found || f.served < minimum) {
			minimum, found = f.served, true
		}
	}
	return minimum
}

// last returns the waiter to evict.
func (q *FairQueue[Known]) last() *Waiter[Known] {
	worst := slices.MaxFunc(q.levels[len(q.levels)-1].flows, func(a, b *flow[Known]) int {
		return cmp.Or(cmp.Compare(min(1, len(a.waiters)), min(1, len(b.waiters))), cmp.Compare(a.served+a.queued, b.served+b.queued))
	})
	return worst.waiters[len(worst.waiters)-1]
}

// First returns the first waiter that may go; nil if there is none.
func (q *FairQueue[Known]) First(mayGo func(Known) bool) *Waiter[Known] {
	for _, l := range q.levels {
		// The clients are evaluated one after another, least served first, nearly always only one.
		var done [8]*flow[Known]
		evaluated := done[:0]
		for range l.flows {
			f := l.next(evaluated)
			if f == nil {
				break
			}
			for _, w := range f.waiters {
				if mayGo(w.Known) {
					return w
				}
			}
			evaluated = append(evaluated, f)
		}
	}
	return nil
}

// next returns the client with the least work among those that wait and were not evaluated, and of equal ones the client
// whose first waiter arrived first.
func (l *level[Known]) next(evaluated []*flow[Known]) (next *flow[Known]) {
	for _, f := range l.flows {
		if len(f.waiters) == 0 || slices.Contains(evaluated, f) {
			continue
		}
		if next == nil || cmp.Or(cmp.Compare(f.served, next.served), cmp.Compare(f.waiters[0].arrival, next.waiters[0].arrival)) < 0 {
			next = f
		}
	}
	return next
}

// Leave removes a waiter, and returns how long it has waited. served is true if it has got a place: its work then counts
// for its client. Removing a waiter twice is a no-op.
func (q *FairQueue[Known]) Leave(w *Waiter[Known], served bool, now time.Time) time.Duration {
	if w.level != nil {
		if served {
			w.flow.served += w.work
		}
		q.remove(w)
	}
	return now.Sub(w.since)
}

// remove removes a waiter. A level without waiters forgets its clients.
func (q *FairQueue[Known]) remove(w *Waiter[Known]) {
	l, f := w.level, w.flow
	w.level = nil
	at := slices.Index(f.waiters, w)
	f.waiters = slices.Delete(f.waiters, at, at+1)
	f.queued -= w.work
	q.length--
	if !slices.ContainsFunc(l.flows, func(f *flow[Known]) bool { return len(f.waiters) > 0 }) {
		q.levels = slices.DeleteFunc(q.levels, func(other *level[Known]) bool { return other == l })
	}
}

// Wake wakes the request for another attempt.
func (w *Waiter[Known]) Wake() {
	select {
	case w.woken <- struct{}{}:
	default: // the previous wake-up is still pending
	}
}

// Woken receives when the request is to try again.
func (w *Waiter[Known]) Woken() <-chan struct{} { return w.woken }
