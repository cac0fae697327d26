// Package pattern finds the regular expressions by which tokenizer.json files cut text.
//
// Those expressions are written for Oniguruma: they look ahead, nest and intersect classes, and know Unicode's
// properties, so Go's engine cannot take them. Understood are alternation, groups, greedy and possessive quantifiers,
// look-ahead, anchors, classes with nesting and intersection, general categories and scripts, and (?i:...) by simple
// case folding. Anything else is refused by name when the expression is compiled.
//
// Invariants:
//   - The match is the leftmost, and of those the one that backtracking finds first.
//   - No part of an expression is tried twice at the same place of the text, so time and memory grow with the length of the text times
//     the number of steps of the expression, whatever both are: texts come from clients, expressions from checkpoints.
//   - A match repeats a group at most 50,000 times: the matcher recurses for each choice, and its stack is bounded.
//   - A Pattern is immutable; a Matcher belongs to one goroutine.
package pattern
