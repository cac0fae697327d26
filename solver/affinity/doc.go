// SPDX-License-Identifier: Apache-2.0

// Package affinity converts routing traces into the inputs of the solver and the request router: how often each token
// id or request activated each expert, and the forecast tables that follow from these counts and a placement.
//
// Invariants:
//   - Counts are sums: the counts of two disjoint sets of requests merge into the counts of their union, in any order.
//   - A forecast uses only information that is known before the gates have run. It is built from train requests only,
//     and is used in the quantised form in which a plan stores it, so that a stored plan yields the same scores as
//     during solving.
//   - Scores are expected shares of local activations: between 0 and 1. Without redundant experts they sum to 1 over
//     the ranks.
package affinity
