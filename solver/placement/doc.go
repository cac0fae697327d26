// SPDX-License-Identifier: Apache-2.0

// Package placement solves the placement of experts: which expert is in which slot of which rank. Solve is the entry
// point; Auto combines simulated annealing on the Gram matrix of the profile (anneal.go), alternation of exact
// assignments (layers.go for attention TP, joint.go for attention DP) and local search by exact swaps (exchange.go,
// refine.go).
//
// Invariants:
//   - A Placement that Solve returns is valid: every expert of a layer is in exactly one slot, and every rank has
//     the same number of slots.
//   - With groups, the slots of a layer are a permutation that maps groups onto groups.
//   - The result depends only on the problem and its seed, not on the number of processors. Effort is counted in
//     steps. A time budget only cuts the search off, and then Truncated is set.
//   - The search never returns a placement with a lower value, by its own model, than the contiguous one.
package placement
