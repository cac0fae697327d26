// Package bound computes upper bounds on the local activation rate that any placement can reach, so that a plan can say
// how far from the best it can be at most.
//
// Invariants:
//   - A bound holds for every placement with equal slots per rank and no redundant expert, and for every assignment of
//     the rows to ranks, fractional ones included (Balanced: for those whose loads stay within the limit given).
//   - Bounds never depend on the placement for their validity; an incumbent only makes Tangent tighter.
package bound
