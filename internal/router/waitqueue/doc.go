// SPDX-License-Identifier: Apache-2.0

// Package waitqueue queues the requests that wait until the rank of their experts has capacity (late binding). The rule
// of waiting is that of dispatch.WaitList, as in evaluations; this package wakes the goroutines of the requests.
//
// Invariants:
//   - A queued request waits until it is woken or its caller stops waiting. The queue has no timers.
//   - At most dispatch.OvertakeFactor times the size of the queue requests overtake a queued request.
//   - Requests are queued in order of arrival, each in one queue at a time.
//   - A queue is not safe for concurrent use, except Woken: the caller holds a lock.
package waitqueue
