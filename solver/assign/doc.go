// SPDX-License-Identifier: Apache-2.0

// Package assign solves the two assignment problems of co-scheduling: unit items into bins of fixed capacity (experts
// into slots, the tokens of a batch into equal shards; a transportation problem), and sized items under a load limit
// (requests on ranks; a generalized assignment problem). The Lagrangian dual of the capacities gives prices of bins
// (see Fisher, "The Lagrangian relaxation method for solving integer programming problems", Management Science 1981).
//
// Invariants:
//   - Solver.Assign is exact: no other assignment with the same capacities has a higher sum of scores, up to
//     rounding.
//   - Prices are dual variables. For non-negative prices, the value of the relaxation is an upper bound on every
//     assignment within the limits. For any prices, it is an upper bound on every assignment that fills each bin exactly.
//   - All results are deterministic; ties go to the lower bin.
package assign
