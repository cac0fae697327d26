// SPDX-License-Identifier: Apache-2.0

// Package report writes an HTML report of a plan for readers who did not make the plan: the local activation rate, the
// time saved, and the changes that the plan makes. A routing trace is optional.
//
// Invariants:
//   - Build computes figures and Render formats them. Neither reads a file or a clock. The same inputs give the same
//     bytes.
//   - Every figure comes from package cost or is counted from the trace. A figure that the inputs do not allow is nil
//     in Data, and the page names the missing input.
//   - The page is self-contained: it has no scripts, fonts or links. All text from outside this package is escaped.
//   - The size of the page is bounded by heat maps of at most maxCells × maxCells cells, and one table row per layer,
//     rank and kind of text. It is below 2 MB for 61 layers of 256 experts.
package report
