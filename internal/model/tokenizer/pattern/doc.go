// SPDX-License-Identifier: Apache-2.0

// Package pattern implements the regular expressions with which tokenizer.json files split text.
//
// These expressions are written for Oniguruma: they use look-ahead, nested and intersected classes, and Unicode
// properties, which Go's engine does not support. Supported are alternation, groups, greedy and possessive quantifiers,
// look-ahead, anchors, classes with nesting and intersection, general categories and scripts, and (?i:...) by simple
// case folding. Compile refuses any other construct by name.
//
// Invariants:
//   - The match is the leftmost, and among the leftmost the one that backtracking finds first.
//   - No part of an expression is tried twice at the same position, so time and memory grow with the length of the text
//     times the number of steps of the expression. Both texts and expressions are untrusted: texts come from clients,
//     expressions from checkpoints.
//   - A match repeats a group at most 50,000 times, because the matcher recurses for each choice and its stack is
//     bounded.
//   - A Pattern is immutable. A Matcher must be used by one goroutine at a time.
package pattern
