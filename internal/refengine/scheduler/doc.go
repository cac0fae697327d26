// SPDX-License-Identifier: Apache-2.0

// Package scheduler batches requests continuously: one goroutine steps all running requests together, decoding requests
// by one token and prefilling ones by a chunk of their prompt.
//
// Invariants:
//   - At most MaxRunning requests run and at most MaxQueued requests wait. Requests are admitted in the order of their
//     arrival.
//   - The output of a request does not depend on other requests.
//   - Every accepted request ends with exactly one call of Done, after its last call of Token. A request is dropped
//     before the next step if its context ends.
package scheduler
