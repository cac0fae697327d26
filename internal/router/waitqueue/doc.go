// SPDX-License-Identifier: Apache-2.0

// Package waitqueue queues requests in a router, and wakes their goroutines. Neither queue chooses a place: a woken
// request asks the scheduler again.
//
//   - Queue holds the requests that wait until the rank of their experts has capacity (late binding). The rule of waiting
//     is that of dispatch.WaitList, as in evaluations.
//   - FairQueue holds the requests that wait until any rank has a free place (admission control), by priority and with
//     equal shares of work for the clients.
//
// Invariants:
//   - A queued request waits until it is woken or its caller stops waiting. The queues have no timers.
//   - A FairQueue holds a bounded number of requests, and no client without a request in it once it is empty.
//   - At most dispatch.OvertakeFactor times the size of the queue requests overtake a queued request.
//   - Requests are queued in order of arrival, each in one queue at a time.
//   - Queues are not safe for concurrent use, except Woken: the caller holds a lock.
package waitqueue
