// Package assign solves the two assignment problems of co-scheduling: items of size one into bins of fixed capacity
// (experts into slots, the tokens of a batch into equal shards), and sized items under a load limit (requests on ranks).
//
// Invariants:
//   - Solver.Assign is exact: no other assignment with the same capacities has a higher sum of scores, up to rounding.
//   - Prices are duals: for non-negative prices, RelaxedValue is an upper bound on every assignment within the limits; for any prices,
//     on every one that fills each bin exactly.
//   - Everything is deterministic; ties go to the lower bin.
package assign
