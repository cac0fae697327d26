// Package waitqueue queues the requests that wait until the rank of their experts has capacity (late binding).
// Evaluations use dispatch.Line instead.
//
// Invariants:
//   - A queued request waits until it is woken or its caller stops waiting. The queue has no timers.
//   - At most dispatch.OvertakeFactor times the size of the queue requests overtake a queued request (dispatch.MustGo).
//   - Requests are queued in order of arrival, each in one queue at a time.
//   - A queue is not safe for concurrent use, except Woken: the caller holds a lock.
package waitqueue
