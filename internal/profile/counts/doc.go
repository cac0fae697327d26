// SPDX-License-Identifier: Apache-2.0

// Package counts counts which experts token IDs activate, and writes and reads such counts as files (docs/trace-format.md).
//
// Invariants:
//   - Memory grows with the number of different pairs of token and expert, and can be bounded. To stay within the bound, all
//     pairs of the rarest tokens are dropped. The counts of the remaining tokens are complete in all layers.
//   - Merging adds counts. Without a bound, the result of a merge equals one Counts of all tokens.
//   - The bytes of a file depend only on the counts.
package counts
