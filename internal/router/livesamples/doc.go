// SPDX-License-Identifier: Apache-2.0

// Package livesamples keeps the tokens of sampled requests with the experts that they activated. Profiles of live
// traffic are built from them.
//
// Invariants:
//   - Counts do not reveal the content of a request: they are sums over token ids and over hashed pairs of token ids. Complete
//     sequences are kept only if configured.
//   - One model is counted at a time. A second model that serves concurrently is ignored until the first one has had no samples
//     for some time.
//   - Memory is bounded (maxPairs, maxIDs), and so is the share of the time spent on counting (share). Which request is skipped
//     because of these bounds does not depend on the request.
//   - A response contains no samples from before the start time of the query.
package livesamples
