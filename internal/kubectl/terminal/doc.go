// SPDX-License-Identifier: Apache-2.0

// Package terminal formats text for terminals, with line wrapping and colors, and for pipes, as plain text.
//
// Invariants:
//   - Output depends only on the arguments. Of is the only function that reads the process environment.
//   - Without a width, lines are not wrapped, so that programs that read a pipe find one item per line. With a width,
//     no line is longer.
//   - Colors add no information that the text does not contain.
package terminal
