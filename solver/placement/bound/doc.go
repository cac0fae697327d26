// SPDX-License-Identifier: Apache-2.0

// Package bound computes upper bounds on the local activation rate of all placements, which limit the distance of a
// plan to the optimum.
//
// Invariants:
//   - A bound holds for every placement with equal slots per rank and no redundant expert, and for every assignment
//     of the rows to ranks, including fractional ones (Balanced: for assignments with loads within the given limit).
//   - The validity of bounds never depends on a placement. An incumbent only makes Tangent tighter.
package bound
