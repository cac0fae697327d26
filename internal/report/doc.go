// Package report turns a plan, and a routing trace where there is one, into one HTML page for people who did not make the plan: what
// it keeps local, what that is worth, and what would change.
//
// Invariants:
//   - Build computes figures, Render writes them down; neither reads a file or a clock. The same inputs give the same bytes.
//   - Every figure comes from package cost, or is counted from the trace. What the inputs do not tell is nil in Data, and the page
//     says what to pass.
//   - The page needs nothing besides itself: no script, no font, no address. All that is not of this package is escaped.
//   - Its size follows the pictures, which are at most maxCells on a side, and one line of a table for each layer, rank and kind of text:
//     below 2 MB for 61 layers of 256 experts.
package report
