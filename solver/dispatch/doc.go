// SPDX-License-Identifier: Apache-2.0

// Package dispatch decides online, based only on forecast scores, which rank serves a request (attention data
// parallelism) or a token (attention tensor parallelism).
//
// Invariants:
//   - A decision depends on earlier requests only, never on later ones. The window policy also sees its queue, the late
//     policy the requests in its wait queue.
//   - At most OvertakeFactor times the size of the wait queue requests overtake a waiting request.
//   - A decision for one request allocates nothing and takes time proportional to the number of places.
//   - The value of a place is measured in microseconds saved. A weight scales each component; 1 is the modelled value.
//   - Load is counted in tokens. Every policy returns a rank, for any scores and loads.
//   - Schedulers are not safe for concurrent use; the caller holds a lock.
package dispatch
