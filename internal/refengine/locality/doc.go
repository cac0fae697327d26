// SPDX-License-Identifier: Apache-2.0

// Package locality maps experts to expert-parallel ranks, and determines whether an activation is local to the rank
// that serves its token.
//
// Invariants: an accepted map places every expert of every MoE layer at least once, gives each rank the same number of
// slots, and places no expert twice on one rank. Maps do not change outputs.
package locality
