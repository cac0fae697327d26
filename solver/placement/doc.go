// Package placement decides which expert sits in which slot of which rank.
//
// Invariants:
//   - A Placement that Solve returns is valid: every expert of a layer is in exactly one slot, every rank has the same
//     number of slots.
//   - With groups the slots of a layer are a permutation that maps groups onto groups.
//   - The result depends on the problem and its seed alone, not on the number of processors. Effort is counted in steps;
//     a time budget only cuts off, and then Truncated is set.
//   - The search never returns a placement that it values below the contiguous one.
package placement
