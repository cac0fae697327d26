// SPDX-License-Identifier: Apache-2.0

package dispatch

import "slices"

// OvertakeFactor bounds waiting: a request goes unconditionally after this number times the queue size of later
// arrivals. Half of it costs 2% of locality at 16 ranks; half as much again gains 0.5%.
const OvertakeFactor = 4

// WaitList contains the requests that wait for a rank, in order of arrival, and implements the rule that bounds their
// wait: the first request must go as soon as the list is full, or OvertakeFactor times its size of requests have arrived
// after it. At most that number of requests therefore overtake a request. Evaluation (WaitQueue) and request router
// share it; each adds its own limit of time.
type WaitList[T any] struct {
	size    int
	arrived int
	waiting []waitingRequest[T]
}

// waitingRequest is a request with the number of arrivals up to and including it.
type waitingRequest[T any] struct {
	request T
	arrival int
}

// NewWaitList returns an empty list for size requests, at least 1.
func NewWaitList[T any](size int) WaitList[T] { return WaitList[T]{size: size} }

// Arrive counts an arrival, whether or not the request waits.
func (l *WaitList[T]) Arrive() { l.arrived++ }

// Add appends the request that has arrived last.
func (l *WaitList[T]) Add(request T) {
	l.waiting = append(l.waiting, waitingRequest[T]{request, l.arrived})
}

// Len returns the number of waiting requests.
func (l *WaitList[T]) Len() int { return len(l.waiting) }

// At returns the i-th waiting request.
func (l *WaitList[T]) At(i int) T { return l.waiting[i].request }

// MustGo reports whether the first request must go.
func (l *WaitList[T]) MustGo() bool {
	return len(l.waiting) >= l.size || len(l.waiting) > 0 && l.after(0) >= OvertakeFactor*l.size
}

// Remove removes the i-th request. It returns the number of requests that have arrived after it.
func (l *WaitList[T]) Remove(i int) (after int) {
	after = l.after(i)
	l.waiting = slices.Delete(l.waiting, i, i+1)
	return after
}

// after returns the number of requests that have arrived after the i-th request.
func (l *WaitList[T]) after(i int) int { return l.arrived - l.waiting[i].arrival }
