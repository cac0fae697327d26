// Package counts counts which experts token ids activate, and writes and reads such counts as files (docs/formats.md).
//
// Invariants:
//   - Memory follows the number of different pairs of token and expert, and can be bounded. What does not fit is whole rows of
//     the rarest tokens: the counts of a token that is left are of all layers and experts alike.
//   - Merging adds. What is merged is what one Counts of all tokens would hold, as long as no bound was met.
//   - The bytes of a file depend on the counts alone.
package counts
